"""An interrupted run ends with the weights and the history of one that never was."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import molt_sdk as molt
from molt_sdk.checkpoints import Checkpoints
from molt_sdk.errors import ConfigError, ModelPathError
from molt_sdk.store import Store
from molt_sdk.testing import ScriptedEngine
from tests.training import FALLING, arguments, chatter, fit, moody, state_hash
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import StepResult, Trainer

KILLS = int(os.environ.get("MOLT_KILLS", "5"))
"""`make soak` sets more."""

UNREPEATABLE = ("time", "seconds", "queue", "failed/", "dropped/", "eval/seconds")
"""Metrics that depend on the clock, or that count what one session of the run has seen."""


class Crash(Exception):
    """Stands for a process that ends at this point."""


@pytest.fixture(scope="module")
def unbroken(pocket: str, tmp_path_factory: pytest.TempPathFactory) -> molt.Run:
    """The run that all others have to equal."""
    return fit(pocket, tmp_path_factory.mktemp("unbroken") / "run")


def crash(
    model: str, run_dir: Path, patch: pytest.MonkeyPatch, *, in_step: int, after: bool = False, **changes: Any
) -> None:
    """A run that ends in the trainer, before (or just after) it trains this step, and leaves what ``kill -9`` would: no
    last checkpoint."""
    original = Trainer.step
    batches = molt.open_run(run_dir).batches if Store.is_run(run_dir) else {}
    steps = iter(range(max((c.step for c in _checkpoints(run_dir)), default=0) + 1, 10**6))

    def step(self: Trainer, *args: Any, **options: Any) -> StepResult:
        now = next(steps)
        self.wait_saved()
        if now == in_step and not after:
            raise Crash
        result = original(self, *args, **options)
        if now == in_step:
            raise Crash
        return result

    async def nothing(*_: Any) -> None: ...

    with patch.context() as during:
        during.setattr(Trainer, "step", step)
        during.setattr(Checkpoints, "finish", nothing)
        with pytest.raises(Crash):
            fit(model, run_dir, resume=True, **changes)
    assert len(molt.open_run(run_dir).batches) >= len(batches)


def _checkpoints(run_dir: Path) -> list[Any]:
    return molt.open_run(run_dir).checkpoints if Store.is_run(run_dir) else []


def check_history(run: molt.Run, like: molt.Run) -> None:
    """Final state, batches and numbers are those of ``like``; nothing was trained twice."""
    last = like.checkpoints[-1]
    assert run.checkpoints[-1].step == last.step
    assert state_hash(run.checkpoints[-1].path) == state_hash(last.path)
    assert state_hash(run.dir / "model") == state_hash(like.dir / "model")
    states = [json.loads((r.checkpoints[-1].path / "trainer.json").read_text()) for r in (run, like)]
    counted = ("step", "position", "version", "skipped_steps", "adam_steps")
    assert [states[0][name] for name in counted] == [states[1][name] for name in counted]
    assert states[0]["position"] == run.next_position(last.step)
    assert list(run.batches) == list(like.batches) == list(range(1, last.step + 1))
    for step in run.batches:
        ours, theirs = run.groups(step), like.groups(step)
        assert [(g.epoch, g.position) for g in ours] == [(g.epoch, g.position) for g in theirs]
        assert [(t.index, t.text, t.reward) for g in ours for t in g] == [
            (t.index, t.text, t.reward) for g in theirs for t in g
        ]
    trained = Counter(identity for ids in run.batches.values() for identity in ids)
    assert set(trained.values()) == {1}
    assert [_repeatable(row) for row in run.metrics] == [_repeatable(row) for row in like.metrics]
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    steps = Counter(line["step"] for line in lines if "loss" in line)
    assert steps == dict.fromkeys(range(1, last.step + 1), 1)
    kept = Counter(
        (t.split, t.position, t.index, t.split == "eval" and t.turns[0].versions[0]) for t in run.trajectories()
    )
    assert set(kept.values()) == {1}, "two trajectories of one place count"


def _repeatable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(UNREPEATABLE)}


# Interruptions


@pytest.mark.parametrize("in_step", [1, 2, 4, 6])
@pytest.mark.parametrize("after", [False, True])
def test_committed_batches_are_trained_again_to_the_bit(
    pocket: str, tmp_path: Path, unbroken: molt.Run, monkeypatch: pytest.MonkeyPatch, in_step: int, after: bool
) -> None:
    crash(pocket, tmp_path / "run", monkeypatch, in_step=in_step, after=after)
    run = molt.open_run(tmp_path / "run")
    assert max(run.batches) == in_step
    assert [c.step for c in run.checkpoints] == [s for s in (3, 6) if s < in_step]
    before = run.batches
    run = fit(pocket, tmp_path / "run", resume=True)
    check_history(run, unbroken)
    assert {step: run.batches[step] for step in before} == before, "what was committed was trained, not sampled again"
    sampled = Counter(t.position for t in run.trajectories(superseded=True))
    assert {sampled[position] for position in range(8)} == {4}


def test_a_run_may_crash_again_and_while_it_resumes(
    pocket: str, tmp_path: Path, unbroken: molt.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice within the tail that is trained again, once before any checkpoint exists, once after one was made."""
    for in_step in (3, 2, 1, 5, 4, 5, 8, 7):
        crash(pocket, tmp_path / "run", monkeypatch, in_step=in_step)
    check_history(fit(pocket, tmp_path / "run", resume=True), unbroken)


