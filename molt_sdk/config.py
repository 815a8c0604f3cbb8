"""Settings of a rollout, and how keywords set settings. Each field is a flag of ``molt-sdk`` and a key of a file."""

from __future__ import annotations

import math
import os
from typing import Any, Literal, TypeVar, get_origin

import msgspec
from msgspec import Struct

from molt_sdk.errors import ConfigError
from molt_sdk.types import SamplingParams


class RolloutConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How trajectories are run."""

    max_concurrent: int = 64
    """Most trajectories that run at the same time; evaluation has as many of its own."""
    timeout: float | None = None
    """Seconds that one trajectory may take, rewards included; beyond them its status is ``timeout``."""
    close_timeout: float = 30.0
    """Seconds that an environment's ``close`` may take."""
    threads: int = 64
    """Most threads for sync tools, rewards and environment methods."""
    agent_error_reward: float | None = None
    """Reward of a trajectory whose policy raised; None leaves it out of training."""
    sampling_from: Literal["agent", "config"] = "agent"
    """``config`` overrules all that an agent asks for but max_tokens, stop and seed."""
    tool_emulation: bool = True
    """Tools are described, called and answered in plain text where the chat template cannot show them or nothing reads
    the calls that it writes; without it such a model is refused at start."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} must be at least 1")
        error_reward = self.agent_error_reward
        if error_reward is not None and not math.isfinite(error_reward):
            raise ConfigError(f"rollout.agent_error_reward={error_reward} must be a finite number or None")
        for name in ("timeout", "close_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"rollout.{name}={value} must be a positive number of seconds")


S = TypeVar("S", bound=Struct)


def checked(value: Any, kind: Any, name: str) -> Any:
    """A keyword as the type of its field. Raises ConfigError naming keyword and value."""
    if get_origin(kind) is Literal:  # a name: whoever uses it knows the nearest one
        return value
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}={value!r:.80} is not valid: {error}") from None


def check_sampling_type(sampling: Any) -> None:
    """Raise ConfigError unless it is None or SamplingParams."""
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise ConfigError(
            f"sampling={sampling!r:.80} is {type(sampling).__name__}; write SamplingParams(temperature=..., ...)"
        )


def with_keywords(config: S, place: str, **keywords: Any) -> S:
    """``config`` with the keywords that were given (not None). Raises ConfigError where both say something else."""
    changes: dict[str, Any] = {}
    defaults = {f.name: f for f in msgspec.structs.fields(config)}
    for name, value in keywords.items():
        if value is None:
            continue
        value = checked(value, defaults[name].type, name)
        current = getattr(config, name)
        default = defaults[name].default if defaults[name].default is not msgspec.NODEFAULT else current
        if current not in (default, value):
            raise ConfigError(f"{name}={value!r} contradicts {place}.{name}={current!r}; set it in one place")
        changes[name] = value
    try:
        return msgspec.structs.replace(config, **changes) if changes else config
    except TypeError as error:
        raise ConfigError(f"{place}: {error}") from None
