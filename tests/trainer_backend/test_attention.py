from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from molt_sdk.errors import TrainingError
from trainer_backend import attention as module
from trainer_backend.attention import tree_attention, tree_layout
from trainer_backend.batch import Forest, Row, build_forest

CPU = torch.device("cpu")


def row_of(token_ids: list[int]) -> Row:
    """Only the last token is trained."""
    length = len(token_ids)
    return Row(
        trajectory_id="",
        token_ids=np.array(token_ids),
        trained=np.arange(length) == length - 1,
        turn_ids=np.zeros(length, dtype=np.int64),
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        temperatures=np.ones(length, dtype=np.float32),
        advantages=np.ones(length, dtype=np.float32),
    )


def random_forest(seed: int, share: bool = True) -> Forest:
    rng = random.Random(seed)
    rows = [row_of([rng.randint(0, 1) for _ in range(rng.choice([2, 5, 40, 70]))]) for _ in range(10)]
    return build_forest(sorted(rows, key=lambda row: row.inputs.tolist()), share=share)


def dense(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: node i sees the nodes of its path, itself included, at most ``window`` of them; scores go through
    a softcap; a sink is one more logit in the softmax, without a value."""
    count = len(forest.token_ids)
    visible = torch.zeros(count, count, dtype=torch.bool)
    for path in forest.row_nodes:
        for depth, node in enumerate(path.tolist()):
            seen = path[: depth + 1]
            visible[node, seen[-window:] if window else seen] = True
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2)) * 0.3
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, count, 1)], dim=-1)
    return (scores.softmax(-1)[..., :count] @ value).transpose(1, 2)


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


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("score_elements", [5000, 1 << 23])
def test_softcap_and_sinks_equal_the_definition(
    share: bool,
    window: int | None,
    kv_heads: int,
    softcap: float | None,
    with_sinks: bool,
    score_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SCORE_ELEMENTS", score_elements)
    forest = random_forest(1, share)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 4, len(forest.token_ids), 8)
    query, key, value = (
        torch.randn(shape, dtype=torch.float64, generator=generator)[:, :heads].requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    sinks = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() if with_sinks else None
    weight = torch.randn(1, shape[2], 4, 8, dtype=torch.float64, generator=generator)
    inputs = [tensor for tensor in (query, key, value, sinks) if tensor is not None]

    expected = dense(forest, query, key, value, window, softcap, sinks)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    found, _ = tree_attention(
        nn.Identity(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
        tree=tree_layout(forest, CPU),
    )
    grads = torch.autograd.grad((found * weight).sum(), inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, wanted)


def test_scores_outside_a_fused_kernel_are_not_kept_for_the_backward_pass() -> None:
    forest = build_forest([row_of([1] * 201)], share=False)
    query, key, value = (torch.randn(1, 4, 200, 8, requires_grad=True) for _ in range(3))
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        tree_attention(nn.Identity(), query, key, value, None, s_aux=torch.zeros(4), tree=tree_layout(forest, CPU))
    assert saved < 4 * 200 * 200


def test_costs_grow_linearly_with_the_number_of_trees() -> None:
    """Score elements of equal trees packed into one micro-batch; one mask over all would need nodes squared."""

    def elements(trees: int) -> int:
        rng, rows = random.Random(0), []
        for tree in range(trees):
            trunk = [tree, *(rng.randint(0, 9) for _ in range(200))]
            rows += [[*trunk, branch, *(rng.randint(0, 9) for _ in range(80))] for branch in range(4)]
        forest = build_forest([row_of(tokens) for tokens in sorted(rows)], share=True)
        assert len(forest.token_ids) == trees * (201 + 4 * 80)
        return sum(bucket.queries.numel() * bucket.keys.shape[1] for bucket in tree_layout(forest, CPU).buckets)

    one = elements(1)
    assert one < 2.0 * (201 * 201 + 4 * 80 * 281)
    assert [elements(trees) for trees in (2, 5, 20)] == [2 * one, 5 * one, 20 * one]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_variable_length_form_holds_the_same_blocks(seed: int, share: bool) -> None:
    """Per row that adds nodes: its queries are the last nodes of its path, its keys the whole path."""
    forest = random_forest(seed, share)
    varlen = tree_layout(forest, CPU, varlen=True).varlen
    assert varlen is not None
    assert varlen.query_starts.dtype == varlen.key_starts.dtype == torch.int32
    queries = torch.arange(len(forest.token_ids)).tensor_split(varlen.query_starts[1:-1].long())
    keys = varlen.keys.tensor_split(varlen.key_starts[1:-1].long())
    assert varlen.query_starts[-1] == len(forest.token_ids)
    assert varlen.key_starts[-1] == len(varlen.keys)
    assert (varlen.max_queries, varlen.max_keys) == (max(map(len, queries)), max(map(len, keys)))
    paths = {path.tobytes() for path in forest.row_nodes}
    for new, path in zip(queries, keys, strict=True):
        assert path[-len(new) :].tolist() == new.tolist()
        assert path.numpy().tobytes() in paths
    assert tree_layout(forest, CPU).varlen is None


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
