"""Losses: tensors of per-token values in, per-token losses and metrics out.

A loss never reduces and never sees trees, ranks or settings other than its own. The one reduction (a sum divided by the
number of trained tokens in the whole batch) is in ``trainer.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor


class PPOClip(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="algorithm", tag="ppo_clip"):
    """Clipped surrogate, ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(logp - logp_old)``
    (PPO, arXiv 1707.06347; unequal bounds as in DAPO, arXiv 2503.14476).

    ``logp_old`` is the sampler's own log-probability, so a stale or differently rounded sampler is corrected for by
    the ratio.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    zero_without_advantage: ClassVar[bool] = True
    """Loss and gradient of a token with advantage 0 are exactly 0 (there is no KL or entropy term), so such rows need
    no forward pass. They stay in the denominator of the mean."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                from molt_sdk.errors import ConfigError  # not at the top: molt_sdk's own settings hold this struct

                raise ConfigError(f"PPOClip: {name}={getattr(self, name)!r} is not valid; {name} must be {rule}")

        need(0.0 <= self.clip_low < 1.0, "clip_low", "in [0, 1)")
        need(0.0 <= self.clip_high < float("inf"), "clip_high", "a finite number >= 0")

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All tensors have one shape, [tokens] or any other; ``mask`` is boolean, None trains every token.

        Returns the per-token loss and detached per-token metrics, named as their mean over trained tokens is reported.
        Where the mask is False, loss, metrics and gradients are exactly 0 whatever stands there, NaN and infinity
        included. At a trained token nothing is hidden: a non-finite log-ratio gives a non-finite loss, which the
        trainer turns into a skipped step.
        """
        import torch

        if mask is not None:
            # Selecting before anything is computed keeps NaN and infinity out of the backward pass as well; multiplying
            # by 0 would not.
            logprobs, old_logprobs, advantages = (
                torch.where(mask, values, torch.zeros_like(values)) for values in (logprobs, old_logprobs, advantages)
            )
        ratio = (logprobs - old_logprobs).exp()
        clipped_ratio = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        unclipped_loss, clipped_loss = -ratio * advantages, -clipped_ratio * advantages
        loss = torch.maximum(unclipped_loss, clipped_loss)
        metrics = {
            "ratio_mean": ratio.detach(),
            "clip_fraction": (clipped_loss > unclipped_loss).detach().to(loss.dtype),
        }
        if mask is not None:
            metrics = {name: torch.where(mask, value, torch.zeros_like(value)) for name, value in metrics.items()}
        return loss, metrics
