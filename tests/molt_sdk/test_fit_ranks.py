"""``fit`` with a trainer of several processes: the same run as with one, within rounding."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

import molt_sdk as molt
from molt_sdk.errors import TrainingError, TrainingMemoryError
from tests.training import FALLING, fit
from trainer_backend.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TWO = molt.FitConfig(checkpoint_every=3, trainer=msgspec.structs.replace(FALLING, ranks=2))


def rank_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [
        child
        for child in children
        if "trainer_backend.rank" in child.cmdline() and "torch.distributed.run" not in child.cmdline()
    ]


def test_two_ranks_train_what_one_does_and_leave_no_process(pocket: str, tmp_path: Path) -> None:
    one = fit(pocket, tmp_path / "one", steps=4)
    two = fit(pocket, tmp_path / "two", steps=4, config=TWO)
    names = ("loss", "grad_norm", "reward", "trained_tokens", "learning_rate", "entropy")
    steps = [(a, b) for a, b in zip(one.metrics, two.metrics, strict=True) if not a["skipped"]]
    assert len(steps) >= 2
    for alone, together in steps:
        for name in names:
            assert together[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name
    left, right = (load_file(run.dir / "model" / "model.safetensors") for run in (one, two))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert_close(right[name], tensor, rtol=1e-3, atol=1e-4)
    assert rank_processes() == []


def test_a_rank_that_dies_ends_the_run_which_resumes(pocket: str, tmp_path: Path) -> None:
    """Killed while step 3 is under way: its batch is committed, and trained by the resumed run."""

    class Killer:
        def start(self, run: Any) -> None: ...
        def finish(self) -> None: ...
        def log(self, step: int, metrics: dict[str, float]) -> None:
            if step == 2:
                os.kill(rank_processes()[0].pid, signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"rank [01] of 2 \(process \d+\) was killed by signal SIGKILL"):
        fit(pocket, tmp_path / "run", steps=4, config=TWO, trackers=[Killer()])
    assert rank_processes() == []
    run = fit(pocket, tmp_path / "run", steps=4, config=TWO, resume=True)
    assert sorted(run.batches) == [1, 2, 3, 4]
    whole = fit(pocket, tmp_path / "whole", steps=4, config=TWO)
    left, right = (load_file(r.dir / "model" / "model.safetensors") for r in (run, whole))
    assert all(bool((left[name] == right[name]).all()) for name in right)


def test_ranks_that_run_out_of_memory_start_over_once_with_smaller_micro_batches(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 3, on which the ranks end; the run goes on from its records by itself. The second time is the last."""
    step, sizes, limit = Trainer.step, [], [2048]

    def short_of_memory(trainer: Trainer, groups: Any, **arguments: Any) -> Any:
        if trainer.version >= 2 and trainer.config.max_tokens_per_microbatch > limit[0]:
            trainer.close()
            sizes.append(trainer.config.max_tokens_per_microbatch)
            raise TrainingMemoryError("rank 1 of 2 failed: OutOfMemoryError")
        return step(trainer, groups, **arguments)

    monkeypatch.setattr(Trainer, "step", short_of_memory)
    run = fit(pocket, tmp_path / "run", steps=4, config=TWO)
    assert (sorted(run.batches), sizes) == ([1, 2, 3, 4], [4096])
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    limit[0] = 0
    with pytest.raises(TrainingMemoryError):
        fit(pocket, tmp_path / "run", steps=6, config=TWO, resume=True)
    assert rank_processes() == []
