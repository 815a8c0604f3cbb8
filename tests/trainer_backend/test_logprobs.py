from __future__ import annotations

import math

import pytest
import torch

from trainer_backend import logprobs as module
from trainer_backend.logprobs import selected_logprobs

PAIR = torch.tensor([0, 0, 1, 3, 3, 3])  # row 2 has no target, rows 0 and 3 several
TOKEN = torch.tensor([1, 4, 0, 2, 2, 5])


@pytest.fixture(params=[1, 14, 1 << 20], ids=["row by row", "two rows at once", "all at once"])
def chunk_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("chunk_elements")
def test_equal_to_log_softmax_with_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, generator=generator).requires_grad_()
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0])
    weights = torch.randn(6, dtype=torch.float64, generator=generator)

    expected = (logits / temperature.double()[:, None]).log_softmax(-1)
    (wanted_grad,) = torch.autograd.grad((expected[PAIR, TOKEN] * weights).sum(), logits)
    found, entropy = selected_logprobs(logits, temperature, PAIR, TOKEN)
    (grad,) = torch.autograd.grad((found * weights).sum(), logits)

    torch.testing.assert_close(found, expected[PAIR, TOKEN])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    torch.testing.assert_close(grad, wanted_grad)
    assert not entropy.requires_grad


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    """A uniform row of 1,000: log-probability -ln 1000 = -6.9078, which bfloat16 can only write as -6.90625."""
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    found, entropy = selected_logprobs(logits, torch.ones(1), torch.zeros(1, dtype=torch.long), torch.tensor([3]))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-math.log(1000), abs=1e-5)
    assert entropy.item() == pytest.approx(math.log(1000), abs=1e-4)


def test_forbidden_tokens_add_nothing_to_the_entropy() -> None:
    """Two possible tokens, p = 1/2 each: entropy ln 2; a third has logit -inf."""
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    found, entropy = selected_logprobs(logits, torch.ones(1), torch.zeros(1, dtype=torch.long), torch.tensor([0]))
    found.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.5, -0.5, 0.0]]
