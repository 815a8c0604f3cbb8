"""Checkpoints to go on from: each rank writes and reads its own shards; no pickle anywhere.

    trainer.json                            version, counters, settings: see state.py
    model/*.safetensors                     float32 weights under the module's names
    optimizer/*.safetensors                 AdamW's moments, "<parameter>.<moment>"
    rng/rank-<r>.safetensors                random number generators of each rank
    config.json, tokenizer, chat template   of the model
    weight_names.json                       names of the weights in the model folder, for an export in that form

Weights and moments are in the safetensors layout of torch.distributed.checkpoint: pieces with their offsets, which any
number of ranks reads. A checkpoint exists under its name when it is complete, and only then: it is written in a hidden
folder beside it, flushed to disk, and renamed. What transformers and inference engines load, ``export_checkpoint``
makes of it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor

from molt_sdk.errors import TrainingError
from trainer_backend.loading import (
    ModelFiles,
    TensorFiles,
    aliases,
    check_fit,
    empty_model,
    fill,
    local_offsets,
    source_dtype,
)
from trainer_backend.optim import MOMENTS, new_state
from trainer_backend.parallel import local, rank_of_ranks
from trainer_backend.state import STATE_FILE, TrainerState, crc_of, load_state, state_json
from trainer_backend.weights import (
    dtype_in_files,
    hidden_directory,
    named_buckets,
    publish,
    write_model_folder,
    write_tensors,
)

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, in CPU memory, and where in the tensor it begins."""

    block: Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Staged:
    """One rank's part of the state, copied to CPU memory."""

    model: dict[str, Piece]
    optimizer: dict[str, Piece]
    rng: dict[str, Tensor]


def stage(lm: nn.Module, optimizer: torch.optim.Optimizer) -> Staged:
    """Copy what this rank holds; training may go on at once. Parameters must be in their sharded state."""
    model = _tensors(lm)
    moments: dict[str, Tensor] = {}
    if adam_steps(optimizer):
        for name, parameter in _trained(model, optimizer).items():
            # One that no gradient ever reached has no state of its own yet.
            state = optimizer.state.get(parameter) or new_state(optimizer, parameter)
            moments |= {f"{name}.{moment}": state[moment] for moment in MOMENTS}
    return Staged(model=_pieces(model), optimizer=_pieces(moments), rng=_rng_state())


class Saver:
    """Writes checkpoints in the background, one at a time. Every rank of ``group`` has one and calls the same methods.

    ``group`` is a gloo group of its own, so that what ranks tell each other here never meets training's collectives;
    None for a single rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, files: ModelFiles) -> None:
        """``files``: config and tokenizer, which are part of every checkpoint."""
        self._group = group
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._files = files

    def start(self, directory: str | os.PathLike[str], staged: Staged, state: TrainerState) -> None:
        """Begin to write a checkpoint, after waiting for an earlier one. A checkpoint that stands at ``directory`` is
        replaced when the new one is complete."""
        self.wait()
        arguments = (Path(directory), staged, state)
        self._thread = threading.Thread(target=self._run, args=arguments, name="molt-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> str:
        """Why a save failed, the same text on all ranks and told once; "" if none did. Ranks may learn of it at
        different moments: act on what one of them says, or ``wait`` before."""
        failure, self._failure = self._failure, ""
        return failure

    def _run(self, target: Path, staged: Staged, state: TrainerState) -> None:
        try:
            self._save(target, staged, state)
        except Exception as error:
            self._failure = f"the checkpoint {str(target)!r} was not saved: {error}; earlier checkpoints are untouched"

    def _save(self, target: Path, staged: Staged, state: TrainerState) -> None:
        main = self._rank == 0
        folder, *_ = self._together(lambda: hidden_directory(target, owned=True) if main else None)
        try:
            written = self._together(lambda: self._write(folder, staged))
            state = msgspec.structs.replace(state, files=dict(itertools.chain(*written)))
            self._together(lambda: self._complete(folder, target, state) if main else None)
        except BaseException:
            if main:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _write(self, folder: Path, staged: Staged) -> list[tuple[str, int]]:
        """This rank's files, with their checksums."""
        file = f"rank-{self._rank}.safetensors"
        for name in (MODEL, OPTIMIZER, RNG):
            (folder / name).mkdir(exist_ok=True)
        _write_pieces(folder / MODEL / file, staged.model)
        _write_pieces(folder / OPTIMIZER / file, staged.optimizer)
        write_tensors(folder / RNG / file, staged.rng)
        paths = (f"{name}/{file}" for name in (MODEL, OPTIMIZER, RNG))
        return [(path, crc_of(folder / path)) for path in paths if (folder / path).exists()]

    def _complete(self, folder: Path, target: Path, state: TrainerState) -> None:
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        (folder / STATE_FILE).write_text(state_json(state), encoding="utf-8")
        publish(folder, target)

    def _together(self, action: Callable[[], Any]) -> Any:
        """Do ``action`` on every rank; the results of all. Raises TrainingError on all ranks if it failed on any."""
        result, error = None, ""
        try:
            result = action()
        except Exception as raised:
            error = str(raised) if self._group is None else f"rank {self._rank}: {raised}"
        everyone: list[Any] = [(result, error)]
        if self._group is not None:
            everyone = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, (result, error), group=self._group)
        if errors := sorted({error for _, error in everyone if error}):
            raise TrainingError("; ".join(errors))
        return [result for result, _ in everyone]

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group) if self._group is not None else 0


