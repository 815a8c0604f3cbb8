"""What is proven of a record: that its rows train what was sampled, and that nothing of it changed since."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from molt_sdk.forest import abandoned_turns, rows
from molt_sdk.packed import Span, pack_floats
from molt_sdk.types import Certificate, Sample, Trajectory, Turn


def turn_digest(turn: Turn) -> bytes:
    """16 bytes over the parent's digest and all of a turn that a certificate speaks of: its place, agent, what it
    follows, whether it is trained, temperature, ids, logprobs and versions. Messages and rewards are not part of it."""
    head = [
        turn.id,
        turn.parent_turn.digest.hex() if turn.parent_turn is not None else None,
        turn.follows,
        turn.agent,
        bool(turn.trainable),
        float(turn.sampling.temperature),
        [[int(number) for number in span] for span in turn.version_spans],
        len(turn.context_i32),
        len(turn.completion_i32),
    ]
    digest = hashlib.blake2b(json.dumps(head).encode(), digest_size=16)
    for data in (turn.context_i32, turn.completion_i32, turn.logprobs_f32):
        digest.update(data)
    return digest.digest()


def certify(trajectory: Trajectory) -> Certificate:
    """Check from the record alone: links, lengths, versions, digests, and that the rows train each trainable sampled
    token exactly once under exactly the prompt that its call recorded. The truth of the logprobs is not checked.

    Where any turn has a digest, every turn must have one that fits. Where none has one (turns made by hand), the
    structure alone is proven, and the certificate is not ``sealed``. No digest tells that the last turns are missing.
    """
    turns = trajectory.turns
    sealed = any(turn.digest for turn in turns)
    problems = [problem for index, turn in enumerate(turns) for problem in _turn_problems(turns, index, sealed)]
    abandoned = abandoned_turns(turns) if not problems else {}
    seen: dict[int, int] = defaultdict(int)
    context = trained = 0
    for row in rows(trajectory) if not problems else ():
        mask = row.loss_mask_u8
        trained += mask.count(1)
        context += len(mask) - mask.count(1)
        problems += _row_problems(row, turns)
        for turn_id, start, end in row.turn_spans:
            seen[turn_id] += mask.count(1, start, end)
    if not problems:
        for turn in turns:
            expected = 0 if not turn.trainable or turn.id in abandoned else len(turn.completion_i32) // 4
            if seen[turn.id] != expected:
                problems.append(f"turn {turn.id}: {seen[turn.id]} tokens trained, {expected} were to be")
    return Certificate(
        trained_tokens=trained,
        context_tokens=context,
        abandoned_tokens=sum(len(turns[i].completion_i32) // 4 for i in abandoned),
        problems=tuple(problems),
        sealed=sealed,
    )


def _row_problems(row: Sample, turns: Sequence[Turn]) -> Iterator[str]:
    """Compares a row with the record in one pass: when a turn is reached, its parent's prompt + completion was compared
    already and lies right before it."""
    at = 0
    parent: int | None = None
    versions: list[Span] = []
    for turn_id, start, end in row.turn_spans:
        if turn_id < 0:
            if row.loss_mask_u8.count(1, start, end):
                yield f"context tokens {start}..{end} of a sample are trained"
            versions.append((-1, start, end))
            continue
        turn = turns[turn_id]
        count = end - start
        shown = (
            turn.parent,
            turn.context_i32 + turn.completion_i32,
            turn.logprobs_f32,
            pack_floats([turn.sampling.temperature]) * count,
        )
        if shown != (
            parent,
            row.token_ids_i32[4 * at : 4 * end],
            row.logprobs_f32[4 * start : 4 * end],
            row.temperatures_f32[4 * start : 4 * end],
        ):
            yield f"turn {turn_id}: the sample does not show the recorded prompt + completion"
        versions += [(version, start + a, start + b) for version, a, b in turn.version_spans]
        at, parent = end, turn_id
    if tuple(versions) != row.version_spans:
        yield f"a sample that ends with turn {parent} does not show the recorded versions"
    if not len(row.token_ids_i32) // 4 == len(row.loss_mask_u8) == at:
        yield f"a sample that ends with turn {parent} is longer or shorter than what was recorded"


def _turn_problems(turns: Sequence[Turn], index: int, sealed: bool) -> Iterator[str]:
    turn = turns[index]
    if turn.id != index:
        yield f"turn at index {index} has id {turn.id}"
        return
    yield from (f"turn {index}: {problem}" for problem in _structure_problems(turns, index))
    if sealed and not turn.digest:
        yield f"turn {index}: it has no digest, and other turns have one"
    elif sealed and turn.digest != turn_digest(turn):
        yield f"turn {index}: its ids, logprobs, versions, agent, temperature or parent are not as recorded"


def _structure_problems(turns: Sequence[Turn], index: int) -> Iterator[str]:
    turn = turns[index]
    if turn.parent is None:
        if turn.parent_turn is not None:
            yield "a root with a parent record"
        if not turn.fork_reason:
            yield "a root without a fork_reason"
        if turn.follows is not None and not 0 <= turn.follows < index:
            yield f"it follows turn {turn.follows}, which is not an earlier turn"
    elif turn.follows is not None:
        yield f"it follows turn {turn.follows}, although it is not a root"
    elif not 0 <= turn.parent < index:
        yield f"parent {turn.parent} is not an earlier turn"
        return
    elif turn.parent_turn is not turns[turn.parent]:
        yield f"its prompt is built on a record that is not turn {turn.parent}"
        return
    if any(len(data) % 4 for data in (turn.context_i32, turn.completion_i32, turn.logprobs_f32)):
        yield "token ids or logprobs are not whole 4-byte numbers"
        return
    count = len(turn.completion_i32) // 4
    if count == 0 or (turn.parent is None and not turn.context_i32):
        yield "empty prompt or completion"
    if len(turn.logprobs_f32) != len(turn.completion_i32):
        yield f"{len(turn.logprobs_f32) // 4} logprobs for {count} tokens"
    elif any(not -9999.0 < value <= 1e-3 for value in turn.logprobs):
        yield "a logprob is missing, NaN or positive"
    expected = 0
    for version, start, end in turn.version_spans:
        if start != expected or end <= start or version < 0:
            yield f"version spans {turn.version_spans} do not cover {count} tokens in order"
            return
        expected = end
    if expected != count:
        yield f"version spans cover {expected} of {count} tokens"
