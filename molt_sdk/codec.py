"""Trajectories as bytes: msgpack, never pickle.

A turn is stored as its parent's number and what the parent does not hold. Prompt tokens that an earlier turn has in the
same place are stored as that turn's number and a count; each distinct message, list of tool schemas and set of sampling
parameters is stored once per trajectory. Token ids, logprobs and version spans stay the compact arrays that they are.
What a user puts into a task or returns from a policy may be any object: ``plain`` makes data of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from molt_sdk.errors import ConfigError, StoreError
from molt_sdk.packed import Span
from molt_sdk.plain import read_extension, to_plain
from molt_sdk.prefixes import PrefixTree
from molt_sdk.types import Message, SamplingParams, Task, ToolExecution, Trajectory, Turn

FORMAT = 3
"""First element of every blob; raised when an older reader could misread a newer blob. 1 and 2 were never released."""

_UNENCODABLE = (TypeError, OverflowError, UnicodeEncodeError, RecursionError)

_Clean = Callable[[Any], Any]
_Number = Annotated[int, Meta(ge=0)]


class _Turn(Struct, array_like=True):
    """A turn on disk. Fields are only ever appended, with a default."""

    parent: int | None
    fork_reason: Any
    agent: Any
    trainable: bool
    asked: list[tuple[_Number, _Number]]
    """``new_messages``, as ranges of ``trajectory.messages``: end not included."""
    answered: _Number
    """``message``, as an index of ``trajectory.messages``."""
    tools: _Number
    drawn: _Number
    """``sampling`` without its seed, as an index of ``trajectory.samplings``."""
    seed: Any
    finish_reason: Any
    context_i32: bytes
    """Without the tokens that are ``shared``."""
    completion_i32: bytes
    logprobs_f32: bytes
    version_spans: tuple[Span, ...]
    reward: Any
    seconds: float
    remarks: Any = ()
    digest: bytes = b""
    shared: tuple[_Number, _Number] | None = None
    """(turn, tokens): the context begins with as many tokens as that turn's prompt + completion has in this place."""
    follows: int | None = None


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
    messages: list[Any]
    samplings: list[Any]


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The blob of a trajectory. No object of a user makes it fail."""
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
    except (msgspec.DecodeError, TypeError, IndexError, ValueError, RecursionError, ConfigError) as error:
        raise StoreError(f"a trajectory's blob of {len(blob)} bytes cannot be read: {error}") from error


class _Table:
    """Objects of which each distinct one is stored once, under a number."""

    def __init__(self, clean: _Clean) -> None:
        self.stored: list[msgspec.Raw] = []
        self._clean = clean
        self._numbers: dict[int | bytes, int] = {}  # by content; by identity, so that a shared object is encoded once

    def number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            data = _ENCODER.encode(self._clean(value))
            number = self._numbers.setdefault(data, len(self.stored))
            if number == len(self.stored):
                self.stored.append(msgspec.Raw(data))
            self._numbers[id(value)] = number
        return number

    def ranges(self, values: Sequence[Any]) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for number in map(self.number, values):
            if ranges and ranges[-1][1] == number:
                ranges[-1] = (ranges[-1][0], number + 1)
            else:
                ranges.append((number, number + 1))
        return ranges


def _to_wire(trajectory: Trajectory, clean: _Clean) -> _Trajectory:
    messages, tools = _Table(clean), _Table(clean)
    samplings = _Table(lambda sampling: clean({**msgspec.structs.asdict(sampling), "seed": None}))
    prefixes = PrefixTree()

    def turn_to_wire(turn: Turn) -> _Turn:
        other, same = prefixes.add(turn)
        return _Turn(
            parent=turn.parent,
            fork_reason=clean(turn.fork_reason),
            agent=clean(turn.agent),
            trainable=turn.trainable,
            asked=messages.ranges(turn.new_messages),
            answered=messages.number(turn.message),
            tools=tools.number(turn.tools),
            drawn=samplings.number(turn.sampling),
            seed=clean(turn.sampling.seed),
            finish_reason=turn.finish_reason,
            context_i32=turn.context_i32[4 * same :],
            completion_i32=turn.completion_i32,
            logprobs_f32=turn.logprobs_f32,
            version_spans=turn.version_spans,
            reward=clean(turn.reward),
            seconds=turn.seconds,
            remarks=clean(turn.remarks),
            digest=turn.digest,
            shared=(other, same) if same else None,
            follows=turn.follows,
        )

    task = trajectory.task
    return _Trajectory(
        format=FORMAT,
        id=clean(trajectory.id),
        task=[to_plain(task.prompt), to_plain(task.answer), clean(task.id), to_plain(task.metadata)],
        turns=[turn_to_wire(turn) for turn in trajectory.turns],
        tools=tools.stored,
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
        messages=messages.stored,
        samplings=samplings.stored,
    )


def _from_wire(wire: _Trajectory) -> Trajectory:
    tools = [tuple(schemas) for schemas in wire.tools]
    turns: list[Turn] = []
    ends: list[int] = []  # bytes of prompt + completion of each turn
    for number, turn in enumerate(wire.turns):
        if turn.parent is not None and not 0 <= turn.parent < number:
            raise ValueError(f"turn {number} names turn {turn.parent} as its parent")
        start = 0 if turn.parent is None else ends[turn.parent]
        context = turn.context_i32
        if turn.shared is not None:
            other, same = turn.shared
            if other >= number or start + 4 * same > ends[other]:
                raise ValueError(f"turn {number} begins with {same} tokens of turn {other}, which are not there")
            context = _stream(turns[other], ends, start, start + 4 * same) + context
        ends.append(start + len(context) + len(turn.completion_i32))
        turns.append(
            Turn(
                id=number,
                parent=turn.parent,
                fork_reason=turn.fork_reason,
                agent=turn.agent,
                trainable=turn.trainable,
                new_messages=_in_ranges(wire.messages, turn.asked),
                tools=tools[turn.tools],
                sampling=SamplingParams(**{**wire.samplings[turn.drawn], "seed": turn.seed}),
                message=wire.messages[turn.answered],
                finish_reason=turn.finish_reason,
                context_i32=context,
                completion_i32=turn.completion_i32,
                logprobs_f32=turn.logprobs_f32,
                version_spans=turn.version_spans,
                reward=turn.reward,
                seconds=turn.seconds,
                parent_turn=None if turn.parent is None else turns[turn.parent],
                remarks=tuple(turn.remarks),
                digest=turn.digest,
                follows=turn.follows,
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


def _stream(turn: Turn | None, ends: Sequence[int], start: int, end: int) -> bytes:
    """Bytes start..end-1 of the prompt + completion of ``turn``."""
    parts: list[bytes] = []
    while turn is not None and ends[turn.id] > start:
        first = 0 if turn.parent is None else ends[turn.parent]
        own = turn.context_i32 + turn.completion_i32
        parts.append(own[max(0, start - first) : max(0, end - first)])
        turn = turn.parent_turn
    return b"".join(reversed(parts))


def _in_ranges(table: Sequence[Message], ranges: Sequence[tuple[int, int]]) -> list[Message]:
    for start, end in ranges:
        if not start < end <= len(table):
            raise ValueError(f"messages {start}..{end} of {len(table)} are named")
    return [message for start, end in ranges for message in table[start:end]]


def _unchanged(value: Any) -> Any:
    return value


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Trajectory, ext_hook=read_extension)
