"""Where a resumed run goes on: the newest complete checkpoint, the batches committed after it, then fresh sampling.

Every batch was committed before the optimizer saw it. Where the trainer repeats to the bit (its fingerprint is that of
the trainer before), the batches after the checkpoint are trained again from their records, and the weights are those
of a run that was never interrupted. Where it does not (a GPU, another number of ranks or threads), they are discarded
with everything that their weights have sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from loguru import logger
from msgspec import Struct

from molt_sdk import database
from molt_sdk.errors import StoreError
from molt_sdk.run import TRAINER_STATE, Checkpoint, Run, open_run
from molt_sdk.store import Store
from molt_sdk.types import TrajectoryGroup

SHOWN = 3
"""Damaged checkpoints that are named, the newest; older ones were mostly pruned by the run itself."""


class ResumePoint(Struct, frozen=True, kw_only=True):
    """What is left to do of a run, and what is done. Of a new run, nothing is."""

    tail: tuple[int, ...] = ()
    """Steps to train again from their recorded batches, in order."""
    position: int = 0
    """Of the task stream; sampling goes on there."""
    trained: frozenset[int] = frozenset()
    """Steps whose numbers are recorded."""
    evaluated: frozenset[int] = frozenset()
    """Steps whose evaluation is complete."""
    note: str = ""
    """What the user should know about it."""


def newest_checkpoint(run: Run) -> Checkpoint | None:
    """The checkpoint to go on from; None: from the initial weights, since none was made yet.

    Raises:
        StoreError: there were checkpoints, and none is complete. Starting over would lose what they held.
    """
    complete = run.checkpoints
    newest = complete[-1] if complete else None
    damaged = _damaged(run, after=newest.step if newest else 0)
    if damaged and newest is None and run.batches:
        raise StoreError(
            f"{run.dir} holds {len(run.batches)} trained steps, but no checkpoint of it is complete: "
            f"{'; '.join(damaged)}. Put a copy of one back, or start over in another run_dir"
        )
    if damaged and newest is not None:
        logger.warning("going on from {}, because newer checkpoints are damaged: {}", newest.path, "; ".join(damaged))
    return newest


async def settle(store: Store, checkpoint: Checkpoint | None, fingerprint: Mapping[str, str | int]) -> ResumePoint:
    """Bring the records in line with the weights that were loaded, and say what is left to do. Safe to repeat: a
    process that is killed meanwhile leaves the same point.

    Args:
        checkpoint: whose weights the trainer has; None: the initial ones.
        fingerprint: the trainer's.
    """
    run = open_run(store.dir)
    loaded = 0 if checkpoint is None else checkpoint.step
    if checkpoint is not None and loaded not in _recorded(run):  # killed between the rename and the record
        await store.add_checkpoint(loaded, checkpoint.version, checkpoint.path)
    tail = tuple(step for step in run.batches if step > loaded)
    before = next((made for step in tail if (made := run.fingerprint(step)) != fingerprint), fingerprint)
    note = ""
    if tail and fingerprint and before == fingerprint:
        note = f"training {_steps(tail)} again from the recorded batches; the newest checkpoint is of step {loaded}"
    elif tail:
        await store.discard_after(loaded)
        note = f"discarding {_steps(tail)} and going on from step {loaded}: {_why(before, fingerprint)}"
        tail = ()
    last = tail[-1] if tail else loaded
    metrics = run.metrics
    evaluated = frozenset(row["step"] for row in metrics if any(name.startswith("eval/") for name in row))
    position = run.next_position(last)
    await store.discard_uncommitted(position, evaluated)
    await store.set_trainer(last, fingerprint)
    trained = frozenset(row["step"] for row in metrics if "loss" in row)
    return ResumePoint(tail=tail, position=position, trained=trained, evaluated=evaluated, note=note)


def recorded_groups(run: Run, step: int) -> list[TrajectoryGroup]:
    """The groups that a step was given: its committed batch, and the siblings that had failed, which count in its
    numbers and are never trained."""
    groups = []
    for group in run.groups(step):
        failed = [t for t in run.trajectories(position=group.position, split="train") if not t.scored]
        members = tuple(sorted((*group.trajectories, *failed), key=lambda t: t.index))
        groups.append(msgspec.structs.replace(group, trajectories=members))
    return groups


def _recorded(run: Run) -> dict[int, Path]:
    """Places of the checkpoints that were complete once, by step; most are deleted since."""
    with database.reading(run.dir / database.DATABASE) as connection:
        rows = connection.execute("SELECT step, path FROM checkpoints WHERE NOT superseded").fetchall()
    return {step: run.dir / path for step, path in rows}


def _damaged(run: Run, *, after: int) -> list[str]:
    """Places of checkpoints of steps after ``after`` that are none, with what is there instead."""
    folder = run.dir / database.CHECKPOINTS
    named = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
    places = {step: path for step, path in (_recorded(run) | named).items() if step > after}
    return [f"{path} {_state(path)}" for _, path in sorted(places.items())[-SHOWN:]]


def _state(path: Path) -> str:
    if not path.exists():
        return "is gone"
    return (
        f"has a {TRAINER_STATE} that cannot be used" if (path / TRAINER_STATE).exists() else f"has no {TRAINER_STATE}"
    )


def _steps(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _why(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> str:
    """In what the trainers differ."""
    if not now:
        return "on this device, training does not repeat to the bit"
    if not before:
        return "they were trained where training does not repeat to the bit"
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = (f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)
    return f"training them again would not give the same bits ({', '.join(changes)})"
