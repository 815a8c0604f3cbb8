"""Training rows and the certificate: every trainable sampled token is trained once, under its own prompt."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import molt_sdk as molt
from molt_sdk.packed import pack_floats, pack_ints, to_spans
from molt_sdk.testing import Script, ScriptedEngine

END = 258


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


# --- any agent --------------------------------------------------------------------------------------------------------

Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["more", "more", "more", "retry", "edit", "cut", "fork", "blind", "both", "raw", "credit", "new"]
        ),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=14,
)


class Diary:
    """An engine's replies, and what it really sampled under which prompt."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sampled: list[tuple[list[int], list[int]]] = []

    def __call__(self, prompt: list[int], sampling: molt.SamplingParams) -> Script:
        kind = self.random.randrange(5)
        ids = [self.random.randrange(97, 100) for _ in range(self.random.randint(0, 2))]
        if kind == 0:
            ids += [0xC3, 257]  # half a character and a control token in the middle
        cut = kind == 1
        ids += [self.random.randrange(256)] if cut else [END]
        self.sampled.append((prompt, ids))
        versions = sorted(self.random.randrange(3) for _ in ids)
        return Script(token_ids=ids, finish_reason="length" if cut else "stop", versions=versions)


def agent_of(steps: Sequence[Step]) -> Callable[[Any, molt.Model], Any]:
    """A policy that does these steps to a few conversations, each with a handle of its own or of its parent."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        conversations: list[tuple[molt.Model, list[Any]]] = [(model, [{"role": "user", "content": "q"}])]

        async def ask(index: int) -> molt.Reply:
            handle, history = conversations[index]
            return await handle.chat(list(history))

        for kind, which, salt in steps:
            index = which % len(conversations)
            handle, history = conversations[index]
            if kind == "more":
                reply = await ask(index)
                history += [reply.message, {"role": "user", "content": f"m{salt}"}]
            elif kind == "retry":
                await ask(index)
                await ask(index)
            elif kind == "both":
                replies = await asyncio.gather(*(ask(i) for i in range(len(conversations))))
                history.append(replies[index].message)
            elif kind == "edit":
                history[salt % len(history)] = {"role": "user", "content": f"edited{salt}"}
            elif kind == "cut" and len(history) > 1:
                del history[salt % len(history)]
            elif kind in ("fork", "blind"):
                conversations.append((handle.fork(trainable=kind == "fork"), list(history)))
            elif kind == "raw":
                await handle.complete([1, 2, salt])
            elif kind == "credit":
                (await ask(index)).reward(salt)
            elif kind == "new":
                conversations.append((handle, [{"role": "system", "content": f"s{salt}"}]))

    return policy


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_whatever_an_agent_does_each_token_is_trained_once_under_its_prompt(
    pocket: str, steps: list[Step], seed: int
) -> None:
    diary = Diary(seed)
    engine = ScriptedEngine(pocket, diary)
    (group,) = molt.rollout(agent_of(steps), [{"prompt": "q"}], engine=engine)
    (trajectory,) = group.trajectories
    assert trajectory.error is None, trajectory.error
    certificate = trajectory.certify()
    assert certificate.ok, certificate.problems

    # the record holds what the engine sampled: every call, no other call, under the prompt that it was given
    recorded = Counter(str((t.prompt_token_ids, t.completion_token_ids)) for t in trajectory.turns)
    assert recorded == Counter(map(str, diary.sampled))

    # each masked token belongs to one call and is preceded by that call's whole prompt
    trained: Counter[tuple[int, int]] = Counter()
    for sample in trajectory.samples():
        ids, owners, mask = sample.token_ids, sample.turn_ids, sample.loss_mask
        assert any(mask)
        for position, owner in enumerate(owners):
            if not mask[position]:
                continue
            turn = trajectory.turns[owner]
            offset = position - owners.index(owner)
            assert ids[: owners.index(owner)] == turn.prompt_token_ids
            assert ids[position] == turn.completion_token_ids[offset]
            assert sample.rollout_logprobs[position] == turn.logprobs[offset]
            assert sample.versions[position] == turn.versions[offset]
            trained[owner, offset] += 1
    assert set(trained.values()) <= {1}
    by_turn = Counter(owner for owner, _ in trained)
    skipped = [t for t in trajectory.turns if not by_turn[t.id]]
    assert all(by_turn[t.id] in (0, len(t.completion_token_ids)) for t in trajectory.turns)

    # what is not trained was not trainable, or is one of several replies to a prompt of which another went on
    parents = {t.parent for t in trajectory.turns}
    for t in skipped:
        assert not t.trainable or any(
            o.id in parents and o.agent == t.agent and o.prompt_token_ids == t.prompt_token_ids
            for o in trajectory.turns
            if o.id != t.id
        )
    abandoned = sum(len(t.completion_token_ids) for t in skipped if t.trainable)
    assert (certificate.trained_tokens, certificate.abandoned_tokens) == (len(trained), abandoned)
    for t in trajectory.turns:
        assert (t.parent is None) == bool(t.fork_reason)
