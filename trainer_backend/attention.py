"""Attention over a forest: every node sees its own prefix, and nothing else is ever computed.

Nodes come in depth-first order, so the nodes that a row adds to its tree are neighbours, and their keys are one path. A
block is such a run of queries with the path above them: key number d of a block is the node at depth d, and a query at
depth p sees keys 0..p. That is ordinary causal attention (with the layer's sliding window, if it has one) on gathered
keys; its cost is queries x path length per row, not nodes squared, and no mask spans the whole micro-batch. Blocks of
similar size are padded to one shape and run together; on a GPU, a variable-length kernel takes them without padding.

The function is registered with transformers under ``TREE_ATTENTION`` and gets its :class:`TreeLayout` as the keyword
``tree`` of the model's forward.

Shapes: N nodes; B blocks of one bucket, S queries and L keys each; H heads, of which G share each of the H / G
key-value heads; D the head dimension.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from molt_sdk.errors import TrainingError
from trainer_backend.batch import Forest, Ints

TREE_ATTENTION = "molt_tree"
MAX_QUERIES = 256
"""Longer runs are cut, so that the padding of a path that grows along a run stays small."""
SCORE_ELEMENTS = 1 << 23
"""Float32 attention scores held at once where the scores must be made outside a fused kernel."""


class Bucket(Struct, frozen=True):
    """Blocks that run as one call."""

    queries: Tensor
    """[B, S] node of each query; padding repeats a node and its result is dropped."""
    query_depths: Tensor
    """[B, S]"""
    keys: Tensor
    """[B, L] node at depth 0..L-1 of the path; beyond its end node 0, which no query sees."""


class Varlen(Struct, frozen=True):
    """All blocks of a forest one after the other, one block per row that adds nodes; its queries are the last nodes of
    its path, so the causal mask is aligned at the end."""

    query_starts: Tensor
    """[blocks + 1] int32, cumulative; the queries are all nodes in their order."""
    key_starts: Tensor
    """[blocks + 1] int32, cumulative."""
    keys: Tensor
    """[keys] node of each key."""
    max_queries: int
    max_keys: int


class TreeLayout(Struct, frozen=True):
    """The attention of one forest. (Neither pytree nor dataclass, on purpose: FSDP2 must not look inside.)"""

    buckets: tuple[Bucket, ...]
    order: Tensor
    """[N] where in the buckets' flattened outputs the result of each node is."""
    varlen: Varlen | None
    """Where given, layers without softcap and sinks use it instead of the buckets."""


def tree_layout(forest: Forest, device: torch.device, *, varlen: bool = False) -> TreeLayout:
    """Cut a forest into blocks and put blocks of similar size together; with ``varlen`` also for a kernel that takes
    blocks of any size."""
    groups: dict[tuple[int, int], list[tuple[Ints, int, int]]] = defaultdict(list)
    runs: list[tuple[Ints, int]] = []
    done = 0
    for path in forest.row_nodes:
        new = int(np.searchsorted(path, done))  # nodes before are shared with an earlier row
        if new == len(path):
            continue
        runs.append((path, new))
        cuts = [*range(new, len(path), MAX_QUERIES), len(path)]
        for start, end in pairwise(cuts):
            groups[_round_up(end - start), _round_up(end)].append((path, start, end))
        done = int(path[-1]) + 1
    buckets, order, offset = [], np.empty(done, dtype=np.int64), 0
    for (width, length), blocks in groups.items():
        depths = np.stack([np.minimum(np.arange(start, start + width), end - 1) for _, start, end in blocks])
        queries = np.stack([path[depth] for (path, _, _), depth in zip(blocks, depths, strict=True)])
        keys = np.zeros((len(blocks), length), dtype=np.int64)
        for index, (path, start, end) in enumerate(blocks):
            keys[index, :end] = path[:end]
            order[path[start:end]] = np.arange(end - start) + offset + index * width
        offset += queries.size
        tensors = (torch.from_numpy(values).to(device) for values in (queries, depths, keys))
        buckets.append(Bucket(*tensors))
    return TreeLayout(
        buckets=tuple(buckets),
        order=torch.from_numpy(order).to(device),
        varlen=_varlen(runs, device) if varlen else None,
    )


def _varlen(runs: list[tuple[Ints, int]], device: torch.device) -> Varlen:
    """Runs: the path of each row that adds nodes, and how many nodes at its start are not new."""
    queries, keys = [len(path) - new for path, new in runs], [len(path) for path, _ in runs]
    query_starts, key_starts = (
        torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)).to(device) for sizes in (queries, keys)
    )
    return Varlen(
        query_starts=query_starts,
        key_starts=key_starts,
        keys=torch.from_numpy(np.concatenate([path for path, _ in runs])).to(device),
        max_queries=max(queries),
        max_keys=max(keys),
    )


