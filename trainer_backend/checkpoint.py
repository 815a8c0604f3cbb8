"""A checkpoint is a Hugging Face model folder plus what training needs to go on exactly; no pickle anywhere.

    config.json, model.safetensors (float32), tokenizer, chat template    what transformers and inference engines load
    trainer.json                                                          version, counters, settings
    trainer/optimizer.safetensors                                         AdamW's moments, "<parameter>.<moment>"

The optimizer is in a folder of its own because inference engines load every *.safetensors file beside config.json.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from molt_sdk.errors import TrainingError
from trainer_backend.config import TrainerConfig
from trainer_backend.model import quiet_transformers
from trainer_backend.optim import MOMENTS, full

STATE_FILE = "trainer.json"
OPTIMIZER_FILE = "trainer/optimizer.safetensors"
COPIED = ("*token*", "*.jinja", "vocab*", "merges.txt", "chat_template*", "*processor_config.json", "LICENSE*")
"""Files of the source model that belong to a model folder and are not weights or config."""


class TrainerState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of ``trainer.json``."""

    format: int = 1
    version: int
    skipped_steps: int
    adam_steps: float
    """Steps that AdamW's moments have seen; 0.0 before the first."""
    config: TrainerConfig


def full_weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """(name as in ``state_dict()``, whole CPU tensor) one at a time; of tied names only the first. Every rank must
    iterate to the end."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole = full(tensor.detach())
        # A copy even where nothing changes: what is handed out must not move with the next optimizer step.
        yield name, whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype, copy=True)


def save_checkpoint(
    directory: str | os.PathLike[str],
    source: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
) -> None:
    """Write everything to a sibling folder, flush it to disk, then rename: the directory is whole or not there. What
    stood there before is replaced. Raises OSError."""

    def write(folder: Path) -> None:
        saved: Any = model
        with quiet_transformers():
            saved.save_pretrained(folder, state_dict=dict(full_weights(model)))
        for pattern in COPIED:
            for file in Path(source).glob(pattern):
                if file.is_file() and file.suffix != ".safetensors":
                    shutil.copyfile(file, folder / file.name)
        (folder / OPTIMIZER_FILE).parent.mkdir()
        save_file(dict(_moments(model, optimizer)), folder / OPTIMIZER_FILE)
        # The json module, because msgspec would write an infinite grad_clip as null.
        (folder / STATE_FILE).write_text(json.dumps(msgspec.to_builtins(state), indent=2) + "\n", encoding="utf-8")

    _atomic_directory(Path(directory), write)


def load_state(directory: str | os.PathLike[str]) -> TrainerState:
    """Read ``trainer.json``. Raises TrainingError when it is missing or is not one."""
    path = Path(directory) / STATE_FILE
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), TrainerState)
    except FileNotFoundError as error:
        raise TrainingError(f"{str(path)!r} does not exist; resume from a folder that the trainer saved") from error
    except (msgspec.ValidationError, ValueError) as error:
        raise TrainingError(f"{str(path)!r} is not a trainer state that this release reads: {error}") from error


def load_optimizer(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, adam_steps: float
) -> None:
    """Put saved moments back, sharded like their parameters. Raises TrainingError when one does not fit."""
    if adam_steps == 0.0:
        return
    path = Path(directory) / OPTIMIZER_FILE
    if not path.is_file():
        raise TrainingError(f"{str(path)!r} does not exist although {STATE_FILE} counts {adam_steps:g} steps")
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        for name, parameter in model.named_parameters():
            state: dict[str, Tensor] = {"step": torch.tensor(adam_steps, dtype=torch.float32, device=parameter.device)}
            for moment in MOMENTS:
                key = f"{name}.{moment}"
                if key not in stored or list(file.get_slice(key).get_shape()) != list(parameter.shape):
                    raise TrainingError(f"{str(path)!r} holds no {key!r} of shape {tuple(parameter.shape)}")
                state[moment] = _like(parameter, file.get_tensor(key))
            optimizer.state[parameter] = state


def adam_steps(optimizer: torch.optim.Optimizer) -> float:
    """Steps that AdamW's moments have seen; the same for all parameters, as each step updates all."""
    return max((float(state["step"]) for state in optimizer.state.values()), default=0.0)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            if parameter in optimizer.state:
                yield f"{name}.{moment}", full(optimizer.state[parameter][moment]).cpu().contiguous()


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole


def _atomic_directory(target: Path, write: Callable[[Path], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = uuid.uuid4().hex[:8]
    temporary, previous = (target.with_name(f".{target.name}.{kind}-{suffix}") for kind in ("new", "old"))
    temporary.mkdir()
    try:
        write(temporary)
        for path in (*sorted(temporary.rglob("*")), temporary):
            _flush(path)
        if target.exists():
            target.rename(previous)
        temporary.rename(target)
        _flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
