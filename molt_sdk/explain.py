"""A recorded trajectory in words: its segments, why each began, what branched, and what is trained of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from molt_sdk.forest import abandoned_turns, children_of, trained_paths
from molt_sdk.packed import to_spans
from molt_sdk.prefixes import PrefixTree
from molt_sdk.types import Trajectory, Turn

SHARED_TOKENS = 16
"""Fewer leading tokens than these tell nothing: all prompts of a template begin alike."""
NOT_CONTINUED = re.compile(r".*, so turn \d+ is not continued", re.DOTALL)
"""The remark on an edit that made a turn branch."""


class Segment(Struct, frozen=True, kw_only=True):
    """One tree of the turn forest: a turn that extends no other, and all that descend from it. Token counts take each
    token once, however many rows show it."""

    turns: tuple[int, ...]
    """Ids, in the order of the record; the first is the root."""
    agents: tuple[str, ...]
    rows: int
    """Training rows: ``trajectory.samples()`` that begin with this root."""
    trained_tokens: int
    context_tokens: int
    """Prompts, and what agents that are not trained sampled, as it is stored. A certificate counts what the rows show:
    once in each of them, and nothing of abandoned turns."""
    abandoned_tokens: int
    """As in a certificate."""
    shared_turn: int | None
    """The earlier turn whose prompt + completion begins most like the root's prompt; None if no token is the same."""
    shared_tokens: int
    """Leading prompt tokens that are the same; they are stored once."""
    events: tuple[str, ...]
    """Where it starts, branches and is given up, and why: one sentence each."""

    def __str__(self) -> str:
        counts = f"{self.trained_tokens} tokens trained, {self.context_tokens} stored as context"
        if self.abandoned_tokens:
            counts += f", {self.abandoned_tokens} abandoned"
        head = f"{_numbered(self.turns)} ({', '.join(self.agents)}): {counts}, {counted(self.rows, 'row')}"
        return "\n  ".join([head, *self.events])


class Explanation(Struct, frozen=True, kw_only=True):
    """Result of ``explain()``: one segment per root, in the order of the record. ``str()`` gives it as lines."""

    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.segments)) or "the model was never called"


def explain(trajectory: Trajectory) -> Explanation:
    """The segments of a trajectory. Says what the record holds; whether the record is exact, ``certify()`` says."""
    turns = trajectory.turns
    prefixes = PrefixTree()
    shared = [prefixes.add(turn) for turn in turns]
    roots: list[int] = []  # of each turn
    members: defaultdict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        roots.append(turn.id if turn.parent is None else roots[turn.parent])
        members[roots[-1]].append(turn)
    rows: defaultdict[int, int] = defaultdict(int)
    for path, _ in trained_paths(turns):
        rows[path[0].id] += 1
    abandoned = abandoned_turns(turns)
    children = children_of(turns)
    return Explanation(
        segments=tuple(
            _segment(members[root.id], rows[root.id], shared[root.id], children, abandoned)
            for root in children.get(None, ())
        )
    )


def _segment(
    turns: Sequence[Turn],
    rows: int,
    shared: tuple[int, int],
    children: Mapping[int | None, Sequence[Turn]],
    abandoned: Mapping[int, int],
) -> Segment:
    root = turns[0]
    other, same = shared
    total = sum(len(turn.context_i32) + len(turn.completion_i32) for turn in turns) // 4
    sampled = {turn.id: len(turn.completion_i32) // 4 for turn in turns if turn.trainable}
    given_up = sum(count for identity, count in sampled.items() if identity in abandoned)
    events = [_start(root)]
    prompt = len(root.context_i32) // 4
    if same >= min(SHARED_TOKENS, prompt) > 0:
        which = f"all {prompt}" if same == prompt else f"the first {same} of its {prompt}"
        events.append(f"{which} prompt tokens are those of turn {other}, stored once")
    for turn in turns:
        events += _branches(turn, children.get(turn.id, ()))
    given_up_for: defaultdict[int, list[int]] = defaultdict(list)
    for turn in turns:
        if turn.id in abandoned:
            given_up_for[abandoned[turn.id]].append(turn.id)
    for kept, ids in given_up_for.items():
        were = "was" if len(ids) == 1 else "were"
        why = f"turn {kept}, a reply to the same prompt, was continued, and no reward was given here"
        events.append(f"{_numbered(ids)} {were} abandoned: {why}")
    untrained = [turn.id for turn in turns if not turn.trainable]
    if untrained:
        agents = dict.fromkeys(turn.agent for turn in turns if not turn.trainable)
        events.append(f"not trained, as {' and '.join(agents)} is not trainable: {_numbered(untrained)}")
    return Segment(
        turns=tuple(turn.id for turn in turns),
        agents=tuple(dict.fromkeys(turn.agent for turn in turns)),
        rows=rows,
        trained_tokens=sum(sampled.values()) - given_up,
        context_tokens=total - sum(sampled.values()),
        abandoned_tokens=given_up,
        shared_turn=other if same else None,
        shared_tokens=same,
        events=tuple(events),
    )


def _start(root: Turn) -> str:
    refused = re.fullmatch(r"cannot continue (turn \d+): (.*)", root.fork_reason, re.DOTALL)
    if refused:
        return f"turn {root.id} starts a new segment and does not continue {refused[1]}: {refused[2]}"
    return f"turn {root.id} starts a new segment: {root.fork_reason}"


def _branches(turn: Turn, children: Sequence[Turn]) -> Iterator[str]:
    """Why ``turn`` is continued more than once, or in place of a later one."""
    prompts: dict[bytes, int] = {}
    agents: set[str] = set()
    branches: defaultdict[str, list[int]] = defaultdict(list)
    for child in children:
        if edit := next(filter(NOT_CONTINUED.fullmatch, child.remarks), None):
            branches[edit].append(child.id)
        elif child.context_i32 in prompts:
            branches[f"the prompt of turn {prompts[child.context_i32]} was asked again"].append(child.id)
        elif prompts and child.agent not in agents:
            branches[f"agent {child.agent} goes on from there"].append(child.id)
        elif prompts:
            branches[f"other messages follow than in turn {children[0].id}"].append(child.id)
        prompts.setdefault(child.context_i32, child.id)
        agents.add(child.agent)
    for why, ids in branches.items():
        yield f"{_numbered(ids)} {'branches' if len(ids) == 1 else 'branch'} from turn {turn.id}: {why}"


def _numbered(turns: Sequence[int]) -> str:
    """Turn ids with runs joined: "turns 0-3, 5"."""
    runs = [(start + base, end - 1 + base) for base, start, end in to_spans([t - i for i, t in enumerate(turns)])]
    names = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return f"turn{'' if len(turns) == 1 else 's'} {', '.join(names)}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 turn", "2 turns"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
