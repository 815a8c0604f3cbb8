"""Threads for sync user code: pinned, bounded, daemons, and replaced when a call on them hangs."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from molt_sdk.workers import PinnedThread, Worker, WorkerPool, contained

pytestmark = pytest.mark.anyio


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2, grace=0.05)
    yield made
    made.close()


class Blocker:
    """A call that says when it has begun and goes on until it is let go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.go_on = threading.Event()
        self.thread = 0

    def __call__(self) -> int:
        self.thread = threading.get_ident()
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.go_on.wait(timeout=30)
        return self.thread


async def hung(thread: Worker | PinnedThread | WorkerPool) -> Blocker:
    """A call on the thread that was given up on and still runs."""
    blocker = Blocker()
    task = asyncio.create_task(thread.run(blocker))
    await blocker.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return blocker


# --- one thread -------------------------------------------------------------------------------------------------------


async def test_calls_run_in_order_on_a_daemon_thread_with_the_callers_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    worker = Worker("here")
    seen: list[tuple[int, int, bool, str]] = []

    def note(i: int) -> int:
        thread = threading.current_thread()
        seen.append((i, variable.get(), thread.daemon, thread.name.rsplit("-", 1)[0]))
        return i

    async def call(i: int) -> int:
        variable.set(10 * i)
        return await worker.run(note, i)

    assert await asyncio.gather(*(call(i) for i in range(5))) == list(range(5))
    assert seen == [(i, 10 * i, True, "here") for i in range(5)]
    assert worker.load == 0
    worker.close()


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
async def test_what_a_call_raises_reaches_the_caller_and_the_thread_goes_on(error: BaseException) -> None:
    worker = Worker()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await worker.run(fail)
    assert not worker.stuck
    assert await worker.run(lambda: 1) == 1
    worker.close()


async def test_stop_iteration_becomes_an_error_that_a_coroutine_can_raise() -> None:
    worker = Worker()
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.run(next, iter(()))
    worker.close()


async def test_a_cancelled_call_that_had_not_begun_never_runs() -> None:
    worker = Worker()
    blocker, ran = Blocker(), threading.Event()
    first = asyncio.create_task(worker.run(blocker))
    await blocker.begun.wait()
    second = asyncio.create_task(worker.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not worker.stuck  # what runs is still awaited
    blocker.go_on.set()
    await first
    await worker.run(int)
    assert not ran.is_set()
    worker.close()


async def test_a_thread_is_stuck_until_the_call_that_was_given_up_on_returns() -> None:
    worker = Worker()
    blocker = await hung(worker)
    assert worker.stuck
    assert worker.load == 0
    later = asyncio.create_task(worker.run(threading.get_ident))
    blocker.go_on.set()
    assert await later == blocker.thread
    assert not worker.stuck
    worker.close()


async def test_a_closed_thread_refuses_calls_instead_of_keeping_them_waiting() -> None:
    worker = Worker()
    worker.close()
    with pytest.raises(RuntimeError, match=r"molt-worker-\d+ was closed"):
        await worker.run(int)


async def test_an_idle_thread_keeps_nothing_of_its_last_call_alive() -> None:
    class Heavy:
        def work(self) -> None:
            pass

    worker = Worker()
    heavy = Heavy()
    await worker.run(heavy.work)
    reference = weakref.ref(heavy)
    del heavy
    with anyio.fail_after(30):
        while reference() is not None:  # the thread lets go a moment after it has answered
            gc.collect()
            await asyncio.sleep(0.001)
    worker.close()


def test_a_call_that_outlives_its_event_loop_harms_nobody() -> None:
    release, ended = threading.Event(), threading.Event()

    def call() -> None:
        release.wait(timeout=30)
        ended.set()

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)  # type: ignore[union-attr]
        await Worker().run(call)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    release.set()
    assert ended.wait(timeout=30)  # an error of the thread would fail this test


def test_a_hanging_call_does_not_keep_the_process_alive() -> None:
    program = """
        import asyncio, threading
        from molt_sdk.workers import WorkerPool

        async def main():
            try:
                await asyncio.wait_for(WorkerPool(1).run(threading.Event().wait), 0.01)
            except TimeoutError:
                print("gone on")

        asyncio.run(main())
    """
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "gone on\n", "")


