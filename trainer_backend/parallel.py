"""Device, process group and sharding: one rank in this process, on the same FSDP2 path that many ranks take."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from molt_sdk.errors import ConfigError, TrainingError

_group_lock = threading.Lock()


def pick_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= count:
            raise ConfigError(f"trainer: device={name!r}, but torch sees {count} CUDA devices; use 'auto' or 'cpu'")
    return device


def inline_mesh(device: torch.device) -> DeviceMesh:
    """A mesh of this process alone. The process group behind it is made once and then reused, as torch allows only one
    per process. Raises TrainingError when the process already belongs to a larger group."""
    with _group_lock:
        if not dist.is_initialized():
            # A backend per device type: whichever device comes first, a later trainer can use the other.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            hook = sys.excepthook
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            sys.excepthook = hook  # torch's own would prefix every later traceback of the program with [rank0]
        if dist.get_world_size() != 1:
            raise TrainingError(
                f"this process belongs to a torch.distributed group of {dist.get_world_size()} ranks; the inline "
                "trainer is a single rank. Start it in a process without a group"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return init_device_mesh(device.type, (1,))


def shard(model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh, compute_dtype: torch.dtype) -> FSDPModule:
    """Shard each decoder block and then the root in place; computing in ``compute_dtype``, reducing in float32.

    Embedding, final norm and head stay in the root's group: a tied embedding and head would come apart in groups of
    their own. FSDP2's division of gradients by the number of ranks is off, because the loss is already divided by the
    number of trained tokens of the whole batch.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def reshard(model: nn.Module) -> None:
    """Put the sharded float32 parameters back in place. After a forward pass without a backward pass the root still
    holds gathered ones in the compute dtype, which neither the optimizer nor a checkpoint knows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
