"""One forward pass of a forest -> the log-probability of every trained token and the entropy it was drawn with.

Logits are computed only at nodes whose child is trained. They stay in the compute dtype; everything after them
(softmax, gather, entropy) is float32, a few rows at a time, and the backward pass recomputes it, so no float32 copy of
the logits is ever held. Letters in shapes as in ``batch.py``; V is the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_backend.attention import tree_layout
from trainer_backend.batch import Forest

CHUNK_ELEMENTS = 1 << 23
"""Float32 numbers per chunk of the softmax: 32 MiB, whatever the vocabulary."""


class TargetStats(NamedTuple):
    """Both float32 (float64 for a float64 model), shape [E]."""

    logprobs: Tensor
    """Differentiable."""
    entropy: Tensor
    """Of the whole distribution that the token was drawn from, in nats; not differentiable."""


def target_stats(model: nn.Module, forest: Forest, device: torch.device) -> TargetStats:
    """Run a Hugging Face causal LM (sharded or not) that uses :func:`trainer_backend.attention.tree_attention`."""
    logits = forest_logits(model, forest, device, torch.from_numpy(forest.kept_nodes).to(device))
    pair_kept = torch.from_numpy(forest.pair_kept).to(device)
    if len(forest.pair_kept) != len(forest.kept_nodes):  # one node sampled from at several temperatures
        logits = logits.index_select(0, pair_kept)
    temperature = torch.from_numpy(forest.pair_temperature).to(device)
    pair = torch.from_numpy(forest.target_pair).to(device)
    token = torch.from_numpy(forest.target_token).to(device)
    logprobs, entropy = selected_logprobs(logits, temperature, pair, token)
    return TargetStats(logprobs, entropy[pair])


def forest_logits(model: nn.Module, forest: Forest, device: torch.device, nodes: Tensor) -> Tensor:
    """Logits [len(nodes), V] of the given nodes, in the compute dtype. Always through the root module's forward: there
    FSDP2 gathers the parameters."""
    output = model(
        input_ids=torch.from_numpy(forest.token_ids).to(device)[None],
        position_ids=torch.from_numpy(forest.positions).to(device)[None],
        logits_to_keep=nodes,
        use_cache=False,
        tree=tree_layout(forest, device),
    )
    logits: Tensor = output.logits[0]
    return logits


def selected_logprobs(logits: Tensor, temperature: Tensor, pair: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """``log_softmax(logits / temperature)[pair, token]`` [E] and the entropy of every row [R] (not differentiable).

    logits [R, V]; temperature [R], > 0; pair [E], ascending, in [0, R); token [E] in [0, V).
    """
    result: tuple[Tensor, Tensor] = _SelectedLogProbs.apply(logits, temperature, pair, token)  # type: ignore[no-untyped-call]
    return result


class _SelectedLogProbs(torch.autograd.Function):
    """d logprob[e] / d logits[r, v] = ((v == token[e]) - softmax[r, v]) / temperature[r] for r = pair[e], else 0."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: Tensor, pair: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scale = temperature.to(dtype).reciprocal()
        selected = logits[pair, token].to(dtype) * scale[pair]
        normalizer = torch.empty(len(logits), dtype=dtype, device=logits.device)
        entropy = torch.empty_like(normalizer)
        for rows in _chunks(logits):
            scaled = logits[rows].to(dtype) * scale[rows, None]
            normalizer[rows] = scaled.logsumexp(dim=-1)
            log_p = scaled.sub_(normalizer[rows, None])
            # 0 * -inf is NaN, its limit is 0: tokens that a model forbids with -inf logits add nothing.
            entropy[rows] = -(log_p.exp() * log_p.clamp_min(torch.finfo(dtype).min)).sum(dim=-1)
        ctx.save_for_backward(logits, scale, normalizer, pair, token)
        ctx.mark_non_differentiable(entropy)
        return selected - normalizer[pair], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, scale, normalizer, pair, token = ctx.saved_tensors
        grad = grads[0]
        row_grad = torch.zeros_like(normalizer).index_add_(0, pair, grad)
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            softmax = (logits[rows].to(normalizer.dtype) * scale[rows, None]).sub_(normalizer[rows, None]).exp_()
            chunk = softmax.mul_((-row_grad[rows] * scale[rows])[:, None])
            inside = (pair >= rows.start) & (pair < rows.stop)
            at, what = pair[inside], token[inside]
            chunk.index_put_((at - rows.start, what), grad[inside] * scale[at], accumulate=True)
            grad_logits[rows] = chunk
        return grad_logits, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    rows, vocabulary = logits.shape
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
