"""A trajectory comes back from its bytes exactly as it was."""

from __future__ import annotations

import dataclasses
import enum
from array import array
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
INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns whose parents are earlier turns, with tool lists and sampling parameters that repeat or differ."""
    toolboxes = draw(st.lists(TOOLS, min_size=1, max_size=2))
    turns: list[Turn] = []
    for number in range(draw(st.integers(0, 5))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        logprobs = draw(st.lists(FLOAT32, min_size=1, max_size=5))
        size = len(logprobs)
        turns.append(
            Turn(
                id=number,
                parent=parent,
                fork_reason=draw(ANY_TEXT),
                agent=draw(ANY_TEXT),
                trainable=draw(st.booleans()),
                new_messages=draw(MESSAGES),
                tools=draw(st.sampled_from(toolboxes)),
                sampling=SamplingParams(
                    temperature=draw(st.sampled_from([0.5, 1.0])),
                    seed=draw(st.none() | st.integers(0, 2**64 - 1)),
                    stop=draw(st.lists(ANY_TEXT.filter(bool), max_size=2).map(tuple)),
                ),
                message={"role": "assistant", "content": draw(ANY_TEXT)},
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                context_i32=pack_ints(draw(st.lists(INT32, max_size=5))),
                completion_i32=pack_ints(draw(st.lists(INT32, min_size=size, max_size=size))),
                logprobs_f32=pack_floats(logprobs),
                version_spans=to_spans(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))),
                reward=draw(st.none() | st.floats(allow_nan=False)),
                seconds=draw(st.floats(0, 100)),
                parent_turn=None if parent is None else turns[parent],
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


def test_what_turns_share_is_stored_once() -> None:
    def size(turns: int) -> int:
        schema = {"type": "function", "function": {"name": "t", "description": "d" * 10_000}}
        equal_tools = [(dict(schema),) for _ in range(turns)]  # equal, not identical
        records = [one_turn(id=i, context_i32=pack_ints(range(10_000)) if i == 0 else b"") for i in range(turns)]
        linked = [records[0]]
        for number, turn in enumerate(records[1:], start=1):
            linked.append(msgspec.structs.replace(turn, parent=number - 1, parent_turn=linked[-1]))
        linked = [msgspec.structs.replace(t, tools=equal_tools[i]) for i, t in enumerate(linked)]
        return len(encode_trajectory(Trajectory(id="a", task=Task("q"), turns=tuple(linked))))

    # The prompt is 40,000 bytes and the schema 10,000; nine further turns must add neither of them again.
    assert 50_000 < size(1) < 51_000
    assert size(10) < size(1) + 9 * 200


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


def test_a_newer_format_is_named() -> None:
    fields = msgspec.msgpack.decode(encode_trajectory(Trajectory(id="abc", task=Task("q"))))
    with pytest.raises(StoreError, match="abc: format 2"):
        decode_trajectory(msgspec.msgpack.encode([2, *fields[1:]]))