def load(directory: str | os.PathLike[str], lm: nn.Module, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Read weights, moments and, at the same number of ranks, random number generators into a model that
    ``empty_model`` made of ``directory`` or of the model's folder, sharded over any number of ranks and given memory by
    ``materialize``, and into its optimizer. Nothing here waits for other ranks.

    Raises TrainingError when the folder is no complete checkpoint of this format, a file is damaged, or tensors are
    missing, unexpected or of another shape.
    """
    path = Path(directory)
    state = load_state(path)
    _check_files(path, state)
    tensors = _tensors(lm)
    weights = _open(path / MODEL, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    trained = _trained(tensors, optimizer)
    moments = None
    if state.adam_steps:
        shapes = {f"{name}.{moment}": tuple(p.shape) for name, p in trained.items() for moment in MOMENTS}
        moments = _open(path / OPTIMIZER, shapes)
    for name, tensor in tensors.items():
        fill(tensor.detach(), partial(weights.read, name))
    optimizer.state.clear()
    if moments is not None:
        for name, parameter in trained.items():
            slot = new_state(optimizer, parameter, state.adam_steps)
            for moment in MOMENTS:
                fill(slot[moment], partial(moments.read, f"{name}.{moment}"))
            optimizer.state[parameter] = slot
    _restore_rng(path / RNG)
    return state


def export_checkpoint(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> None:
    """Make a Hugging Face model folder of a checkpoint, in one process and without a trainer; ``dtype`` defaults to
    that of the source model. Memory: one file of the result. Raises TrainingError, ModelPathError, OSError."""
    path = Path(directory)
    load_state(path)
    lm = empty_model(path)
    dtype = dtype or source_dtype(path)
    tensors = _tensors(lm)
    stored = _open(path / MODEL, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    dtypes = {name: dtype_in_files(lm, name, tensor, dtype) for name, tensor in tensors.items()}
    buckets = named_buckets(lm, lambda name: stored.whole(name).to(dtypes[name]), lambda name: dtypes[name].itemsize)
    write_model_folder(target, path, (named for bucket in buckets for named in bucket), dtype)


def adam_steps(optimizer: torch.optim.Optimizer) -> float:
    """Steps that AdamW's moments have seen; the same for all parameters, as each step updates all."""
    return next((float(state["step"]) for state in optimizer.state.values()), 0.0)


def _tensors(lm: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, tied ones once."""
    kept = aliases(lm)
    return {name: tensor for name, tensor in lm.state_dict(keep_vars=True).items() if kept[name] == name}


def _trained(tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter) and id(t) in known}


def _pieces(tensors: dict[str, Tensor]) -> dict[str, Piece]:
    """Copies of what this rank holds; whole tensors are held by all, and written by the first."""
    pieces = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or rank_of_ranks()[0] == 0:
            block = local(tensor.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)
            if block.numel():
                pieces[name] = Piece(block, local_offsets(tensor))
    return pieces


def _write_pieces(path: Path, pieces: dict[str, Piece]) -> None:
    """In the layout of torch.distributed.checkpoint's safetensors storage. Its own writer holds Python's lock, and so
    training, while it puts a file together in memory; this one does neither."""
    if pieces:
        layout = {name: {SAVED_OFFSETS_KEY: piece.offsets} for name, piece in pieces.items()}
        metadata = {CUSTOM_METADATA_KEY: json.dumps(layout), "format": "pt"}
        write_tensors(path, {name: piece.block for name, piece in pieces.items()}, metadata)


def _check_files(path: Path, state: TrainerState) -> None:
    """Raise TrainingError if a file is not the one that was saved. Each rank looks at its share of them."""
    rank, ranks = rank_of_ranks()
    for name in sorted(state.files)[rank::ranks]:
        try:
            found = crc_of(path / name)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            why = "is missing from the checkpoint" if gone else f"cannot be read: {error}"
            raise TrainingError(f"{str(path / name)!r} {why}") from error
        if found != state.files[name]:
            raise TrainingError(
                f"{str(path / name)!r} is not what was saved: its checksum differs; the file is damaged"
            )


def _open(folder: Path, shapes: dict[str, tuple[int, ...]]) -> TensorFiles:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainingError(f"the checkpoint has no {str(folder / '*.safetensors')!r}; resume from another one")
    stored = TensorFiles(files, TrainingError)
    check_fit(shapes, stored.shapes(), str(folder), TrainingError)
    if gaps := stored.with_gaps():
        raise TrainingError(f"pieces of {gaps[0]!r} are missing in {str(folder)!r}: some of its files are gone")
    return stored


def _rng_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(folder: Path) -> None:
    """Each rank's own; with another number of ranks nothing, as no rank goes on where one has stopped."""
    rank, ranks = rank_of_ranks()
    if len(list(folder.glob("rank-*.safetensors"))) != ranks:
        return
    path = folder / f"rank-{rank}.safetensors"
    try:
        states = load_file(path)
    except (SafetensorError, OSError) as error:
        raise TrainingError(f"{str(path)!r} cannot be read: {error}") from error
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
