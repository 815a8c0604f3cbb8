"""A trajectory comes back from its bytes exactly as it was."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt_sdk.codec import decode_trajectory, encode_trajectory
from molt_sdk.errors import StoreError
from molt_sdk.packed import pack_floats, pack_ints, to_spans
from molt_sdk.prefixes import PrefixTree
from molt_sdk.types import SamplingParams, Task, ToolExecution, Trajectory, Turn

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
FLOAT32 = st.floats(width=32, max_value=0.0, allow_nan=False, allow_infinity=False)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": ANY_TEXT}, optional={"x": JSON}), max_size=3
)
TOOLS = st.lists(st.dictionaries(ANY_TEXT, JSON, max_size=2), max_size=2).map(tuple)
IDS = st.lists(st.sampled_from([0, 1, 257, 2**31 - 1, -(2**31)]), max_size=6)  # prompts that often begin alike


@st.composite
def forests(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns whose parents are earlier turns, with prompts, messages, tool lists and sampling parameters that repeat or
    differ."""
    toolboxes = draw(st.lists(TOOLS, min_size=1, max_size=2))
    turns: list[Turn] = []
    for number in range(draw(st.integers(0, 7))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        logprobs = draw(st.lists(FLOAT32, min_size=1, max_size=5))
        size = len(logprobs)
        context, messages = draw(IDS), draw(MESSAGES)
        if turns and draw(st.booleans()):  # begins as an earlier conversation does
            model = draw(st.sampled_from(turns))
            whole = model.prompt_token_ids + model.completion_token_ids
            context = [*whole[: draw(st.integers(0, len(whole)))], *context]
            messages = [*model.messages, model.message, *messages]
        turns.append(
            Turn(
                id=number,
                parent=parent,
                fork_reason=draw(ANY_TEXT),
                agent=draw(ANY_TEXT),
                trainable=draw(st.booleans()),
                new_messages=messages,
                tools=draw(st.sampled_from(toolboxes)),
                sampling=SamplingParams(
                    temperature=draw(st.sampled_from([0.5, 1.0])),
                    seed=draw(st.none() | st.integers(0, 2**64 - 1)),
                    stop=draw(st.lists(ANY_TEXT.filter(bool), max_size=2).map(tuple)),
                    logit_bias=draw(st.sampled_from([(), ((1, 0.5), (7, -1.0))])),
                ),
                message={"role": "assistant", "content": draw(ANY_TEXT)},
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                context_i32=pack_ints(context),
                completion_i32=pack_ints(draw(st.lists(IDS.filter(bool).map(min), min_size=size, max_size=size))),
                logprobs_f32=pack_floats(logprobs),
                version_spans=to_spans(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))),
                reward=draw(st.none() | st.floats(allow_nan=False)),
                seconds=draw(st.floats(0, 100)),
                parent_turn=None if parent is None else turns[parent],
                remarks=tuple(draw(st.lists(ANY_TEXT, max_size=2))),
                digest=draw(st.binary(max_size=16)),
            )
        )
    return tuple(turns)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    scores = st.dictionaries(ANY_TEXT, st.floats(allow_nan=False), max_size=2)
    call = {"id": "1", "type": "function", "function": {"name": draw(ANY_TEXT), "arguments": "{}"}}
    execution = ToolExecution(call=call, message={"role": "tool", "content": draw(ANY_TEXT)}, error=draw(ANY_TEXT))  # type: ignore[arg-type]
    return Trajectory(
        id=draw(st.text("0123456789abcdef", min_size=1)),
        task=Task(prompt=draw(ANY_TEXT | MESSAGES), answer=draw(JSON), id="t", metadata={"m": draw(JSON)}),  # type: ignore[arg-type]
        turns=draw(forests()),
        status=draw(st.sampled_from(["ok", "truncated", "env_error"])),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        rewards=draw(scores),
        agent_rewards=draw(scores),
        output=draw(JSON),
        metrics=draw(scores),
        tool_executions=(execution,) * draw(st.integers(0, 2)),
        error=draw(st.none() | ANY_TEXT),
        policy=draw(ANY_TEXT),
        environment=draw(ANY_TEXT),
        position=draw(st.integers(0, 2**40)),
        index=draw(st.integers(0, 100)),
        attempt=draw(st.integers(0, 5)),
        split=draw(st.sampled_from(["train", "eval", "rollout"])),
        started=draw(st.floats(0, 2e9)),
        seconds=draw(st.floats(0, 1e6)),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trajectories())
