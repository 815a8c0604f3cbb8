from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from molt_sdk.errors import TrainingError
from molt_sdk.packed import pack_floats
from molt_sdk.types import Trajectory, TrajectoryGroup
from trainer_backend.advantage import GRPO
from trainer_backend.batch import Forest, Row, build_forest, make_row, make_rows, pack

CENTERED = GRPO(normalize_std=False)
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
    forests = [build_forest(batch, share=share) for batch in pack(rows, budget, share=share)]
    assert sorted(itertools.chain.from_iterable(map(targets_in, forests))) == targets_of(rows)
    for forest in forests:
        paths = [tuple(path.tolist()) for path in forest.row_nodes]
        if share:
            prefixes = {tuple(forest.token_ids[path[:d]].tolist()) for path in map(list, paths) for d in range(1, 20)}
            prefixes = {p for p in prefixes if p}
            assert len(forest.token_ids) == len(prefixes)  # each distinct prefix is one node
        assert len(forest.token_ids) <= budget or len(set(paths)) == 1 or not share
        assert sorted({node for path in paths for node in path}) == list(range(len(forest.token_ids)))


@pytest.mark.parametrize("share", [True, False])
def test_packing_does_not_depend_on_the_order_of_rows(share: bool) -> None:
    rows = random_rows(3)
    shuffled = random.Random(0).sample(rows, len(rows))
    packed, again = (
        [[r.trajectory_id for r in batch] for batch in pack(order, 11, share=share)] for order in (rows, shuffled)
    )
    assert packed == again


def test_micro_batches_keep_to_the_budget_and_an_oversized_row_stands_alone() -> None:
    """Inputs have 3, 3 and 9 tokens, of which the first two share 2: 4 nodes together, and the 9 fit nowhere."""
    long, left, right = row([9] * 10, [9], "long"), row([1, 1, 2, 0], [3], "left"), row([1, 1, 3, 0], [3], "right")
    batches = list(pack([long, left, right], 4, share=True))
    assert [[r.trajectory_id for r in batch] for batch in batches] == [["left", "right"], ["long"]]
    assert len(list(pack([long, left, right], 3, share=True))) == 3


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
    (batch,) = pack(make_rows([make_group(members)], CENTERED), 100, share=True)
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
    (packed,) = pack([rows[i] for i in (2, 0, 3, 1)], 100, share=True)
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
