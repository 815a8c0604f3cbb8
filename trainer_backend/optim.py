"""AdamW over sharded parameters, its learning rate, and the clipping of their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.adamw import adamw

from molt_sdk.errors import ConfigError
from trainer_backend.config import TrainerConfig
from trainer_backend.parallel import local

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_BYTES = 1 << 28
"""Of the moments that :class:`OffloadedAdamW` has on the device at a time."""


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) on float32 master weights: in bfloat16 an update below 1/256 of a weight is lost.

    The learning rate is that of the first step; whoever steps sets ``group["lr"]`` to :func:`learning_rate` before.
    """
    # With offload="parameters" the weights are in CPU memory already, and moments are made where their weights are.
    kind = OffloadedAdamW if config.offload == "optimizer" else torch.optim.AdamW
    return kind(
        parameters,
        lr=learning_rate(config, 0),
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: TrainerConfig, completed_steps: int) -> float:
    """The rate of the step after ``completed_steps`` optimizer steps (t below); W warm-up and D decay steps.

        t < W:       learning_rate * (t + 1) / W         as PyTorch's LinearLR(start_factor=1/W, total_iters=W-1)
        W <= t < D:  min + (learning_rate - min) * f(p)  with p = (t - W) / (D - W)
        D <= t:      min                                 with min = min_lr_ratio * learning_rate

    f(p) is 1 - p (linear) or (1 + cos(pi p)) / 2 (cosine), as in transformers' schedules of these names; their warm-up
    spends the first step at rate 0, this one does not. A constant schedule keeps ``learning_rate`` from W on. Raises
    ConfigError for a falling schedule without ``decay_steps``.
    """
    peak, warmup, end = config.learning_rate, config.warmup_steps, config.decay_steps
    if config.schedule != "constant" and end is None:
        raise ConfigError(
            f"trainer: schedule={config.schedule!r} needs decay_steps, the number of steps at which it ends; "
            "only `fit` knows a value for decay_steps=None"
        )
    if completed_steps < warmup:
        return peak * (completed_steps + 1) / warmup
    if end is None:
        return peak
    if completed_steps >= end:
        return peak * config.min_lr_ratio
    progress = (completed_steps - warmup) / (end - warmup)
    part = 1.0 - progress if config.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * part)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are in CPU memory (pinned, if there is CUDA) between steps. During a step they visit the
    device of their parameters, at most ``bucket_bytes`` at a time, or those of one parameter if that is more. The
    update itself is the fused one: it gives the same bits. Sharded parameters are updated shard by shard."""

    bucket_bytes = BUCKET_BYTES

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("this optimizer takes no closure")
        for group in self.param_groups:
            for bucket in _buckets([p for p in group["params"] if p.grad is not None], self.bucket_bytes):
                self._step_bucket(bucket, group)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # whoever reads the moments next reads them on the CPU

    def _step_bucket(self, bucket: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        parameters = [local(p) for p in bucket]
        states = [self._state(p) for p in bucket]
        kept = [local(state[name]) for name in MOMENTS for state in states]
        visiting = [moment.to(p.device, non_blocking=True) for moment, p in zip(kept, parameters * 2, strict=True)]
        adamw(
            params=parameters,
            grads=[local(p.grad) for p in bucket if p.grad is not None],
            exp_avgs=visiting[: len(bucket)],
            exp_avg_sqs=visiting[len(bucket) :],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, visitor in zip(kept, visiting, strict=True):
            moment.copy_(visitor, non_blocking=True)  # does nothing where both are one tensor

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(new_state(self, parameter))
        for name in MOMENTS:
            if state[name].device.type != "cpu":  # load_state_dict puts them beside their parameters
                state[name] = new_state(self, parameter)[name].copy_(state[name])
        return state


def new_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: float = 0.0) -> dict[str, Tensor]:
    """What ``optimizer.state[parameter]`` is before the first step: ``step`` (a scalar, here set to ``steps``) and the
    two MOMENTS (zero, shaped and sharded like the parameter), on the device where this optimizer keeps them."""
    where: dict[str, Any] = {}
    if isinstance(optimizer, OffloadedAdamW):
        where = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    state = {"step": torch.tensor(steps, dtype=torch.float32, device=parameter.device)}
    return state | {name: torch.zeros_like(parameter.detach(), **where) for name in MOMENTS}


def _buckets(parameters: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters whose moments take at most ``most`` bytes together, or of a single one."""
    bucket: list[nn.Parameter] = []
    total = 0
    for parameter in parameters:
        size = len(MOMENTS) * local(parameter).nbytes
        if bucket and total + size > most:
            yield bucket
            bucket, total = [], 0
        bucket.append(parameter)
        total += size
    if bucket:
        yield bucket


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm over all ranks, a float32 scalar; NaN or infinity if any gradient is. Every rank must call it."""
    layouts: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        # By layout of the parameter, not of the gradient: a rank without any must take part in the sum all the same.
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        gradients = layouts.setdefault(layout, [])
        if parameter.grad is not None:
            gradients.append(local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64)
    for layout, gradients in layouts.items():
        # Squares in float64: those of float32 norms beyond 1e19 are infinite.
        square = torch.nn.utils.get_total_norm(gradients).double().square()
        if layout is not None:
            mesh, placements = layout
            parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
            square = DTensor.from_local(square, mesh, parts).full_tensor()
        total = total.to(square.device) + square
    return total.sqrt().float()


@torch.no_grad()
def clip_gradient(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` where the norm is above the limit."""
    if not norm > limit:
        return
    scale = limit / norm
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.mul_(scale.to(gradient.device))
