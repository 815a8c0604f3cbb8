from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from molt_sdk.errors import TrainingError
from trainer_backend import attention as module
from trainer_backend.attention import tree_attention, tree_layout
from trainer_backend.batch import Forest, Row, build_forest, pack

CPU = torch.device("cpu")


def random_forest(seed: int, share: bool = True) -> Forest:
    rng = random.Random(seed)
    rows = []
    for index in range(10):
        length = rng.choice([2, 5, 40, 70])
        rows.append(
            Row(
                trajectory_id=str(index),
                token_ids=np.array([rng.randint(0, 1) for _ in range(length)]),
                trained=np.arange(length) == length - 1,
                turn_ids=np.zeros(length, dtype=np.int64),
                rollout_logprobs=np.zeros(length, dtype=np.float32),
                temperatures=np.ones(length, dtype=np.float32),
                advantages=np.ones(length, dtype=np.float32),
            )
        )
    (batch,) = pack(rows, 1 << 20, share=share)
    return build_forest(batch, share=share)


def dense(forest: Forest, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """The definition: node i sees the nodes of its path, itself included, at most ``window`` of them."""
    count = len(forest.token_ids)
    visible = torch.zeros(count, count, dtype=torch.bool)
    for path in forest.row_nodes:
        for depth, node in enumerate(path.tolist()):
            seen = path[: depth + 1]
            visible[node, seen[-window:] if window else seen] = True
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2)) * 0.3
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("max_queries", [7, 256])
def test_equal_to_dense_attention_over_each_path(
    seed: int, share: bool, window: int | None, kv_heads: int, max_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUERIES", max_queries)
    forest = random_forest(seed, share)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 4, len(forest.token_ids), 8)
    query, key, value = (
        torch.randn(shape, dtype=torch.float64, generator=generator)[:, :heads].requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    weight = torch.randn(1, shape[2], 4, 8, dtype=torch.float64, generator=generator)

    expected = dense(forest, query, key, value, window)
    wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    layout = tree_layout(forest, CPU)
    found, _ = tree_attention(nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, tree=layout)
    grads = torch.autograd.grad((found * weight).sum(), (query, key, value))

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, wanted)


def test_every_node_is_a_query_once() -> None:
    forest = random_forest(0)
    layout = tree_layout(forest, CPU)
    flat = torch.cat([bucket.queries.flatten() for bucket in layout.buckets])
    assert flat[layout.order].tolist() == list(range(len(forest.token_ids)))


def test_an_architecture_that_drops_the_layout_is_an_error() -> None:
    """Falling back to plain causal attention would let siblings see each other."""
    tensor = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TrainingError, match="Identity does not hand"):
        tree_attention(nn.Identity(), tensor, tensor, tensor, None)
