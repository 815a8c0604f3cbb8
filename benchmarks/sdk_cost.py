"""What the SDK itself costs: a scripted engine that answers at once, recording and store on.

Prints calls/s, bytes per live trajectory and the lag of the event loop, beside the same agent loop without the SDK.

    python benchmarks/sdk_cost.py [--trajectories 2000] [--turns 4]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

import molt_sdk as molt
from molt_sdk.testing import ScriptedEngine, pocket_model

REPLY = "I will think about it and then say: it is 42."
QUESTION = "What do you get if you multiply six by nine? Think step by step, then answer."


def agent(turns: int, meeting: anyio.Event | None = None, arrived: list[int] | None = None):
    """A policy of ``turns`` chat turns; with ``meeting``, each waits there until all others have arrived."""

    @molt.policy
    async def talk(task: molt.Task, model: molt.Model) -> float:
        messages: list[molt.Message] = [{"role": "user", "content": task.prompt}]
        for _ in range(turns):
            reply = await model.chat(messages)
            messages = [*reply.messages, {"role": "user", "content": "Are you sure?"}]
        if meeting is not None and arrived is not None:
            arrived.append(1)
            await meeting.wait()
        return 1.0

    return talk


async def lag_meter(lags: list[float], every: float = 0.005) -> None:
    """How late the loop wakes up, in seconds."""
    while True:
        due = time.perf_counter() + every
        await anyio.sleep(every)
        lags.append(time.perf_counter() - due)


async def with_sdk(model: str, trajectories: int, turns: int, concurrent: int, run_dir: Path) -> tuple[float, float]:
    """(seconds, worst loop lag in seconds)."""
    tasks = [{"prompt": f"{i}. {QUESTION}"} for i in range(trajectories)]
    engine = ScriptedEngine(model, lambda prompt, sampling: REPLY)
    lags: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(lag_meter, lags)
        started = time.perf_counter()
        groups = await molt.arollout(agent(turns), tasks, engine=engine, max_concurrent=concurrent, run_dir=run_dir)
        seconds = time.perf_counter() - started
        group.cancel_scope.cancel()
    assert all(t.status == "ok" and len(t.turns) == turns for g in groups for t in g.trajectories)
    return seconds, max(lags)


async def without_sdk(model: str, trajectories: int, turns: int) -> float:
    """The same prompts rendered and encoded from scratch each turn, nothing recorded: what any agent loop must do."""
    engine = ScriptedEngine(model, lambda prompt, sampling: REPLY)
    renderer = engine.renderer
    started = time.perf_counter()

    async def one(i: int) -> None:
        messages: list[molt.Message] = [{"role": "user", "content": f"{i}. {QUESTION}"}]
        for _ in range(turns):
            renderer.prompt(messages, ())
            ids = renderer.encode_reply(REPLY, end=True)
            await asyncio.sleep(0)
            answer: molt.Message = {"role": "assistant", "content": renderer.text(ids)}
            messages += [answer, {"role": "user", "content": "Are you sure?"}]

    await asyncio.gather(*(one(i) for i in range(trajectories)))
    return time.perf_counter() - started


async def live_bytes(model: str, trajectories: int, turns: int) -> float:
    """Python memory per trajectory while all of them wait at their end."""
    meeting, arrived = anyio.Event(), []
    engine = ScriptedEngine(model, lambda prompt, sampling: REPLY)
    tasks = [molt.Task(f"{i}. {QUESTION}") for i in range(trajectories)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await molt.arollout(agent(turns, meeting, arrived), tasks, engine=engine, max_concurrent=trajectories)

        group.start_soon(run)
        while len(arrived) < trajectories:
            await anyio.sleep(0.02)
        engine.requests.clear()
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        meeting.set()
    return used / trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # figures per core
    n, turns = options.trajectories, options.turns
    table = Table("trajectories at once", "calls/s", "calls/s without SDK", "ratio", "worst loop lag (ms)", box=None)
    with tempfile.TemporaryDirectory() as folder:
        model = pocket_model(Path(folder) / "model")
        for concurrent in (1, 64, n):
            seconds, lag = asyncio.run(with_sdk(model, n, turns, concurrent, Path(folder) / f"run-{concurrent}"))
            bare = asyncio.run(without_sdk(model, n, turns))
            calls = n * turns
            table.add_row(
                str(concurrent),
                f"{calls / seconds:.0f}",
                f"{calls / bare:.0f}",
                f"{seconds / bare:.2f}",
                f"{lag * 1000:.1f}",
            )
        size = asyncio.run(live_bytes(model, n, turns))
    console = Console(width=120)
    console.print(table)
    console.print(f"bytes per live trajectory of {turns} turns: {size:.0f}")


if __name__ == "__main__":
    main()
