"""The writer of a run: one SQLite file, one thread that batches whatever is waiting into one durable transaction.

``await store.add_group(group)`` returns after COMMIT; only then may anything build on the group. What was acknowledged
survives ``kill -9`` and power loss. Reading is run.py's job and works while this writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from molt_sdk import database
from molt_sdk.codec import encode_trajectory
from molt_sdk.errors import StoreError
from molt_sdk.plain import plain_object
from molt_sdk.types import Trajectory, TrajectoryGroup
from molt_sdk.writer import Writer

_PACKAGES = ("molt-sdk", "torch", "transformers", "tokenizers", "vllm", "msgspec")


class Store:
    """The one writer of a run directory. Its async methods return when what they wrote is durable.

    All raise StoreError: at once for what was refused (an unknown or repeated id), and from then on for every caller
    when writing itself failed (disk full). Cancelling a caller does not take its write back. Use it as an async context
    manager, or call :meth:`close`; :meth:`shutdown` does the same without an event loop.
    """

    def __init__(self, directory: Path, connection: sqlite3.Connection, resources: contextlib.ExitStack) -> None:
        """Use :meth:`create` or :meth:`resume`."""
        self.dir = directory
        self._metrics = (directory / database.METRICS).open("ab", buffering=0)
        resources.callback(lambda: self._metrics.close())  # whichever file it is by then
        self._writer = Writer(connection, str(directory), resources.pop_all())  # its thread closes them now

    @classmethod
    def create(cls, run_dir: str | os.PathLike[str], *, meta: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """Start a run in a missing or empty directory. ``config`` goes to ``config.json`` too.

        Raises:
            StoreError: the directory holds another run or other files, or cannot be written.
        """
        directory = Path(run_dir)
        texts = {
            "schema_version": json.dumps(database.SCHEMA_VERSION),
            "created": json.dumps(time.time()),
            "meta": _to_json(meta, "meta"),
            "config": _to_json(config, "config"),
        }
        with _os_errors(directory), contextlib.ExitStack() as undo:
            directory.mkdir(parents=True, exist_ok=True)
            _check_free(directory)
            undo.callback(os.close, database.lock_run(directory))
            _check_free(directory)  # another process may have been faster
            database.create_database(directory / database.DATABASE, texts)
            return cls._open(directory, undo)

    @classmethod
    def resume(cls, run_dir: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None) -> Self:
        """Open an existing run to go on writing it; ``config`` replaces the stored one.

        Raises:
            StoreError: the directory holds no run, one of a newer molt_sdk, or one that a live process writes.
        """
        directory = Path(run_dir)
        text = None if config is None else _to_json(config, "config")
        with _os_errors(directory), contextlib.ExitStack() as undo:
            if not cls.is_run(directory):
                raise StoreError(f"{directory} holds no run to resume; leave out resume=True to start one there")
            undo.callback(os.close, database.lock_run(directory))
            return cls._open(directory, undo, text)

    @staticmethod
    def is_run(run_dir: str | os.PathLike[str]) -> bool:
        """Whether the directory holds a run."""
        return (Path(run_dir) / database.DATABASE).is_file()

    @classmethod
    def _open(cls, directory: Path, resources: contextlib.ExitStack, config: str | None = None) -> Self:
        connection = database.connect_writer(directory / database.DATABASE)
        resources.callback(connection.close)
        database.check_schema(connection, directory / database.DATABASE)
        if config is not None:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'config'", (config,))
        session = (time.time(), platform.python_version(), platform.platform(), json.dumps(_package_versions()))
        connection.execute("INSERT INTO sessions VALUES (?, ?, ?, ?)", session)
        (text,) = connection.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
        database.replace_text(directory / database.CONFIG, json.dumps(json.loads(text), indent=2) + "\n")
        database.replace_text(directory / database.METRICS, _metrics_lines(connection))
        resources.callback(database.leave_wal, connection)
        return cls(directory, connection, resources)

    async def add_group(self, group: TrajectoryGroup, *, step: int | None = None) -> None:
        """Record a group whole or not at all. ``step``: of an evaluation, the step after which it ran."""
        await self._writer.write(lambda c: _insert(c, group.trajectories, group.epoch, step))

    async def add_trajectory(self, trajectory: Trajectory, *, epoch: int = 0, step: int | None = None) -> None:
        """Record one trajectory outside a group. ``step``: of an evaluation, the step after which it ran."""
        await self._writer.write(lambda c: _insert(c, (trajectory,), epoch, step))

    async def commit_batch(self, step: int, trajectory_ids: Sequence[str]) -> None:
        """Record the ordered trajectories of a step's batch; to be awaited before the optimizer runs.

        Raises:
            StoreError: an id is unknown, discarded or in a batch already, or the step has a batch.
        """
        ids = list(trajectory_ids)
        await self._writer.write(lambda c: _commit_batch(c, step, ids))

    async def add_metrics(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Record the metrics of a step: in the database, then as one line of ``metrics.jsonl``."""
        text = _to_json(metrics, f"the metrics of step {step}")
        row = (step, time.time(), text)
        await self._writer.write(
            lambda c: _execute(c, "INSERT INTO metrics (step, time, data) VALUES (?, ?, ?)", row),
            lambda c: self._append_metrics(_metrics_line(*row)),
        )

    async def add_checkpoint(self, step: int, version: int, path: str | os.PathLike[str]) -> None:
        """Record that the weights of ``version`` after ``step`` are complete at ``path``."""
        row = (step, version, self._relative(path), time.time())
        await self._writer.write(lambda c: _add_checkpoint(c, row))

    async def discard_after(self, step: int) -> None:
        """Go back to the checkpoint of ``step`` (0: the initial weights). Rows are kept, flagged as superseded: later
        batches, metrics, checkpoints and evaluations, and every trajectory that holds a token of a newer version than
        the checkpoint's. The other trajectories of later batches are free again.

        Raises:
            StoreError: there is no checkpoint of ``step``.
        """
        await self._writer.write(lambda c: _discard_after(c, step), self._rewrite_metrics)

    async def discard_uncommitted(self, position: int, evaluated: Collection[int]) -> None:
        """Flag as superseded what an interrupted run left unfinished: trajectories at ``position`` of the task stream
        or later that are in no batch, and evaluations after steps that are not in ``evaluated``."""
        steps = json.dumps(sorted(evaluated))
        await self._writer.write(lambda c: _execute(c, _DISCARD_UNCOMMITTED, (position, steps)))

    async def set_trainer(self, after: int, fingerprint: Mapping[str, str | int]) -> None:
        """Record which trainer trains the steps after ``after``, from now on."""
        await self._writer.write(lambda c: _set_trainer(c, after, dict(fingerprint)))

    async def close(self) -> None:
        """Write what is waiting, then free file, lock and thread. Safe to call twice, and after a failure."""
        await self._writer.close()

    def shutdown(self, timeout: float = 60.0) -> None:
        """:meth:`close` for a caller whose event loop is gone.

        Raises:
            StoreError: what is waiting could not be written within ``timeout`` seconds.
        """
        self._writer.shutdown(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _relative(self, path: str | os.PathLike[str]) -> str:
        """A path inside the run as relative to it, so that the run can be moved; any other one as absolute."""
        place, home = Path(path).absolute(), self.dir.absolute()
        return str(place.relative_to(home) if place.is_relative_to(home) else place)

    def _append_metrics(self, line: str) -> None:
        data = line.encode()
        if self._metrics.write(data) != len(data):
            raise OSError(errno.ENOSPC, "a line was written in part", self._metrics.name)

    def _rewrite_metrics(self, connection: sqlite3.Connection) -> None:
        path = self.dir / database.METRICS
        database.replace_text(path, _metrics_lines(connection))
        self._metrics.close()
        self._metrics = path.open("ab", buffering=0)


def _check_free(directory: Path) -> None:
    names = {entry.name for entry in directory.iterdir()}
    if database.DATABASE in names:
        raise StoreError(f"{directory} holds a run already; choose another run_dir (--run-dir)")
    foreign = sorted(names - {database.LOCK, database.DRAFT, database.DRAFT + "-journal"})
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise StoreError(f"{directory} holds other files ({shown}); run_dir must be a new or an empty directory")


@contextlib.contextmanager
def _os_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{directory} cannot be used as run_dir: {error}") from error


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _to_json(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(msgspec.to_builtins(dict(value), str_keys=True, enc_hook=plain_object))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{what} cannot be written as JSON: {error}") from error


def _metrics_line(step: int, moment: float, text: str) -> str:
    """A line of strict JSON: numbers that are not finite become null (the database keeps them)."""
    data = {"step": step, "time": moment} | json.loads(text) | {"step": step}
    try:
        return json.dumps(data, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(data)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _metrics_lines(connection: sqlite3.Connection) -> str:
    rows = connection.execute("SELECT step, time, data FROM metrics WHERE NOT superseded ORDER BY rowid")
    return "".join(_metrics_line(*row) for row in rows)


def _execute(connection: sqlite3.Connection, statement: str, row: tuple[Any, ...]) -> None:
    connection.execute(statement, row)


def _insert(connection: sqlite3.Connection, trajectories: Sequence[Trajectory], epoch: int, step: int | None) -> None:
    for trajectory in trajectories:
        try:
            cursor = connection.execute(_INSERT, _row(trajectory, epoch, step))
        except sqlite3.IntegrityError as error:
            raise StoreError(f"trajectory {trajectory.id} was recorded before; ids are unique in a run") from error
        connection.execute("INSERT INTO blobs VALUES (?, ?)", (cursor.lastrowid, encode_trajectory(trajectory)))


_INSERT = """
INSERT INTO trajectories (id, position, epoch, idx, attempt, split, step, task_id, status, reward, agents, turns,
                          tokens, oldest_version, newest_version, started, seconds)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


def _row(trajectory: Trajectory, epoch: int, step: int | None) -> tuple[Any, ...]:
    versions = [span[0] for turn in trajectory.turns if turn.trainable for span in turn.version_spans]
    return (
        trajectory.id,
        trajectory.position,
        epoch,
        trajectory.index,
        trajectory.attempt,
        trajectory.split,
        step,
        database.sql_text(trajectory.task.id),
        trajectory.status,
        trajectory.reward,
        json.dumps(trajectory.agents),
        len(trajectory.turns),
        sum(len(turn.completion_i32) for turn in trajectory.turns) // 4,
        min(versions, default=None),
        max(versions, default=None),
        trajectory.started,
        trajectory.seconds,
    )


def _commit_batch(connection: sqlite3.Connection, step: int, ids: list[str]) -> None:
    try:
        connection.execute(
            "INSERT INTO batches (step, ids, created) VALUES (?, ?, ?)", (step, json.dumps(ids), time.time())
        )
    except sqlite3.IntegrityError as error:
        raise StoreError(f"step {step} has a committed batch; go back with discard_after({step - 1}) first") from error
    for trajectory_id in ids:
        changed = connection.execute(
            "UPDATE trajectories SET step = ? WHERE id = ? AND step IS NULL AND NOT superseded", (step, trajectory_id)
        )
        if changed.rowcount != 1:
            raise StoreError(f"batch of step {step}: trajectory {trajectory_id} {_why_not(connection, trajectory_id)}")


def _why_not(connection: sqlite3.Connection, trajectory_id: str) -> str:
    row = connection.execute("SELECT step, superseded FROM trajectories WHERE id = ?", (trajectory_id,)).fetchone()
    if row is None:
        return "was never recorded; await add_group before its batch is committed"
    return "was discarded" if row[1] else f"is in the batch of step {row[0]}; nothing is trained on twice"


def _add_checkpoint(connection: sqlite3.Connection, row: tuple[int, int, str, float]) -> None:
    connection.execute("UPDATE checkpoints SET superseded = 1 WHERE step = ?", row[:1])
    connection.execute("INSERT INTO checkpoints (step, version, path, created) VALUES (?, ?, ?, ?)", row)


def _discard_after(connection: sqlite3.Connection, step: int) -> None:
    select = "SELECT version FROM checkpoints WHERE step = ? AND NOT superseded"
    row = connection.execute(select, (step,)).fetchone()
    if row is None and step != 0:
        raise StoreError(f"there is no checkpoint of step {step} to go back to")
    version = row[0] if row else 0
    for table in ("batches", "metrics", "checkpoints"):
        connection.execute(f"UPDATE {table} SET superseded = 1 WHERE step > ?", (step,))
    connection.execute(
        "UPDATE trajectories SET superseded = 1 WHERE newest_version > ? OR (step > ? AND split != 'train')",
        (version, step),
    )
    connection.execute("UPDATE trajectories SET step = NULL WHERE step > ? AND NOT superseded", (step,))


_DISCARD_UNCOMMITTED = """
UPDATE trajectories SET superseded = 1
WHERE (split = 'train' AND step IS NULL AND position >= ?)
   OR (split = 'eval' AND step NOT IN (SELECT value FROM json_each(?)))
"""


def _set_trainer(connection: sqlite3.Connection, after: int, fingerprint: dict[str, str | int]) -> None:
    row = connection.execute("SELECT value FROM meta WHERE key = 'trainers'").fetchone()
    trainers = [t for t in json.loads(row[0]) if t["after"] < after] if row else []
    if not trainers or trainers[-1]["fingerprint"] != fingerprint:
        trainers.append({"after": after, "fingerprint": fingerprint})
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('trainers', ?)", (json.dumps(trainers),))
