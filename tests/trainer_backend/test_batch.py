from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_sdk.errors import TrainingError
from molt_sdk.packed import pack_floats
from molt_sdk.types import Trajectory, TrajectoryGroup
from trainer_backend.advantage import GRPO
from trainer_backend.batch import (
    CostModel,
    Forest,
    Row,
    build_forest,
    common_prefix,
    cost_model,
    decode_array,
    encode_array,
    make_row,
    make_rows,
    plan,
)

CENTERED = GRPO(normalize_std=False)
LINEAR = CostModel(attention=0.0, head=0.0)
MakeTrajectory = Callable[..., Trajectory]
MakeGroup = Callable[..., TrajectoryGroup]


def row(token_ids: list[int], trained: list[int], name: str = "t", temperatures: list[float] | None = None) -> Row:
    """A row whose trained token at position p has logprob -p and advantage p."""
    positions = np.arange(len(token_ids), dtype=np.float32)
    return Row(
        trajectory_id=name,
        token_ids=np.array(token_ids, dtype=np.int64),
        trained=np.isin(np.arange(len(token_ids)), trained),
        turn_ids=np.zeros(len(token_ids), dtype=np.int64),
        rollout_logprobs=-positions,
        temperatures=np.array(temperatures or [1.0] * len(token_ids), dtype=np.float32),
        advantages=positions,
    )