@pytest.mark.parametrize("way", ["scope", "task"])
@pytest.mark.parametrize("calls", [1, 13, 22])
def test_a_cancelled_run_resumes_to_the_bit(
    pocket: str, tmp_path: Path, unbroken: molt.Run, way: str, calls: int
) -> None:
    """Cancelled at some model call, through a cancel scope or as asyncio does it."""

    async def cancelled() -> None:
        scope, task, count = anyio.CancelScope(), asyncio.current_task(), 0

        def reply(prompt: list[int], sampling: molt.SamplingParams) -> str:
            nonlocal count
            count += 1
            if count == calls:
                assert task is not None
                scope.cancel() if way == "scope" else task.cancel()
            return chatter(prompt, sampling)

        with scope:
            await molt.afit(**arguments(pocket, tmp_path / "run", engine=ScriptedEngine(pocket, reply)))
        assert scope.cancelled_caught

    if way == "task":
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())
    else:
        asyncio.run(cancelled())
    assert max(molt.open_run(tmp_path / "run").batches, default=0) < 8
    check_history(fit(pocket, tmp_path / "run", resume=True), unbroken)


def test_an_engine_that_fails_to_take_the_weights_ends_a_run_that_resumes_to_the_bit(
    pocket: str, tmp_path: Path, unbroken: molt.Run
) -> None:
    class Broken(ScriptedEngine):
        async def update_weights(self, weights: Any, version: int) -> None:
            if version == 3:
                raise molt.EngineError("out of reach")
            await super().update_weights(weights, version)

    with pytest.raises(molt.EngineError, match="out of reach"):
        fit(pocket, tmp_path / "run", engine=Broken(pocket, chatter))
    assert [c.version for c in molt.open_run(tmp_path / "run").checkpoints][-1] == 3, "saved at the end all the same"
    check_history(fit(pocket, tmp_path / "run", resume=True), unbroken)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_evaluation_that_was_interrupted_is_run_again(pocket: str, tmp_path: Path, at: int) -> None:
    """The first one, one between steps, and the last one, each with one of its two trajectories done."""
    evaluation = {"config": molt.FitConfig(eval_every=2, trainer=FALLING), "steps": 4}
    held_out = [{"prompt": "held out 0"}, {"prompt": "held out 1"}]
    seen = 0

    async def interrupted() -> None:
        task = asyncio.current_task()

        @molt.reward(name="moody")
        def grade(asked: molt.Task, trajectory: molt.Trajectory) -> float:
            nonlocal seen
            seen += str(asked.prompt).startswith("held out")
            if seen == 2 * at + 2 and task is not None:
                arrived = threading.Event()
                for call in (task.cancel, arrived.set):
                    task.get_loop().call_soon_threadsafe(call)
                arrived.wait()
            return moody(asked, trajectory)

        await molt.afit(**arguments(pocket, tmp_path / "run", rewards=[grade], eval_tasks=held_out, **evaluation))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    found = molt.open_run(tmp_path / "run")
    assert [row["step"] for row in found.metrics if "eval/reward" in row] == [0, 2, 4][:at]
    run = fit(pocket, tmp_path / "run", resume=True, eval_tasks=held_out, **evaluation)
    check_history(run, fit(pocket, tmp_path / "whole", eval_tasks=held_out, **evaluation))
    assert [row["step"] for row in run.metrics if "eval/reward" in row] == [0, 2, 4]
    assert len(list(run.trajectories(split="eval"))) == 6


