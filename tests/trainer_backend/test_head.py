from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_backend import head as module
from trainer_backend.head import LogitTransform, TargetStats, target_stats

PLAIN = LogitTransform()
TRANSFORMS = [PLAIN, LogitTransform(scale=0.25), LogitTransform(softcap=3.0), LogitTransform(scale=1.5, softcap=2.0)]


class Case:
    """Random inputs; every few rows have no target, others several, some of them the same token twice."""

    def __init__(self, rows: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden, self.weight, self.bias = normal(rows, width), normal(vocabulary, width), normal(vocabulary)
        self.temperature = torch.tensor([0.5, 1.0, 1.7]).repeat(rows)[:rows]
        targets = [row for row in range(rows) for _ in range(row * 7 % 4)]
        self.pair = torch.tensor(targets, dtype=torch.long)
        self.token = torch.randint(0, vocabulary, (len(targets),), generator=generator)
        if len(targets) > 1:
            self.token[-1] = self.token[-2]
        self.grad = torch.randn(len(targets), generator=generator, dtype=torch.float64)

    def run(self, function: Any, bias: bool, **options: Any) -> tuple[TargetStats, list[Tensor]]:
        inputs = [tensor.clone().requires_grad_() for tensor in (self.hidden, self.weight, self.bias)]
        stats = function(
            inputs[0], inputs[1], inputs[2] if bias else None, self.temperature, self.pair, self.token, **options
        )
        inputs = inputs if bias else inputs[:2]
        return stats, list(torch.autograd.grad(stats.logprobs, inputs, self.grad.to(stats.logprobs.dtype)))


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    pair: Tensor,
    token: Tensor,
    *,
    transform: LogitTransform = PLAIN,
) -> TargetStats:
    """The definition, in float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * (logits / transform.softcap).tanh()
    logprobs = (logits / temperature.double()[:, None]).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return TargetStats(logprobs[pair, token], entropy[pair])


@pytest.fixture(params=[(1, 4096, 4096), (12, 3, 5), (35, 4096, 7), (1 << 22, 4096, 1 << 14)], ids=str)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Most elements, rows and columns of a block; most do not divide the sizes below."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", {"cpu": request.param[0]})
    monkeypatch.setattr(module, "BLOCK_ROWS", request.param[1])
    monkeypatch.setattr(module, "BLOCK_VOCABULARY", request.param[2])
    return request.param  # type: ignore[no-any-return]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 5, 40), (4, 3, 7), (17, 8, 23)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_values_and_gradients_equal_log_softmax(
    size: tuple[int, int, int], bias: bool, transform: LogitTransform
) -> None:
    case = Case(*size)
    expected, wanted = case.run(reference, bias, transform=transform)
    found, grads = case.run(target_stats, bias, transform=transform)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, wanted)
    assert not found.entropy.requires_grad


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("fp32", [False, True])
def test_float32_within_rounding(fp32: bool) -> None:
    case = Case(17, 8, 23, torch.float32)
    expected, wanted = case.run(reference, True)
    found, grads = case.run(target_stats, True, fp32=fp32)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    torch.testing.assert_close(found, TargetStats(*(value.float() for value in expected)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_bfloat16_within_its_rounding_and_a_float32_head_is_exact() -> None:
    """Logits of size 3 are rounded to 1/128 by a product in bfloat16, and not at all by one in float32."""
    case = Case(17, 8, 23, torch.bfloat16)
    expected, wanted = case.run(reference, True)
    for fp32, near in ((False, 0.1), (True, 1e-5)):
        found, grads = case.run(target_stats, True, fp32=fp32)
        assert found.logprobs.dtype == torch.float32
        torch.testing.assert_close(found.logprobs, expected.logprobs.float(), rtol=0, atol=near)
        torch.testing.assert_close(found.entropy, expected.entropy.float(), rtol=0, atol=near)
        for grad, want in zip(grads, wanted, strict=True):
            assert grad.dtype == torch.bfloat16
            assert (grad - want).float().norm() < 0.02 * want.float().norm()
    assert (found.logprobs - case.run(target_stats, True)[0].logprobs).abs().max() > 1e-4


def test_a_uniform_row_is_normalised_in_float32() -> None:
    """1,000 equal logits: log-probability -ln 1000 = -6.9078, which bfloat16 can only write as -6.90625."""
    hidden, weight = torch.zeros(1, 4, dtype=torch.bfloat16), torch.ones(1000, 4, dtype=torch.bfloat16)
    pair, token = torch.zeros(1, dtype=torch.long), torch.tensor([3])
    found, entropy = target_stats(hidden, weight, None, torch.ones(1), pair, token)
    assert found.item() == pytest.approx(-math.log(1000), abs=1e-5)
    assert entropy.item() == pytest.approx(math.log(1000), abs=1e-4)


@pytest.mark.usefixtures("blocks")
def test_rows_without_targets_and_no_rows_at_all() -> None:
    for rows in (0, 3):
        hidden = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        none = torch.zeros(0, dtype=torch.long)
        found = target_stats(hidden, weight, None, torch.ones(rows), none, none)
        assert found.logprobs.shape == found.entropy.shape == (0,)
        found.logprobs.sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert not hidden.grad.any()
        assert not weight.grad.any()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_forbidden_tokens_add_nothing_to_the_entropy(temperature: float) -> None:
    """Two possible tokens, p = 1/2 each: entropy ln 2; all others have logit -inf, whole blocks of them."""
    bias = torch.full((20,), -math.inf)
    bias[[3, 17]] = 0.0
    hidden, weight = torch.zeros(2, 4, requires_grad=True), torch.zeros(20, 4, requires_grad=True)
    pair, token = torch.tensor([0, 1]), torch.tensor([3, 17])
    found, entropy = target_stats(hidden, weight, bias, torch.full((2,), temperature), pair, token)
    found.sum().backward()
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2)
    assert found.tolist() == pytest.approx([-math.log(2)] * 2)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.usefixtures("blocks")
def test_logits_of_any_size_stay_finite() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [2.0], [-3.0]])
    pair, token = torch.tensor([0, 1]), torch.tensor([1, 2])
    found, entropy = target_stats(hidden, weight, None, torch.full((2,), 0.5), pair, token)
    assert found.tolist() == entropy.tolist() == [0.0, 0.0]


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transform", TRANSFORMS[::3], ids=str)
@pytest.mark.parametrize("fp32", [False, True])
def test_no_tensor_of_tokens_times_vocabulary(dtype: torch.dtype, transform: LogitTransform, fp32: bool) -> None:
    """Real block sizes: 80 rows and a vocabulary of 60,000 are 4.8M logits, just above what one block may hold."""
    case = Case(80, 4, 60_000, dtype)
    with LargestTensor() as largest:
        case.run(target_stats, True, transform=transform, fp32=fp32)
    assert 0 < largest.elements < 80 * 60_000 / 2
    with LargestTensor() as largest:  # the recorder sees what is there to see
        case.run(reference, False)
    assert largest.elements >= 80 * 60_000


def test_a_large_common_offset_of_the_logits_is_not_rounded_away() -> None:
    """As with ``log_softmax``: what all logits share cancels, and no digits go with it."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16), torch.randn(50, 16)
    pair, token = torch.arange(7), torch.arange(7) * 7
    bias = torch.full((50,), 2.0**13)  # exact in float32, as are the sums up to 2^-10
    exact = (hidden @ weight.T + bias).double().log_softmax(-1)[pair, token]
    found = target_stats(hidden, weight, bias, torch.ones(7), pair, token)
    torch.testing.assert_close(found.logprobs.double(), exact, rtol=0, atol=1e-5)
