"""A run on disk, read-only: what was recorded, trained, measured and saved. Works while the run is being written."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from molt_sdk import database
from molt_sdk.codec import decode_trajectory
from molt_sdk.errors import StoreError
from molt_sdk.types import Status, Trajectory, TrajectoryGroup

_PAGE = 64
"""Trajectories per read of the lazy iterator; each page is one short read, so that it never holds the writer back."""


_MEAN_REWARD = """
SELECT {axis}, avg(reward) FROM trajectories
WHERE {split} AND NOT superseded AND reward IS NOT NULL AND {axis} IS NOT NULL GROUP BY 1 ORDER BY 1
"""


TRAINER_STATE = "trainer.json"
"""File of a checkpoint that says of which step it is; a folder without it is none."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """Complete state of a trainer on disk: what training goes on from. ``molt-sdk export`` makes a model of it."""

    step: int
    """Steps of the run when it was saved, skipped ones included."""
    version: int
    """Policy version of these weights."""
    path: Path


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """What a folder holds; None unless it is a complete checkpoint."""
    try:
        state = msgspec.convert(json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8")), _State)
    except (OSError, ValueError, msgspec.ValidationError):
        return None
    return Checkpoint(step=state.step, version=state.version, path=folder)


class _State(Struct):
    """The part of ``trainer.json`` that is read without the trainer."""

    step: int
    version: int


class Run:
    """A run directory. Every read opens the file anew, so a Run can be shared by threads and sees what is new.

    What a resume discarded is left out, except by :meth:`trajectory` and with ``superseded=True``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use :func:`open_run`, which checks that there is a run."""
        given = Path(path)
        self.dir = given.parent if given.name == database.DATABASE else given
        self._file = self.dir / database.DATABASE

    def __repr__(self) -> str:
        try:
            steps, total = len(self.batches), sum(self.status.values())
        except StoreError as error:
            return f"Run({str(self.dir)!r}, unreadable: {error})"
        return f"Run({str(self.dir)!r}, {steps} steps, {total} trajectories)"

    @property
    def meta(self) -> dict[str, Any]:
        """What was noted at creation, with ``schema_version``, ``created`` (Unix time) and ``sessions``: for each time
        the run was opened for writing, when, and by which Python, platform and package versions."""
        with database.reading(self._file) as connection:
            values = {key: json.loads(text) for key, text in connection.execute("SELECT key, value FROM meta")}
            sessions = connection.execute("SELECT started, python, platform, packages FROM sessions ORDER BY rowid")
            names = ("started", "python", "platform", "packages")
            listed = [dict(zip(names, (*row[:3], json.loads(row[3])), strict=True)) for row in sessions]
        return {
            **values["meta"],
            "schema_version": values["schema_version"],
            "created": values["created"],
            "sessions": listed,
        }

    @property
    def config(self) -> dict[str, Any]:
        """The configuration the run was last started with."""
        ((text,),) = self._rows("SELECT value FROM meta WHERE key = 'config'")
        config: dict[str, Any] = json.loads(text)
        return config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, in order: ``step`` and everything that was measured at it."""
        steps: dict[int, dict[str, Any]] = {}
        for step, text in self._rows("SELECT step, data FROM metrics WHERE NOT superseded ORDER BY step, rowid"):
            steps.setdefault(step, {"step": step}).update(json.loads(text), step=step)
        return list(steps.values())

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints on disk, oldest step first; also one that a killed run had no time to record."""
        rows = self._rows("SELECT step, path FROM checkpoints WHERE NOT superseded")
        recorded = {(step, self.dir / path) for step, path in rows}
        folders = {*(self.dir / database.CHECKPOINTS).glob("step-*"), *(path for _, path in recorded)}
        found = [checkpoint for folder in sorted(folders) if (checkpoint := read_checkpoint(folder)) is not None]
        by_step = {c.step: c for c in found if (c.step, c.path) in recorded or c.path.name == f"step-{c.step}"}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest ``eval/reward`` after its step, the newest of equal ones; None if no
        checkpoint was evaluated."""
        rewards = {row["step"]: row["eval/reward"] for row in self.metrics if "eval/reward" in row}
        evaluated = [checkpoint for checkpoint in self.checkpoints if checkpoint.step in rewards]
        return max(evaluated, key=lambda c: (rewards[c.step], c.step), default=None)

    @property
    def batches(self) -> dict[int, list[str]]:
        """The ordered trajectory ids that each step trains on."""
        rows = self._rows("SELECT step, ids FROM batches WHERE NOT superseded ORDER BY step")
        return {step: json.loads(ids) for step, ids in rows}

    def next_position(self, step: int) -> int:
        """First position of the task stream that no batch up to ``step`` has taken."""
        ((last,),) = self._rows(
            "SELECT max(position) FROM trajectories WHERE split = 'train' AND step <= ? AND NOT superseded", (step,)
        )
        return 0 if last is None else int(last) + 1

    def fingerprint(self, step: int) -> dict[str, str | int]:
        """What the trainer of a step said of itself: where it is equal, training repeats to the bit. {} if it never
        does."""
        row = self._rows("SELECT value FROM meta WHERE key = 'trainers'")
        trainers = [t for t in json.loads(row[0][0]) if t["after"] < step] if row else []
        return dict(trainers[-1]["fingerprint"]) if trainers else {}

    @property
    def status(self) -> dict[str, int]:
        """Number of trajectories by status, most frequent first."""
        rows = self._rows(
            "SELECT status, count(*) FROM trajectories WHERE NOT superseded GROUP BY status ORDER BY 2 DESC, 1"
        )
        return dict(rows)

    def trajectories(
        self,
        *,
        step: int | None = None,
        task: str | None = None,
        status: str | None = None,
        agent: str | None = None,
        split: str | None = None,
        position: int | None = None,
        limit: int | None = None,
        superseded: bool = False,
    ) -> Iterator[Trajectory]:
        """The recorded trajectories in the order of recording, read lazily; each filter keeps what equals it.

        Args:
            step: of the committed batch (for evaluations: the step after which they ran).
            task: id of the task.
            agent: name of an agent that called the model in it.
            limit: most trajectories to give.
            superseded: also those that a resume discarded.

        Raises:
            StoreError: ``status`` is no status, or the run cannot be read.
        """
        known = get_args(Status)
        if status is not None and status not in known:
            raise StoreError(f"no status {status!r}{_nearest(status, known)}; the statuses are {', '.join(known)}")
        given = {"step": step, "task_id": task, "status": status, "split": split, "position": position}
        where = [f"{name} = ?" for name, value in given.items() if value is not None]
        values: list[Any] = [
            database.sql_text(value) if isinstance(value, str) else value
            for value in given.values()
            if value is not None
        ]
        if agent is not None:
            where.append("EXISTS (SELECT 1 FROM json_each(agents) WHERE value = ?)")
            values.append(agent)
        if not superseded:
            where.append("NOT superseded")
        return self._pages(" AND ".join(["seq > ?", *where]), values, limit)

    def _pages(self, where: str, values: list[Any], limit: int | None) -> Iterator[Trajectory]:
        last = -1
        while limit is None or limit > 0:
            size = _PAGE if limit is None else min(_PAGE, limit)
            rows = self._rows(
                f"SELECT seq, data FROM trajectories JOIN blobs USING (seq) WHERE {where} ORDER BY seq LIMIT {size}",
                (last, *values),
            )
            for _, blob in rows:
                yield decode_trajectory(blob)
            if len(rows) < size:
                return
            last = rows[-1][0]
            limit = None if limit is None else limit - size

    def trajectory(self, id: str) -> Trajectory:
        """One trajectory by its id or the beginning of its id.

        Raises:
            StoreError: no id or more than one begins so; the message names the nearest ones.
        """
        found = self._rows("SELECT id, seq FROM trajectories WHERE id = ?", (id,)) or self._rows(
            "SELECT id, seq FROM trajectories WHERE substr(id, 1, ?) = ? LIMIT 4", (len(id), id)
        )
        if len(found) > 1:
            raise StoreError(f"{self.dir}: several ids begin with {id!r}: {', '.join(row[0] for row in found)}")
        if not found:
            recent = [row[0] for row in self._rows("SELECT id FROM trajectories ORDER BY seq DESC LIMIT 5000")]
            raise StoreError(f"{self.dir} has no trajectory {id!r}{_nearest(id, recent)}")
        ((blob,),) = self._rows("SELECT data FROM blobs WHERE seq = ?", (found[0][1],))
        return decode_trajectory(blob)

    def groups(self, step: int) -> list[TrajectoryGroup]:
        """The committed batch of a step, in training order, as groups.

        Raises:
            StoreError: the step has no committed batch.
        """
        found = self._rows("SELECT ids FROM batches WHERE step = ? AND NOT superseded", (step,))
        if not found:
            steps = list(self.batches)
            have = f"there are batches for steps {steps[0]} to {steps[-1]}" if steps else "none was committed yet"
            raise StoreError(f"{self.dir} has no batch of step {step}; {have}")
        rows = self._rows(
            "SELECT epoch, position, data FROM json_each(?) AS batch "
            "JOIN trajectories ON trajectories.id = batch.value JOIN blobs USING (seq) ORDER BY batch.key",
            (found[0][0],),
        )
        groups = []
        for (epoch, position), members in groupby(rows, key=lambda row: row[:2]):
            trajectories = tuple(decode_trajectory(member[2]) for member in members)
            groups.append(
                TrajectoryGroup(task=trajectories[0].task, position=position, epoch=epoch, trajectories=trajectories)
            )
        return groups

    def plot(self, path: str | os.PathLike[str], *, metrics: tuple[str, ...] | None = None) -> Path:
        """Draw curves over the steps as an image: the mean reward of each batch, the mean reward of the evaluations,
        and ``metrics`` by name (by default the named parts of both rewards, and ``success``).

        Raises:
            StoreError: there is nothing to draw yet, or no step has a metric of that name.
        """
        known = {name for row in self.metrics for name in row}
        for name in metrics or ():
            if name not in known:
                raise StoreError(f"{self.dir} has no metric {name!r}{_nearest(name, known)}")
        from molt_sdk.plotting import draw

        return draw(self.curves(metrics), Path(path), title=self.dir.name)

    def curves(self, metrics: tuple[str, ...] | None = None) -> dict[str, list[tuple[int, float]]]:
        """What :meth:`plot` draws: (step, value) points by name."""
        curves: dict[str, list[Any]] = {
            "reward": self._rows(_MEAN_REWARD.format(axis="step", split="split != 'eval'")),
            "eval/reward": self._rows(
                _MEAN_REWARD.format(axis="coalesce(step, newest_version)", split="split = 'eval'")
            ),
        }
        for row in self.metrics:
            for name, value in row.items():
                part = name.startswith(("reward/", "eval/reward/")) or name in ("success", "eval/success")
                chosen = part if metrics is None else name in metrics
                if chosen and isinstance(value, int | float) and name not in ("reward", "eval/reward"):
                    curves.setdefault(name, []).append((row["step"], value))
        return {name: points for name, points in curves.items() if points}

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with database.reading(self._file) as connection:
            return connection.execute(query, values).fetchall()


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run directory (or its ``run.sqlite``) to read it; it may still be training, and needs no right to write.

    Raises:
        StoreError: there is no run, or a newer molt_sdk wrote it.
    """
    run = Run(path)
    with database.reading(run.dir / database.DATABASE):
        return run


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(close)})" if close else ""
