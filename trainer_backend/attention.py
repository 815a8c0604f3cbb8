"""Attention over a forest: every node sees its own prefix, and nothing else is ever computed.

Nodes come in depth-first order, so the nodes that a row adds to its tree are neighbours, and their keys are one path. A
block is such a run of queries with the path above them: key number d of a block is the node at depth d, and a query at
depth p sees keys 0..p. That is ordinary causal attention (with the layer's sliding window, if it has one) on gathered
keys; its cost is queries x path length per row, not nodes squared, and no mask spans the whole micro-batch. Blocks of
similar size are padded to one shape and run together.

The function is registered with transformers under ``TREE_ATTENTION`` and gets its :class:`TreeLayout` as the keyword
``tree`` of the model's forward.

Shapes: N nodes; B blocks of one bucket, S queries and L keys each; H heads, of which G share each of the H / G
key-value heads; D the head dimension.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from molt_sdk.errors import TrainingError
from trainer_backend.batch import Forest, Ints

TREE_ATTENTION = "molt_tree"
MAX_QUERIES = 256
"""Longer runs are cut, so that the padding of a path that grows along a run stays small."""


@dataclass(frozen=True)
class Bucket:
    """Blocks that run as one call."""

    queries: Tensor
    """[B, S] node of each query; padding repeats a node and its result is dropped."""
    query_depths: Tensor
    """[B, S]"""
    keys: Tensor
    """[B, L] node at depth 0..L-1 of the path; beyond its end node 0, which no query sees."""


@dataclass(frozen=True)
class TreeLayout:
    """The attention of one forest. (Not a pytree on purpose: FSDP2 must not cast or move what is inside.)"""

    buckets: tuple[Bucket, ...]
    order: Tensor
    """[N] where in the buckets' flattened outputs the result of each node is."""


def tree_layout(forest: Forest, device: torch.device) -> TreeLayout:
    """Cut a forest into blocks and put blocks of similar size together."""
    groups: dict[tuple[int, int], list[tuple[Ints, int, int]]] = defaultdict(list)
    done = 0
    for path in forest.row_nodes:
        new = int(np.searchsorted(path, done))  # nodes before are shared with an earlier row
        cuts = [*range(new, len(path), MAX_QUERIES), len(path)]
        for start, end in pairwise(cuts):
            groups[_round_up(end - start), _round_up(end)].append((path, start, end))
        done = max(done, int(path[-1]) + 1)
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
    return TreeLayout(buckets=tuple(buckets), order=torch.from_numpy(order).to(device))


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
    tree: TreeLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query [1, H, N, D], key and value [1, H / G, N, D] -> [1, N, H, D], in the interface of transformers.

    ``attention_mask`` is None by construction: transformers builds no mask for an attention that it does not know.
    """
    if tree is None:
        raise TrainingError(
            f"{type(module).__name__} does not hand the keywords of forward on to its attention; this architecture "
            "cannot be trained here"
        )
    q_nodes, k_nodes, v_nodes = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    parts = [_run_bucket(bucket, q_nodes, k_nodes, v_nodes, scaling, sliding_window) for bucket in tree.buckets]
    return torch.cat(parts).index_select(0, tree.order)[None], None


def _run_bucket(
    bucket: Bucket, q_nodes: Tensor, k_nodes: Tensor, v_nodes: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Tensors by node, [N, heads, D] -> [B * S, H, D]."""
    blocks, queries = bucket.queries.shape
    kv_heads, width = k_nodes.shape[1:]
    shared = q_nodes.shape[1] // kv_heads
    q = q_nodes.index_select(0, bucket.queries.flatten()).view(blocks, queries, kv_heads, shared, width)
    # Heads that share keys are laid out as further queries of the same keys: exact, and no key is copied.
    q = q.permute(0, 2, 3, 1, 4).reshape(blocks, kv_heads, shared * queries, width)
    k, v = (
        tensor.index_select(0, bucket.keys.flatten()).view(blocks, -1, kv_heads, tensor.shape[-1]).transpose(1, 2)
        for tensor in (k_nodes, v_nodes)
    )
    mask = _visible(bucket, window).repeat(1, shared, 1)[:, None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out = out.view(blocks, kv_heads, shared, queries, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(blocks * queries, kv_heads * shared, -1)


def _visible(bucket: Bucket, window: int | None) -> Tensor:
    """Boolean [B, S, L]: keys at the query's depth and above, within the window."""
    behind = bucket.query_depths[:, :, None] - torch.arange(bucket.keys.shape[1], device=bucket.keys.device)
    visible = behind >= 0
    return visible & (behind < window) if window else visible
