"""What several ranks do with weights and checkpoints, one function per check; run by ``test_checkpoint.py``."""

from __future__ import annotations

import resource
import shutil
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - imported here, once, and not by each rank
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from molt_sdk.errors import TrainingError
from tests.trainer_backend.folders import reference
from trainer_backend import checkpoint
from trainer_backend.checkpoint import Saver, adam_steps, stage
from trainer_backend.config import TrainerConfig
from trainer_backend.loading import empty_model, load_weights, materialize, model_files
from trainer_backend.optim import make_optimizer
from trainer_backend.state import TrainerState
from trainer_backend.weights import weight_buckets, write_model_folder

CPU = torch.device("cpu")
CONFIG = TrainerConfig(learning_rate=1e-2)
KINDS = ("tied", "untied", "experts")
FOLDERS = (*KINDS, "renamed", "float32-bias")
CHECKS: list[Callable[[Path], None]] = []


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS.append(function)
    return function


def sharded(directory: str | Path) -> Any:
    """On the meta device, over all ranks of the default group."""
    lm = empty_model(directory)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in lm.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(lm, mesh=mesh)


def trained(directory: str | Path, steps: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    lm = sharded(directory)
    load_weights(lm, directory, CPU)
    optimizer = make_optimizer(lm.parameters(), CONFIG)
    train(lm, optimizer, steps)
    return lm, optimizer


def train(lm: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """The same tokens on all ranks: the mean of their gradients is that of one."""
    for _ in range(steps):
        lm(torch.arange(6)[None], use_cache=False).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def everything(lm: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of weights and moments, whole."""
    names = {id(parameter): name for name, parameter in lm.named_parameters()}
    moments = {
        f"{names[id(parameter)]}.{moment}": state[moment]
        for parameter, state in optimizer.state.items()
        for moment in ("exp_avg", "exp_avg_sq", "step")
    }
    return {name: tensor.clone() for name, tensor in whole({**lm.state_dict(), **moments}).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different


def state_of(optimizer: torch.optim.Optimizer, step: int = 1) -> TrainerState:
    return TrainerState(step=step, version=1, skipped_steps=0, adam_steps=adam_steps(optimizer), config=CONFIG)


def save(
    directory: Path, lm: Any, optimizer: torch.optim.Optimizer, source: str | Path, saver: Saver | None = None
) -> str:
    saver = saver or Saver(dist.new_group(backend="gloo"), model_files(source))
    saver.start(directory, stage(lm, optimizer), state_of(optimizer))
    saver.wait()
    return saver.failure()


@check
def weights_are_read_straight_into_shards(work: Path) -> None:
    """Uneven and empty shards included; nothing is whole on the way, save what is converted."""
    for kind in FOLDERS:
        lm = sharded(work / kind)
        load_weights(lm, work / kind, CPU)
        assert_same(whole(lm.state_dict()), reference(work / kind).state_dict())


@check
def f116_tied_names_stay_one_parameter_with_both_gradients(work: Path) -> None:
    lm = sharded(work / "tied")
    load_weights(lm, work / "tied", CPU)
    alone = reference(work / "tied")
    for model in (lm, alone):
        model(torch.arange(6)[None], use_cache=False).logits.square().mean().backward()
    found = whole({name: p.grad for name, p in lm.named_parameters()})
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    torch.optim.SGD(lm.parameters(), lr=0.1).step()
    after = lm.state_dict(keep_vars=True)
    assert after["lm_head.weight"] is after["model.embed_tokens.weight"]


@check
def weights_go_out_whole_on_the_first_rank_and_in_step(work: Path) -> None:
    for kind in KINDS:
        lm, _ = trained(work / kind)
        counts, found = 0, {}
        for bucket in weight_buckets(lm, torch.float32, bucket_bytes=5000):
            counts += 1
            found |= dict(bucket)
        alone = reference(work / kind)
        alone.load_state_dict(whole(lm.state_dict()))
        expected = dict(next(weight_buckets(alone, torch.float32, bucket_bytes=1 << 30)))
        assert_same(found, expected if dist.get_rank() == 0 else {})
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, counts)
        assert len(set(everyone)) == 1
        assert counts > 2


@check
def a_checkpoint_of_another_number_of_ranks_is_read(work: Path) -> None:
    """``saved-by-<n>`` were written before, by one rank and perhaps by two, after the same steps."""
    for directory in sorted(work.glob("saved-by-*")):
        lm = sharded(work / "tied")
        materialize(lm, CPU)
        optimizer = make_optimizer(lm.parameters(), CONFIG)
        assert checkpoint.load(directory, lm, optimizer).adam_steps == 2.0
        assert_same(everything(lm, optimizer), load_file(work / f"expected-of-{directory.name}"))


@check
def a_checkpoint_of_as_many_ranks_goes_on_to_the_bit(work: Path) -> None:
    """Training goes on while it is written; the random numbers of each rank come back as well."""
    lm, optimizer = trained(work / "tied", steps=2)
    torch.manual_seed(100 + dist.get_rank())
    target = work / f"saved-by-{dist.get_world_size()}"
    saver = Saver(dist.new_group(backend="gloo"), model_files(work / "tied"))
    saver.start(target, stage(lm, optimizer), state_of(optimizer))
    now = everything(lm, optimizer)
    if dist.get_rank() == 0:
        save_file(now, work / f"expected-of-{target.name}")
    drawn = torch.rand(3)
    train(lm, optimizer, steps=2)
    saver.wait()
    assert saver.failure() == ""
    again = sharded(target)  # the checkpoint itself says what model it is of
    materialize(again, CPU)
    other = make_optimizer(again.parameters(), CONFIG)
    state = checkpoint.load(target, again, other)
    assert state.adam_steps == 2.0
    assert torch.equal(torch.rand(3), drawn)
    assert_same(everything(again, other), now)
    train(again, other, steps=2)
    assert_same(everything(again, other), everything(lm, optimizer))


@check
def f112_a_disk_that_is_full_for_one_rank_fails_the_save_on_all(work: Path) -> None:
    """Without a hang; the hidden folder goes, and what was there before stays."""
    lm, optimizer = trained(work / "tied")
    parent, last = work / f"full-{dist.get_world_size()}", dist.get_world_size() - 1
    saver = Saver(dist.new_group(backend="gloo"), model_files(work / "tied"))
    assert save(parent / "step-1", lm, optimizer, work / "tied", saver) == ""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    failures = [save(parent / name, lm, optimizer, work / "tied", saver) for name in ("step-1", "step-2")]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for failure, name in zip(failures, ("step-1", "step-2"), strict=True):
        assert f"{name}' was not saved: rank {last}: " in failure
        assert "File too large" in failure
    dist.barrier()
    assert [path.name for path in parent.iterdir()] == ["step-1"]
    checkpoint.load(parent / "step-1", lm, optimizer)
    assert save(parent / "step-2", lm, optimizer, work / "tied", saver) == ""


@check
def torch_reads_what_was_written(work: Path) -> None:
    """The layout of the files is that of torch.distributed.checkpoint. Whole tensors (buffers) are in them once."""
    for kind in ("untied", "float32-bias"):
        lm, optimizer = trained(work / kind)
        target = work / f"{kind}-{dist.get_world_size()}"
        assert save(target, lm, optimizer, work / kind) == ""
        expected = {name: tensor.clone() for name, tensor in whole(lm.state_dict()).items()}
        found = {name: torch.empty(tensor.shape) for name, tensor in expected.items()}
        dcp_load(found, storage_reader=HuggingFaceStorageReader(str(target / "model")))
        assert_same(found, expected)
        train(lm, optimizer)
        checkpoint.load(target, lm, optimizer)
        assert_same(whole(lm.state_dict()), expected)


@check
def a_lost_file_is_noticed(work: Path) -> None:
    lm, optimizer = trained(work / "tied")
    target = work / f"lost-{dist.get_world_size()}"
    assert save(target, lm, optimizer, work / "tied") == ""
    if dist.get_rank() == 0:
        (target / "model" / "rank-0.safetensors").unlink()
    dist.barrier()
    with pytest.raises(TrainingError, match=r"missing|gone|do not fit"):
        checkpoint.load(target, lm, optimizer)


@check
def the_first_rank_writes_what_all_gather(work: Path) -> None:
    lm, _ = trained(work / "experts")
    target = work / f"exported-{dist.get_world_size()}"
    named = (pair for bucket in weight_buckets(lm, torch.float32) for pair in bucket)
    if dist.get_rank() == 0:
        write_model_folder(target, work / "experts", named, torch.float32)
    else:
        assert list(named) == []
    dist.barrier()
    assert_same(whole(lm.state_dict()), reference(target).state_dict())


def run(rank: int, ranks: int, work: Path, log: Path) -> None:
    """One process: every check in turn; the first rank notes those that all have passed."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(log.with_suffix(".store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for function in CHECKS:
        try:
            function(work)
        except BaseException:
            log.with_suffix(f".{rank}").write_text(f"{function.__name__} on rank {rank}:\n{traceback.format_exc()}")
            raise
        dist.barrier()
        if rank == 0:
            with log.open("a") as file:
                file.write(f"{function.__name__}\n")
    shutil.rmtree(log.with_suffix(".store"), ignore_errors=True)
    dist.destroy_process_group()