def test_f106_f107_a_run_goes_on_at_the_end_of_an_epoch_and_in_a_later_one(pocket: str, tmp_path: Path) -> None:
    whole = fit(pocket, tmp_path / "whole", steps=13)
    for steps in (5, 8, 10, 13):  # epochs are 5 tasks long
        run = fit(pocket, tmp_path / "run", resume=True, steps=steps)
    check_history(run, whole)
    again = fit(pocket, tmp_path / "run", resume=True, steps=13)  # nothing is left to do
    check_history(again, whole)
    epochs = [g.epoch for step in whole.batches for g in whole.groups(step)]
    assert epochs == [0] * 5 + [1] * 5 + [2] * 3
    third = [g.task.prompt for step in (11, 12, 13) for g in run.groups(step)]
    assert len(set(third)) == 3, "the third epoch starts at its own first task"


def test_with_staleness_too_committed_batches_give_the_weights_that_were_lost(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sampled after may differ."""
    lost: list[str] = []
    original = Trainer.step

    def step(self: Trainer, *args: Any, **options: Any) -> StepResult:
        result = original(self, *args, **options)
        lost.append(digest(self.weights()))
        return result

    monkeypatch.setattr(Trainer, "step", step)
    crash(pocket, tmp_path / "run", monkeypatch, in_step=5, after=True, max_staleness=1)
    before = molt.open_run(tmp_path / "run").batches
    found: list[str] = []

    class Looks(ScriptedEngine):
        async def update_weights(self, weights: Any, version: int) -> None:
            found.append(digest(weights))
            await super().update_weights(weights, version)

    run = fit(pocket, tmp_path / "run", resume=True, max_staleness=1, engine=Looks(pocket, chatter))
    assert found[0] == lost[4]
    assert {step: run.batches[step] for step in before} == before
    assert [g.position for step in run.batches for g in run.groups(step)] == list(range(8))
    superseded = {t.id for t in run.trajectories(superseded=True)} - {t.id for t in run.trajectories()}
    assert superseded.isdisjoint(i for ids in run.batches.values() for i in ids)


def digest(weights: Any) -> str:
    import hashlib

    made = hashlib.sha256()
    for name, tensor in weights:
        made.update(name.encode() + tensor.numpy().tobytes())
    return made.hexdigest()


# A tail that cannot be repeated


def pretend(patch: pytest.MonkeyPatch, fingerprint: dict[str, str | int]) -> None:
    """The trainers made from now on say this of themselves."""
    start = Trainer._start

    def other(self: Trainer, setup: Any) -> None:
        start(self, setup)
        self.fingerprint = fingerprint

    patch.setattr(Trainer, "_start", other)


OTHER: dict[str, tuple[dict[str, str | int], str]] = {
    "other": ({"threads": 99}, r"would not give the same bits.*threads was \d+ and is 99"),
    "gpu": ({}, "on this device, training does not repeat to the bit"),
}


@pytest.mark.parametrize("kind", OTHER)
def test_what_another_trainer_trained_is_discarded_with_all_that_its_weights_sampled(
    pocket: str,
    tmp_path: Path,
    unbroken: molt.Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    crash(pocket, tmp_path / "run", monkeypatch, in_step=6)
    run = molt.open_run(tmp_path / "run")
    before, (checkpoint,) = run.batches, run.checkpoints
    fingerprint, message = OTHER[kind]
    pretend(monkeypatch, fingerprint)
    fit(pocket, tmp_path / "run", resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(f"discarding steps 4 to 6 and going on from step 3: .*{message}", said)
    assert {step: run.batches[step] == before[step] for step in before} == {s: s <= 3 for s in range(1, 7)}
    for t in (run.trajectory(identity) for step in (4, 5, 6) for identity in before[step]):
        assert t.oldest_version is not None
        assert t.oldest_version >= checkpoint.version
    check_history(run, unbroken)  # the trainer only said that it is another one


def test_a_tail_counts_as_that_of_the_trainer_that_trained_it(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever made the checkpoint before it."""
    crash(pocket, tmp_path / "run", monkeypatch, in_step=5)
    with monkeypatch.context() as elsewhere:
        pretend(elsewhere, {"threads": 99})
        crash(pocket, tmp_path / "run", monkeypatch, in_step=5)
        crash(pocket, tmp_path / "run", monkeypatch, in_step=4)
        said = capsys.readouterr().err
        assert "discarding steps 4 to 5" in said
        assert "training steps 4 to 5 again" in said
    fit(pocket, tmp_path / "run", resume=True)
    assert "discarding steps 4 to 5" in capsys.readouterr().err


# Checkpoints


def test_the_newest_and_the_best_checkpoint_are_kept(pocket: str, tmp_path: Path) -> None:
    held_out = [{"prompt": "held out"}]
    good = {"1": [1], "tie": [1, 2], "last": [3]}
    for case, best in good.items():
        evaluations = iter(range(4))

        def reward(
            task: molt.Task, t: molt.Trajectory, best: list[int] = best, evaluations: Iterator[int] = evaluations
        ) -> float:
            return float(next(evaluations) in best) if task.prompt == "held out" else float(len(t.text) % 2)

        config = molt.FitConfig(checkpoint_every=5, eval_every=2, keep_checkpoints=1, trainer=FALLING)
        run = fit(pocket, tmp_path / case, steps=6, rewards=[reward], eval_tasks=held_out, config=config)
        assert run.best is not None
        assert run.best.step == 2 * max(best)
        assert [c.step for c in run.checkpoints] == sorted({run.best.step, 6})
        names = {path.name for path in (run.dir / "checkpoints").iterdir()}
        assert names == {f"step-{c.step}" for c in run.checkpoints}
    more = molt.FitConfig(checkpoint_every=1, keep_checkpoints=3, trainer=FALLING)
    run = fit(pocket, tmp_path / "1", steps=8, resume=True, config=more)
    assert [c.step for c in run.checkpoints] == [2, 6, 7, 8]


def test_f109_f110_damaged_checkpoints_are_passed_over_and_their_loss_is_an_error(
    pocket: str, tmp_path: Path, unbroken: molt.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    crash(pocket, tmp_path / "run", monkeypatch, in_step=8)
    assert [c.step for c in molt.open_run(tmp_path / "run").checkpoints] == [3, 6]
    (folder / ".step-7.new-0123abcd" / "model").mkdir(parents=True)  # a save that was killed
    (folder / "step-7").mkdir()  # a copy that lost files
    (folder / "step-6" / "trainer.json").write_text('{"format": 2, "st')
    with pytest.MonkeyPatch.context() as patch:
        crash(pocket, tmp_path / "run", patch, in_step=5)  # steps 4 and 5 are trained again; then all is gone
    assert not list(folder.glob(".*"))
    backup = (folder / "step-3" / "trainer.json").read_bytes()
    (folder / "step-3" / "trainer.json").unlink()
    with pytest.raises(
        molt.StoreError,
        match=r"holds 8 trained steps, but no checkpoint of it is complete: .*step-3 has no trainer.json; "
        r".*step-6 has a trainer.json that cannot be used; .*step-7 has no trainer.json",
    ):
        fit(pocket, tmp_path / "run", resume=True)
    shutil.rmtree(folder)
    with pytest.raises(molt.StoreError, match=r"step-3 is gone; .*step-6 is gone"):
        fit(pocket, tmp_path / "run", resume=True)
    shutil.copytree(unbroken.dir / "checkpoints" / "step-6", folder / "step-6")
    (folder / "step-3").mkdir()
    (folder / "step-3" / "trainer.json").write_bytes(backup)  # older than the newest: nobody looks at it
    check_history(fit(pocket, tmp_path / "run", resume=True), unbroken)


def test_f109_a_checkpoint_that_no_one_had_time_to_record_is_gone_on_from(
    pocket: str,
    tmp_path: Path,
    unbroken: molt.Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def killed(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_checkpoint", killed)
        crash(pocket, tmp_path / "run", patch, in_step=8)
    run = molt.open_run(tmp_path / "run")
    assert [c.step for c in run.checkpoints] == [3]
    fit(pocket, tmp_path / "run", resume=True)
    assert "the newest checkpoint is of step 3" in capsys.readouterr().err
    check_history(run, unbroken)


def test_a_checkpoint_with_a_damaged_tensor_file_is_named(
    pocket: str, tmp_path: Path, unbroken: molt.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(pocket, tmp_path / "run", monkeypatch, in_step=8)
    newest = tmp_path / "run" / "checkpoints" / "step-6"
    for file in (newest / "model").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(molt.TrainingError, match=rf"remove {newest} to go on from step-3"):
        fit(pocket, tmp_path / "run", resume=True)
    shutil.rmtree(newest)
    check_history(fit(pocket, tmp_path / "run", resume=True), unbroken)


def fill_disk(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Writing tensors of these checkpoints fails half-way."""
    from trainer_backend import checkpoint

    write_tensors = checkpoint.write_tensors

    def full(path: Path, tensors: Any, *args: Any) -> None:
        if any(f".step-{step}." in str(path) for step in steps):
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        write_tensors(path, tensors, *args)

    patch.setattr(checkpoint, "write_tensors", full)


def test_f112_f113_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(
    pocket: str, tmp_path: Path, unbroken: molt.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_disk(patch, 6, 7)
        with pytest.raises(molt.TrainingError, match=r"after step 6, .*step-6. was not saved: .*No space"):
            fit(pocket, tmp_path / "run")
    run = molt.open_run(tmp_path / "run")
    assert [c.step for c in run.checkpoints] in ([3], [3, 8])  # 8: if it failed so late that all steps were done
    assert {path.name for path in (run.dir / "checkpoints").iterdir()} == {f"step-{c.step}" for c in run.checkpoints}
    check_history(fit(pocket, tmp_path / "run", resume=True), unbroken)


def test_f112_a_run_may_go_on_without_the_checkpoint_but_not_without_the_last_one(
    pocket: str, tmp_path: Path, unbroken: molt.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = molt.FitConfig(checkpoint_every=3, on_save_error="warn", trainer=FALLING)
    with monkeypatch.context() as patch:
        fill_disk(patch, 3)
        patch.setattr("molt_sdk.checkpoints.logger.error", lambda text, *args: said.append(text.format(*args)))
        run = fit(pocket, tmp_path / "run", config=config)
    assert [c.step for c in run.checkpoints] == [6, 8]
    check_history(run, unbroken)
    (line,) = said
    assert re.search(r"after step 3, .* was not saved.*No space left.*the run goes on", line)
    with monkeypatch.context() as patch:
        fill_disk(patch, 8)
        with pytest.raises(molt.TrainingError, match=r"after step 8, .* was not saved"):
            fit(pocket, tmp_path / "last", config=config)
    check_history(fit(pocket, tmp_path / "last", resume=True), unbroken)


def test_the_trained_model_can_be_loaded_and_is_replaced_by_that_of_the_resumed_run(
    pocket: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = ScriptedEngine(pocket, chatter)
    last: dict[str, Any] = {}

    async def update_weights(weights: Any, version: int) -> None:
        last.update(weights)
        engine.version = version

    engine.update_weights = update_weights  # type: ignore[method-assign]
    before = state_hash(fit(pocket, tmp_path / "run", steps=2).dir / "model")
    run = fit(pocket, tmp_path / "run", steps=3, resume=True, engine=engine)
    assert state_hash(run.dir / "model") != before
    model = AutoModelForCausalLM.from_pretrained(run.dir / "model")
    loaded = model.state_dict()
    assert all((loaded[name] == tensor.to(loaded[name].dtype)).all() for name, tensor in last.items())
    assert AutoTokenizer.from_pretrained(run.dir / "model").chat_template


# Settings


def test_what_changes_speed_and_memory_only_may_change_on_resume(pocket: str, tmp_path: Path) -> None:
    fit(pocket, tmp_path / "run", steps=2)
    frugal = msgspec.structs.replace(
        FALLING, max_tokens_per_microbatch=64, activation_checkpointing=True, offload="optimizer", device="cpu"
    )
    run = fit(pocket, tmp_path / "run", steps=3, resume=True, config=molt.FitConfig(trainer=frugal))
    assert sorted(run.batches) == [1, 2, 3]
    cosine = msgspec.structs.replace(FALLING, schedule="cosine", ranks=2)
    with pytest.raises(ConfigError, match=r"settings: trainer\.schedule was 'linear' and is 'cosine'\. Use"):
        fit(pocket, tmp_path / "run", steps=3, resume=True, config=molt.FitConfig(trainer=cosine))


def test_a_run_or_checkpoint_is_no_model_and_says_where_one_is(pocket: str, tmp_path: Path) -> None:
    run = fit(pocket, tmp_path / "run", steps=1)
    for path, kind in ((run.dir, "a run"), (run.checkpoints[-1].path, "a checkpoint")):
        with pytest.raises(ModelPathError, match=f"is {kind}, not a model; .*molt-sdk export"):
            fit(str(path), tmp_path / "other", steps=1, engine="torch")


def test_f115_a_longer_run_keeps_its_schedule_only_if_told_so(pocket: str, tmp_path: Path) -> None:
    def settings(decay_steps: int | None) -> molt.FitConfig:
        return molt.FitConfig(trainer=TrainerConfig(schedule="linear", decay_steps=decay_steps))

    short = fit(pocket, tmp_path / "run", steps=3, config=settings(None))
    assert short.config["trainer"]["decay_steps"] is None, "what was given is stored as it was"
    with pytest.raises(
        molt.ConfigError, match=r"falls over the steps of the run, which were 3 and are 5; .*trainer.decay_steps=3"
    ):
        fit(pocket, tmp_path / "run", steps=5, config=settings(None), resume=True)
    run = fit(pocket, tmp_path / "run", steps=5, config=settings(3), resume=True)
    whole = fit(pocket, tmp_path / "whole", steps=5, config=settings(3))
    check_history(run, whole)
    rates = [row["learning_rate"] for row in whole.metrics]
    assert rates[0] > rates[2] > rates[4]
    with pytest.raises(molt.ConfigError, match=r"trainer.decay_steps was 3 and is 4"):
        fit(pocket, tmp_path / "run", steps=6, config=settings(4), resume=True)
    config = molt.FitConfig(trainer=TrainerConfig(schedule="linear", warmup_steps=9))
    with pytest.raises(molt.ConfigError, match=r"warmup_steps"):
        fit(pocket, tmp_path / "other", steps=5, config=config)


# kill -9


CHILD = """
import sys
from pathlib import Path
import molt_sdk as molt
from tests.training import FALLING, QUESTIONS, fit
config = molt.FitConfig(checkpoint_every=3, eval_every=5, trainer=FALLING)
print("loading", file=sys.stderr, flush=True)
fit(sys.argv[1], Path(sys.argv[2]), resume=True, steps=int(sys.argv[3]), eval_tasks=QUESTIONS[:2], config=config)
"""


@pytest.mark.slow
@pytest.mark.timeout(180 + 20 * KILLS)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(pocket: str, tmp_path: Path) -> None:
    """``kill -9`` after a random number of progress lines and a random time."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    steps = 4 * KILLS + 4
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CHILD, pocket, str(tmp_path / "run"), str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    kills = 0
    while True:
        with subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            said, wanted = [], dice.randint(1, 8)
            for line in child.stderr:
                said.append(line)
                wanted -= re.match("loading|run |step ", line) is not None
                if wanted == 0 and kills < KILLS:
                    time.sleep(dice.uniform(0, 0.3))
                    child.kill()
            code = child.wait(timeout=60)
        if code == 0:
            break
        assert code == -9, "".join(said)
        kills += 1
        print(f"kill {kills} after {said[-1].strip()}")
    command[-2] = str(tmp_path / "unbroken")  # in a process of its own too: as many threads, the same bits
    subprocess.run(command, cwd=root, env=environment, check=True)
    run = molt.open_run(tmp_path / "run")
    check_history(run, molt.open_run(tmp_path / "unbroken"))
    folder = tmp_path / "run" / "checkpoints"
    kept = {c.path for c in run.checkpoints[-2:]} | {run.best.path if run.best else None}
    assert set(folder.iterdir()) == kept
