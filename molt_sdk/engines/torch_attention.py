"""Attention of the torch engine: every request against its own keys, a shared prefix once for all.

transformers' continuous batching puts all requests of a step into one row. Its sdpa path then scores each query against
the keys of every request and masks the others out, so that work grows with the square of the batch: on a CPU it takes
most of the time. Here a prefilled part is one causal call, requests that decode one token are padded into a batch, and
where these read the same cache slots (a prompt prefix shared through block sharing) those keys and values are gathered
and multiplied once. It is registered with transformers' ``AttentionInterface`` and needs only full-attention layers.

Shapes: T query tokens of all requests, B requests that decode, H query heads, K key heads, G = H / K, D head size,
P shared slots, S other slots of the longest request in a padded batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from molt_sdk.errors import EngineError

PAGED = "molt_sdk_paged"
"""Name for ``set_attn_implementation``."""


def only_full_attention(config: Any) -> bool:
    """Whether every layer of a (text) config attends to the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return getattr(config, "sliding_window", None) is None
    return all(layer_type == "full_attention" for layer_type in layer_types)


class _Part(NamedTuple):
    """Several query tokens of one request."""

    queries: slice
    keys: slice
    """Into what the cache returns."""
    mask: Tensor | None
    """bool [queries, keys], True where seen; None if there is no past, so that plain causal order holds."""


class _Batch(NamedTuple):
    """Requests of similar length that decode one token each."""

    queries: Tensor
    """Their query tokens, int64 [B]."""
    shared: slice
    """P rows of what the cache returns, read by all."""
    own: slice
    """B * S rows, padded."""
    bias: Tensor
    """float32 [B, 1, 1, S], -inf on padding."""