def _round_up(size: int) -> int:
    """The next multiple of an eighth of the power of two at or below ``size``, at least of 16: few distinct shapes, at
    most an eighth of padding beyond small sizes."""
    step = max(16, (1 << (size.bit_length() - 1)) // 8)
    return -(-size // step) * step


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree: TreeLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query [1, H, N, D], key and value [1, H / G, N, D] -> [1, N, H, D], in the interface of transformers.

    ``softcap`` c turns a score z into ``c * tanh(z / c)``; ``s_aux`` [H] is one more logit in each head's softmax, a
    sink without a value. ``attention_mask`` is None by construction: transformers builds no mask for an attention that
    it does not know. Other keywords that change the maths are caught by the layout check.
    """
    if tree is None:
        raise TrainingError(
            f"{type(module).__name__} does not hand the keywords of forward on to its attention; this architecture "
            "cannot share prefixes or pack rows"
        )
    q_nodes, k_nodes, v_nodes = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    plain = softcap is None and s_aux is None
    if tree.varlen is not None and plain and query.dtype in (torch.bfloat16, torch.float16):
        return _run_varlen(tree.varlen, q_nodes, k_nodes, v_nodes, scaling, sliding_window)[None], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for bucket in tree.buckets:
        q, k, v = _gather(bucket, q_nodes, k_nodes, v_nodes)
        shared = query.shape[1] // key.shape[1]
        mask = _visible(bucket, sliding_window).repeat(1, shared, 1)[:, None]
        if plain:
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            sinks = None
            if s_aux is not None:  # [heads] -> one per query row of _gather
                sinks = s_aux.view(1, -1, shared, 1).expand(-1, -1, -1, bucket.queries.shape[1]).flatten(2)
            out = _attention(q, k, v, mask, scale, softcap, sinks)
        parts.append(_scatter(out, *bucket.queries.shape))
    return torch.cat(parts).index_select(0, tree.order)[None], None


def _run_varlen(
    varlen: Varlen, q_nodes: Tensor, k_nodes: Tensor, v_nodes: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Tensors by node, [N, heads, D] -> [N, H, D]."""
    from torch.nn.attention.varlen import varlen_attn  # not in every torch; the layout check then takes buckets

    out: Any = varlen_attn(
        q_nodes.contiguous(),
        k_nodes.index_select(0, varlen.keys),
        v_nodes.index_select(0, varlen.keys),
        varlen.query_starts,
        varlen.key_starts,
        varlen.max_queries,
        varlen.max_keys,
        scale=scaling,
        window_size=(window - 1, 0) if window else (-1, 0),  # its window leaves the query itself out
        enable_gqa=q_nodes.shape[1] != k_nodes.shape[1],
    )
    return out  # type: ignore[no-any-return]


def _gather(bucket: Bucket, q_nodes: Tensor, k_nodes: Tensor, v_nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors by node, [N, heads, D] -> queries [B, H / G, G * S, D], keys and values [B, H / G, L, D].

    Heads that share keys are laid out as further queries of the same keys: exact, and no key is copied."""
    blocks, queries = bucket.queries.shape
    kv_heads, width = k_nodes.shape[1:]
    shared = q_nodes.shape[1] // kv_heads
    q = q_nodes.index_select(0, bucket.queries.flatten()).view(blocks, queries, kv_heads, shared, width)
    q = q.permute(0, 2, 3, 1, 4).reshape(blocks, kv_heads, shared * queries, width)
    k, v = (
        tensor.index_select(0, bucket.keys.flatten()).view(blocks, -1, kv_heads, tensor.shape[-1]).transpose(1, 2)
        for tensor in (k_nodes, v_nodes)
    )
    return q, k, v


def _scatter(out: Tensor, blocks: int, queries: int) -> Tensor:
    """[B, H / G, G * S, D] -> [B * S, H, D]."""
    kv_heads, width = out.shape[1], out.shape[-1]
    out = out.view(blocks, kv_heads, -1, queries, width).permute(0, 3, 1, 2, 4)
    return out.reshape(blocks * queries, -1, width)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with what no fused kernel offers: a few queries at a time, made again in the backward pass."""
    size = max(1, SCORE_ELEMENTS // (k.shape[0] * k.shape[1] * k.shape[2]))
    parts = []
    for start in range(0, q.shape[2], size):
        rows = slice(start, start + size)
        sink = None if sinks is None else sinks[:, :, rows]
        arguments = q[:, :, rows], k, v, mask[:, :, rows], scale, softcap, sink
        parts.append(checkpoint(_few_queries, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2)


def _few_queries(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The definition, with the softmax in float32."""
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[..., None].expand(len(q), -1, -1, 1)
        scores = torch.cat([scores, sink], dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _visible(bucket: Bucket, window: int | None) -> Tensor:
    """Boolean [B, S, L]: keys at the query's depth and above, within the window."""
    behind = bucket.query_depths[:, :, None] - torch.arange(bucket.keys.shape[1], device=bucket.keys.device)
    visible = behind >= 0
    return visible & (behind < window) if window else visible
