"""Several ranks on one machine: real processes under torchrun, over gloo."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from molt_sdk.errors import ConfigError, ModelPathError, TrainingError
from molt_sdk.types import Trajectory, TrajectoryGroup
from tests.trainer_backend.reference import (
    EXACT,
    READABLE,
    assert_gradients,
    gradient_of,
    hash_of,
    norm_of,
    reference,
)
from trainer_backend.config import TrainerConfig
from trainer_backend.launch import Launched
from trainer_backend.trainer import NON_FINITE, SaveError, StepCancelled, Trainer
from trainer_backend.wire import Bucket, Channel, Hello

MakeTrajectory = Callable[..., Trajectory]
MakeGroup = Callable[..., TrajectoryGroup]
MakeGroups = Callable[..., list[TrajectoryGroup]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", params=[2, 4])
def readable(request: pytest.FixtureRequest, pocket: str) -> Iterator[Trainer]:
    """A trainer of several ranks whose weights stay as they are and whose gradients can be read."""
    trainer = Trainer(pocket, TrainerConfig(ranks=request.param, **READABLE))
    yield trainer
    trainer.close()
    assert alive(trainer) == []


def processes(trainer: Trainer) -> list[psutil.Process]:
    assert isinstance(trainer._ranks, Launched)
    return [psutil.Process(pid) for pid in (trainer._ranks._process.pid, *trainer._ranks._pids.values())]


def alive(trainer: Trainer) -> list[int]:
    assert isinstance(trainer._ranks, Launched)
    pids = (trainer._ranks._process.pid, *trainer._ranks._pids.values())
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def set_budget(trainer: Trainer, tokens: int) -> None:
    trainer._budget = tokens


def test_loss_and_gradient_equal_an_unpacked_one_rank_float64_reference(
    readable: Trainer, pocket: str, make_groups: MakeGroups, tmp_path: Path
) -> None:
    """Random trees, orders, and splits into micro-batches. Ranks get unequal numbers of tokens and of micro-batches."""
    for seed, budget in enumerate([10_000, 30, 1]):
        set_budget(readable, budget)
        groups = make_groups(seed, groups=1 + seed)
        loss, gradients, count = reference(pocket, groups)
        random.Random(seed).shuffle(groups)
        result, found = gradient_of(readable, groups, tmp_path / str(seed))
        assert result.trained_tokens == result.computed_tokens == count  # each token on one rank, once
        assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert result.grad_norm == pytest.approx(norm_of(gradients), rel=1e-5)
        assert_gradients(found, gradients)


def test_a_rank_without_rows_takes_part(
    readable: Trainer,
    pocket: str,
    make_trajectory: MakeTrajectory,
    make_group: MakeGroup,
    tmp_path: Path,
) -> None:
    """One row for all ranks: its sibling has no trained token."""
    long = {"context": [1, 2, 3], "completion": [4, 5, 6, 7], "logprobs": [-5.6] * 4}
    masked = {"context": [1, 2], "completion": [9], "trainable": False}
    groups = [make_group([make_trajectory("a", [long], 1.0), make_trajectory("b", [masked], 0.0)])]
    set_budget(readable, 10_000)
    loss, gradients, count = reference(pocket, groups)
    result, found = gradient_of(readable, groups, tmp_path / "out")
    assert (result.microbatches, result.computed_tokens) == (1, count)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert_gradients(found, gradients)


def test_metrics_are_those_of_one_rank(readable: Trainer, pocket: str, make_groups: MakeGroups) -> None:
    set_budget(readable, 30)
    groups = make_groups(7, groups=3)
    alone = Trainer(pocket, TrainerConfig(max_tokens_per_microbatch=30, **READABLE)).step(groups)
    together = readable.step(groups)
    assert together.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    assert together.flat_tokens == alone.flat_tokens
    assert together.learning_rate == alone.learning_rate


def test_weights_arrive_whole_under_their_names(readable: Trainer, pocket: str) -> None:
    alone = Trainer(pocket, TrainerConfig(**READABLE))
    assert hash_of(readable) == hash_of(alone)
    low = dict(readable.weights("bfloat16"))
    assert all(torch.equal(low[name], tensor.bfloat16()) for name, tensor in alone.weights())
    given_up = readable.weights()  # and kept, as an exception would keep it
    next(given_up)
    assert hash_of(readable) == hash_of(alone)  # gets nothing that was meant for the one before
    with pytest.raises(TrainingError, match="not read to the end"):
        list(given_up)
    assert readable.step([]).skipped


def test_a_failed_save_is_told_once(readable: Trainer, make_groups: MakeGroups, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    readable.save(tmp_path / "file" / "step-1")
    with pytest.raises(SaveError, match=r"step-1' was not saved: rank 0: "):
        readable.wait_saved()
    for _ in range(3):
        readable.step(make_groups(1))
    readable.save(tmp_path / "step-2")
    readable.wait_saved()


def test_a_cancelled_step_ends_on_all_ranks_and_changes_nothing(readable: Trainer, make_groups: MakeGroups) -> None:
    """Asked for before the step, and while it is under way. The next step does not hear of it."""
    set_budget(readable, 1)
    for says_so in (1, 2):
        before, version = hash_of(readable), readable.version
        asked = 0

        def cancelled() -> bool:
            nonlocal asked
            asked += 1
            return asked >= says_so  # noqa: B023

        with pytest.raises(StepCancelled):
            readable.step(make_groups(2, groups=8, size=6), cancelled=cancelled)
        assert (hash_of(readable), readable.version) == (before, version)
        assert not readable.step(make_groups(2)).skipped


def test_a_non_finite_loss_on_one_rank_skips_the_step_on_all(
    readable: Trainer, make_trajectory: MakeTrajectory, make_group: MakeGroup, make_groups: MakeGroups
) -> None:
    turns = [[{"context": [1], "completion": [2], "logprobs": [p]}] for p in (-1.0, -200.0)]
    overflow = make_group([make_trajectory(str(i), turn, 1.0 - i) for i, turn in enumerate(turns)])
    result = readable.step([overflow])
    assert (result.skipped, result.skip_reason) == (True, NON_FINITE)
    assert not readable.step(make_groups(1)).skipped


def test_two_runs_on_two_ranks_give_the_same_bits_and_resume_on_one(
    pocket: str, make_groups: MakeGroups, tmp_path: Path
) -> None:
    """Bits depend on ranks and threads alone; on another number of ranks the difference is rounding."""
    config = TrainerConfig(ranks=2, learning_rate=1e-3, compute_dtype="float32", max_tokens_per_microbatch=40)
    hashes = []
    for run in range(2):
        trainer = Trainer(pocket, config)
        for seed in range(3):
            trainer.step(make_groups(seed))
        hashes.append(hash_of(trainer))
        if run == 0:
            trainer.save(tmp_path / "step-3", step=3)
            trainer.wait_saved()
        else:
            trainer.step(make_groups(3))
            together = dict(trainer.weights())
        trainer.close()
    assert hashes[0] == hashes[1]
    alone = Trainer.load(tmp_path / "step-3", msgspec.structs.replace(config, ranks=1))
    assert hash_of(alone) == hashes[0]
    assert alone.version == 3
    alone.step(make_groups(3))
    for name, tensor in alone.weights():
        torch.testing.assert_close(tensor, together[name], rtol=1e-4, atol=1e-5)


def test_a_killed_rank_ends_the_run_and_is_named(pocket: str, make_groups: MakeGroups) -> None:
    """Also when it is noticed only later, when torchrun has ended the others."""
    trainer = Trainer(pocket, TrainerConfig(ranks=2, **EXACT))
    assert isinstance(trainer._ranks, Launched)
    everyone, victim = processes(trainer), trainer._ranks._pids[1]
    os.kill(victim, signal.SIGKILL)
    _, left = psutil.wait_procs(everyone[1:], timeout=60)
    assert left == []
    assert trainer.alive
    with pytest.raises(TrainingError, match=rf"(?s)rank 1 of 2 \(process {victim}\) was killed by signal SIGKILL"):
        trainer.step(make_groups())
    assert not trainer.alive
    assert alive(trainer) == []
    with pytest.raises(TrainingError, match="have ended"):
        trainer.step(make_groups())
    trainer.close()


def test_an_exception_on_one_rank_is_raised_with_its_traceback(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    """A token id that only one rank meets; the other one waits for it in a collective."""
    trainer = Trainer(pocket, TrainerConfig(ranks=2, **EXACT))
    trainer.vocab_size = 10**6  # lets it through to the rank
    turns = ({"context": [1], "completion": completion} for completion in ([2, 3], [65535, 3]))
    members = [make_trajectory(str(i), [turn], float(i)) for i, turn in enumerate(turns)]
    with pytest.raises(TrainingError, match=r"(?s)rank [01] of 2 failed: IndexError: .*Traceback .*rank\.py"):
        trainer.step([make_group(members)])
    assert alive(trainer) == []
    trainer.close()


def test_ranks_end_when_their_driver_is_killed(pocket: str) -> None:
    program = f"""