def random_rows(seed: int, count: int = 12) -> list[Row]:
    """Rows over two tokens, so that they share prefixes, repeat and contain each other."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        length = rng.randint(2, 9)
        tokens = [rng.randint(0, 1) for _ in range(length)]
        trained = rng.sample(range(1, length), rng.randint(1, length - 1))
        rows.append(row(tokens, trained, f"t{index}", [rng.choice([0.5, 1.0]) for _ in range(length)]))
    return rows


def micro_batches(rows: list[Row], max_tokens: int, *, share: bool) -> list[list[Row]]:
    """Those of a single rank."""
    (found,) = plan(rows, ranks=1, max_tokens=max_tokens, share=share, cost=LINEAR)
    return found


def ids(planned: list[list[list[Row]]]) -> list[list[list[str]]]:
    return [[[r.trajectory_id for r in batch] for batch in rank] for rank in planned]


def targets_of(rows: list[Row]) -> list[tuple[Any, ...]]:
    """(prefix, token, temperature, logprob, advantage) of every trained token."""
    found = []
    for r in rows:
        for at in np.flatnonzero(r.trained):
            values = (r.token_ids[at], r.temperatures[at], r.rollout_logprobs[at], r.advantages[at])
            found.append((tuple(r.token_ids[:at].tolist()), *(value.item() for value in values)))
    return sorted(found)


def targets_in(forest: Forest) -> list[tuple[Any, ...]]:
    """The same, read from a forest: the prefix is the path to the node whose distribution is used."""
    prefix_of = {}
    for path in forest.row_nodes:
        for depth, node in enumerate(path.tolist()):
            prefix_of[node] = tuple(forest.token_ids[path[: depth + 1]].tolist())
    node_of = forest.kept_nodes[forest.pair_kept[forest.target_pair]]
    return sorted(
        (prefix_of[node], *(value.item() for value in values))
        for node, *values in zip(
            node_of.tolist(),
            forest.target_token,
            forest.pair_temperature[forest.target_pair],
            forest.rollout_logprobs,
            forest.advantages,
            strict=True,
        )
    )


def test_forest_by_hand() -> None:
    """Rows 5 6 [7] [8] and 5 6 [9] 4 (trained tokens in brackets): the inputs 5 6 7 and 5 6 share their path, so there
    are three nodes. 7 and 9 are both predicted at node 1, 8 at node 2; neither 8 nor 9 and what follows is an input."""
    forest = build_forest([row([5, 6, 9, 4], [2]), row([5, 6, 7, 8], [2, 3])], share=True)
    assert forest.token_ids.tolist() == [5, 6, 7]
    assert forest.positions.tolist() == [0, 1, 2]
    assert [path.tolist() for path in forest.row_nodes] == [[0, 1], [0, 1, 2]]
    assert forest.kept_nodes.tolist() == [1, 2]
    assert forest.target_token.tolist() == [9, 7, 8]
    assert forest.target_pair.tolist() == [0, 0, 1]
    assert forest.flat_tokens == 5


def test_a_chain_forest_shares_nothing() -> None:
    forest = build_forest([row([5, 6, 9, 4], [2]), row([5, 6, 7, 8], [2, 3])], share=False)
    assert forest.token_ids.tolist() == [5, 6, 5, 6, 7]
    assert forest.positions.tolist() == [0, 1, 0, 1, 2]
    assert [path.tolist() for path in forest.row_nodes] == [[0, 1], [2, 3, 4]]


def test_one_node_at_two_temperatures_is_two_distributions() -> None:
    forest = build_forest([row([1, 2], [1]), row([1, 3], [1], temperatures=[1.0, 0.5])], share=True)
    assert forest.kept_nodes.tolist() == [0]
    assert forest.pair_kept.tolist() == [0, 0]
    assert forest.pair_temperature.tolist() == [0.5, 1.0]
    assert forest.target_token.tolist() == [3, 2]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_forests_hold_exactly_the_trained_tokens_of_their_rows(seed: int, share: bool, budget: int) -> None:
    rows = random_rows(seed)
    forests = [build_forest(batch, share=share) for batch in micro_batches(rows, budget, share=share)]
    assert sorted(itertools.chain.from_iterable(map(targets_in, forests))) == targets_of(rows)
    for forest in forests:
        paths = [tuple(path.tolist()) for path in forest.row_nodes]
        if share:
            prefixes = {tuple(forest.token_ids[path[:d]].tolist()) for path in map(list, paths) for d in range(1, 20)}
            prefixes = {p for p in prefixes if p}
            assert len(forest.token_ids) == len(prefixes)  # each distinct prefix is one node
        assert len(forest.token_ids) <= budget or len(set(paths)) == 1 or not share
        assert sorted({node for path in paths for node in path}) == list(range(len(forest.token_ids)))


def test_micro_batches_keep_to_the_budget_and_an_oversized_row_stands_alone() -> None:
    """Inputs have 3, 3 and 9 tokens, of which the first two share 2: 4 nodes together, and the 9 fit nowhere. The
    largest comes first."""
    long, left, right = row([9] * 10, [9], "long"), row([1, 1, 2, 0], [3], "left"), row([1, 1, 3, 0], [3], "right")
    rows = [long, left, right]
    assert ids([micro_batches(rows, 4, share=True)]) == [[["long"], ["left", "right"]]]
    assert len(micro_batches(rows, 3, share=True)) == 3
    assert len(micro_batches(rows, 4, share=False)) == 3


def test_micro_batches_are_evened_out() -> None:
    """Six rows of two inputs in a budget of 8: as many as fit would be 4 + 2 rows."""
    rows = [row([i, i, 0], [2], str(i)) for i in range(6)]
    assert [len(batch) for batch in micro_batches(rows, 8, share=False)] == [3, 3]


def test_ranks_are_balanced_by_cost_not_by_rows() -> None:
    """Inputs of 6, 2, 2 and 2 tokens: the long row is as much work as the others together. With an expensive head it
    is a row with one trained token like any other."""
    rows = [row([0] * 7, [6], "long"), *[row([i, i, 0], [2], str(i)) for i in (1, 2, 3)]]

    def of_ranks(cost: CostModel, ranks: int) -> list[list[str]]:
        planned = plan(rows, ranks=ranks, max_tokens=100, share=True, cost=cost)
        return [list(itertools.chain.from_iterable(rank)) for rank in ids(planned)]

    assert of_ranks(LINEAR, 2) == [["long"], ["1", "2", "3"]]
    assert of_ranks(CostModel(attention=0.0, head=100.0), 2) == [["long", "1"], ["2", "3"]]
    assert of_ranks(CostModel(attention=1.0, head=0.0), 3) == [["long"], ["1", "2"], ["3"]]
    assert of_ranks(LINEAR, 6) == [["long"], ["1"], ["2"], ["3"], [], []]


def test_ranks_get_equally_many_micro_batches() -> None:
    """Rows of 3 and of 4 inputs, budget 6: the three of 4 have to be alone. The four of 3 fit into two passes, but as
    there are three anyway, a third makes each one shorter or as long."""
    rows = [
        *[row([i, 5, 5, 0], [3], f"three {i}") for i in range(4)],
        *[row([9, i, 9, 9, 0], [4], f"four {i}") for i in range(3)],
    ]
    planned = plan(rows, ranks=2, max_tokens=6, share=False, cost=LINEAR)
    assert [[len(batch) for batch in rank] for rank in planned] == [[2, 1, 1], [1, 1, 1]]


def test_a_long_shared_prefix_is_not_computed_more_often_to_make_counts_equal() -> None:
    """Rank 1 has a tree with a trunk of 40 nodes: in four passes like rank 0 it would compute the trunk four times."""
    singles = [row([i, *[0] * 10], [10], str(i)) for i in range(4)]
    tree = [row([9] * 40 + [i, 0], [41], f"t{i}") for i in range(4)]
    planned = plan([*singles, *tree], ranks=2, max_tokens=44, share=True, cost=LINEAR)
    assert [len(rank) for rank in planned] == [1, 1]
    planned = plan([*singles, *tree], ranks=2, max_tokens=10, share=True, cost=LINEAR)
    assert [len(rank) for rank in planned] == [4, 4]  # over the budget in any case: alone


def test_f58_trajectories_are_split_over_ranks_not_replicated() -> None:
    rows = [row([i, i, 0], [2], str(i)) for i in range(8)]
    left, right = ids(plan(rows, ranks=2, max_tokens=100, share=True, cost=LINEAR))
    assert sorted(left[0] + right[0]) == [str(i) for i in range(8)]
    assert len(left[0]) == len(right[0]) == 4


def test_no_rows_are_no_micro_batches() -> None:
    assert plan([], ranks=3, max_tokens=10, share=True, cost=LINEAR) == [[], [], []]


def test_padded_micro_batches_count_the_padding() -> None:
    """Inputs of 6, 5, 2 and 1 tokens, budget 12: 2 x 6 and 2 x 2. Without padding, 6 + 5 + 1 would fit."""
    rows = [row([i] * (length + 1), [length], str(length)) for i, length in enumerate((2, 6, 1, 5))]
    (planned,) = ids(plan(rows, ranks=1, max_tokens=12, share=False, padded=True, cost=LINEAR))
    assert planned == [["6", "5"], ["2", "1"]]
    with pytest.raises(ValueError, match="padded"):
        plan(rows, ranks=1, max_tokens=12, share=True, padded=True, cost=LINEAR)


tokens_and_masks = st.lists(st.integers(0, 2), min_size=2, max_size=9).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.sets(st.integers(1, len(tokens) - 1), min_size=1))
)


@st.composite
def problems(draw: Any, most_rows: int = 14) -> tuple[list[Row], dict[str, Any]]:
    """Rows that share prefixes, repeat and contain each other, and the other arguments of ``plan``."""
    drawn = draw(st.lists(tokens_and_masks, min_size=1, max_size=most_rows))
    rows = [row(tokens, sorted(trained), f"t{index}") for index, (tokens, trained) in enumerate(drawn)]
    share = draw(st.booleans())
    costs = st.sampled_from([0.0, 0.25, 3.0])
    return rows, {
        "ranks": draw(st.integers(1, 5)),
        "max_tokens": draw(st.sampled_from([1, 5, 12, 1000])),
        "share": share,
        "padded": not share and draw(st.booleans()),
        "cost": CostModel(attention=draw(costs), head=draw(costs)),
    }


def work_of(rows: list[Row], cost: CostModel, *, share: bool) -> float:
    """Counted on the forest of the rows: each node, each node that it sees, each trained token."""
    ordered = [r for batch in micro_batches(rows, 10**9, share=share) for r in batch]
    forest = build_forest(ordered, share=share)
    return float(
        len(forest.token_ids) + cost.attention * (forest.positions + 1).sum() + cost.head * len(forest.target_token)
    )


@settings(deadline=None, max_examples=200)
@given(problems(), st.randoms(use_true_random=False))
def test_each_row_is_in_one_micro_batch_within_the_budget_in_any_order(
    problem: tuple[list[Row], dict[str, Any]], rng: random.Random
) -> None:
    rows, arguments = problem
    planned = plan(rows, **arguments)
    assert len(planned) == arguments["ranks"]
    batches = list(itertools.chain.from_iterable(planned))
    assert sorted(r.trajectory_id for batch in batches for r in batch) == sorted(r.trajectory_id for r in rows)
    assert [bool(rank) for rank in planned] == [index < len(rows) for index in range(arguments["ranks"])]
    for batch in batches:
        if arguments["padded"]:
            nodes = len(batch) * max(len(r.inputs) for r in batch)
        else:
            nodes = len(build_forest(batch, share=arguments["share"]).token_ids)
        assert nodes <= arguments["max_tokens"] or len(batch) == 1
    shuffled = rng.sample(rows, len(rows))
    assert ids(plan(shuffled, **arguments)) == ids(planned)


@settings(deadline=None, max_examples=200)
@given(problems(most_rows=7))
def test_no_cut_of_the_sorted_rows_has_a_lower_largest_cost(problem: tuple[list[Row], dict[str, Any]]) -> None:
    """Tried all; and with a bound that holds at any size: the mean of one tree, a row, and a prefix once more."""
    rows, arguments = problem
    cost, share, ranks = arguments["cost"], arguments["share"], arguments["ranks"]
    if arguments["padded"]:
        order = [r for (batch,) in plan(rows, **{**arguments, "ranks": len(rows)}) for r in batch]
    else:
        order = [r for batch in micro_batches(rows, 10**9, share=share) for r in batch]
    parts = min(ranks, len(order))
    largest = max(
        work_of([r for batch in rank for r in batch], cost, share=share) for rank in plan(rows, **arguments)[:parts]
    )
    cuts = itertools.combinations(range(1, len(order)), parts - 1)
    best = min(
        max(work_of(order[start:stop], cost, share=share) for start, stop in itertools.pairwise([0, *cut, len(order)]))
        for cut in cuts
    )
    assert largest == pytest.approx(best)
    rows_alone = [work_of([r], cost, share=share) for r in rows]
    assert largest <= work_of(rows, cost, share=share) / ranks + 2 * max(rows_alone) + 1e-6


def greedy(rows: list[Row], max_tokens: int, *, share: bool) -> int:
    """Micro-batches when each row goes into the current one if it fits."""
    count, nodes, last = 0, max_tokens, None
    for r in sorted(rows, key=lambda r: (r.inputs.tolist(), r.trajectory_id)):
        length = len(r.inputs)
        new = length - (common_prefix(last.inputs, r.inputs) if last is not None and share else 0)
        if last is None or nodes + new > max_tokens:
            count, nodes, new = count + 1, 0, length
        nodes, last = nodes + new, r
    return count


@settings(deadline=None, max_examples=200)
@given(problems())
def test_as_few_micro_batches_as_the_budget_allows(problem: tuple[list[Row], dict[str, Any]]) -> None:
    rows, arguments = problem
    budget, share = arguments["max_tokens"], arguments["share"]
    assert len(micro_batches(rows, budget, share=share)) <= greedy(rows, budget, share=share)


def test_cost_model_by_hand() -> None:
    """2 layers of width 8 (hidden 8, one head of 8): 100 parameters are 200 FLOPs a node; each node seen takes 2 * 8
    for the score and 2 * 8 for the value in both layers: 64; a head of 50 tokens 2 * 8 * 50 = 800."""
    cost = cost_model(hidden=8, layers=2, attention_width=8, vocab=50, parameters=100)
    assert (cost.attention, cost.head) == (64 / 200, 800 / 200)


class Message(msgspec.Struct):
    batches: list[list[Row]]
    name: str


def test_rows_cross_a_process_border_bit_by_bit() -> None:
    strange = np.array([-0.0, np.inf, 1e-45, 3.4028235e38], dtype=np.float32)
    sent = msgspec.structs.replace(random_rows(0, 1)[0], rollout_logprobs=strange, token_ids=np.arange(20)[::5])
    frame = msgspec.msgpack.Encoder(enc_hook=encode_array).encode(Message([[sent], []], "x"))
    message = msgspec.msgpack.Decoder(Message, dec_hook=decode_array).decode(frame)
    ((received,), empty) = message.batches
    assert (empty, message.name, received.trajectory_id) == ([], "x", sent.trajectory_id)
    for name in ("token_ids", "trained", "turn_ids", "rollout_logprobs", "temperatures", "advantages"):
        before, after = getattr(sent, name), getattr(received, name)
        assert (after.dtype, after.tobytes()) == (before.dtype, before.tobytes())


def test_only_arrays_are_encoded_beside_what_msgspec_knows() -> None:
    encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
    for value in (object(), np.array([object()]), np.float32(1.0)):
        with pytest.raises(NotImplementedError, match="message"):
            encoder.encode([value])


def test_f49_baseline_counts_trajectories_not_turns(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """A: three turns, reward 0. B: one turn, reward 1. The mean is 1/2 (by turn it would be 1/4)."""
    turns = [{"context": [1], "completion": [2, 3]}, *[{"context": [4], "completion": [5]}] * 2]
    group = make_group([make_trajectory("A", turns, 0.0), make_trajectory("B", turns[:1], 1.0)])
    rows = {r.trajectory_id: r for r in make_rows([group], CENTERED)}
    assert rows["A"].advantages[rows["A"].trained].tolist() == [-0.5] * 4
    assert rows["B"].advantages[rows["B"].trained].tolist() == [0.5] * 2


def test_f52_a_turn_is_never_compared_with_a_turn(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """Four trajectories with 1, 2, 1, 2 turns and rewards 1, 0, 0, 1 are a group of four with mean 1/2; each advantage
    goes to all turns, also where they are rows of their own (here the second turn starts a new root)."""
    first, second = {"context": [1], "completion": [2]}, {"context": [7], "completion": [8], "parent": None}
    shapes = [([first], 1.0), ([first, second], 0.0), ([first], 0.0), ([first, second], 1.0)]
    members = [make_trajectory(str(i), turns, reward) for i, (turns, reward) in enumerate(shapes)]
    rows = make_rows([make_group(members)], CENTERED)
    assert len(rows) == 6
    by_trajectory = {i: [r.advantages[r.trained].tolist() for r in rows if r.trajectory_id == i] for i in "0123"}
    assert by_trajectory == {"0": [[0.5]], "1": [[-0.5], [-0.5]], "2": [[-0.5]], "3": [[0.5], [0.5]]}


def test_agents_are_compared_among_themselves(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """The fork of "a" has reward 4 of its own, that of "b" 2: advantages +1 and -1. "c" never forked, so the fork's
    group has two members; the main agents have rewards 0, 1, 5 with mean 2."""
    main, fork = {"context": [1], "completion": [2]}, {"context": [3], "completion": [4], "parent": None, "agent": "f"}
    members = [
        make_trajectory("a", [main, fork], 0.0, agent_rewards={"f": 4.0}),
        make_trajectory("b", [main, fork], 1.0, agent_rewards={"f": 2.0}),
        make_trajectory("c", [main], 5.0),
    ]
    rows = make_rows([make_group(members)], CENTERED)
    found = {(r.trajectory_id, r.token_ids[0].item()): r.advantages[-1].item() for r in rows}
    assert found == {("a", 1): -2.0, ("b", 1): -1.0, ("c", 1): 3.0, ("a", 3): 1.0, ("b", 3): -1.0}


def test_unscored_trajectories_are_neither_compared_nor_trained(
    make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    turn = [{"context": [1], "completion": [2]}]
    scored = [make_trajectory("a", turn, 1.0), make_trajectory("b", turn, 0.0)]
    failed = [make_trajectory("c", turn, None, status="infra_error"), make_trajectory("d", turn, None)]
    rows = make_rows([make_group([*scored, *failed])], CENTERED)
    assert {r.trajectory_id: r.advantages[-1].item() for r in rows} == {"a": 0.5, "b": -0.5}
    assert make_rows([make_group(failed)], CENTERED) == []


def test_f61_a_trajectory_that_trains_nothing_still_counts_in_its_group(
    make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    """Rewards 1, 0, 0, 0 with mean 1/4. The last one is not trainable: the others keep the advantages of the group of
    four (of three they would be 2/3 and -1/3), each under its own id."""
    members = [
        make_trajectory(str(i), [{"context": [1], "completion": [i], "trainable": i != 3}], float(i == 0))
        for i in range(4)
    ]
    rows = make_rows([make_group(members)], CENTERED)
    found = {r.trajectory_id: (r.token_ids[-1].item(), r.advantages[-1].item()) for r in rows}
    assert found == {"0": (0, 0.75), "1": (1, -0.25), "2": (2, -0.25)}


def test_f64_context_is_not_trained(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """Two sampled tokens, three of a tool result, one sampled token: exactly the sampled ones are targets."""
    turns = [{"context": [1, 1], "completion": [2, 2]}, {"context": [3, 3, 3], "completion": [4]}]
    (made,) = make_rows([make_group([make_trajectory("a", turns, 1.0)])], CENTERED)
    assert build_forest([made], share=True).target_token.tolist() == [2, 2, 4]


def test_f65_the_first_token_of_a_packed_row_is_not_predicted_from_the_row_before() -> None:
    """Lengths 4 and 4, masks 0011 and 0001: three targets, each predicted from its own row."""
    forest = build_forest([row([1, 2, 3, 4], [2, 3]), row([5, 6, 7, 8], [3])], share=False)
    assert targets_in(forest) == targets_of([row([1, 2, 3, 4], [2, 3]), row([5, 6, 7, 8], [3])])
    assert forest.target_token.tolist() == [3, 4, 8]


def test_f73_a_completion_of_one_token_is_trained(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """An immediate end token with reward 0 beside a longer reply with reward 1."""
    members = [
        make_trajectory("short", [{"context": [1], "completion": [0]}], 0.0),
        make_trajectory("long", [{"context": [1], "completion": [2, 3, 0]}], 1.0),
    ]
    (batch,) = micro_batches(make_rows([make_group(members)], CENTERED), 100, share=True)
    forest = build_forest(batch, share=True)
    assert sorted(zip(forest.target_token.tolist(), forest.advantages.tolist(), strict=True)) == [
        (0, -0.5),
        (0, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]


def test_f76_rows_keep_their_values_in_any_order(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """Ids, mask, logprob and advantage of a row are checked by its id after packing has re-ordered the rows."""
    members = [
        make_trajectory(
            str(i), [{"context": [9 - i], "completion": [i, i], "logprobs": [-i - 1.0, -i - 1.5]}], float(i)
        )
        for i in range(4)
    ]
    rows = make_rows([make_group(members)], CENTERED)
    (packed,) = micro_batches([rows[i] for i in (2, 0, 3, 1)], 100, share=True)
    assert [r.trajectory_id for r in packed] == ["3", "2", "1", "0"]
    for r in packed:
        i = int(r.trajectory_id)
        assert r.token_ids.tolist() == [9 - i, i, i]
        assert r.trained.tolist() == [False, True, True]
        assert r.rollout_logprobs.tolist() == [0.0, -i - 1.0, -i - 1.5]
        assert r.advantages.tolist() == [0.0, i - 1.5, i - 1.5]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_f67_a_rollout_logprob_that_is_no_number_is_refused_by_name(
    value: float, make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    turns = [
        {"context": [1], "completion": [2]},
        {"context": [3], "completion": [40, 41, 42], "logprobs": [-0.1, value, -0.2]},
    ]
    with pytest.raises(TrainingError, match=r"trajectory bad, turn 1, position 4 \(token id 41\): rollout logprob"):
        make_rows([make_group([make_trajectory("bad", turns, 1.0)])], CENTERED)


def test_a_trained_token_needs_a_positive_temperature(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    turns = [{"context": [1], "completion": [2], "temperature": 0.0}]
    with pytest.raises(TrainingError, match=r"trajectory greedy, turn 0, position 1 .*temperature 0.0"):
        make_rows([make_group([make_trajectory("greedy", turns, 1.0)])], CENTERED)


def test_a_reward_that_is_no_number_is_refused_by_name(make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    member = make_trajectory("odd", [{"context": [1], "completion": [2]}], float("nan"))
    with pytest.raises(TrainingError, match=r"trajectory odd: the reward of agent 'main' is nan"):
        make_rows([make_group([member])], CENTERED)


def test_an_advantage_that_is_no_number_is_refused_by_name(make_trajectory: MakeTrajectory) -> None:
    """Finite rewards can overflow float32."""
    (sample,) = make_trajectory("big", [{"context": [1], "completion": [2]}], 1.0).samples()
    with pytest.raises(TrainingError, match=r"trajectory big, turn 0, position 1 .*advantage inf"):
        make_row(sample, np.array([np.inf], dtype=np.float32))


def test_missing_logprobs_are_refused(make_trajectory: MakeTrajectory) -> None:
    (sample,) = make_trajectory("short", [{"context": [1], "completion": [2, 3]}], 1.0).samples()
    broken = msgspec.structs.replace(sample, logprobs_f32=pack_floats([0.0, -1.0]))
    with pytest.raises(TrainingError, match=r"trajectory short: .*3 token ids.*\[3, 3, 2, 3\]"):
        make_row(broken, np.zeros(1, dtype=np.float32))


def test_a_trained_first_token_is_refused(make_trajectory: MakeTrajectory) -> None:
    (sample,) = make_trajectory("headless", [{"context": [1], "completion": [2]}], 1.0).samples()
    broken = msgspec.structs.replace(sample, loss_mask_u8=b"\1\1", turn_spans=((0, 0, 2),))
    with pytest.raises(TrainingError, match=r"trajectory headless, turn 0, position 0"):
        make_row(broken, np.zeros(1, dtype=np.float32))
