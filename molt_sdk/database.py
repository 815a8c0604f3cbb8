"""The SQLite file of a run: its tables, how it is opened, and the lock of its writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from molt_sdk.errors import StoreError

DATABASE, METRICS, CONFIG, LOCK = "run.sqlite", "metrics.jsonl", "config.json", "lock"
CHECKPOINTS, MODEL = "checkpoints", "model"
"""Folders: what training goes on from (``step-<N>`` each), and the trained model for inference."""
DRAFT = "run.sqlite.draft"
"""The file while it is being made; a creation that was killed leaves at most this and the lock behind."""

SCHEMA_VERSION = 1
"""Raised when an older molt_sdk could misread a newer file."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);  -- values are JSON
-- key "trainers": [{"after": step, "fingerprint": {...}}, ...] in order: who trained the steps after it
CREATE TABLE sessions (  -- one row each time the run was opened for writing
    started REAL NOT NULL, python TEXT NOT NULL, platform TEXT NOT NULL, packages TEXT NOT NULL);
CREATE TABLE trajectories (
    seq INTEGER PRIMARY KEY,  -- in the order of recording
    id TEXT NOT NULL UNIQUE,
    position INTEGER NOT NULL, epoch INTEGER NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL,
    split TEXT NOT NULL,
    step INTEGER,  -- of its committed batch; for an evaluation, the step after which it ran
    task_id TEXT NOT NULL, status TEXT NOT NULL, reward REAL,
    agents TEXT NOT NULL,  -- JSON list of names
    turns INTEGER NOT NULL, tokens INTEGER NOT NULL,  -- model calls, sampled tokens
    oldest_version INTEGER, newest_version INTEGER,  -- of trainable sampled tokens
    started REAL NOT NULL, seconds REAL NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0);  -- discarded on resume; kept for the record
CREATE INDEX trajectories_step ON trajectories (step);
CREATE INDEX trajectories_position ON trajectories (position);
CREATE INDEX trajectories_task ON trajectories (task_id);
CREATE INDEX trajectories_status ON trajectories (status);
CREATE TABLE blobs (seq INTEGER PRIMARY KEY REFERENCES trajectories, data BLOB NOT NULL);
CREATE TABLE batches (
    step INTEGER NOT NULL, ids TEXT NOT NULL,  -- JSON list of trajectory ids, in training order
    created REAL NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX batches_step ON batches (step) WHERE NOT superseded;
CREATE TABLE metrics (
    step INTEGER NOT NULL, time REAL NOT NULL, data TEXT NOT NULL,  -- JSON object
    superseded INTEGER NOT NULL DEFAULT 0);
CREATE TABLE checkpoints (
    step INTEGER NOT NULL, version INTEGER NOT NULL, path TEXT NOT NULL,  -- relative where it is inside the run
    created REAL NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX checkpoints_step ON checkpoints (step) WHERE NOT superseded;
"""


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open for writing by any one thread: transactions by hand, each commit durable against power loss."""
    connection = sqlite3.connect(_uri(path, "rw"), uri=True, timeout=60, isolation_level=None, check_same_thread=False)
    try:
        use_wal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def use_wal(connection: sqlite3.Connection) -> str:
    """Switch to write-ahead logging, or to a rollback journal where the file system cannot; return the mode in force.

    EXTRA is FULL in WAL mode; with a rollback journal it also makes the removal of the journal durable, without which a
    power loss right after a commit could undo it.
    """
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        (mode,) = connection.execute("PRAGMA journal_mode=DELETE").fetchone()
    connection.execute("PRAGMA synchronous=EXTRA")
    return str(mode)


def leave_wal(connection: sqlite3.Connection) -> None:
    """Fold the log into the file, so that a finished run is one plain file, readable from a read-only medium.

    Impossible while someone reads it or when the disk is full; the log then stays, and holds the same.
    """
    connection.execute("PRAGMA busy_timeout=0")
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=DELETE")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection for one short read; closed at the end, so that it never holds the writer back.

    Raises:
        StoreError: the file is missing, is no run, or cannot be read.
    """
    if not path.is_file():
        raise StoreError(f"{path.parent} holds no run ({path.name} is missing); is the path right?")
    try:
        with contextlib.closing(_connect_reader(path)) as connection:
            check_schema(connection, path)
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _connect_reader(path: Path) -> sqlite3.Connection:
    try:
        return _probe(_uri(path, "ro"))
    except sqlite3.OperationalError as error:
        # In WAL mode a reader needs the log's index beside the file, or the right to make it. Where there is neither,
        # and no log that could hold more than the file, the file alone is the whole truth.
        log = path.with_name(path.name + "-wal")
        refused = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        if not refused or (log.exists() and log.stat().st_size):
            raise
        return _probe(_uri(path, "ro") + "&immutable=1")


def _probe(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=60, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _uri(path: Path, mode: str) -> str:
    return f"{path.absolute().as_uri()}?mode={mode}"


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError unless the file is a run that this version of molt_sdk understands."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except sqlite3.OperationalError as error:
        if "no such" not in str(error):
            raise
        row = None
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} is not a run of molt_sdk: {error}") from error
    if row is None:
        raise StoreError(f"{path} is not a run of molt_sdk: the SQLite file has other tables")
    version = json.loads(row[0])
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer molt_sdk (schema {version}, this one reads up to {SCHEMA_VERSION}); "
            "update molt_sdk to open it"
        )


def lock_run(directory: Path) -> int:
    """Take the writer's lock of a run directory; return the open file that holds it. It ends with the process.

    Raises:
        StoreError: a live process has it.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise StoreError(
                f"{directory} is open for writing by process {owner or 'unknown'}; "
                "wait until it ends, stop it, or use another run_dir"
            ) from error
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(descriptor)
            raise
        logger.warning(f"{directory}: this file system has no locks; do not let two processes write the run")
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def create_database(path: Path, meta: dict[str, str]) -> None:
    """Make the file with its tables and ``meta`` rows (values are JSON), complete or not at all.

    Raises:
        sqlite3.Error, OSError: it cannot be written.
    """
    draft = path.with_name(DRAFT)
    draft.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        connection.executescript("BEGIN;" + SCHEMA)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("COMMIT")
    os.replace(draft, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a new name in ``directory`` survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_directory(path.parent)


def sql_text(value: str) -> str:
    """Text as SQLite can hold it: lone surrogates escaped."""
    return value.encode("utf-8", "backslashreplace").decode()