import sys
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer
trainer = Trainer({pocket!r}, TrainerConfig(ranks=2))
print(trainer._ranks._process.pid, *trainer._ranks._pids.values(), flush=True)
sys.stdin.read()
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    found = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(found) == 3
    driver.kill()
    driver.communicate()
    _, left = psutil.wait_procs(found, timeout=30)
    assert left == []


def test_errors_of_the_start_come_back_as_they_are(pocket: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(pocket) / "config.json").read_text())
    with pytest.raises(ModelPathError, match="safetensors"):
        Trainer(tmp_path, TrainerConfig(ranks=2))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device='cuda' and ranks=2"):
            Trainer(pocket, TrainerConfig(ranks=2, device="cuda"))


def test_the_start_is_not_led_astray(
    pocket: str, make_groups: MakeGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By options that a scheduler has set for torchrun, nor by a module of the working directory; and it is the model
    that was named, wherever the program goes later."""
    monkeypatch.setenv("PET_NNODES", "2")
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(Path(pocket).parent)
    trainer = Trainer(Path(pocket).name, TrainerConfig(ranks=2, **EXACT))
    monkeypatch.chdir(tmp_path)
    trainer.save("step-1")
    trainer.wait_saved()
    trainer.export("out")
    trainer.close()
    assert (tmp_path / "step-1" / "trainer.json").is_file()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_stranger_at_the_door_is_turned_away() -> None:
    """What is no hello of a rank, however long it says that it is, ends nothing but its own connection."""
    for first in (b"GET / HT", (1 << 40).to_bytes(8, "big")):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(first + b"TP/1.1")
            with pytest.raises(EOFError):
                Channel(ours).receive(Hello, longest=4096)


def test_weights_of_any_dtype_and_shape_cross_the_wire() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [
            ("a", torch.randn(3, 5)),
            ("b", torch.randn(4, 4).bfloat16().t()),
            ("c", torch.tensor(7)),
            ("d", torch.empty(0, 3)),
        ]
        Channel(ours).send_bucket(sent)
        channel = Channel(theirs)
        found = channel.receive_tensors(channel.receive(Bucket))
    for (name, tensor), (other, copy) in zip(sent, found, strict=True):
        assert name == other
        assert (tensor.dtype, tensor.shape) == (copy.dtype, copy.shape)
        assert torch.equal(tensor, copy)
