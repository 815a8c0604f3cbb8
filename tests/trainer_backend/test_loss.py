from __future__ import annotations

import math

import pytest
import torch

from trainer_backend.loss import PPOClip


def test_ppo_clip_by_hand() -> None:
    """Bounds 0.8 and 1.2. A = 1: ratio 1.5 is cut to 1.2, ratio 0.5 is not. A = -1: 1.5 is not cut, 0.5 is cut to 0.8.
    A clipped token has no gradient; another has d loss / d logp = -ratio * A."""
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    logprobs = (ratios.log() - 3.0).requires_grad_()
    loss, metrics = PPOClip()(logprobs, torch.full((5,), -3.0), advantages)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.5, 1.5, 0.8, -2.0]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5, 1.5, 0.0, -2.0]))
    torch.testing.assert_close(metrics["ratio_mean"], ratios)
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_ppo_clip_bounds_are_independent() -> None:
    """Bounds 0.9 and 1.4: ratio 1.3 is inside, 0.5 with A = -1 is cut to 0.9."""
    ratios = torch.tensor([1.3, 0.5])
    loss, _ = PPOClip(clip_low=0.1, clip_high=0.4)(ratios.log(), torch.zeros(2), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(loss, torch.tensor([-1.3, 0.9]))


def test_zero_advantage_has_zero_loss_and_gradient() -> None:
    logprobs = torch.tensor([-1.0, -9.0], requires_grad=True)
    loss, _ = PPOClip()(logprobs, torch.tensor([-5.0, -1.0]), torch.zeros(2))
    loss.sum().backward()
    assert PPOClip.zero_without_advantage
    assert loss.tolist() == [0.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("hidden", [0.0, math.nan, math.inf, -math.inf])
def test_f59_masked_tokens_enter_neither_numerator_nor_gradient(hidden: float) -> None:
    """Losses [[2, .], [4, .]] with the second column masked sum to 6, whatever stands there. At ratio 1 the loss is
    -A and its gradient -A."""
    mask = torch.tensor([[True, False], [True, False]])
    logprobs = torch.tensor([[-1.0, hidden], [-1.0, hidden]], requires_grad=True)
    old = torch.tensor([[-1.0, 7.0], [-1.0, hidden]])
    advantages = torch.tensor([[-2.0, -7.0], [-4.0, hidden]])
    loss, metrics = PPOClip()(logprobs, old, advantages, mask)
    loss.sum().backward()
    assert loss.tolist() == [[2.0, 0.0], [4.0, 0.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[2.0, 0.0], [4.0, 0.0]]
    assert metrics["ratio_mean"].tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_f68_infinite_minus_infinite() -> None:
    """Masked it has no effect; at a trained token the loss is not finite, on which the trainer skips the step."""
    both = torch.tensor([-math.inf, -1.0])
    loss, _ = PPOClip()(both, both, torch.ones(2), torch.tensor([False, True]))
    assert loss.tolist() == [0.0, -1.0]
    loss, _ = PPOClip()(both, both, torch.ones(2))
    assert math.isnan(loss[0].item())
