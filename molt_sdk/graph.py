"""The turn forest of one trajectory: lineage while it is recorded, training rows and certificate afterwards.

Lineage rule: a request may extend an earlier turn whose messages + reply are a prefix of the request's messages (in
canonical form: text joined, arguments as parsed JSON, reasoning left out); the longest wins, ties go to the newest. The
match is only a candidate: the new prompt is the parent's ids plus a bridge verified on the template, else a new root.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from molt_sdk.messages import first_difference, parsed_arguments, shown_difference
from molt_sdk.packed import pack_floats
from molt_sdk.types import Certificate, Message, Sample, Trajectory, Turn

COMPARED = 32
"""Latest turns that a new root is compared with; keeps the cost of explaining it apart from the trajectory's length."""


def canonical(message: Message) -> bytes:
    """What makes two messages the same for lineage: a client that echoes a reply without its reasoning, with parsed
    arguments or with None for "" still continues it; any change of text, name or arguments does not."""
    calls = [
        (call["function"]["name"], parsed_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    parts = [message["role"], message.get("content") or "", calls, message.get("tool_call_id") or ""]
    return json.dumps(parts, sort_keys=True).encode()  # JSON holds whatever a model writes: huge integers, odd escapes


def extend_key(key: bytes, message: Message) -> bytes:
    """Key of a conversation from the key of all but its last message (b"" for none)."""
    return hashlib.blake2b(key + canonical(message), digest_size=16).digest()


def prefix_keys(messages: Sequence[Message]) -> list[bytes]:
    """One key per non-empty prefix of the conversation."""
    return list(itertools.accumulate(messages, extend_key, initial=b""))[1:]


class Lineage:
    """Finds the turn that a request may extend."""

    def __init__(self) -> None:
        self._turns_by_conversation: defaultdict[bytes, list[Turn]] = defaultdict(list)

    def add(self, turn: Turn, request_keys: Sequence[bytes]) -> None:
        """Remember ``turn`` under its conversation with the reply; ``request_keys`` are those of its request."""
        self._turns_by_conversation[extend_key(request_keys[-1], turn.message)].append(turn)

    def candidate(self, keys: Sequence[bytes], visible: Callable[[Turn], bool]) -> tuple[Turn, int] | None:
        """(turn, messages that it covers) of the longest visible match, the newest on a tie."""
        for length in range(len(keys), 0, -1):
            for turn in reversed(self._turns_by_conversation.get(keys[length - 1], ())):
                if visible(turn):
                    return turn, length
        return None


def explain_new_root(messages: Sequence[Message], turns: Sequence[Turn]) -> str:
    """Why a request extends none of ``turns``: the first message in which it differs from the closest of the latest."""
    if not turns:
        return "first call"
    request = [canonical(m) for m in messages]
    closest, best_turn = (-1, False), turns[-1]
    for turn in reversed(turns[-COMPARED:]):
        same = first_difference([canonical(m) for m in (*turn.messages, turn.message)], request)
        rank = (same, same == len(request) == len(turn.messages))
        if rank > closest:
            closest, best_turn = rank, turn
    conversation = [*best_turn.messages, best_turn.message]
    best = closest[0]
    if best >= len(request):
        if len(request) == len(conversation) - 1:
            return f"same prompt as turn {best_turn.id}"
        return f"history of turn {best_turn.id} was cut to its first {len(request)} messages"
    return f"differs from turn {best_turn.id}: {_difference(best, conversation[best], messages[best])}"


def _difference(index: int, before: Message, after: Message) -> str:
    if before["role"] != after["role"]:
        return f"message {index} changed its role from {before['role']} to {after['role']}"
    old, new = str(before.get("content") or ""), str(after.get("content") or "")
    if old != new:
        at = first_difference(old, new)
        return f"message {index} ({after['role']}) changed at character {at}: {shown_difference(old, new, at)}"
    return f"message {index} ({after['role']}) has other tool calls or another tool_call_id"


def children_of(turns: Sequence[Turn]) -> dict[int | None, list[Turn]]:
    """Turns by parent id (None: roots), each list in the order of the record."""
    children: dict[int | None, list[Turn]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn)
    return children


def leaf_paths(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Paths root to leaf, depth first, children in the order of the record."""
    children = children_of(turns)
    stack = [[root] for root in reversed(children.get(None, []))]
    while stack:
        path = stack.pop()
        below = children.get(path[-1].id)
        if below:
            stack += [[*path, child] for child in reversed(below)]
        else:
            yield path


def abandoned_turns(trajectory: Trajectory) -> set[int]:
    """Best of n: where one of several replies to one prompt is continued, the childless others without a reward of
    their own are not trained."""
    children = children_of(trajectory.turns)
    abandoned: set[int] = set()
    for siblings in children.values():
        by_prompt: defaultdict[tuple[str, bytes], list[Turn]] = defaultdict(list)
        for turn in siblings:
            by_prompt[turn.agent, turn.context_i32].append(turn)
        for same in by_prompt.values():
            if len(same) > 1 and any(children.get(turn.id) for turn in same):
                given_up = (t for t in same if t.trainable and t.reward is None and not children.get(t.id))
                abandoned |= {turn.id for turn in given_up}
    return abandoned


def samples(trajectory: Trajectory) -> list[Sample]:
    """One row per leaf of the turn forest that trains at least one token; each sampled token is trained once."""
    return _rows(trajectory, abandoned_turns(trajectory))


def _rows(trajectory: Trajectory, abandoned: set[int]) -> list[Sample]:
    trained: set[int] = set()
    rows = []
    for path in leaf_paths(trajectory.turns):
        fresh = {t.id for t in path if t.trainable and t.id not in trained and t.id not in abandoned}
        if fresh:
            rows.append(_row(trajectory.id, path, fresh))
            trained |= fresh
    return rows


def _row(trajectory_id: str, path: Sequence[Turn], trained: set[int]) -> Sample:
    ids, mask, logprobs = bytearray(), bytearray(), bytearray()
    versions: list[tuple[int, int, int]] = []
    turn_spans: list[tuple[int, int, int]] = []
    temperatures = bytearray()
    for turn in path:
        context, completion = len(turn.context_i32) // 4, len(turn.completion_i32) // 4
        start = len(mask)
        ids += turn.context_i32 + turn.completion_i32
        mask += bytes(context) + (b"\1" if turn.id in trained else b"\0") * completion
        logprobs += bytes(4 * context) + turn.logprobs_f32
        middle = start + context
        if context:
            versions.append((-1, start, middle))
            turn_spans.append((-1, start, middle))
        versions += [(v, middle + a, middle + b) for v, a, b in turn.version_spans]
        turn_spans.append((turn.id, middle, middle + completion))
        temperatures += pack_floats([1.0]) * context + pack_floats([turn.sampling.temperature]) * completion
    return Sample(
        trajectory_id=trajectory_id,
        token_ids_i32=bytes(ids),
        loss_mask_u8=bytes(mask),
        logprobs_f32=bytes(logprobs),
        version_spans=tuple(versions),
        turn_spans=tuple(turn_spans),
        temperatures_f32=bytes(temperatures),
    )


def certify(trajectory: Trajectory) -> Certificate:
    """Check structure from the record alone: links, lengths, versions, and that the rows train each trainable sampled
    token exactly once under exactly the prompt that its call recorded. The truth of the logprobs is not checked."""
    problems = [problem for i, turn in enumerate(trajectory.turns) for problem in _turn_problems(trajectory, i, turn)]
    abandoned = abandoned_turns(trajectory) if not problems else set()
    rows = _rows(trajectory, abandoned) if not problems else []
    by_id = {turn.id: turn for turn in trajectory.turns}
    seen: dict[int, int] = defaultdict(int)
    context = trained = 0
    for row in rows:
        mask, ids = row.loss_mask_u8, row.token_ids_i32
        trained += sum(mask)
        context += len(mask) - sum(mask)
        for turn_id, start, end in row.turn_spans:
            if turn_id < 0:
                if any(mask[start:end]):
                    problems.append(f"context tokens {start}..{end} of a sample are trained")
                continue
            turn = by_id[turn_id]
            if ids[: 4 * start] != turn.prompt_i32 or ids[4 * start : 4 * end] != turn.completion_i32:
                problems.append(f"turn {turn_id}: the sample does not show the recorded prompt + completion")
            seen[turn_id] += sum(mask[start:end])
    if not problems:
        for turn in trajectory.turns:
            expected = 0 if not turn.trainable or turn.id in abandoned else len(turn.completion_i32) // 4
            if seen[turn.id] != expected:
                problems.append(f"turn {turn.id}: {seen[turn.id]} tokens trained, {expected} were to be")
    return Certificate(
        trained_tokens=trained,
        context_tokens=context,
        abandoned_tokens=sum(len(by_id[i].completion_i32) // 4 for i in abandoned),
        problems=tuple(problems),
    )


def _turn_problems(trajectory: Trajectory, index: int, turn: Turn) -> Iterator[str]:
    where = f"turn {turn.id}"
    if turn.id != index:
        yield f"turn at index {index} has id {turn.id}"
        return
    if turn.parent is None:
        if turn.parent_turn is not None:
            yield f"{where}: a root with a parent record"
        if not turn.fork_reason:
            yield f"{where}: a root without a fork_reason"
    elif not 0 <= turn.parent < index:
        yield f"{where}: parent {turn.parent} is not an earlier turn"
        return
    elif turn.parent_turn is not trajectory.turns[turn.parent]:
        yield f"{where}: its prompt is built on a record that is not turn {turn.parent}"
        return
    if any(len(data) % 4 for data in (turn.context_i32, turn.completion_i32, turn.logprobs_f32)):
        yield f"{where}: token ids or logprobs are not whole 4-byte numbers"
        return
    count = len(turn.completion_i32) // 4
    if count == 0 or (turn.parent is None and not turn.context_i32):
        yield f"{where}: empty prompt or completion"
    if len(turn.logprobs_f32) != len(turn.completion_i32):
        yield f"{where}: {len(turn.logprobs_f32) // 4} logprobs for {count} tokens"
    elif any(not -9999.0 < value <= 1e-3 for value in turn.logprobs):
        yield f"{where}: a logprob is missing, NaN or positive"
    expected = 0
    for version, start, end in turn.version_spans:
        if start != expected or end <= start or version < 0:
            yield f"{where}: version spans {turn.version_spans} do not cover {count} tokens in order"
            return
        expected = end
    if expected != count:
        yield f"{where}: version spans cover {expected} of {count} tokens"
