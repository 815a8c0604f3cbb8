"""One thread that writes to an SQLite database for tasks of event loops: whatever is waiting becomes one transaction.

A caller is answered after COMMIT. A write that cannot be (a repeated id) is refused alone; when the file itself fails
(disk full), everyone waiting and everyone later gets the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from molt_sdk.errors import StoreError

Apply = Callable[[sqlite3.Connection], object]

_MOST_WRITES = 512
"""Writes of one transaction: enough to make the cost of a commit vanish, few enough that nobody waits long."""


class _Waiter(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class _Write(NamedTuple):
    apply: Apply
    committed: Apply | None
    waiter: _Waiter


class Writer:
    """Owns ``connection`` (autocommit mode, usable by any thread) and ``resources`` until it is closed."""

    def __init__(self, connection: sqlite3.Connection, place: str, resources: contextlib.ExitStack) -> None:
        """``place`` names the database in errors; ``resources`` is closed by the thread when everything is written."""
        self._connection = connection
        self._place = place
        self._resources = resources
        self._queue: deque[_Write] = deque()
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._close_waiters: list[_Waiter] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"molt-store {place}", daemon=True)
        self._thread.start()

    async def write(self, apply: Apply, committed: Apply | None = None) -> None:
        """Run ``apply`` inside a transaction and return when that is durable. ``committed`` follows the commit.

        Raises:
            StoreError: refused, failed, or closed before. Cancelling the caller does not take the write back.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future())
        with self._changed:
            if self._failure is not None:
                raise self._failed()
            if self._closing:
                raise StoreError(f"{self._place} is closed for writing; nothing was recorded")
            self._queue.append(_Write(apply, committed, waiter))
            self._changed.notify_all()
        await waiter.future

    async def close(self) -> None:
        """Write what is waiting, then free everything. Safe to call twice, and after a failure."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future())
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._closed:
                waiter.future.set_result(None)
            else:
                self._close_waiters.append(waiter)
        await waiter.future
        self._thread.join()  # it has answered; only its return is left

    def shutdown(self, timeout: float) -> None:
        """:meth:`close` without an event loop.

        Raises:
            StoreError: what is waiting was not written within ``timeout`` seconds.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StoreError(
                f"{self._place}: still writing after {timeout:g} s; the disk is slow or a reader blocks it"
            )

    # From here on: the writer's thread.

    def _run(self) -> None:
        try:
            while writes := self._next():
                self._write(writes)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            try:
                self._resources.close()
            finally:
                self._finish()

    def _next(self) -> list[_Write]:
        """The waiting writes, in order; blocks until there are some, empty when the writer closes."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(len(self._queue), _MOST_WRITES))]

    def _write(self, writes: list[_Write]) -> None:
        refused: dict[int, StoreError] = {}
        try:
            if self._failure is None:
                self._transact(writes, refused)
        except BaseException as error:  # nobody may be left waiting: it reaches every caller below
            self._fail(error)
        failed = self._failure is not None
        _answer([(w.waiter, refused.get(i) or (self._failed() if failed else None)) for i, w in enumerate(writes)])

    def _transact(self, writes: list[_Write], refused: dict[int, StoreError]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        for number, write in enumerate(writes):
            connection.execute("SAVEPOINT one")
            try:
                write.apply(connection)
            except Exception as error:
                if _is_fatal(error):
                    raise
                refused[number] = _refusal(error)
                connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
        connection.execute("COMMIT")
        for number, write in enumerate(writes):
            if write.committed is not None and number not in refused:
                write.committed(connection)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to report
                self._connection.execute("ROLLBACK")

    def _failed(self) -> StoreError:
        error = StoreError(
            f"{self._place}: writing failed ({self._failure}), so nothing more is recorded; what was acknowledged "
            "before is safe. Remove the cause, for instance free disk space, and go on with resume=True"
        )
        error.__cause__ = self._failure
        return error

    def _finish(self) -> None:
        with self._changed:
            self._closing = self._closed = True
            lost = [(write.waiter, self._failed()) for write in self._queue]  # only where this thread itself failed
            self._queue.clear()
        _answer([*lost, *((waiter, None) for waiter in self._close_waiters)])


def _answer(outcomes: list[tuple[_Waiter, StoreError | None]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], StoreError | None]]] = {}
    for waiter, error in outcomes:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, error))
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple[asyncio.Future[None], StoreError | None]]) -> None:
    for future, error in settled:
        if future.done():  # its caller was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _is_fatal(error: Exception) -> bool:
    """Whether the file or the disk is at fault rather than what was to be written."""
    return isinstance(error, sqlite3.OperationalError | sqlite3.InternalError | OSError) or (
        type(error) is sqlite3.DatabaseError
    )


def _refusal(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    refusal = StoreError(f"it cannot be recorded: {type(error).__name__}: {error}")
    refusal.__cause__ = error
    return refusal
