"""Where sync user code runs: a bounded pool of daemon threads, so that it never blocks the event loop nor the exit.

Each environment instance is pinned to one thread (the stdlib's sqlite3 needs that). Threads are daemons because a tool
that hangs must not keep the process alive after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]
_names = itertools.count()


class Worker:
    """One daemon thread that runs functions in order."""

    def __init__(self, name: str = "molt-worker") -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.load = 0
        """Environments pinned here plus calls queued or running."""
        self.stuck = False
        """A call was given up on (cancelled or timed out) and still occupies the thread."""
        self._thread = threading.Thread(target=self._run, name=f"{name}-{next(_names)}", daemon=True)
        self._thread.start()

    async def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call ``fn`` on the thread, with the caller's context variables. If the caller is cancelled, the call goes on
        unheard and the worker counts as stuck until it returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()
        self.load += 1
        self._queue.put((lambda: context.run(fn, *args, **kwargs), future, loop))
        try:
            return await future
        except asyncio.CancelledError:
            self.stuck = True
            raise
        finally:
            self.load -= 1

    def close(self) -> None:
        """Let the thread end after what is queued."""
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            call, future, loop = job
            if future.cancelled():
                self.stuck = False
                continue
            try:
                result, error = call(), None
            except BaseException as raised:  # handed to the awaiting coroutine
                result, error = None, raised
            self.stuck = False
            try:
                loop.call_soon_threadsafe(_resolve, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del call, future, result, error, job


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future cannot hold it
        error = RuntimeError(f"StopIteration: {error}")
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class WorkerPool:
    """At most ``size`` threads, made when needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[Worker] = []

    def pick(self) -> Worker:
        """The least loaded thread. A stuck one is replaced, so that a hanging tool costs one thread, not its share of
        everything to come."""
        for worker in [w for w in self._workers if w.stuck]:
            self._workers.remove(worker)
            worker.close()
        idle = min(self._workers, key=lambda worker: worker.load, default=None)
        if idle is None or (idle.load > 0 and len(self._workers) < self.size):
            idle = Worker()
            self._workers.append(idle)
        return idle

    async def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``fn`` on any thread."""
        return await self.pick().run(fn, *args, **kwargs)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


class PinnedThread:
    """One environment's thread: always the same, until a call on it hangs."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._worker: Worker | None = None

    async def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        if self._worker is None or self._worker.stuck:
            self.release()
            self._worker = self._pool.pick()
            self._worker.load += 1
        return await self._worker.run(fn, *args, **kwargs)

    def release(self) -> None:
        if self._worker is not None:
            self._worker.load -= 1
            self._worker = None
