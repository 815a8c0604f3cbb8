"""What is certified: each token trained once under its prompt, and every change of a record named with its turn."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import molt_sdk as molt
from molt_sdk import certificate as certificates
from molt_sdk.certificate import turn_digest
from molt_sdk.codec import decode_trajectory, encode_trajectory
from molt_sdk.packed import pack_floats, pack_ints
from molt_sdk.testing import TEMPLATES, Script, ScriptedEngine, pocket_model

END = 258


def link(turns: Sequence[molt.Turn]) -> tuple[molt.Turn, ...]:
    """The same turns with ``parent_turn`` set from ``parent``: what a careful forger would do."""
    linked: list[molt.Turn] = []
    for turn in turns:
        parent = linked[turn.parent] if turn.parent is not None else None
        linked.append(msgspec.structs.replace(turn, parent_turn=parent))
    return tuple(linked)


def changed(trajectory: molt.Trajectory, index: int, **fields: Any) -> molt.Trajectory:
    """One turn exchanged, and the turns that extend it linked to the new one."""
    turns = list(trajectory.turns)
    turns[index] = msgspec.structs.replace(turns[index], **fields)
    return msgspec.structs.replace(trajectory, turns=link(turns))


@pytest.fixture(scope="module")
def honest(pocket: str) -> molt.Trajectory:
    """Turn 1 extends 0, 2 extends 1, 3 extends 0 and 4 is a root."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        first = await model.chat("q")
        second = await model.chat([*first.messages, {"role": "user", "content": "more"}])
        await model.chat([*second.messages, {"role": "user", "content": "more"}])
        await model.chat([*first.messages, {"role": "user", "content": "other"}])
        (await model.chat("new")).reward(0.5)

    script = Script(token_ids=[97, 98, END], logprobs=[-0.5, -1.0, -2.0], versions=[1, 1, 2])
    (group,) = molt.rollout(policy, [{"prompt": "q"}], engine=ScriptedEngine(pocket, [script] * 5))
    (trajectory,) = group.trajectories
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 0, None]
    return trajectory


# --- a record that was changed ----------------------------------------------------------------------------------------


def test_an_honest_record_is_sealed(honest: molt.Trajectory) -> None:
    certificate = honest.certify()
    assert (certificate.problems, certificate.sealed, certificate.trained_tokens) == ((), True, 15)
    assert {len(turn.digest) for turn in honest.turns} == {16}
    assert len({turn.digest for turn in honest.turns}) == 5
    assert honest.turns[4].reward == 0.5  # credit came after the digest
    assert decode_trajectory(encode_trajectory(honest)).certify() == certificate