class _Plan(NamedTuple):
    slots: Tensor
    """Cache slots to read, in the order that parts and batches slice; empty if nothing was cached before."""
    parts: list[_Part]
    batches: list[_Batch]


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: dict[str, Tensor],
    max_length_k: dict[str, int],
    read_index: Sequence[Tensor],
    write_index: Sequence[Tensor],
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer. ``query`` is [1, H, T, D], ``key`` and ``value`` [1, K, T, D]; returns [1, T, H, D]."""
    if softcap is not None:
        raise EngineError(f"torch engine: {type(module).__name__} caps its attention scores, which is not supported")
    plan = _plan(cache, cu_seq_lens_q, cu_seq_lens_k["full_attention"], read_index)
    access = {
        "cu_seq_lens_k": cu_seq_lens_k,
        "max_length_k": max_length_k,
        "read_index": [plan.slots],
        "write_index": write_index,
    }
    keys, values = cache.update(key, value, module.layer_idx, access)  # writes, then reads what the plan asks for
    out = torch.empty_like(query.transpose(1, 2))
    for part in plan.parts:
        attended = scaled_dot_product_attention(
            query[:, :, part.queries],
            keys[:, :, part.keys],
            values[:, :, part.keys],
            attn_mask=part.mask,
            is_causal=part.mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        out[:, part.queries] = attended.transpose(1, 2)
    for batch in plan.batches:
        decode = _decode if batch.shared.stop == batch.shared.start else _decode_shared
        out[0, batch.queries] = decode(query[0], keys[0], values[0], batch, scaling)
    return out, None


AttentionInterface.register(PAGED, paged_attention)


def _decode(query: Tensor, keys: Tensor, values: Tensor, batch: _Batch, scaling: float) -> Tensor:
    """Padded attention; the G query heads of a key head are its query positions. Returns [B, H, D]."""
    heads, _, size = query.shape
    rows, key_heads = len(batch.queries), keys.shape[0]
    attended = scaled_dot_product_attention(
        query[:, batch.queries].transpose(0, 1).reshape(rows, key_heads, heads // key_heads, size),
        _padded(keys[:, batch.own], rows),
        _padded(values[:, batch.own], rows),
        attn_mask=batch.bias.to(query.dtype),
        scale=scaling,
    )
    return attended.reshape(rows, heads, size)


def _decode_shared(query: Tensor, keys: Tensor, values: Tensor, batch: _Batch, scaling: float) -> Tensor:
    """The same with the scores of shared and own keys under one softmax, in float32. Returns [B, H, D]."""
    heads, _, size = query.shape
    rows, key_heads = len(batch.queries), keys.shape[0]
    group = heads // key_heads
    shared = batch.shared.stop - batch.shared.start
    queries = query[:, batch.queries].float().mul_(scaling).view(key_heads, group, rows, size)
    per_request = queries.permute(2, 0, 1, 3)  # [B, K, G, D]
    per_head = queries.transpose(1, 2).reshape(key_heads, rows * group, size)
    scores = torch.cat(
        [
            (per_head @ _float(keys[:, batch.shared]).mT).view(key_heads, rows, group, shared).transpose(0, 1),
            per_request @ _float(_padded(keys[:, batch.own], rows)).mT + batch.bias,
        ],
        dim=-1,
    )  # [B, K, G, P + S]
    weights = scores.softmax(dim=-1)
    on_shared = weights[..., :shared].transpose(0, 1).reshape(key_heads, rows * group, shared)
    attended = (on_shared @ _float(values[:, batch.shared])).view(key_heads, rows, group, size).transpose(0, 1)
    attended = attended + weights[..., shared:] @ _float(_padded(values[:, batch.own], rows))
    return attended.reshape(rows, heads, size).to(query.dtype)


def _float(states: Tensor) -> Tensor:
    """float32 and in the order that a product needs, in one pass."""
    return states.to(torch.float32, memory_format=torch.contiguous_format)


def _padded(states: Tensor, rows: int) -> Tensor:
    """[K, B * S, D] -> [B, K, S, D]."""
    key_heads, _, size = states.shape
    return states.view(key_heads, rows, -1, size).transpose(0, 1)


# ---------------------------------------------------------------------------------------------------------- planning

_plans: weakref.WeakKeyDictionary[Any, tuple[Sequence[Tensor], _Plan]] = weakref.WeakKeyDictionary()
"""Per cache: the plan of its current step, and the list of read indices that identifies the step."""


def _plan(cache: Any, query_ends: Tensor, key_ends: Tensor, read_index: Sequence[Tensor]) -> _Plan:
    """The layers of one step pass the same list of read indices: the first makes the plan, the others find it."""
    known = _plans.get(cache)
    if known is None or known[0] is not read_index:
        known = (read_index, make_plan(query_ends.tolist(), key_ends.tolist(), read_index[0]))
        _plans[cache] = known
    return known[1]


def make_plan(query_ends: list[int], key_ends: list[int], slots: Tensor) -> _Plan:
    """Decide what to read and how to attend.

    Args:
        query_ends, key_ends: cumulative lengths, [requests + 1], starting at 0.
        slots: cache slots of all keys in order, int64 [key_ends[-1]]; empty if no request of the step has a past.
    """
    requests = range(len(query_ends) - 1)
    queries = [slice(query_ends[i], query_ends[i + 1]) for i in requests]
    keys = [slice(key_ends[i], key_ends[i + 1]) for i in requests]
    if slots.numel() == 0:
        return _Plan(slots, [_Part(q, k, None) for q, k in zip(queries, keys, strict=True)], [])
    reads: list[Tensor] = []
    end = 0

    def read(chosen: Tensor) -> slice:
        nonlocal end
        reads.append(chosen.reshape(-1))
        start, end = end, end + chosen.numel()
        return slice(start, end)

    parts, decoding = [], []
    for q, k in zip(queries, keys, strict=True):
        new, length = q.stop - q.start, k.stop - k.start
        if new == 1:
            decoding.append((length, q.start, k.start))
            continue
        seen = torch.ones(new, length, dtype=torch.bool, device=slots.device).tril(length - new)
        parts.append(_Part(q, read(slots[k]), seen if length > new else None))
    batches = []
    for rows in _of_similar_length(sorted(decoding)):
        lengths = torch.tensor([length for length, _, _ in rows], device=slots.device).unsqueeze(1)
        starts = torch.tensor([start for _, _, start in rows], device=slots.device).unsqueeze(1)
        columns = torch.arange(rows[-1][0], device=slots.device)
        table = slots[starts + columns.minimum(lengths - 1)]  # [B, longest], padded with the last slot
        shared = _shared_columns(table)
        padding = columns[shared:] >= lengths
        batches.append(
            _Batch(
                queries=torch.tensor([query for _, query, _ in rows], device=slots.device),
                shared=read(table[0, :shared]),
                own=read(table[:, shared:]),
                bias=torch.zeros(padding.shape, device=slots.device).masked_fill_(padding, -torch.inf)[:, None, None],
            )
        )
    return _Plan(torch.cat(reads), parts, batches)


def _of_similar_length(rows: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Split rows, sorted by length, so that padding stays below about half of a batch."""
    batches: list[list[tuple[int, int, int]]] = []
    for row in rows:
        if batches and row[0] <= 1.5 * batches[-1][0][0] + 32:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _shared_columns(table: Tensor) -> int:
    """Leading slots that all rows share if they are most of the work, else 0. A request's last slot is its own."""
    if len(table) == 1:
        return 0
    shared = int((table == table[0]).all(dim=0).int().cumprod(dim=0).sum())
    return shared if 2 * shared >= table.shape[1] else 0
