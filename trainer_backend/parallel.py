"""Device, process group and sharding. One rank or many, in this process or under torchrun: the same FSDP2 path."""

from __future__ import annotations

import datetime
import functools
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from molt_sdk.errors import ConfigError, TrainingError

_group_lock = threading.Lock()

PATIENCE = datetime.timedelta(days=1)
"""For a collective: a reader of weights or a disk may be slow, and ranks that die are seen without it."""


def pick_device(name: str, *, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """``auto`` is CUDA if there is one, else the CPU; of several ranks each gets the device of its number. Raises
    ConfigError for a device that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if local_ranks > 1 and device.index is not None:
        raise ConfigError(
            f"trainer: device={name!r} with {local_ranks} ranks; leave the index out, each rank has its own"
        )
    index = device.index if device.index is not None else local_rank
    if max(index + 1, local_ranks) > count:
        wanted = f"device={name!r}" + (f" and ranks={local_ranks}" if local_ranks > 1 else "")
        way_out = "'cpu', a lower index or fewer ranks" if count else "'cpu'"
        raise ConfigError(f"trainer: {wanted}, but torch sees {count} CUDA devices; use {way_out}")
    return torch.device("cuda", index)


def make_mesh(device: torch.device, *, launched: bool = False) -> DeviceMesh:
    """A mesh of this process alone, or (``launched``) of the processes that torchrun started with this one.

    The group of a process alone is made once and then reused, as torch allows only one per process. Raises
    TrainingError when the process belongs to a group that somebody else made.
    """
    with _group_lock:
        # A backend per device type: whichever device comes first, a later trainer can use the other.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if not dist.is_initialized():
            hook = sys.excepthook
            if launched:
                dist.init_process_group(backend, timeout=PATIENCE)
            else:
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(backend, store=store, rank=0, world_size=1)
            sys.excepthook = hook  # torch's own would prefix every later traceback of the program with [rank0]
        if not launched and dist.get_world_size() != 1:
            raise TrainingError(
                f"this process belongs to a torch.distributed group of {dist.get_world_size()} ranks; start the "
                "trainer in a process without a group, and give it ranks=...: it starts its own"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(
    root: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh, compute_dtype: torch.dtype, *, offload: bool = False
) -> FSDPModule:
    """Shard each decoder block and then the root in place; computing in ``compute_dtype``, reducing in float32.

    Embedding, final norm and head stay in the root's group: a tied embedding and head would come apart in groups of
    their own. FSDP2's division of gradients by the number of ranks is off, because the loss is already divided by the
    number of trained tokens of the whole batch. ``offload`` keeps parameters and gradients in CPU memory.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    where: OffloadPolicy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=where)
    fully_shard(root, mesh=mesh, mp_policy=policy, offload_policy=where)
    assert isinstance(root, FSDPModule)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Ranks must reduce the same tensors even where one of them did not use a parameter (an expert without tokens).
    root.set_reduce_scatter_unused_params(True)
    return root


def checkpoint_activations(blocks: nn.ModuleList) -> None:
    """Keep only the input of each block for the backward pass, which computes the rest again. Names of parameters stay
    as they are, unlike with a wrapper module."""
    for block in blocks:
        plain: Any = block.forward
        block.forward = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)


def reshard(root: nn.Module) -> None:
    """Put the sharded float32 parameters back in place. After a forward pass without a backward pass the root still
    holds gathered ones in the compute dtype, which neither the optimizer nor a checkpoint knows."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def recover(root: nn.Module) -> None:
    """After an exception in the middle of a pass: forget the pass, so that the next one starts from a clean state. For
    one rank, since others would not know of the exception."""
    assert isinstance(root, FSDPModule)
    root.reset_iter_state()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()  # a gathered parameter keeps the gradient of a backward pass that did not end
            for parameter in module.parameters():
                parameter.grad = None
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rank_of_ranks() -> tuple[int, int]:
    """This process's rank, and how many there are; (0, 1) where no group was made."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The elementwise sum over all ranks (collective), on the CPU in float64."""
    values = values.to("cpu", torch.float64)
    if rank_of_ranks()[1] > 1:
        dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks (collective), on the CPU in float64."""
    values = values.to("cpu", torch.float64)
    if rank_of_ranks()[1] > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values
