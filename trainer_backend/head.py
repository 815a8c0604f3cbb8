"""The output head of a language model without its logits: hidden states -> log-probability of each trained token and
entropy of the distribution that it was drawn from.

Logits are made for a block of rows and a block of the vocabulary at a time, folded into a running maximum, sum of
exponentials and sum for the entropy (an online softmax), and dropped; the backward pass makes them again. So no tensor
of [tokens, vocabulary] ever exists: beyond the gradients themselves, memory is a few blocks, whatever the micro-batch.
The product with the weight runs in the compute dtype, as in an inference engine; all that follows is float32.

Shapes as in ``batch.py``: R distinct (node, temperature) pairs, E trained tokens; d the width of the hidden states, V
the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Most logits of one block, by type of device: on a CPU what its caches hold, on a GPU what keeps it busy."""
BLOCK_ROWS = 4096
BLOCK_VOCABULARY = 1 << 14


class TargetStats(NamedTuple):
    """Both float32 (float64 for a float64 model), shape [E]."""

    logprobs: Tensor
    """Differentiable."""
    entropy: Tensor
    """Of the whole distribution that the token was drawn from, in nats; not differentiable."""


class LogitTransform(Struct, frozen=True, kw_only=True):
    """What a model does to the product z of hidden state and head: ``scale * z``, or ``c * tanh(scale * z / c)``."""

    scale: float = 1.0
    softcap: float | None = None
    """c; None for no softcap."""


IDENTITY = LogitTransform()


def target_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    pair: Tensor,
    token: Tensor,
    *,
    transform: LogitTransform = IDENTITY,
    fp32: bool = False,
) -> TargetStats:
    """``log_softmax(transform(hidden @ weight.T + bias) / temperature)[pair, token]`` and the entropy of those rows.

    hidden [R, d], weight [V, d] and bias [V] in one dtype; temperature [R], > 0; pair [E], ascending, in [0, R); token
    [E] in [0, V). ``fp32`` also multiplies in float32. Gradients reach hidden, weight and bias. A token with logit -inf
    has probability 0 and adds nothing to the entropy.
    """
    logprobs, entropy = _Head.apply(hidden, weight, bias, temperature, pair, token, transform, fp32)  # type: ignore[no-untyped-call]
    return TargetStats(logprobs, entropy[pair])