def test_a_trajectory_comes_back_exactly(trajectory: Trajectory) -> None:
    back = decode_trajectory(encode_trajectory(trajectory))
    assert back == trajectory  # every field of every turn, the packed bytes and the parents' records included
    for turn, original in zip(back.turns, trajectory.turns, strict=True):
        assert turn.prompt_i32 == original.prompt_i32
        assert turn.messages == original.messages
        assert turn.parent_turn is (None if turn.parent is None else back.turns[turn.parent])


def one_turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "id": 0,
        "parent": None,
        "fork_reason": "first call",
        "agent": "main",
        "trainable": True,
        "new_messages": [{"role": "user", "content": "q"}],
        "tools": (),
        "sampling": SamplingParams(),
        "message": {"role": "assistant", "content": "a"},
        "finish_reason": "stop",
        "context_i32": pack_ints([1, 2]),
        "completion_i32": pack_ints([3]),
        "logprobs_f32": pack_floats([-0.5]),
        "version_spans": ((0, 0, 1),),
    }
    return Turn(**{**fields, **changes})


def linked(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with ids and links to their parents."""
    done: list[Turn] = []
    for number, turn in enumerate(turns):
        parent = None if turn.parent is None else done[turn.parent]
        done.append(msgspec.structs.replace(turn, id=number, parent_turn=parent))
    return tuple(done)


def size(turns: Sequence[Turn]) -> int:
    """Bytes of a trajectory, which also comes back as it was."""
    trajectory = Trajectory(id="a", task=Task("q"), turns=linked(turns))
    blob = encode_trajectory(trajectory)
    assert decode_trajectory(blob) == trajectory
    return len(blob)


def test_what_turns_share_is_stored_once() -> None:
    def chain(turns: int) -> list[Turn]:
        schema = {"type": "function", "function": {"name": "t", "description": "d" * 10_000}}
        equal_tools = [(dict(schema),) for _ in range(turns)]  # equal, not identical
        root = one_turn(context_i32=pack_ints(range(10_000)), tools=equal_tools[0])
        return [root, *(one_turn(parent=i - 1, context_i32=b"", tools=equal_tools[i]) for i in range(1, turns))]

    # The prompt is 40,000 bytes and the schema 10,000; nine further turns must add neither of them again.
    assert 50_000 < size(chain(1)) < 51_000
    assert size(chain(10)) < size(chain(1)) + 9 * 100


LONG = [n * 7919 % 32_000 for n in range(5000)]


def long_messages(number: int) -> list[Any]:
    return [{"role": "user", "content": f"{i} {'x' * 200}"} for i in range(number)]


@pytest.mark.parametrize("parent", [None, 0], ids=["roots", "siblings"])
def test_a_prompt_that_is_asked_fifty_times_is_stored_once(parent: int | None) -> None:
    def asked(times: int) -> list[Turn]:
        first = [] if parent is None else [one_turn()]
        same = [one_turn(parent=parent, context_i32=pack_ints(LONG), new_messages=long_messages(90))] * times
        return first + same

    assert 38_000 < size(asked(1)) < 42_000
    assert size(asked(50)) < size(asked(1)) + 49 * 100


def test_a_history_that_is_edited_near_its_end_is_stored_once() -> None:
    """Each root repeats all but the last 10 tokens and the last message of the one before, and goes on differently."""
    roots = []
    for i in range(50):
        edited = [*LONG[: 4000 + 10 * i], *range(40_000 + 20 * i, 40_020 + 20 * i)]
        messages = [*long_messages(50 + i), {"role": "user", "content": f"edit {i}"}]
        roots.append(one_turn(context_i32=pack_ints(edited), new_messages=messages))
    # per further root: 30 new prompt tokens and two new messages of 200 bytes
    assert size(roots) < size(roots[:1]) + 49 * (30 * 4 + 400 + 100)


def test_going_back_to_an_earlier_branch_is_stored_once() -> None:
    """After 40 unrelated roots, a root that repeats the second turn of the first conversation, its reply included."""
    unrelated = [one_turn(context_i32=pack_ints([50_000 + i, *LONG[i : i + 20]])) for i in range(40)]
    start = [
        one_turn(context_i32=pack_ints(LONG)),
        one_turn(parent=0, context_i32=pack_ints(LONG[:100]), completion_i32=pack_ints([3])),
    ]
    whole = [*LONG, 3, *LONG[:100], 3]
    back = one_turn(context_i32=pack_ints([*whole, 77]))
    assert size([*start, *unrelated, back]) < size([*start, *unrelated]) + 100


def test_a_turn_may_share_what_lies_in_the_middle_of_another() -> None:
    """The second root samples what the first was given, and its child goes on as the first did."""
    first = one_turn(context_i32=pack_ints([1, 2, 3, *LONG]))
    second = one_turn(context_i32=pack_ints([1, 2]))
    child = one_turn(parent=1, context_i32=pack_ints([*LONG[:4000], 9]))
    assert size([first, second, child]) < size([first, second]) + 100


@settings(deadline=None)
@given(forests())
def test_as_many_tokens_are_shared_as_any_earlier_turn_has(turns: tuple[Turn, ...]) -> None:
    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    tree = PrefixTree()
    streams: list[list[int]] = []
    for turn in turns:
        prompt = turn.prompt_token_ids
        start = len(prompt) - len(turn.context_i32) // 4
        other, same = tree.add(turn)
        assert same == max(0, *(common(prompt, stream) - start for stream in streams), 0)
        assert (other == -1) == (same == 0)
        if same:
            assert streams[other][: start + same] == prompt[: start + same]
        streams.append(prompt + turn.completion_token_ids)


@pytest.mark.parametrize("ids", [b"\1", b"\1\0\0\0\2\0", b""])
def test_ids_that_are_no_whole_numbers_come_back_as_they_are(ids: bytes) -> None:
    """Such a record does not certify, which it can only say when it is read again."""
    turn = one_turn(context_i32=ids, completion_i32=ids)
    size([turn, turn, one_turn(parent=0, context_i32=ids + b"\3"), one_turn(parent=0, context_i32=ids + b"\3")])


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Thing:
    def __repr__(self) -> str:
        return "Thing(7)"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Name(str):
    pass


def stored(value: Any) -> Any:
    """What a task's answer looks like after a round trip."""
    return decode_trajectory(encode_trajectory(Trajectory(id="a", task=Task("q", id="t", answer=value)))).task.answer


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (array("i", [1, 2]), [1, 2]),
        (Decimal("1.50"), "1.50"),
        ({3, 1, 2}, [1, 2, 3]),
        ((1, (2,)), [1, [2]]),
        (Point(1, {"p": Point(2, None)}), {"x": 1, "y": {"p": {"x": 2, "y": None}}}),
        (Colour.RED, "red"),
        (Name("n"), "n"),
        (bytearray(b"\x00\xff"), b"\x00\xff"),
        (2**200, 2**200),
        (-(2**64), -(2**64)),
        ("\ud800", "\ud800"),
        ({"\udfff": {2**70: 1}, (1, "\ud800"): 2}, {"\udfff": {2**70: 1}, (1, "\ud800"): 2}),
        ({Colour.RED: 1, 2: 3, None: 4, (1, 2): 5}, {"red": 1, 2: 3, None: 4, (1, 2): 5}),
        ({Thing(): 1}, {"Thing(7)": 1}),
        (float("inf"), float("inf")),
    ],
)
def test_objects_become_plain_data(value: Any, plain: Any) -> None:
    back = stored(value)
    assert back == plain
    assert type(back) is type(plain)


