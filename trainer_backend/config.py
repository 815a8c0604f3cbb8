"""Settings of the trainer. Importing this module needs no torch and nothing of molt_sdk."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from trainer_backend.advantage import GRPO
from trainer_backend.loss import PPOClip

Advantage = GRPO
"""Union of the advantage algorithms; the field ``algorithm`` selects one in a config file."""
Loss = PPOClip
"""Union of the losses; the field ``algorithm`` selects one in a config file."""


class TrainerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the weights are updated. Fields are checked when the struct is made; ConfigError names field and value."""

    learning_rate: float = 1e-6
    """AdamW's step size, constant over the run. 0 measures without learning."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay, per step times the learning rate."""
    grad_clip: float = 1.0
    """Largest global L2 norm of the gradient; larger ones are scaled down to it. Infinity switches clipping off."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of forward and backward. Master weights, gradient sums, log-probabilities and optimizer are always float32."""
    advantage: Advantage = GRPO()
    """Rewards of a group -> one advantage per trajectory and agent."""
    loss: Loss = PPOClip()
    """Per-token policy loss."""
    layout: Literal["auto", "tree", "chain"] = "auto"
    """``tree``: every distinct prefix token is computed once, refused for a model that a check at start-up shows to
    compute something else then; ``chain``: each sample on its own; ``auto``: tree where the check passes."""
    max_tokens_per_microbatch: int = 4096
    """Most distinct tokens in one forward pass; bounds memory, never changes the result. A single longer sample gets
    a pass of its own."""
    device: str = "auto"
    """``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:<index>``."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                from molt_sdk.errors import ConfigError  # not at the top: molt_sdk's own settings hold this struct

                raise ConfigError(f"trainer: {name}={getattr(self, name)!r} is not valid; {name} must be {rule}")

        need(0.0 <= self.learning_rate < math.inf, "learning_rate", "a finite number >= 0")
        need(len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas), "betas", "two numbers in [0, 1)")
        need(0.0 < self.eps < math.inf, "eps", "a finite number > 0")
        need(0.0 <= self.weight_decay < math.inf, "weight_decay", "a finite number >= 0")
        need(self.grad_clip > 0.0, "grad_clip", "a number > 0 (infinity switches clipping off)")
        need(self.compute_dtype in ("bfloat16", "float32"), "compute_dtype", "'bfloat16' or 'float32'")
        need(isinstance(self.advantage, GRPO), "advantage", "an advantage struct such as GRPO()")
        need(isinstance(self.loss, PPOClip), "loss", "a loss struct such as PPOClip()")
        need(self.layout in ("auto", "tree", "chain"), "layout", "'auto', 'tree' or 'chain'")
        need(self.max_tokens_per_microbatch >= 1, "max_tokens_per_microbatch", ">= 1")
        need(
            self.device in ("auto", "cpu", "cuda") or (self.device[:5] == "cuda:" and self.device[5:].isdigit()),
            "device",
            "'auto', 'cpu', 'cuda' or 'cuda:<index>'",
        )
