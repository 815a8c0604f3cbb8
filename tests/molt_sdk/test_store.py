"""What the store acknowledged is there, whatever happens next; what it cannot do it says."""
# Blocking calls are meant here: nothing else runs on these tests' loops.
# ruff: noqa: ASYNC220, ASYNC221

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from molt_sdk import database
from molt_sdk.database import use_wal
from molt_sdk.errors import StoreError
from molt_sdk.packed import pack_floats, pack_ints
from molt_sdk.run import open_run
from molt_sdk.store import Store
from molt_sdk.types import SamplingParams, Task, Trajectory, TrajectoryGroup, Turn

pytestmark = pytest.mark.anyio


def trajectory(id: str, *, version: int = 0, **fields: Any) -> Trajectory:
    """One turn of two sampled tokens."""
    turn = Turn(
        id=0,
        parent=None,
        fork_reason="first call",
        agent="main",
        trainable=True,
        new_messages=[{"role": "user", "content": "q"}],
        tools=(),
        sampling=SamplingParams(),
        message={"role": "assistant", "content": id},
        finish_reason="stop",
        context_i32=pack_ints([1, 2, 3]),
        completion_i32=pack_ints([4, 5]),
        logprobs_f32=pack_floats([-0.25, -0.5]),
        version_spans=((version, 0, 2),),
    )
    return Trajectory(id=id, task=Task("q", id="task"), turns=(turn,), **{"reward": 1.0, **fields})


def group(position: int, *ids: str, version: int = 0) -> TrajectoryGroup:
    members = tuple(trajectory(id, version=version, position=position, index=i) for i, id in enumerate(ids))
    return TrajectoryGroup(task=Task("q", id="task"), position=position, epoch=0, trajectories=members)


def create(directory: Path) -> Store:
    return Store.create(directory, meta={"purpose": "test"}, config={"steps": 3})


def recorded(directory: Path, **filters: Any) -> list[str]:
    return [t.id for t in open_run(directory).trajectories(**filters)]


def store_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("molt-store")]


async def test_a_run_directory_has_the_documented_files(tmp_path: Path) -> None:
    async with create(tmp_path / "deep" / "run") as store:
        await store.add_group(group(0, "a", "b"))
        await store.add_metrics(1, {"loss": 0.5})
    assert sorted(path.name for path in store.dir.iterdir()) == ["config.json", "lock", "metrics.jsonl", "run.sqlite"]
    assert json.loads((store.dir / "config.json").read_text()) == {"steps": 3}
    run = open_run(store.dir)
    assert run.config == {"steps": 3}
    assert run.meta["purpose"] == "test"
    assert run.meta["schema_version"] == database.SCHEMA_VERSION
    (session,) = run.meta["sessions"]
    assert session["python"] == ".".join(map(str, sys.version_info[:3]))
    assert session["packages"]["msgspec"]


