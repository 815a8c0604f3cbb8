"""Where sync user code runs: a bounded pool of daemon threads, so that it never blocks the event loop nor the exit.

Each environment instance is pinned to one thread (the stdlib's sqlite3 needs that). Threads are daemons because a tool
that hangs must not keep the process alive after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
_names = itertools.count()


def being_cancelled() -> bool:
    """Whether somebody asked the current task to end; else a CancelledError in it comes from the code it runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def contained(awaitable: Awaitable[T], place: str) -> T:
    """Await user code. A CancelledError that nobody asked this task for (user code awaited something that it had
    cancelled) is that code's error, not the end of the trajectory.

    Raises:
        RuntimeError: naming ``place``, in its stead.
    """
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        raise RuntimeError(f"{place} let a CancelledError of its own escape") from error


class _Job:
    """One call for a thread, and the coroutine that waits for it."""

    def __init__(self, worker: Worker, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.worker = worker
        self.call = call
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def run(self) -> None:
        try:
            result, error = self.call(), None
        except BaseException as raised:  # handed to the awaiting coroutine
            result, error = None, raised
        try:
            self.loop.call_soon_threadsafe(_resolve, self.future, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more


class Worker:
    """One daemon thread that runs functions in order."""

    def __init__(self, name: str = "molt-worker", *, on_stuck: Callable[[Worker], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: _Job | None = None
        self._on_stuck = on_stuck
        self.load = 0
        """Environments pinned here plus calls queued or running."""
        self.closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-{next(_names)}", daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """The call that occupies the thread was given up on (cancelled or timed out)."""
        job = self._running
        return job is not None and job.future.cancelled()

    async def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call ``fn`` on the thread, with the caller's context variables. If the caller is cancelled, the call goes on
        unheard and the worker counts as stuck until it returns."""
        if self.closed:
            raise RuntimeError(f"thread {self._thread.name} was closed; nothing can run on it any more")
        context = contextvars.copy_context()
        job = _Job(self, lambda: context.run(fn, *args, **kwargs), asyncio.get_running_loop())
        self.load += 1
        self._queue.put(job)
        try:
            result: T = await job.future
            return result
        except asyncio.CancelledError:
            if job.future.cancelled() and self._on_stuck is not None:
                self._on_stuck(job.worker)
            raise
        finally:
            job.worker.load -= 1

    def hand_over(self, heir: Worker) -> None:
        """Move the calls that wait behind a stuck one to another thread, and end this one when it comes back."""
        with contextlib.suppress(queue.Empty):
            while (job := self._queue.get_nowait()) is not None:
                self.load, heir.load = self.load - 1, heir.load + 1
                job.worker = heir
                heir._queue.put(job)
        self.close()

    def close(self) -> None:
        """Let the thread end after what is queued."""
        self.closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._running = job
            if not job.future.cancelled():
                job.run()
            self._running = None
            del job  # an idle thread keeps nothing of its last call alive


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
    """At most ``size`` threads that are not stuck, made when needed.

    A thread that is still stuck ``grace`` seconds after its call was given up on is replaced, so that a hanging tool
    costs one thread and not everything that is to run on it. Until then it may come back: what is pinned to it waits.
    """

    def __init__(self, size: int, grace: float = 2.0) -> None:
        self.size = size
        self.grace = grace
        self._workers: list[Worker] = []

    def pick(self) -> Worker:
        """The least loaded thread that is not stuck."""
        usable = [worker for worker in self._workers if not worker.stuck]
        idle = min(usable, key=lambda worker: worker.load, default=None)
        if idle is None or (idle.load > 0 and len(self._workers) < self.size):
            idle = Worker(on_stuck=self._watch)
            self._workers.append(idle)
        return idle

    async def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``fn`` on any thread."""
        return await self.pick().run(fn, *args, **kwargs)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _watch(self, worker: Worker) -> None:
        job = worker._running

        def look() -> None:
            if worker._running is job and worker.stuck and worker in self._workers:
                self._workers.remove(worker)
                worker.hand_over(self.pick())

        asyncio.get_running_loop().call_later(self.grace, look)


class PinnedThread:
    """One environment's thread: always the same, until it is replaced because a call on it hangs."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._worker: Worker | None = None

    async def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        if self._worker is None or self._worker.closed:
            self.release()
            self._worker = self._pool.pick()
            self._worker.load += 1
        return await self._worker.run(fn, *args, **kwargs)

    def release(self) -> None:
        if self._worker is not None:
            self._worker.load -= 1
            self._worker = None