def test_torch_values_become_numbers() -> None:
    import torch

    assert stored({"scalar": torch.tensor(0.5, requires_grad=True), "ids": torch.tensor([1, 2])}) == {
        "scalar": 0.5,
        "ids": [1, 2],
    }


def test_other_objects_become_their_repr_with_a_marker() -> None:
    assert stored(Thing())["__repr__"] == "Thing(7)"
    assert stored([Thing()])[0]["type"].endswith("test_codec.Thing")
    assert stored(Broken())["__repr__"] == "<repr failed: RuntimeError: no repr>"
    assert stored(np.zeros(10_001))["type"] == "numpy.ndarray"  # too large to be data of a task


def test_a_structure_that_contains_itself_ends() -> None:
    loop: list[Any] = [1]
    loop += [loop, loop]
    mark = {"__repr__": "[1, [...], [...]]", "type": "builtins.list"}
    assert stored(loop) == [1, mark, mark]
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert isinstance(stored(nested), list)


def test_objects_inside_messages_do_not_fail_the_record() -> None:
    turn = one_turn(new_messages=[{"role": "user", "content": "q", "extra": {1, 2}, "n": 2**80, "thing": Thing()}])
    message = (
        decode_trajectory(encode_trajectory(Trajectory(id="a", task=Task("q"), turns=(turn,)))).turns[0].messages[0]
    )
    assert message["extra"] == [1, 2]  # type: ignore[typeddict-item]
    assert message["n"] == 2**80  # type: ignore[typeddict-item]
    assert message["thing"]["__repr__"] == "Thing(7)"  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    "damage", [b"", b"\x00", b"not msgpack at all", encode_trajectory(Trajectory(id="a", task=Task("q")))[:-3]]
)
def test_a_damaged_blob_is_a_store_error(damage: bytes) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        decode_trajectory(damage)