@pytest.mark.parametrize("index", [0, 2, 4], ids=["root", "leaf", "rewarded"])
@pytest.mark.parametrize(
    "fields",
    [
        {"completion_i32": pack_ints([97, 99, END])},
        {"logprobs_f32": pack_floats([-0.5, -1.0, -2.0001])},
        {"version_spans": ((1, 0, 3),)},
        {"version_spans": ((1, 0, 2), (3, 2, 3))},
        {"trainable": False},
        {"sampling": molt.SamplingParams(temperature=0.5)},
        {"agent": "critic"},
        {"digest": bytes(16)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_change_that_fits_in_length_is_named(honest: molt.Trajectory, index: int, fields: dict[str, Any]) -> None:
    problems = changed(honest, index, **fields).certify().problems
    recorded = f"turn {index}: its ids, logprobs, versions, agent, temperature or parent are not as recorded"
    # a turn that stands on a digest that was changed does not fit either
    children = [1, 3] if index == 0 and "digest" in fields else []
    assert problems == (recorded, *(recorded.replace("turn 0", f"turn {child}") for child in children))


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_changed_prompt_is_named(honest: molt.Trajectory, index: int) -> None:
    ids = [*honest.turns[index].context_i32]
    ids[0] ^= 1
    (problem,) = changed(honest, index, context_i32=bytes(ids)).certify().problems
    assert problem.startswith(f"turn {index}: its ids")


def test_a_turn_that_was_moved_to_another_parent_is_named(honest: molt.Trajectory) -> None:
    for parent, reason in ((1, ""), (2, ""), (None, "first call")):
        (problem,) = changed(honest, 3, parent=parent, fork_reason=reason).certify().problems
        assert problem.startswith("turn 3: its ids")


def test_a_new_digest_for_a_changed_turn_does_not_fit_what_stands_on_it(honest: molt.Trajectory) -> None:
    forged = msgspec.structs.replace(honest.turns[0], completion_i32=pack_ints([97, 99, END]))
    problems = changed(honest, 0, completion_i32=forged.completion_i32, digest=turn_digest(forged)).certify().problems
    assert [problem[:8] for problem in problems] == ["turn 1: ", "turn 3: "]


def test_turns_that_were_made_by_hand_have_no_digest_and_are_not_sealed(honest: molt.Trajectory) -> None:
    bare = msgspec.structs.replace(honest, turns=link([msgspec.structs.replace(t, digest=b"") for t in honest.turns]))
    certificate = bare.certify()
    assert (certificate.ok, certificate.sealed, certificate.trained_tokens) == (True, False, 15)


def test_a_digest_that_was_taken_away_is_missed(honest: molt.Trajectory) -> None:
    problems = changed(honest, 2, digest=b"").certify().problems
    assert problems == ("turn 2: it has no digest, and other turns have one",)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("token_ids_i32", "turn 0: the sample does not show"),
        ("logprobs_f32", "turn 0: the sample does not show"),
        ("temperatures_f32", "turn 0: the sample does not show"),
        ("version_spans", "a sample that ends with turn 2 does not show the recorded versions"),
        ("loss_mask_u8", "turn 0: 1 tokens trained, 3 were to be"),
        ("turn_spans", "turn 2: the sample does not show"),
    ],
)
def test_rows_are_compared_with_the_record(
    honest: molt.Trajectory, monkeypatch: pytest.MonkeyPatch, field: str, words: str
) -> None:
    """The rows that training would get, not only the record that they are made from."""
    samples = honest.samples()
    prompt = len(honest.turns[0].prompt_token_ids)
    wrong = bytearray(getattr(samples[0], field) if not field.endswith("spans") else b"")
    spans = list(getattr(samples[0], field)) if field.endswith("spans") else []
    if field == "version_spans":
        spans[1] = (7, *spans[1][1:])
    elif field == "turn_spans":  # turn 1 is left out
        spans = [span for span in spans if span[0] != 1]
    elif field == "loss_mask_u8":
        wrong[prompt : prompt + 2] = b"\0\0"
    else:
        wrong[4 * prompt] ^= 1
    row = msgspec.structs.replace(samples[0], **{field: tuple(spans) or bytes(wrong)})
    monkeypatch.setattr(certificates, "rows", lambda trajectory: [row, *samples[1:]])
    problems = honest.certify().problems
    assert [problem for problem in problems if problem.startswith(words)], problems


@pytest.fixture(scope="module")
def twins(pocket: str) -> molt.Trajectory:
    """Turns 0 and 1 are the same reply to the same prompt; turn 2 extends 1, and 0 has credit of its own."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        (await model.chat("q")).reward(1.0)
        reply = await model.chat("q")
        await model.chat([*reply.messages, {"role": "user", "content": "more"}])

    (group,) = molt.rollout(policy, [{"prompt": "q"}], engine=ScriptedEngine(pocket, ["same"] * 3))
    (trajectory,) = group.trajectories
    assert [turn.parent for turn in trajectory.turns] == [None, None, 1]
    assert trajectory.turns[0].completion_i32 == trajectory.turns[1].completion_i32
    assert trajectory.certify().ok
    return trajectory


def test_a_turn_that_was_moved_to_the_twin_of_its_parent_is_named(twins: molt.Trajectory) -> None:
    (problem,) = changed(twins, 2, parent=0).certify().problems
    assert problem.startswith("turn 2: its ids")


def test_a_row_that_mistakes_a_turn_for_its_twin_is_named(
    twins: molt.Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is right and trained once, but would get the reward of another turn."""
    samples = twins.samples()
    assert [[turn for turn, _, _ in sample.turn_spans] for sample in samples] == [[-1, 0], [-1, 1, -1, 2]]
    swapped = [
        msgspec.structs.replace(s, turn_spans=tuple(({0: 1, 1: 0}.get(t, t), a, b) for t, a, b in s.turn_spans))
        for s in samples
    ]
    monkeypatch.setattr(certificates, "rows", lambda trajectory: swapped)
    assert twins.certify().problems == ("turn 2: the sample does not show the recorded prompt + completion",)


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


def record(pocket: str, steps: Sequence[Step], diary: Diary) -> molt.Trajectory:
    (group,) = molt.rollout(agent_of(steps), [{"prompt": "q"}], engine=ScriptedEngine(pocket, diary))
    (trajectory,) = group.trajectories
    assert trajectory.error is None, trajectory.error
    return trajectory


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_whatever_an_agent_does_each_token_is_trained_once_under_its_prompt(
    pocket: str, steps: list[Step], seed: int
) -> None:
    diary = Diary(seed)
    trajectory = record(pocket, steps, diary)
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

    # each row shows the prompt and the reply of every turn on its path, trained there or not
    for sample in trajectory.samples():
        for owner, start, end in sample.turn_spans:
            if owner >= 0:
                turn = trajectory.turns[owner]
                assert sample.token_ids[:start] == turn.prompt_token_ids
                assert sample.token_ids[start:end] == turn.completion_token_ids

    # what is stored is what was recorded, and what is explained is what is certified
    back = decode_trajectory(encode_trajectory(trajectory))
    assert back == trajectory
    assert back.certify() == certificate
    segments = trajectory.explain().segments
    assert sorted(i for segment in segments for i in segment.turns) == list(range(len(trajectory.turns)))
    assert sum(segment.trained_tokens for segment in segments) == certificate.trained_tokens
    assert sum(segment.abandoned_tokens for segment in segments) == certificate.abandoned_tokens
    assert sum(segment.rows for segment in segments) == len(trajectory.samples())


CHANGES = ("context_i32", "completion_i32", "logprobs_f32", "version_spans", "parent", "trainable", "sampling", "agent")


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000), data=st.data())
def test_one_change_of_any_record_is_named(pocket: str, steps: list[Step], seed: int, data: st.DataObject) -> None:
    trajectory = record(pocket, steps, Diary(seed))
    if not trajectory.turns:
        return
    turn = data.draw(st.sampled_from(trajectory.turns))
    field = data.draw(st.sampled_from(CHANGES))
    value: Any = getattr(turn, field)
    fields: dict[str, Any] = {}
    if isinstance(value, bytes):
        position = data.draw(st.integers(0, len(value) // 4 - 1)) * 4  # the lowest byte of one number
        value = value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :]
    elif field == "version_spans":
        version, start, end = value[-1]
        value = (*value[:-1], (version + 1, start, end))
    elif field == "parent":
        others = [i for i in (None, *range(turn.id)) if i != turn.parent]
        if not others:
            return
        value = data.draw(st.sampled_from(others))
        fields["fork_reason"] = "first call" if value is None else ""
    elif field == "trainable":
        value = not value
    elif field == "sampling":
        value = msgspec.structs.replace(value, temperature=value.temperature + 0.25)
    else:
        value += "x"
    certificate = changed(trajectory, turn.id, **{field: value}, **fields).certify()
    assert not certificate
    assert certificate.sealed
    assert {problem.split(":")[0] for problem in certificate.problems} == {f"turn {turn.id}"}


@pytest.mark.anyio
async def test_best_of_n_is_settled_also_where_the_template_forces_a_new_root(tmp_path: Path) -> None:
    """The reply that the agent goes on with is continued, though its reasoning is dropped and no token is shared."""
    drops = "message['content'].split('</think>')[-1]"
    path = pocket_model(tmp_path, TEMPLATES["chatml"].replace("message['content']", drops))
    engine = ScriptedEngine(path, ["<think>a</think>A", "<think>b</think>B", "<think>c</think>C", "end"])

    @molt.policy
    async def policy(task: molt.Task, model: molt.Model) -> float:
        question: list[molt.Message] = [{"role": "user", "content": "q"}]
        replies = [await model.chat(question) for _ in range(3)]
        await model.chat([*replies[1].messages, {"role": "user", "content": "go on"}])
        return 1.0

    (group,) = await molt.arollout(policy, [molt.Task("t")], engine=engine)
    (trajectory,) = group.trajectories
    last = trajectory.turns[3]
    assert (last.parent, last.follows) == (None, 1)
    certificate = trajectory.certify()
    assert certificate.ok
    assert certificate.abandoned_tokens == sum(len(trajectory.turns[i].completion_token_ids) for i in (0, 2))
    trained = {t for row in trajectory.samples() for t, m in zip(row.turn_ids, row.loss_mask, strict=True) if m}
    assert trained == {1, 3}
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory
    assert not changed(trajectory, 3, follows=None).certify()
