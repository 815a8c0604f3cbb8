from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from molt_sdk.errors import ConfigError
from trainer_backend.advantage import GRPO
from trainer_backend.config import TrainerConfig
from trainer_backend.loss import PPOClip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-6),
        ("learning_rate", float("nan")),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", float("inf")),
        ("grad_clip", 0.0),
        ("compute_dtype", "float16"),
        ("advantage", "grpo"),
        ("loss", None),
        ("layout", "flat"),
        ("max_tokens_per_microbatch", 0),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("warmup_steps", -1),
        ("schedule", "exponential"),
        ("decay_steps", 0),
        ("min_lr_ratio", 1.5),
        ("min_lr_ratio", float("nan")),
        ("ranks", 0),
        ("offload", "disk"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        TrainerConfig(**{field: value})
    assert f"{field}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("warmup_steps=11", {"schedule": "linear", "decay_steps": 10, "warmup_steps": 11}),
        ("decay_steps=10", {"decay_steps": 10}),
        ("min_lr_ratio=0.1", {"min_lr_ratio": 0.1}),
        ("device='cuda:1'", {"ranks": 2, "device": "cuda:1"}),
    ],
)
def test_settings_that_contradict_each_other_are_named(field: str, other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainerConfig(**other)


@pytest.mark.parametrize(("field", "value"), [("clip_low", 1.0), ("clip_low", -0.1), ("clip_high", float("inf"))])
def test_a_wrong_clip_bound_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        PPOClip(**{field: value})


def test_config_round_trips_and_unknown_keys_are_refused() -> None:
    config = TrainerConfig(learning_rate=1e-5, advantage=GRPO(normalize_std=False), loss=PPOClip(clip_high=0.3))
    assert msgspec.json.decode(msgspec.json.encode(config), type=TrainerConfig) == config
    config = TrainerConfig(
        schedule="cosine", warmup_steps=2, decay_steps=9, min_lr_ratio=0.1, ranks=2, offload="optimizer"
    )
    data = msgspec.json.encode(config)
    assert msgspec.json.decode(data, type=TrainerConfig) == config
    with pytest.raises(msgspec.ValidationError, match="norm_by_std"):
        msgspec.json.decode(b'{"advantage": {"algorithm": "grpo", "norm_by_std": false}}', type=TrainerConfig)
    with pytest.raises(msgspec.ValidationError, match="rloo"):
        msgspec.json.decode(b'{"advantage": {"algorithm": "rloo"}}', type=TrainerConfig)


def test_settings_and_algorithms_need_no_torch() -> None:
    """Command lines and --help are made from these structs."""
    code = (
        "import sys; from trainer_backend.config import TrainerConfig; TrainerConfig(); print('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "False"