def test_a_parent_that_does_not_exist_is_a_store_error() -> None:
    blob = encode_trajectory(Trajectory(id="a", task=Task("q"), turns=(one_turn(parent=4),)))
    with pytest.raises(StoreError, match="turn 0 names turn 4"):
        decode_trajectory(blob)


def wire_of(*turns: Turn) -> Any:
    """The fields of a blob, to damage."""
    return msgspec.msgpack.decode(encode_trajectory(Trajectory(id="a", task=Task("q"), turns=linked(turns))))


ASKED, ANSWERED, DRAWN, SHARED = 4, 5, 7, 18


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (SHARED, [1, 1]),  # itself
        (SHARED, [2, 1]),
        (SHARED, [-1, 1]),
        (SHARED, [0, 4]),  # the first turn has three tokens
        (SHARED, [0, -1]),
        (SHARED, [0, 2**62]),
        (SHARED, [0]),
        (SHARED, ["0", 1]),
        (ASKED, [[0, 9]]),
        (ASKED, [[1, 0]]),
        (ASKED, [[-1, 1]]),
        (ASKED, [[5, 6]]),
        (ASKED, 3),
        (ANSWERED, 2),
        (ANSWERED, -1),
        (DRAWN, 1),
        (DRAWN, -1),
    ],
)
def test_a_damaged_reference_is_a_store_error(field: int, value: Any) -> None:
    wire = wire_of(one_turn(), one_turn())
    assert [wire[3][1][at] for at in (ASKED, ANSWERED, DRAWN, SHARED)] == [[[0, 1]], 1, 0, [0, 2]]
    assert decode_trajectory(msgspec.msgpack.encode(wire)).turns[1].prompt_token_ids == [1, 2]
    wire[3][1][field] = value
    with pytest.raises(StoreError, match="cannot be read"):
        decode_trajectory(msgspec.msgpack.encode(wire))


def test_a_reference_of_a_child_counts_from_the_end_of_its_parent() -> None:
    wire = wire_of(one_turn(), one_turn(parent=0, context_i32=pack_ints([5])), one_turn(parent=0))
    wire[3][2][SHARED] = [1, 2]
    assert decode_trajectory(msgspec.msgpack.encode(wire)).turns[2].prompt_token_ids == [1, 2, 3, 5, 3, 1, 2]
    wire[3][2][SHARED] = [1, 3]
    with pytest.raises(StoreError, match="turn 2 begins with 3 tokens of turn 1"):
        decode_trajectory(msgspec.msgpack.encode(wire))


def test_parameters_that_are_not_valid_are_a_store_error() -> None:
    wire = wire_of(one_turn())
    wire[-1][0]["top_p"] = 7
    with pytest.raises(StoreError, match="top_p=7"):
        decode_trajectory(msgspec.msgpack.encode(wire))


def test_a_newer_format_is_named() -> None:
    fields = msgspec.msgpack.decode(encode_trajectory(Trajectory(id="abc", task=Task("q"))))
    with pytest.raises(StoreError, match="abc: format 4"):
        decode_trajectory(msgspec.msgpack.encode([4, *fields[1:]]))
