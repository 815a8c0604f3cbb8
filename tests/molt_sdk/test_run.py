"""A run on disk can be read by anyone, in every way that the documentation promises."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from molt_sdk.errors import StoreError
from molt_sdk.packed import pack_floats, pack_ints
from molt_sdk.run import Run, open_run
from molt_sdk.store import Store
from molt_sdk.types import SamplingParams, Task, Trajectory, TrajectoryGroup, Turn

pytestmark = pytest.mark.anyio


def trajectory(id: str, *, agents: tuple[str, ...] = ("main",), version: int = 0, **fields: Any) -> Trajectory:
    """One turn of one sampled token for each agent."""
    turns = tuple(
        Turn(
            id=number,
            parent=None,
            fork_reason="first call",
            agent=agent,
            trainable=True,
            new_messages=[{"role": "user", "content": "q"}],
            tools=(),
            sampling=SamplingParams(),
            message={"role": "assistant", "content": "a"},
            finish_reason="stop",
            context_i32=pack_ints([1]),
            completion_i32=pack_ints([2]),
            logprobs_f32=pack_floats([-0.5]),
            version_spans=((version, 0, 1),),
        )
        for number, agent in enumerate(agents)
    )
    return Trajectory(id=id, turns=turns, **{"task": Task("q", id="sum-1"), **fields})


def group(position: int, *members: Trajectory, epoch: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup(task=members[0].task, position=position, epoch=epoch, trajectories=members)


def complete(folder: Path) -> None:
    """A checkpoint, as far as a run needs to know."""
    step = int(folder.name.removeprefix("step-"))
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(f'{{"step": {step}, "version": {step}, "grad_clip": Infinity}}')


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    """Two steps, an evaluation after each, one failure."""
    config = {"model": "pocket"}
    async with Store.create(tmp_path / "run", meta={}, config=config) as store:
        other = Task("q", id="sum-\ud800")
        await store.add_group(group(0, trajectory("aa11", reward=0.0), trajectory("aa22", reward=1.0)))
        await store.add_group(
            group(1, trajectory("bb11", position=1, task=other, reward=0.5, agents=("main", "critic")), epoch=3)
        )
        await store.add_trajectory(trajectory("cc11", position=2, status="env_error", error="Traceback: boom"))
        await store.commit_batch(1, ["bb11", "aa22", "aa11"])
        await store.add_metrics(1, {"loss": 0.75, "reward/correct": 0.5})
        for step in (0, 1):
            await store.add_checkpoint(step, step, store.dir / "checkpoints" / f"step-{step}")
        complete(store.dir / "checkpoints" / "step-1")  # the files of step 0 were deleted since
        await store.add_trajectory(trajectory("ee11", split="eval", version=1, reward=0.25), step=1)
        await store.add_group(group(3, trajectory("dd11", position=3, version=1, reward=1.0)))
        await store.commit_batch(2, ["dd11"])
        await store.add_metrics(2, {"loss": 0.5, "reward/correct": 1.0, "note": "text"})
        await store.add_trajectory(trajectory("ee22", split="eval", version=2, reward=0.5), step=2)
        await store.add_trajectory(trajectory("ee33", split="eval", version=2, reward=1.0), step=2)
    return open_run(tmp_path / "run")


def ids(found: Iterator[Trajectory]) -> list[str]:
    return [t.id for t in found]


async def test_trajectories_can_be_filtered(run: Run) -> None:
    everything = ["aa11", "aa22", "bb11", "cc11", "ee11", "dd11", "ee22", "ee33"]
    assert ids(run.trajectories()) == everything
    assert ids(run.trajectories(limit=3)) == everything[:3]
    assert ids(run.trajectories(limit=0)) == []
    assert ids(run.trajectories(step=1)) == ["aa11", "aa22", "bb11", "ee11"]
    assert ids(run.trajectories(step=1, split="train")) == ["aa11", "aa22", "bb11"]
    assert ids(run.trajectories(split="eval")) == ["ee11", "ee22", "ee33"]
    assert ids(run.trajectories(status="env_error")) == ["cc11"]
    assert ids(run.trajectories(task="sum-\ud800")) == ["bb11"]
    assert ids(run.trajectories(agent="critic")) == ["bb11"]
    assert ids(run.trajectories(agent="main", position=3)) == ["dd11"]
    assert ids(run.trajectories(task="no such task")) == []
    with pytest.raises(StoreError, match=r"no status 'env_eror' \(nearest: env_error, "):
        run.trajectories(status="env_eror")


async def test_many_trajectories_are_read_page_by_page(tmp_path: Path) -> None:
    async with Store.create(tmp_path / "run", meta={}, config={}) as store:
        await store.add_group(group(0, *(trajectory(f"t{n:04d}", index=n) for n in range(300))))
    assert ids(open_run(tmp_path / "run").trajectories()) == [f"t{n:04d}" for n in range(300)]
    assert ids(open_run(tmp_path / "run").trajectories(limit=129)) == [f"t{n:04d}" for n in range(129)]


async def test_a_trajectory_by_the_beginning_of_its_id(run: Run) -> None:
    assert run.trajectory("aa22") == trajectory("aa22", reward=1.0)
    assert run.trajectory("d").id == "dd11"
    with pytest.raises(StoreError, match="several ids begin with 'aa': aa11, aa22"):
        run.trajectory("aa")
    with pytest.raises(StoreError, match=r"no trajectory 'bb12' \(nearest: bb11"):
        run.trajectory("bb12")
    with pytest.raises(StoreError, match="no trajectory '%'"):
        run.trajectory("%")


async def test_groups_give_the_batch_in_training_order(run: Run) -> None:
    first, second = run.groups(1)
    assert (first.epoch, first.position, first.task.id) == (3, 1, "sum-\ud800")
    assert [t.id for t in first] == ["bb11"]
    assert (second.epoch, second.position) == (0, 0)
    assert [t.id for t in second] == ["aa22", "aa11"]
    assert second.rewards == [1.0, 0.0]
    with pytest.raises(StoreError, match="no batch of step 9; there are batches for steps 1 to 2"):
        run.groups(9)


async def test_the_summary(run: Run) -> None:
    assert run.status == {"ok": 7, "env_error": 1}
    assert run.metrics == [
        {"step": 1, "loss": 0.75, "reward/correct": 0.5},
        {"step": 2, "loss": 0.5, "reward/correct": 1.0, "note": "text"},
    ]
    assert run.batches == {1: ["bb11", "aa22", "aa11"], 2: ["dd11"]}
    (checkpoint,) = run.checkpoints
    assert (checkpoint.step, checkpoint.version, checkpoint.path) == (1, 1, run.dir / "checkpoints" / "step-1")
    assert run.config == {"model": "pocket"}
    assert repr(run) == f"Run({str(run.dir)!r}, 2 steps, 8 trajectories)"


async def test_checkpoints_follow_a_run_that_was_moved(run: Run, tmp_path: Path) -> None:
    run.dir.rename(tmp_path / "moved")
    assert open_run(tmp_path / "moved").checkpoints[0].path == tmp_path / "moved" / "checkpoints" / "step-1"
    assert "unreadable" in repr(run)


@pytest.mark.slow  # imports matplotlib
async def test_curves_and_their_image(run: Run, tmp_path: Path) -> None:
    assert run.curves() == {
        "reward": [(1, 0.5), (2, 1.0)],  # step 1: (0 + 1 + 0.5) / 3; evaluations do not count
        "eval/reward": [(1, 0.25), (2, 0.75)],  # after step 2: (0.5 + 1) / 2
        "reward/correct": [(1, 0.5), (2, 1.0)],
    }
    assert run.curves(metrics=("loss",))["loss"] == [(1, 0.75), (2, 0.5)]
    place = run.plot(tmp_path / "curve")
    assert place == tmp_path / "curve.png"
    assert place.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    assert imread(place).std() > 0.01  # something is drawn on the white page
    with pytest.raises(StoreError, match="cannot be written"):
        run.plot(tmp_path / "no" / "such" / "folder.png")


async def test_an_empty_run_reads_as_empty(tmp_path: Path) -> None:
    async with Store.create(tmp_path / "run", meta={}, config={}) as store:
        run = open_run(store.dir)
        assert (list(run.trajectories()), run.metrics, run.batches, run.checkpoints, run.status) == ([], [], {}, [], {})
        with pytest.raises(StoreError, match="none was committed yet"):
            run.groups(1)
        with pytest.raises(StoreError, match="nothing to plot yet"):
            run.plot(tmp_path / "curve.png")


async def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing holds no run \(run.sqlite is missing\)"):
        open_run(tmp_path / "missing")
    with pytest.raises(StoreError, match="holds no run"):
        open_run(tmp_path)


async def test_the_file_itself_names_the_run(run: Run) -> None:
    assert open_run(run.dir / "run.sqlite").dir == run.dir


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that any user may enter (tmp_path is the test user's own)."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Take the right to write in ``directory`` away; root, who may write everywhere, becomes nobody."""
    root = os.geteuid() == 0
    directory.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            (directory / "probe").touch()
        yield
    finally:
        if root:
            os.seteuid(0)
        directory.chmod(0o755)


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_a_finished_run_can_be_read_without_the_right_to_write(public_directory: Path, mode: str) -> None:
    async with Store.create(public_directory / "run", meta={}, config={}) as store:
        await store.add_trajectory(trajectory("a"))
    connection = sqlite3.connect(store.dir / "run.sqlite")  # "wal": as a reader at the moment of closing leaves it
    assert connection.execute(f"PRAGMA journal_mode={mode}").fetchone() == (mode,)
    connection.close()
    with read_only(store.dir):
        assert ids(open_run(store.dir).trajectories()) == ["a"]


async def test_a_running_run_can_be_read_without_the_right_to_write(public_directory: Path) -> None:
    async with Store.create(public_directory / "run", meta={}, config={}) as store:
        await store.add_trajectory(trajectory("a"))
        with read_only(store.dir):
            assert ids(open_run(store.dir).trajectories()) == ["a"]