class _Blocks:
    """The logits of one head, a block at a time, and the targets in each block."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        pair: Tensor,
        token: Tensor,
        transform: LogitTransform,
        fp32: bool,
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        """Of everything after the product."""
        self.product_dtype = self.dtype if fp32 else hidden.dtype
        self.hidden, self.weight, self.bias, self.transform = hidden, weight, bias, transform
        self.inverse_temperature = temperature.to(self.dtype).reciprocal()
        rows, vocabulary = len(hidden), len(weight)
        elements = BLOCK_ELEMENTS[hidden.device.type]
        height = max(1, min(rows, BLOCK_ROWS, elements))
        width = max(1, min(vocabulary, BLOCK_VOCABULARY, elements // height))
        self.rows, self.columns = _slices(rows, height), _slices(vocabulary, width)
        self._product = hidden.new_empty(height * width, dtype=self.product_dtype)
        self._logits = self._product if self.product_dtype == self.dtype else self.buffer()
        # Targets in the order of their blocks, and where those of each block begin.
        key = torch.div(token, width, rounding_mode="floor") * len(self.rows)
        key += torch.div(pair, height, rounding_mode="floor")
        key, self.order = key.sort(stable=True)
        blocks = torch.arange(len(self.rows) * len(self.columns) + 1, device=key.device)
        self._starts = torch.searchsorted(key, blocks).tolist()
        self._local_row, self._local_column = pair[self.order] % height, token[self.order] % width

    def buffer(self) -> Tensor:
        """Room for the float32 logits of one block, to be cut by :func:`_cut`."""
        return torch.empty_like(self._product, dtype=self.dtype)

    def targets(self, row: int, column: int) -> tuple[slice, Tensor, Tensor]:
        """Of a block: where its targets are in ``order``, and their rows and columns within the block."""
        block = column * len(self.rows) + row
        where = slice(self._starts[block], self._starts[block + 1])
        return where, self._local_row[where], self._local_column[where]

    def operands(self, row: int, column: int) -> tuple[Tensor, Tensor]:
        """Hidden states [rows, d] and weight [columns, d] of a block, in the dtype of the product."""
        hidden, weight = self.hidden[self.rows[row]], self.weight[self.columns[column]]
        return hidden.to(self.product_dtype), weight.to(self.product_dtype)

    def logits(self, hidden: Tensor, weight: Tensor, column: int) -> Tensor:
        """Of a block, after the transform, before the temperature; overwritten by the next call."""
        size = len(hidden), len(weight)
        product = _cut(self._product, size)
        if self.bias is None:
            torch.mm(hidden, weight.t(), out=product)
        else:
            bias = self.bias[self.columns[column]].to(self.product_dtype)
            torch.addmm(bias, hidden, weight.t(), out=product)
        logits = _cut(self._logits, size)
        if self._logits is not self._product:
            logits.copy_(product)
        if self.transform.softcap is None:
            return logits if self.transform.scale == 1 else logits.mul_(self.transform.scale)
        return logits.mul_(self.transform.scale / self.transform.softcap).tanh_().mul_(self.transform.softcap)


class _Head(torch.autograd.Function):
    """d logprob[e] / d scaled logit[r, v] = (v == token[e]) - softmax[r, v] for r = pair[e], else 0."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        pair: Tensor,
        token: Tensor,
        transform: LogitTransform,
        fp32: bool,
    ) -> tuple[Tensor, Tensor]:
        blocks = _Blocks(hidden, weight, bias, temperature, pair, token, transform, fp32)
        selected = hidden.new_empty(len(pair), dtype=blocks.dtype)
        # Of scaled logits z: their maximum m, sum of exp(z - m), sum of (z - m) exp(z - m). Starting at the lowest
        # finite number, not at -inf, keeps the differences of maxima finite.
        lowest = torch.finfo(blocks.dtype).min
        maximum = hidden.new_full((len(hidden),), lowest, dtype=blocks.dtype)
        total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
        exponentials = blocks.buffer()
        for column in range(len(blocks.columns)):
            for row, rows in enumerate(blocks.rows):
                scaled = blocks.logits(*blocks.operands(row, column), column)
                scaled.mul_(blocks.inverse_temperature[rows, None])
                where, at, what = blocks.targets(row, column)
                selected[blocks.order[where]] = scaled[at, what]
                before = maximum[rows]
                now = torch.maximum(before, scaled.amax(dim=-1))
                # 0 * -inf is NaN, its limit is 0: a token with logit -inf must add nothing.
                scaled.sub_(now[:, None]).clamp_min_(lowest)
                exp = torch.exp(scaled, out=_cut(exponentials, scaled.shape))
                step = before - now
                decay = step.exp()
                weighted[rows] = (weighted[rows] + total[rows] * step) * decay + scaled.mul_(exp).sum(dim=-1)
                total[rows] = total[rows] * decay + exp.sum(dim=-1)
                maximum[rows] = now
        log_total = total.log()
        entropy = log_total - weighted / total
        # Maximum and log_total stay apart: where the logits share a large offset, their sum would round it away.
        ctx.save_for_backward(hidden, weight, bias, temperature, pair, token, maximum, log_total)
        ctx.options = transform, fp32
        ctx.mark_non_differentiable(entropy)
        return selected - maximum[pair] - log_total[pair], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, temperature, pair, token, maximum, log_total = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        blocks = _Blocks(hidden, weight, bias, temperature, pair, token, *ctx.options)
        grad = grads[0] * blocks.inverse_temperature[pair]
        row_factor = torch.zeros_like(maximum).index_add_(0, pair, grad).neg_()[:, None]
        grad = grad[blocks.order]
        transform = blocks.transform
        slopes = blocks.buffer() if transform.softcap is not None else None
        product = blocks._product
        grad_hidden = torch.zeros_like(hidden, dtype=blocks.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        for column, columns in enumerate(blocks.columns):
            width = columns.stop - columns.start
            weight_sum = hidden.new_zeros(width, hidden.shape[1], dtype=blocks.dtype) if need_weight else None
            bias_sum = hidden.new_zeros(width, dtype=blocks.dtype) if need_bias else None
            for row, rows in enumerate(blocks.rows):
                states, matrix = blocks.operands(row, column)
                logits = blocks.logits(states, matrix, column)
                if slopes is not None and transform.softcap is not None:
                    # d softcap / d z = scale * (1 - tanh^2)
                    slope = torch.div(logits, transform.softcap, out=_cut(slopes, logits.shape))
                    slope.square_().neg_().add_(1).mul_(transform.scale)
                block = logits.mul_(blocks.inverse_temperature[rows, None]).sub_(maximum[rows, None])
                block.sub_(log_total[rows, None]).exp_()
                block.mul_(row_factor[rows])
                where, at, what = blocks.targets(row, column)
                block.index_put_((at, what), grad[where], accumulate=True)
                if slopes is not None:
                    block.mul_(slope)
                elif transform.scale != 1:
                    block.mul_(transform.scale)
                if bias_sum is not None:
                    bias_sum += block.sum(dim=0)
                block = _cut(product, block.shape).copy_(block)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], block, matrix)
                if weight_sum is not None:
                    _add_product(weight_sum, block.t(), states)
            if grad_weight is not None and weight_sum is not None:
                grad_weight[columns] = weight_sum
            if grad_bias is not None and bias_sum is not None:
                grad_bias[columns] = bias_sum
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, whose dtype may be wider than theirs."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _cut(buffer: Tensor, size: tuple[int, ...]) -> Tensor:
    """A contiguous matrix in the first part of a flat buffer."""
    return buffer[: size[0] * size[1]].view(size[0], size[1])


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
