"""Trajectories as bytes: msgpack, never pickle.

A turn is stored as its parent's number and what the parent does not hold; tool schemas and the task are stored
once per trajectory; token ids, logprobs and version spans stay the compact arrays that they are.
What a user puts into a task or returns from a policy may be any object: numpy and torch values, Decimals, dataclasses,
sets and tuples become plain data, anything else becomes ``{"__repr__": ..., "type": ...}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.msgpack import Ext

from molt_sdk.errors import StoreError
from molt_sdk.packed import Span
from molt_sdk.types import SamplingParams, Task, ToolExecution, Trajectory, Turn

FORMAT = 1
"""First element of every blob; raised when an older reader could misread a newer blob."""

_BIG_INT, _SURROGATE_TEXT, _PAIRS = 1, 2, 3
_MAX_DEPTH = 200
_MAX_ARRAY = 10_000
_MAX_REPR = 10_000
_UNENCODABLE = (TypeError, OverflowError, UnicodeEncodeError, RecursionError)

_Clean = Callable[[Any], Any]


class _Turn(Struct, array_like=True):
    """A turn on disk. Fields are only ever appended, with a default."""

    parent: int | None
    fork_reason: Any
    agent: Any
    trainable: bool
    new_messages: Any
    tools: int
    sampling: dict[str, Any]
    message: Any
    finish_reason: Any
    context_i32: bytes
    completion_i32: bytes
    logprobs_f32: bytes
    version_spans: tuple[Span, ...]
    reward: Any
    seconds: float


class _Trajectory(Struct, array_like=True):
    """A trajectory on disk. Text is ``Any`` because text with lone surrogates travels as an extension type."""

    format: int
    id: Any
    task: Any
    turns: list[_Turn]
    tools: list[Any]
    status: Any
    reward: Any
    rewards: Any
    agent_rewards: Any
    output: Any
    metrics: Any
    tool_executions: list[Any]
    error: Any
    policy: Any
    environment: Any
    position: int
    index: int
    attempt: int
    split: Any
    started: float
    seconds: float


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The blob of a trajectory. No object of a user makes it fail; the module's text says what they become."""
    try:
        return _ENCODER.encode(_to_wire(trajectory, _unchanged))
    except _UNENCODABLE:  # something that is not JSON, or text with lone surrogates: the slower way that takes anything
        return _ENCODER.encode(_to_wire(trajectory, to_plain))


def decode_trajectory(blob: bytes) -> Trajectory:
    """The trajectory of a blob, parent links rebuilt.

    Raises:
        StoreError: the blob is damaged or of a newer format.
    """
    try:
        wire = _DECODER.decode(blob)
        if wire.format > FORMAT:
            raise StoreError(f"trajectory {wire.id}: format {wire.format}, newer than {FORMAT}; update molt_sdk")
        return _from_wire(wire)
    except (msgspec.DecodeError, TypeError, IndexError, ValueError, RecursionError) as error:
        raise StoreError(f"a trajectory's blob of {len(blob)} bytes cannot be read: {error}") from error


def _to_wire(trajectory: Trajectory, clean: _Clean) -> _Trajectory:
    tools: list[msgspec.Raw] = []
    tool_numbers: dict[int | bytes, int] = {}

    def tools_number(schemas: tuple[dict[str, Any], ...]) -> int:
        number = tool_numbers.get(id(schemas))
        if number is None:
            data = _ENCODER.encode(clean(schemas))
            number = tool_numbers.setdefault(data, len(tools))
            if number == len(tools):
                tools.append(msgspec.Raw(data))
            tool_numbers[id(schemas)] = number
        return number

    task = trajectory.task
    return _Trajectory(
        format=FORMAT,
        id=clean(trajectory.id),
        task=[to_plain(task.prompt), to_plain(task.answer), clean(task.id), to_plain(task.metadata)],
        turns=[
            _Turn(
                parent=turn.parent,
                fork_reason=clean(turn.fork_reason),
                agent=clean(turn.agent),
                trainable=turn.trainable,
                new_messages=clean(turn.new_messages),
                tools=tools_number(turn.tools),
                sampling=clean(msgspec.structs.asdict(turn.sampling)),
                message=clean(turn.message),
                finish_reason=turn.finish_reason,
                context_i32=turn.context_i32,
                completion_i32=turn.completion_i32,
                logprobs_f32=turn.logprobs_f32,
                version_spans=turn.version_spans,
                reward=clean(turn.reward),
                seconds=turn.seconds,
            )
            for turn in trajectory.turns
        ],
        tools=tools,
        status=trajectory.status,
        reward=clean(trajectory.reward),
        rewards=clean(trajectory.rewards),
        agent_rewards=clean(trajectory.agent_rewards),
        output=to_plain(trajectory.output),
        metrics=clean(trajectory.metrics),
        tool_executions=[clean(msgspec.structs.asdict(execution)) for execution in trajectory.tool_executions],
        error=clean(trajectory.error),
        policy=clean(trajectory.policy),
        environment=clean(trajectory.environment),
        position=trajectory.position,
        index=trajectory.index,
        attempt=trajectory.attempt,
        split=clean(trajectory.split),
        started=trajectory.started,
        seconds=trajectory.seconds,
    )


