"""Settings of a rollout. Each field is a flag of ``molt-sdk`` and a key of ``run.toml``."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from molt_sdk.errors import ConfigError


class RolloutConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How trajectories are run.

    max_concurrent: most trajectories that run at the same time (evaluation has as many of its own).
    timeout: seconds that one trajectory may take, rewards included; None for no limit. Beyond it: status ``timeout``.
    close_timeout: seconds that an environment's close may take.
    threads: most threads for sync tools, rewards and environment methods.
    agent_error_reward: reward of a trajectory whose policy raised; None leaves it out of training.
    sampling_from: "agent" lets a call choose temperature and filters; "config" overrules them.
    """

    max_concurrent: int = 64
    timeout: float | None = None
    close_timeout: float = 30.0
    threads: int = 64
    agent_error_reward: float | None = None
    sampling_from: Literal["agent", "config"] = "agent"

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} must be at least 1")
        for name in ("timeout", "close_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"rollout.{name}={value} must be a positive number of seconds")
