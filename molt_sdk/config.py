"""Settings of a rollout. Each field is a flag of ``molt-sdk`` and a key of ``run.toml``."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from molt_sdk.errors import ConfigError


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
    """``config`` overrules the temperature and the filters that an agent asks for."""

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