# --- the pool ---------------------------------------------------------------------------------------------------------


async def test_a_pool_has_no_more_threads_than_its_size(pool: WorkerPool) -> None:
    blockers = [Blocker() for _ in range(5)]
    tasks = [asyncio.create_task(pool.run(blocker)) for blocker in blockers]
    await blockers[0].begun.wait()
    await blockers[1].begun.wait()
    assert [blocker.begun.is_set() for blocker in blockers] == [True, True, False, False, False]
    for blocker in blockers:
        blocker.go_on.set()
    assert len(set(await asyncio.gather(*tasks))) == 2


async def test_a_pool_starts_a_thread_only_when_all_others_are_busy(pool: WorkerPool) -> None:
    assert len({await pool.run(threading.get_ident) for _ in range(5)}) == 1


async def test_pinned_calls_share_one_thread_and_spread_over_the_pool(pool: WorkerPool) -> None:
    pins = [PinnedThread(pool) for _ in range(4)]
    threads = [{await pin.run(threading.get_ident) for _ in range(3)} for pin in pins]
    assert [len(idents) for idents in threads] == [1] * 4
    assert len(set.union(*threads)) == 2  # four environments on two threads
    for pin in pins:
        pin.release()
        pin.release()  # safe to call twice
    again = PinnedThread(pool)
    await again.run(int)
    assert sum(worker.load for worker in pool._workers) == 1
    again.release()


async def test_a_thread_that_comes_back_in_time_is_kept(pool: WorkerPool) -> None:
    """What is pinned to it (an sqlite3 connection) still works afterwards."""
    pool.grace = 60
    pin = PinnedThread(pool)
    before = await pin.run(threading.get_ident)
    blocker = await hung(pin)
    waiting = asyncio.create_task(pin.run(threading.get_ident))
    await asyncio.sleep(0)
    blocker.go_on.set()
    assert await waiting == before
    pin.release()


async def test_a_thread_that_stays_stuck_is_replaced_and_what_waits_behind_moves(pool: WorkerPool) -> None:
    pin = PinnedThread(pool)
    neighbour = PinnedThread(pool)
    other = PinnedThread(pool)
    old = await pin.run(threading.get_ident)
    await other.run(int)
    assert await neighbour.run(threading.get_ident) == old  # two share the thread, one is on the other
    stuck = threading.enumerate()
    blocker = await hung(pin)
    moved = await asyncio.gather(pin.run(threading.get_ident), neighbour.run(threading.get_ident))
    assert old not in moved
    assert await pin.run(threading.get_ident) != old
    assert await neighbour.run(threading.get_ident) != old
    for thread in (pin, neighbour, other):
        thread.release()
    assert [worker.load for worker in pool._workers] == [0] * len(pool._workers)
    blocker.go_on.set()
    (thread,) = [t for t in stuck if t.ident == old]
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()  # it ends when it comes back


async def test_a_stuck_thread_is_not_picked(pool: WorkerPool) -> None:
    pool.grace = 60
    blockers = [await hung(pool) for _ in range(3)]
    assert len({blocker.thread for blocker in blockers}) == 3
    assert await pool.run(threading.get_ident) not in {blocker.thread for blocker in blockers}
    for blocker in blockers:
        blocker.go_on.set()


# --- cancellation -----------------------------------------------------------------------------------------------------


async def test_a_cancellation_that_nobody_asked_for_is_an_error() -> None:
    async def stray() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="the tool let a CancelledError of its own escape"):
        await contained(stray(), "the tool")


async def test_a_cancellation_that_somebody_asked_for_goes_on() -> None:
    async def wait() -> None:
        await contained(asyncio.Event().wait(), "the tool")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with anyio.move_on_after(0.01) as scope:
        await wait()
    assert scope.cancelled_caught


async def test_results_and_errors_pass(pool: WorkerPool) -> None:
    async def fail() -> Any:
        raise ValueError("x")

    assert await contained(pool.run(lambda: 3), "x") == 3
    with pytest.raises(ValueError, match="x"):
        await contained(fail(), "x")
