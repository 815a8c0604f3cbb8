"""Settings of ``fit``: one struct for flags, files and keywords. Like ``fit``, it may know the trainer's settings."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import Struct

from molt_sdk.config import RolloutConfig, with_keywords
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.errors import ConfigError
from molt_sdk.types import SamplingParams
from trainer_backend.config import TrainerConfig

EXTENDABLE = ("steps", "eval_every", "eval_group_size", "checkpoint_every", "keep_checkpoints", "on_save_error")
"""What may change when a run is resumed."""
EXTENDABLE_TRAINER = ("ranks", "device", "offload", "activation_checkpointing", "max_tokens_per_microbatch")
"""Of the trainer's settings: those that change speed and memory, and the result by rounding only."""


class FitConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``fit`` can be told, as data: each field is a flag of ``molt-sdk fit``, a key of ``run.toml``."""

    model: str = ""
    """Model directory in Hugging Face format."""
    steps: int = 0
    """Training steps in total, those of a resumed run and those that were skipped for want of a signal included."""
    group_size: int = 8
    """Trajectories per task; their rewards are compared with each other."""
    groups_per_step: int = 8
    """Groups in one optimizer step."""
    max_staleness: int = 1
    """Most optimizer steps between the weights that sampled a token and those that train on it; 0 waits for every
    update before it samples again."""
    seed: int = 0
    """Of the task order and of sampling."""
    engine: Literal["auto", "torch"] = "auto"
    """Where the model samples; ``auto`` is ``torch``, in this process."""
    eval_every: int | None = None
    """Steps between evaluations of the held-out tasks; None: only before the first and after the last step."""
    eval_group_size: int = 1
    """Trajectories per held-out task."""
    checkpoint_every: int = 10
    """Steps between checkpoints, which are written while training goes on. Steps that are evaluated, and the last one,
    are saved too."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk; the one with the best evaluation stays as well."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """What follows when a checkpoint cannot be written (disk full): ``stop`` ends the run, ``warn`` goes on and tries
    again when the next one is due. Earlier checkpoints are whole either way."""
    max_failed_groups: int = 16
    """Groups in a row without a single scored trajectory that end the run."""
    max_uncertified: float = 0.05
    """Share of the trajectories (of at least 100) that may fail their certificate before the run ends; those that
    fail it are never trained."""
    sampling: SamplingParams = SamplingParams()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    torch_engine: TorchEngineConfig = TorchEngineConfig()

    def __post_init__(self) -> None:
        at_least = {"steps": 0, "group_size": 1, "groups_per_step": 1, "max_staleness": 0, "eval_group_size": 1}
        for name, least in {**at_least, "checkpoint_every": 1, "keep_checkpoints": 1, "max_failed_groups": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.eval_every is not None and self.eval_every < 1:
            raise ConfigError(f"eval_every={self.eval_every} must be at least 1")
        if self.on_save_error not in ("stop", "warn"):
            raise ConfigError(f"on_save_error={self.on_save_error!r} must be 'stop' or 'warn'")
        if not 0 <= self.max_uncertified <= 1:
            raise ConfigError(f"max_uncertified={self.max_uncertified} must be between 0 and 1")


def merge_keywords(
    config: FitConfig, *, learning_rate: float | None, rollout: dict[str, Any], **keywords: Any
) -> FitConfig:
    merged = with_keywords(config, "config", **keywords)
    return msgspec.structs.replace(
        merged,
        trainer=with_keywords(merged.trainer, "config.trainer", learning_rate=learning_rate),
        rollout=with_keywords(merged.rollout, "config.rollout", **rollout),
    )


def trainer_config(config: FitConfig) -> TrainerConfig:
    """The trainer's settings with the length of the run filled in. Raises ConfigError where it does not fit them."""
    trainer = config.trainer
    if trainer.schedule == "constant" or trainer.decay_steps is not None:
        return trainer
    if trainer.warmup_steps > config.steps:
        raise ConfigError(f"trainer.warmup_steps={trainer.warmup_steps} is more than steps={config.steps}")
    return msgspec.structs.replace(trainer, decay_steps=config.steps)


def changed_settings(before: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What a resumed run must not change but would, by dotted name."""
    now = json.loads(json.dumps(settings))
    past, present = _decay_steps(before), _decay_steps(now)
    falls = before["trainer"]["schedule"] == now["trainer"]["schedule"] != "constant"
    if falls and past != present and now["trainer"]["decay_steps"] is None:
        return [
            f"the learning rate falls over the steps of the run, which were {past} and are {present}; to go on with "
            f"the same schedule, give trainer.decay_steps={past}"
        ]
    if past == present:  # written out or not, it is the same schedule
        before, now = ({**s, "trainer": {**s["trainer"], "decay_steps": past}} for s in (before, now))
    free = tuple(f"trainer.{name} was " for name in EXTENDABLE_TRAINER)
    fixed = [name for name in now if name not in EXTENDABLE]
    lines = [line for name in fixed for line in _changes(name, before.get(name), now[name])]
    return [line for line in lines if not line.startswith(free)]


def _decay_steps(settings: dict[str, Any]) -> int | None:
    """Where the learning rate stops falling; None where it is constant."""
    trainer = settings["trainer"]
    if trainer["schedule"] == "constant":
        return None
    decay_steps: int = trainer["decay_steps"] if trainer["decay_steps"] is not None else settings["steps"]
    return decay_steps


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """What differs between two settings, by dotted name."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [c for key in now for c in _changes(f"{name}.{key}", before.get(key), now[key])]
    return [] if before == now else [f"{name} was {before!r} and is {now!r}"]


def smaller_microbatches(config: FitConfig) -> FitConfig:
    """The same run in half the memory for activations."""
    half = max(1, config.trainer.max_tokens_per_microbatch // 2)
    return msgspec.structs.replace(
        config, trainer=msgspec.structs.replace(config.trainer, max_tokens_per_microbatch=half)
    )
