"""AdamW over sharded parameters, and the clipping of their gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer_backend.config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) on float32 master weights: in bfloat16 an update below 1/256 of a weight is lost."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm over all ranks, a float32 scalar tensor; NaN or infinity if any gradient is."""
    return full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip_gradient(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` where the norm is above the limit."""
    torch.nn.utils.clip_grads_with_norm_(list(parameters), limit, norm)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