async def test_a_group_is_readable_when_add_group_returns(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_group(group(5, "a", "b"))
        assert list(open_run(store.dir).trajectories()) == list(group(5, "a", "b"))
        script = f"import molt_sdk.run as r; print([t.id for t in r.open_run({str(store.dir)!r}).trajectories()])"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert other.stdout.strip() == "['a', 'b']"


async def test_reading_while_writing(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_group(group(0, *(f"first-{i}" for i in range(100))))
        half_read = open_run(store.dir).trajectories()
        assert next(half_read).id == "first-0"
        counts: list[int] = []
        written = threading.Event()

        def read() -> None:
            while not written.is_set() or not counts:
                counts.append(len(recorded(store.dir)))

        reader = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.gather(*(store.add_group(group(n, f"{n}-a", f"{n}-b")) for n in range(1, 200)))
        written.set()
        await reader
        assert counts == sorted(counts)
        assert all(count % 2 == 0 for count in counts)  # never half a group
        assert len(list(half_read)) == 99 + 2 * 199  # the open iterator goes on into what came later


async def test_concurrent_writes_share_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[str] = []

    def traced(path: Path, connect: Any = database.connect_writer) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(path)
        connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
        return connection

    monkeypatch.setattr(database, "connect_writer", traced)
    async with create(tmp_path / "run") as store:
        await asyncio.gather(*(store.add_trajectory(trajectory(f"t{n}")) for n in range(1000)))
    assert len(recorded(store.dir)) == 1000
    assert len(commits) < 20


WRITER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_store import create, group
from pathlib import Path

async def main():
    store = create(Path(sys.argv[1]))
    async def worker(w):
        for n in range(10**6):
            await store.add_group(group(n, f"{w}-{n}-a", f"{w}-{n}-b"))
            print(f"{w}-{n}-a", f"{w}-{n}-b", sep="\\n", flush=True)
    await asyncio.gather(*(worker(w) for w in range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledged", [1, 77, 500])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, acknowledged: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "run"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(acknowledged)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    ids = {line.strip() for line in lines if line.endswith("\n")}
    assert len(ids) >= acknowledged
    present = {t.id: t for t in open_run(tmp_path / "run").trajectories()}
    assert ids <= present.keys()
    assert all(t.text == id and t.turns[0].completion_token_ids == [4, 5] for id, t in present.items())
    assert all(id[:-1] + "b" in present for id in present if id.endswith("a"))  # groups are whole

    async with Store.resume(tmp_path / "run") as store:  # the lock of a dead process is no obstacle
        await store.add_trajectory(trajectory("after"))
    assert recorded(store.dir)[-1] == "after"
    with sqlite3.connect(store.dir / "run.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"other files \(thesis.tex\)"):
        create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="cannot be used as run_dir"):
        create(tmp_path / "thesis.tex")


async def test_a_second_run_in_a_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("run").mkdir()  # an empty directory is fine
    async with create(tmp_path / "run") as store:
        await store.add_trajectory(trajectory("a"))
    with pytest.raises(StoreError, match="holds a run already; choose another run_dir"):
        create(tmp_path / "run")
    assert recorded(tmp_path / "run") == ["a"]


async def test_what_a_killed_creation_leaves_behind_is_no_obstacle(tmp_path: Path) -> None:
    tmp_path.joinpath("lock").write_text("1\n")
    tmp_path.joinpath("run.sqlite.draft").write_bytes(b"half a file")
    async with create(tmp_path) as store:
        await store.add_trajectory(trajectory("a"))
    assert recorded(tmp_path) == ["a"]


async def test_one_writer_at_a_time(tmp_path: Path) -> None:
    async with create(tmp_path / "run"):
        with pytest.raises(StoreError, match=f"open for writing by process {os.getpid()}"):
            Store.resume(tmp_path / "run")
        script = f"import molt_sdk.store as s; s.Store.resume({str(tmp_path / 'run')!r})"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert other.returncode == 1
        assert f"StoreError: {tmp_path / 'run'} is open for writing by process {os.getpid()}" in other.stderr
    async with Store.resume(tmp_path / "run") as store:
        await store.add_trajectory(trajectory("a"))


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run to resume"):
        Store.resume(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert not Store.is_run(tmp_path / "nothing")


async def test_resume_takes_a_new_config_and_notes_the_session(tmp_path: Path) -> None:
    async with create(tmp_path / "run"):
        pass
    async with Store.resume(tmp_path / "run", config={"steps": 9}):
        pass
    assert open_run(tmp_path / "run").config == {"steps": 9}
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"steps": 9}
    assert len(open_run(tmp_path / "run").meta["sessions"]) == 2


async def test_a_newer_or_foreign_file_says_so(tmp_path: Path) -> None:
    async with create(tmp_path / "run"):
        pass
    path = tmp_path / "run" / "run.sqlite"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    connection.close()
    for attempt in (Store.resume, open_run):
        with pytest.raises(StoreError, match=r"newer molt_sdk \(schema 99, this one reads up to 1"):
            attempt(tmp_path / "run")
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    for attempt in (Store.resume, open_run):
        with pytest.raises(StoreError, match="other tables"):
            attempt(tmp_path / "run")
    path.write_bytes(b"a letter, not a database" * 100)
    for attempt in (Store.resume, open_run):
        with pytest.raises(StoreError, match="not a database"):
            attempt(tmp_path / "run")
    assert store_threads() == []


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself reports "database or disk is full" beyond 64 pages."""

    def limited(path: Path, connect: Any = database.connect_writer) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(path)
        connection.execute("PRAGMA max_page_count = 64")
        return connection

    monkeypatch.setattr(database, "connect_writer", limited)


@pytest.mark.usefixtures("small_disk")
async def test_a_full_disk_reaches_every_caller_and_harms_nothing_acknowledged(tmp_path: Path) -> None:
    store = create(tmp_path / "run")
    await store.add_trajectory(trajectory("small"))
    large = [trajectory(f"large-{n}", error="x" * 50_000) for n in range(40)]  # 2 MB into 256 KiB
    outcomes = await asyncio.gather(*(store.add_trajectory(t) for t in large), return_exceptions=True)
    acknowledged = [t.id for t, outcome in zip(large, outcomes, strict=True) if outcome is None]
    failures = [outcome for outcome in outcomes if outcome is not None]
    assert failures
    assert all(isinstance(error, StoreError) and "disk is full" in str(error) for error in failures)
    with pytest.raises(StoreError, match="disk is full"):  # also later, and also what would fit
        await store.add_trajectory(trajectory("tiny"))
    with pytest.raises(StoreError, match="disk is full"):
        await store.add_metrics(1, {"loss": 1.0})
    await store.close()
    assert store_threads() == []
    assert recorded(tmp_path / "run") == ["small", *acknowledged]


async def test_a_run_goes_on_after_its_disk_was_full(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_trajectory(trajectory("before"))
    request.getfixturevalue("small_disk")
    store = Store.resume(tmp_path / "run")
    with pytest.raises(StoreError, match="go on with resume=True"):
        await store.add_trajectory(trajectory("large", error="x" * 500_000))
    await store.close()
    request.getfixturevalue("monkeypatch").undo()
    async with Store.resume(tmp_path / "run") as store:
        await store.add_trajectory(trajectory("large", error="x" * 500_000))
    assert recorded(tmp_path / "run") == ["before", "large"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
async def test_metrics_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = create(tmp_path / "run")
    store._metrics.close()
    store._metrics = open("/dev/full", "ab", buffering=0)  # noqa: ASYNC230, SIM115
    with pytest.raises(StoreError, match="No space left"):
        await store.add_metrics(1, {"loss": 1.0})
    with pytest.raises(StoreError, match="No space left"):
        await store.add_trajectory(trajectory("a"))
    await store.close()


async def test_a_refused_write_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        outcomes = await asyncio.gather(
            store.add_trajectory(trajectory("a")),
            store.add_group(group(0, "b", "a")),  # "a" repeats: nothing of this group is kept
            store.add_trajectory(trajectory("c", position=2**63)),  # beyond SQLite's integers
            store.add_trajectory(trajectory("d")),
            return_exceptions=True,
        )
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreError, StoreError, type(None)]
    assert "trajectory a was recorded before" in str(outcomes[1])
    assert recorded(tmp_path / "run") == ["a", "d"]


async def test_a_batch_is_committed_in_its_order(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_group(group(0, "a", "b"))
        await store.add_group(group(1, "c", "d"))
        await store.commit_batch(1, ["d", "c", "a", "b"])
        assert open_run(store.dir).batches == {1: ["d", "c", "a", "b"]}
        assert recorded(store.dir, step=1) == ["a", "b", "c", "d"]


async def test_a_batch_of_what_cannot_be_trained_is_refused_whole(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_group(group(0, "a", "b"))
        with pytest.raises(StoreError, match="batch of step 1: trajectory x was never recorded"):
            await store.commit_batch(1, ["a", "x"])
        assert open_run(store.dir).batches == {}
        assert recorded(store.dir, step=1) == []
        await store.commit_batch(1, ["a"])
        with pytest.raises(StoreError, match="trajectory a is in the batch of step 1"):
            await store.commit_batch(2, ["b", "a"])
        with pytest.raises(StoreError, match="trajectory b is in the batch of step 2"):
            await store.commit_batch(2, ["b", "b"])
        with pytest.raises(StoreError, match="step 1 has a committed batch"):
            await store.commit_batch(1, ["b"])
        assert open_run(store.dir).batches == {1: ["a"]}


def complete(folder: Path, step: int) -> Path:
    """A checkpoint, as far as a run needs to know."""
    folder.mkdir()
    (folder / "trainer.json").write_text(json.dumps({"step": step, "version": step, "grad_clip": math.inf}))
    return folder


async def test_discarding_goes_back_to_a_checkpoint_and_keeps_the_rows(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        for step, ids, version in [(1, ("a1", "a2"), 0), (2, ("b1", "b2"), 0), (3, ("c1", "c2"), 2)]:
            await store.add_group(group(step, *ids, version=version))
            await store.commit_batch(step, ids)
            await store.add_metrics(step, {"loss": float(step)})
            await store.add_checkpoint(step, step, complete(store.dir / f"checkpoint-{step}", step))
        await store.add_group(group(4, "d1", version=1))
        await store.add_trajectory(trajectory("e1", version=1, split="eval"), step=1)
        await store.add_trajectory(trajectory("e2", version=1, split="eval"), step=2)
        with pytest.raises(StoreError, match="no checkpoint of step 7"):
            await store.discard_after(7)

        await store.discard_after(1)  # its checkpoint has version 1
        run = open_run(store.dir)
        assert run.batches == {1: ["a1", "a2"]}
        assert [c.step for c in run.checkpoints] == [1]
        assert run.metrics == [{"step": 1, "loss": 1.0}]
        # c was sampled by version 2, e2 evaluated after step 2. b holds only version 0: free for a new batch.
        assert recorded(store.dir) == ["a1", "a2", "b1", "b2", "d1", "e1"]
        assert recorded(store.dir, superseded=True) == ["a1", "a2", "b1", "b2", "c1", "c2", "d1", "e1", "e2"]
        assert run.trajectory("c1").id == "c1"
        assert [json.loads(line)["step"] for line in (store.dir / "metrics.jsonl").read_text().splitlines()] == [1]

        with pytest.raises(StoreError, match="c1 was discarded"):
            await store.commit_batch(2, ["c1"])
        await store.commit_batch(2, ["b2", "d1"])
        await store.add_metrics(2, {"loss": 20.0})
        await store.add_checkpoint(2, 2, complete(tmp_path / "elsewhere", 2))
        assert run.batches == {1: ["a1", "a2"], 2: ["b2", "d1"]}
        assert run.metrics[1] == {"step": 2, "loss": 20.0}
        assert [c.path for c in run.checkpoints] == [store.dir / "checkpoint-1", tmp_path / "elsewhere"]

        await store.discard_after(0)
        assert (run.batches, run.metrics, run.checkpoints) == ({}, [], [])
        assert recorded(store.dir) == ["a1", "a2", "b1", "b2"]  # version 0 only; d1 and e1 hold version 1


async def test_what_an_interrupted_run_left_unfinished_is_set_aside(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_group(group(0, "a", "failed"))
        await store.commit_batch(1, ["a"])
        await store.add_group(group(1, "b"))
        await store.add_group(group(2, "c"))
        for step in (0, 1):
            await store.add_trajectory(trajectory(f"e{step}", split="eval"), step=step)
        for _ in range(2):
            await store.discard_uncommitted(2, {0})
            assert recorded(store.dir) == ["a", "failed", "b", "e0"]
        await store.discard_uncommitted(0, ())
        assert recorded(store.dir) == ["a"], "what is in no batch; what is in one stays"


async def test_who_trained_a_step_is_on_record(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        run = open_run(store.dir)
        assert run.fingerprint(1) == {}
        for after, threads in [(0, 1), (3, 1), (5, 2), (7, 1), (6, 3)]:  # the last one went back to step 6
            await store.set_trainer(after, {"threads": threads})
        assert [run.fingerprint(step)["threads"] for step in range(1, 9)] == [1, 1, 1, 1, 1, 2, 3, 3]


async def test_metrics_go_to_the_table_and_to_strict_json_lines(tmp_path: Path) -> None:
    import numpy as np

    async with create(tmp_path / "run") as store:
        await store.add_metrics(1, {"loss": np.float32(0.5), "note": "\ud800é"})  # type: ignore[dict-item]
        await store.add_metrics(1, {"eval": 0.25})
        line, second = (store.dir / "metrics.jsonl").read_text().splitlines()  # flushed: readable before the end
        await store.add_metrics(2, {"loss": math.nan, "inf": math.inf})
    assert json.loads(line)["loss"] == 0.5
    assert json.loads(line)["note"] == "\ud800é"
    assert json.loads(second)["eval"] == 0.25

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    third = json.loads((store.dir / "metrics.jsonl").read_text().splitlines()[2], parse_constant=refuse)
    assert (third["step"], third["loss"], third["inf"]) == (2, None, None)
    first, last = open_run(store.dir).metrics
    assert first == {"step": 1, "loss": 0.5, "note": "\ud800é", "eval": 0.25}
    assert math.isnan(last["loss"])
    assert last["inf"] == math.inf


async def test_resume_restores_a_torn_metrics_file(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        await store.add_metrics(1, {"loss": 0.5})
        await store.add_metrics(2, {"loss": 0.25})
    path = store.dir / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-10])  # as a power loss may leave it
    async with Store.resume(store.dir):
        assert path.read_text() == whole


async def test_closing_writes_what_waits_and_stops_the_thread(tmp_path: Path) -> None:
    store = create(tmp_path / "run")
    assert len(store_threads()) == 1
    waiting = [asyncio.create_task(store.add_trajectory(trajectory(f"t{n}"))) for n in range(100)]
    await asyncio.sleep(0)  # they are queued
    await asyncio.gather(store.close(), store.close())
    await asyncio.gather(*waiting)
    assert store_threads() == []
    assert len(recorded(store.dir)) == 100
    await store.close()
    store.shutdown()
    with pytest.raises(StoreError, match="closed for writing"):
        await store.add_trajectory(trajectory("late"))


async def test_a_cancelled_caller_does_not_disturb_the_writer(tmp_path: Path) -> None:
    async with create(tmp_path / "run") as store:
        task = asyncio.create_task(store.add_trajectory(trajectory("a")))
        await asyncio.sleep(0)  # queued
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.add_trajectory(trajectory("b"))
    assert recorded(store.dir) == ["a", "b"]


def test_a_loop_that_is_gone_before_the_commit_loses_nothing(tmp_path: Path) -> None:
    store = create(tmp_path / "run")
    blocker = sqlite3.connect(store.dir / "run.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # the writer has to wait, so that its answer comes after the loop's end

    async def interrupted() -> None:
        task = asyncio.create_task(store.add_group(group(0, "a", "b")))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(interrupted())
    with pytest.raises(StoreError, match=r"still writing after 0\.01 s"):
        store.shutdown(timeout=0.01)
    blocker.close()
    store.shutdown()
    assert store_threads() == []
    assert recorded(store.dir) == ["a", "b"]


def test_without_shared_memory_a_rollback_journal_takes_over(tmp_path: Path) -> None:
    # SQLite's dotfile VFS has no shared memory, like some network file systems.
    for vfs, mode in [("unix", "wal"), ("unix-dotfile", "delete")]:
        connection = sqlite3.connect(f"file:{tmp_path}/{vfs}.sqlite?vfs={vfs}", uri=True, isolation_level=None)
        assert use_wal(connection) == mode
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA: each commit is durable
        connection.execute("CREATE TABLE t (x)")
        connection.close()
