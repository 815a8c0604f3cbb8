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
    """AdamW's step size, once warmed up; ``schedule`` says how it goes on. 0 measures without learning."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises in a line; the last of them has the full ``learning_rate``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up: unchanged, or falling to ``min_lr_ratio`` in a line or half a cosine wave."""
    decay_steps: int | None = None
    """Completed optimizer steps, warm-up included, at which a falling schedule has reached its end and stays there;
    None: the ``steps`` of ``fit``."""
    min_lr_ratio: float = 0.0
    """Where a falling schedule ends, as a part of ``learning_rate``."""
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
    fp32_head: bool = False
    """Compute logits in float32 whatever ``compute_dtype`` is: closer to the sampler's logprobs, slower on GPUs."""
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
    ranks: int = 1
    """Trainer processes that weights and batches are split over, a GPU each where there are any. 1 trains inside the
    program; more are started under torchrun. The result is the same within rounding."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for backward and compute the rest again: less memory, about a third more time."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What waits in CPU memory while the GPU does not need it. ``optimizer``: AdamW's two moments; ``parameters``:
    master weights, gradients and moments, so that AdamW runs on the CPU. Changes speed and memory only."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                from molt_sdk.errors import ConfigError  # not at the top: molt_sdk's own settings hold this struct

                raise ConfigError(f"trainer: {name}={getattr(self, name)!r} is not valid; {name} must be {rule}")

        need(0.0 <= self.learning_rate < math.inf, "learning_rate", "a finite number >= 0")
        need(self.warmup_steps >= 0, "warmup_steps", ">= 0")
        need(self.schedule in ("constant", "linear", "cosine"), "schedule", "'constant', 'linear' or 'cosine'")
        need(self.decay_steps is None or self.decay_steps >= 1, "decay_steps", ">= 1, or None for the steps of `fit`")
        need(0.0 <= self.min_lr_ratio <= 1.0, "min_lr_ratio", "a number from 0 to 1")
        falls = self.schedule != "constant"
        need(
            falls or self.decay_steps is None,
            "decay_steps",
            "None with schedule='constant', which never reaches an end",
        )
        need(falls or self.min_lr_ratio == 0.0, "min_lr_ratio", "0 with schedule='constant', which never falls")
        need(
            self.decay_steps is None or self.warmup_steps <= self.decay_steps,
            "warmup_steps",
            f"at most decay_steps={self.decay_steps}, which counts the warm-up too",
        )
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
        need(self.ranks >= 1, "ranks", ">= 1")
        need(
            self.ranks == 1 or self.device[:5] != "cuda:",
            "device",
            f"without an index where ranks={self.ranks}, since each rank takes a device of its own",
        )
        need(self.offload in ("none", "optimizer", "parameters"), "offload", "'none', 'optimizer' or 'parameters'")