def _from_wire(wire: _Trajectory) -> Trajectory:
    tools = [tuple(schemas) for schemas in wire.tools]
    turns: list[Turn] = []
    for number, turn in enumerate(wire.turns):
        if turn.parent is not None and not 0 <= turn.parent < number:
            raise ValueError(f"turn {number} names turn {turn.parent} as its parent")
        turns.append(
            Turn(
                id=number,
                parent=turn.parent,
                fork_reason=turn.fork_reason,
                agent=turn.agent,
                trainable=turn.trainable,
                new_messages=turn.new_messages,
                tools=tools[turn.tools],
                sampling=SamplingParams(**{**turn.sampling, "stop": tuple(turn.sampling["stop"])}),
                message=turn.message,
                finish_reason=turn.finish_reason,
                context_i32=turn.context_i32,
                completion_i32=turn.completion_i32,
                logprobs_f32=turn.logprobs_f32,
                version_spans=turn.version_spans,
                reward=turn.reward,
                seconds=turn.seconds,
                parent_turn=None if turn.parent is None else turns[turn.parent],
            )
        )
    prompt, answer, task_id, metadata = wire.task
    return Trajectory(
        id=wire.id,
        task=Task(prompt=prompt, answer=answer, id=task_id, metadata=metadata),
        turns=tuple(turns),
        status=wire.status,
        reward=wire.reward,
        rewards=wire.rewards,
        agent_rewards=wire.agent_rewards,
        output=wire.output,
        metrics=wire.metrics,
        tool_executions=tuple(ToolExecution(**execution) for execution in wire.tool_executions),
        error=wire.error,
        policy=wire.policy,
        environment=wire.environment,
        position=wire.position,
        index=wire.index,
        attempt=wire.attempt,
        split=wire.split,
        started=wire.started,
        seconds=wire.seconds,
    )


def to_plain(value: Any) -> Any:
    """``value`` as None, bool, int, float, str, bytes, datetime, list and dict, or the msgpack extensions that stand
    for integers beyond 64 bits and text with lone surrogates. Objects that are none of these become their repr."""
    return _plain(value, set())


def plain_object(value: object) -> Any:
    """One step from an object that msgspec and json do not know towards plain data, for use as an ``enc_hook``."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        if callable(getattr(type(value), "tolist", None)):  # numpy and torch scalars and arrays, array.array
            return _array(value)
        if callable(getattr(type(value), "model_dump", None)):  # pydantic
            return value.model_dump()  # type: ignore[attr-defined]
        return msgspec.to_builtins(value, builtin_types=(bytes, datetime), enc_hook=_as_repr)
    except Exception:  # the object's own code failed: its repr is all that can be kept of it
        return _as_repr(value)


def _array(value: Any) -> Any:
    size = getattr(value, "size", None)  # an int in numpy, a method in torch (whose element count is numel())
    count = value.numel() if callable(getattr(value, "numel", None)) else size if isinstance(size, int) else len(value)
    if count > _MAX_ARRAY:
        return _as_repr(value)
    plain = value.tolist()
    return plain if isinstance(plain, bool | int | float | str | bytes | list) else _as_repr(value)


def _as_repr(value: object) -> dict[str, str]:
    kind = type(value)
    try:
        text = repr(value)
    except Exception as error:  # user code: a repr that fails is recorded as that
        text = f"<repr failed: {type(error).__name__}: {error}>"
    return {"__repr__": text[:_MAX_REPR], "type": f"{kind.__module__}.{kind.__qualname__}"}


def _plain(value: Any, path: set[int]) -> Any:
    """``path`` holds the ids of the objects that contain ``value``."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if value is None or kind is bool or kind is float or kind is bytes or kind is datetime:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else Ext(_BIG_INT, hex(value).encode())
    if id(value) in path or len(path) > _MAX_DEPTH:
        return _plain(_as_repr(value), set())
    path.add(id(value))
    try:
        if kind is dict:
            return _pairs([(_key(key), _plain(item, path)) for key, item in list(value.items())])
        if kind is list or kind is tuple:
            return [_plain(item, path) for item in list(value)]
        return _plain(_container(value), path)
    finally:
        path.discard(id(value))


def _container(value: Any) -> Any:
    """The dict or list that a container is in plain terms; other objects by :func:`plain_object`."""
    try:
        if isinstance(value, Mapping):
            return dict(value.items())
        if isinstance(value, Set):
            return sorted(value, key=repr)
        if isinstance(value, Struct):
            return msgspec.structs.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = (field.name for field in dataclasses.fields(value))
            return {name: getattr(value, name) for name in names if hasattr(value, name)}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range):
            return list(value)
    except Exception:  # the object's own code failed: its repr is all that can be kept of it
        return _as_repr(value)
    return plain_object(value)


def _key(key: Any) -> Any:
    """A mapping's key: scalars and tuples of scalars stay what they are, the rest becomes text."""
    if isinstance(key, tuple):
        return tuple(_key(part) for part in key)
    plain = _plain(key, set())
    return _text(repr(key)) if isinstance(plain, list | dict) else plain


def _pairs(pairs: list[tuple[Any, Any]]) -> Any:
    try:
        return dict(pairs)
    except TypeError:  # a key that is an extension (a big integer, a lone surrogate) cannot be hashed
        return Ext(_PAIRS, _ENCODER.encode(pairs))


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return Ext(_SURROGATE_TEXT, value.encode("utf-8", "surrogatepass"))
    return value


def _read_extension(code: int, data: memoryview) -> Any:
    if code == _BIG_INT:
        return int(bytes(data), 16)
    if code == _SURROGATE_TEXT:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == _PAIRS:
        pairs = msgspec.msgpack.decode(data, ext_hook=_read_extension)
        return {_hashable(key): item for key, item in pairs}
    raise ValueError(f"unknown msgpack extension type {code}")


def _hashable(key: Any) -> Any:
    return tuple(_hashable(part) for part in key) if isinstance(key, list) else key


def _unchanged(value: Any) -> Any:
    return value


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Trajectory, ext_hook=_read_extension)
