"""The turn forest of a recorded trajectory and its training rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from molt_sdk.packed import Span, pack_floats
from molt_sdk.types import Sample, Trajectory, Turn


def children_of(turns: Sequence[Turn]) -> dict[int | None, list[Turn]]:
    """Turns by parent id (None: roots), each list in the order of the record."""
    children: dict[int | None, list[Turn]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn)
    return children


def leaf_paths(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Paths root to leaf, depth first, children in the order of the record."""
    children = children_of(turns)
    path: list[Turn] = []
    stack = [(0, root) for root in reversed(children.get(None, []))]
    while stack:
        depth, turn = stack.pop()
        path[depth:] = [turn]
        below = children.get(turn.id)
        if below:
            stack += [(depth + 1, child) for child in reversed(below)]
        else:
            yield list(path)


def abandoned_turns(turns: Sequence[Turn]) -> dict[int, int]:
    """Best of n: where one of several replies to one prompt is continued, if only in a root that follows it, the others
    without a reward of their own are not trained. Ids of these, each with the id of the (first) reply that was
    continued."""
    children = children_of(turns)
    went_on = children.keys() | {turn.follows for turn in turns}
    abandoned: dict[int, int] = {}
    for siblings in children.values():
        by_prompt: defaultdict[tuple[str, bytes], list[Turn]] = defaultdict(list)
        for turn in siblings:
            by_prompt[turn.agent, turn.context_i32].append(turn)
        for same in by_prompt.values():
            continued = [turn.id for turn in same if turn.id in went_on]
            if continued:
                given_up = (t for t in same if t.trainable and t.reward is None and t.id not in went_on)
                abandoned |= {turn.id: continued[0] for turn in given_up}
    return abandoned


def trained_paths(turns: Sequence[Turn]) -> Iterator[tuple[list[Turn], set[int]]]:
    """Paths root to leaf that train something, each with the ids of the turns that it trains: those that no earlier
    path trains. Abandoned turns are on none: a reply to the same prompt, which goes on, shows what leads to them."""
    abandoned = abandoned_turns(turns)
    trained: set[int] = set()
    for path in leaf_paths([turn for turn in turns if turn.id not in abandoned]):
        fresh = {t.id for t in path if t.trainable and t.id not in trained}
        if fresh:
            yield path, fresh
            trained |= fresh


def rows(trajectory: Trajectory) -> Iterator[Sample]:
    """One row per leaf of the turn forest that trains at least one token; each sampled token is trained once."""
    for path, trained in trained_paths(trajectory.turns):
        yield _row(trajectory.id, path, trained)


def samples(trajectory: Trajectory) -> list[Sample]:
    return list(rows(trajectory))


def _row(trajectory_id: str, path: Sequence[Turn], trained: set[int]) -> Sample:
    ids, mask, logprobs = bytearray(), bytearray(), bytearray()
    versions: list[Span] = []
    turn_spans: list[Span] = []
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
