"""Training rows and the certificate: every trainable sampled token is trained once, under its own prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import molt_sdk as molt
from molt_sdk.packed import pack_floats, pack_ints, to_spans


def link(turns: Sequence[molt.Turn]) -> tuple[molt.Turn, ...]:
    """The same turns with ``parent_turn`` set from ``parent``."""
    linked: list[molt.Turn] = []
    for turn in turns:
        parent = linked[turn.parent] if turn.parent is not None else None
        linked.append(msgspec.structs.replace(turn, parent_turn=parent))
    return tuple(linked)


def turn(id: int, parent: int | None, context: Sequence[int], completion: Sequence[int], **changes: Any) -> molt.Turn:
    fields: dict[str, Any] = {
        "fork_reason": "first call" if parent is None else "",
        "agent": "main",
        "trainable": True,
        "new_messages": [],
        "tools": (),
        "sampling": molt.SamplingParams(),
        "message": {"role": "assistant", "content": ""},
        "finish_reason": "stop",
        "logprobs_f32": pack_floats([-1.0] * len(completion)),
        "version_spans": to_spans([0] * len(completion)),
    }
    return molt.Turn(
        id=id, parent=parent, context_i32=pack_ints(context), completion_i32=pack_ints(completion), **fields | changes
    )


def trajectory(*turns: molt.Turn) -> molt.Trajectory:
    return molt.Trajectory(id="t", task=molt.Task("q"), turns=link(turns))


def rows(trajectory: molt.Trajectory) -> list[tuple[list[int], list[int], list[int]]]:
    return [(sample.token_ids, sample.loss_mask, sample.turn_ids) for sample in trajectory.samples()]


# --- rows, by hand ----------------------------------------------------------------------------------------------------


def test_a_chain_is_one_row() -> None:
    chain = trajectory(turn(0, None, [1, 2], [3]), turn(1, 0, [4], [5, 6]))
    assert rows(chain) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], [-1, -1, 0, -1, 1, 1])]
    assert chain.certify() == msgspec.convert(
        {"trained_tokens": 3, "context_tokens": 3, "abandoned_tokens": 0}, type(chain.certify())
    )


def test_what_two_leaves_share_is_trained_in_the_first() -> None:
    fork = trajectory(turn(0, None, [1], [2]), turn(1, 0, [3], [4]), turn(2, 0, [5], [6]))
    assert rows(fork) == [
        ([1, 2, 3, 4], [0, 1, 0, 1], [-1, 0, -1, 1]),
        ([1, 2, 5, 6], [0, 0, 0, 1], [-1, 0, -1, 2]),
    ]
    assert fork.certify().trained_tokens == 3


def test_rows_are_depth_first_in_the_order_of_the_record() -> None:
    forest = trajectory(
        turn(0, None, [1], [2]),
        turn(1, None, [3], [4]),
        turn(2, 0, [5], [6]),
        turn(3, 1, [7], [8]),
        turn(4, 0, [9], [9]),
    )
    assert [sample.turn_ids for sample in forest.samples()] == [[-1, 0, -1, 2], [-1, 0, -1, 4], [-1, 1, -1, 3]]


def test_what_is_not_trainable_is_context() -> None:
    mixed = trajectory(
        turn(0, None, [1], [2]), turn(1, 0, [3], [4], trainable=False), turn(2, None, [5], [6], trainable=False)
    )
    assert rows(mixed) == [([1, 2, 3, 4], [0, 1, 0, 0], [-1, 0, -1, 1])]  # nothing to train in the second tree
    assert mixed.certify().ok


def test_replies_that_were_given_up_on_are_not_trained() -> None:
    same = [turn(i, None, [1], [i + 5]) for i in range(3)]
    assert len(trajectory(*same).samples()) == 3  # none was chosen: all of them count
    chosen = trajectory(*same, turn(3, 1, [2], [3]))
    assert rows(chosen) == [([1, 6, 2, 3], [0, 1, 0, 1], [-1, 1, -1, 3])]
    assert chosen.certify().abandoned_tokens == 2
    credited = trajectory(*same[:2], turn(2, None, [1], [7], reward=0.0), turn(3, 1, [2], [3]))
    assert [sample.token_ids for sample in credited.samples()] == [[1, 6, 2, 3], [1, 7]]
    other_agent = trajectory(*same[:2], turn(2, None, [1], [7], agent="critic"), turn(3, 1, [2], [3]))
    assert [sample.token_ids for sample in other_agent.samples()] == [[1, 6, 2, 3], [1, 7]]


def test_a_reply_that_was_given_up_on_has_no_row_of_its_own() -> None:
    """Turn 1 is the first leaf under turn 0, which is trained in the row of turn 3."""
    tree = trajectory(turn(0, None, [1], [2]), turn(1, 0, [3], [4]), turn(2, 0, [3], [5]), turn(3, 2, [6], [7]))
    assert rows(tree) == [([1, 2, 3, 5, 6, 7], [0, 1, 0, 1, 0, 1], [-1, 0, -1, 2, -1, 3])]
    certificate = tree.certify()
    assert (certificate.ok, certificate.trained_tokens, certificate.abandoned_tokens) == (True, 3, 1)


def test_temperatures_and_versions_follow_their_turn() -> None:
    hot = molt.SamplingParams(temperature=2.0)
    chain = trajectory(
        turn(0, None, [1], [2, 3], version_spans=((4, 0, 1), (5, 1, 2))), turn(1, 0, [], [6], sampling=hot)
    )
    (sample,) = chain.samples()
    assert sample.versions == [-1, 4, 5, 0]
    assert sample.temperatures == [1.0, 1.0, 1.0, 2.0]
    assert chain.oldest_version == 0


def test_prompts_are_put_together_from_the_ancestors() -> None:
    chain = trajectory(turn(0, None, [1], [2]), turn(1, 0, [3], [4]), turn(2, 1, [5], [6]))
    assert chain.turns[2].prompt_token_ids == [1, 2, 3, 4, 5]


# --- the certificate sees what was tampered with ----------------------------------------------------------------------


def honest() -> molt.Trajectory:
    return trajectory(
        turn(0, None, [1, 2], [3, 4]), turn(1, 0, [5], [6, 7]), turn(2, 1, [8], [9]), turn(3, 0, [5, 5], [6, 7, 8])
    )


def tampered(index: int, **changes: Any) -> molt.Trajectory:
    """One turn exchanged; the other turns are as they were."""
    good = honest()
    turns = list(good.turns)
    turns[index] = msgspec.structs.replace(turns[index], **changes)
    return msgspec.structs.replace(good, turns=tuple(turns))


def test_an_honest_record_certifies() -> None:
    certificate = honest().certify()
    assert certificate
    assert (certificate.trained_tokens, certificate.context_tokens, certificate.problems) == (8, 4 + 6, ())


@pytest.mark.parametrize(
    ("index", "changes", "words"),
    [
        (0, {"completion_i32": pack_ints([3, 99])}, "turn 1: its prompt is built on a record that is not turn 0"),
        (1, {"completion_i32": pack_ints([6, 99])}, "turn 2: its prompt is built on a record that is not turn 1"),
        (0, {"context_i32": pack_ints([1, 99])}, "turn 3: its prompt is built on a record that is not turn 0"),
        (1, {"context_i32": b""}, "turn 2: its prompt is built on a record that is not turn 1"),
        (2, {"completion_i32": pack_ints([9, 99])}, "turn 2: 1 logprobs for 2 tokens"),
        (2, {"completion_i32": b"", "logprobs_f32": b"", "version_spans": ()}, "turn 2: empty prompt or completion"),
        (2, {"logprobs_f32": b""}, "turn 2: 0 logprobs for 1 tokens"),
        (2, {"logprobs_f32": pack_floats([-1.0, -1.0])}, "turn 2: 2 logprobs for 1 tokens"),
        (2, {"logprobs_f32": pack_floats([float("nan")])}, "turn 2: a logprob is missing, NaN or positive"),
        (2, {"logprobs_f32": pack_floats([float("-inf")])}, "turn 2: a logprob is missing, NaN or positive"),
        (2, {"logprobs_f32": pack_floats([-9999.0])}, "turn 2: a logprob is missing, NaN or positive"),
        (2, {"logprobs_f32": pack_floats([0.5])}, "turn 2: a logprob is missing, NaN or positive"),
        (2, {"logprobs_f32": b"\0\0\0"}, "turn 2: token ids or logprobs are not whole 4-byte numbers"),
        (2, {"completion_i32": b"\0\0\0\0\0", "logprobs_f32": b"\0\0\0\0\0"}, "turn 2: token ids or logprobs are not"),
        (3, {"version_spans": ((0, 0, 2),)}, "turn 3: version spans cover 2 of 3 tokens"),
        (3, {"version_spans": ((0, 0, 4),)}, "turn 3: version spans cover 4 of 3 tokens"),
        (3, {"version_spans": ()}, "turn 3: version spans cover 0 of 3 tokens"),
        (3, {"version_spans": ((0, 0, 1), (1, 2, 3))}, "do not cover 3 tokens in order"),
        (3, {"version_spans": ((0, 0, 2), (1, 1, 3))}, "do not cover 3 tokens in order"),
        (3, {"version_spans": ((0, 0, 2), (1, 2, 2), (1, 2, 3))}, "do not cover 3 tokens in order"),
        (3, {"version_spans": ((-1, 0, 3),)}, "do not cover 3 tokens in order"),
        (3, {"parent": 1}, "turn 3: its prompt is built on a record that is not turn 1"),
        (3, {"parent": None, "fork_reason": "x"}, "turn 3: a root with a parent record"),
        (2, {"parent": 2}, "turn 2: parent 2 is not an earlier turn"),
        (2, {"parent": 3}, "turn 2: parent 3 is not an earlier turn"),
        (2, {"parent": -1}, "turn 2: parent -1 is not an earlier turn"),
        (3, {"parent_turn": None}, "turn 3: its prompt is built on a record that is not turn 0"),
        (0, {"fork_reason": ""}, "turn 0: a root without a fork_reason"),
        (0, {"context_i32": b""}, "turn 0: empty prompt or completion"),
        (3, {"id": 2}, "turn at index 3 has id 2"),
    ],
)
def test_a_tampered_record_does_not_certify(index: int, changes: dict[str, Any], words: str) -> None:
    certificate = tampered(index, **changes).certify()
    assert not certificate
    assert [problem for problem in certificate.problems if words in problem], certificate.problems


def test_turns_that_are_left_out_or_doubled_do_not_certify() -> None:
    good = honest()
    for turns in (good.turns[1:], (*good.turns, good.turns[3]), good.turns[::-1], (good.turns[0], good.turns[0])):
        assert not msgspec.structs.replace(good, turns=turns).certify()


def test_a_link_to_a_forged_parent_does_not_certify() -> None:
    """Turn 1 and its child agree with each other, but not with turn 0 of the record."""
    good = honest()
    forged = msgspec.structs.replace(good.turns[0], context_i32=pack_ints([1, 99]))
    first = msgspec.structs.replace(good.turns[1], parent_turn=forged)
    second = msgspec.structs.replace(good.turns[2], parent_turn=first)
    certificate = msgspec.structs.replace(good, turns=(good.turns[0], first, second)).certify()
    assert certificate.problems == ("turn 1: its prompt is built on a record that is not turn 0",)
