"""A Hugging Face model folder -> a causal LM: first without memory for its weights, then, once it is sharded, each rank
reads its own shards from the safetensors files. No pickle, no collectives.

Where the files' names or layout are not the module's (experts stored one by one, a missing prefix), transformers' own
conversions for the architecture are applied, one group of tensors at a time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from molt_sdk.errors import ModelPathError, MoltError
from trainer_backend.parallel import local

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
NAMES_FILE = "weight_names.json"
"""In a checkpoint: the names that the weights had in the model folder, which say in which form to write them again."""
COPIED = (
    CONFIG_FILE,
    "generation_config.json",
    "*token*",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "LICENSE*",
    "USE_POLICY*",
    "NOTICE*",
)
"""Files of a model folder that are not weights."""
LISTED = 5
"""Names shown of each kind when the weights do not fit the model."""

ModelFiles: TypeAlias = Mapping[str, bytes]
"""File name -> content of what makes a model folder besides its weights."""


def empty_model(directory: str | os.PathLike[str]) -> Any:
    """A ``PreTrainedModel`` in float32, in eval mode, with eager attention, tied weights tied, real buffers and
    parameters on the meta device. ``directory`` is a model folder or a checkpoint of the trainer.

    Raises ModelPathError when the directory is missing, has no config.json or no safetensors weights, holds a model
    that is none or is quantized, a file is damaged, or the weights do not fit: all before any memory is taken.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    path = _model_directory(directory)
    auto_config: Any = AutoConfig
    auto_class: Any = AutoModelForCausalLM
    with quiet_transformers():
        try:
            config = auto_config.from_pretrained(path, local_files_only=True)
            if getattr(config, "quantization_config", None) is not None:
                raise ModelPathError(
                    f"the weights in {str(path)!r} are quantized and cannot be trained; load them with "
                    "from_pretrained(..., dtype=torch.bfloat16) and dequantization, and save that with save_pretrained"
                )
            with init_empty_weights(include_buffers=False):
                lm = auto_class.from_config(config, dtype=torch.float32, attn_implementation="eager")
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise ModelPathError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    lm.tie_weights()  # building on the meta device replaced each tied parameter by one of its own
    # From here on the attribute says, as after from_pretrained, which conversions lead from the files to this model.
    # Now, because fully_shard changes the classes by which transformers finds them.
    lm._weight_conversions = get_model_conversion_mapping(lm)
    _check_names(lm, path)
    lm._weight_conversions = [conversion for conversion in lm._weight_conversions if conversion.was_used()]
    return lm.eval()


def materialize(lm: nn.Module, device: torch.device, buffer_device: torch.device | None = None) -> None:
    """Give (sharded) parameters on the meta device memory on ``device``, uninitialised, and move all buffers to
    ``buffer_device``, by default the same."""
    for parameter in lm.parameters():
        if parameter.is_meta:
            # In place: to_empty would give each of two tied names a parameter of its own.
            empty = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)  # type: ignore[no-untyped-call]
    for module in lm.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(buffer_device or device)


def load_weights(
    lm: Any, directory: str | os.PathLike[str], device: torch.device, buffer_device: torch.device | None = None
) -> None:
    """Fill a model that ``empty_model`` made of the same folder, sharded or not: parameters get float32 memory on
    ``device``, buffers on ``buffer_device`` (default: the same), and each rank reads what it holds; weights that need
    a conversion are read whole, a group at a time. Nothing here waits for other ranks.

    Raises ModelPathError as ``empty_model`` does, and where two tied names hold different values.
    """
    path = _model_directory(directory)
    files = TensorFiles(_weight_files(path), ModelPathError)
    materialize(lm, device, buffer_device)
    tensors = lm.state_dict(keep_vars=True)
    kept = aliases(lm)
    filled: dict[str, str] = {}
    for group in _groups(lm, files.shapes()):
        if group.name not in tensors:
            continue  # one of those that _check_names ignores
        for name, read in group.tensors(lm, files):
            first, tensor = filled.setdefault(kept[name], name), tensors[name].detach()
            if first == name:
                fill(tensor, read)
            elif not torch.equal(local(tensor).cpu(), _read_local(tensor, read).to(tensor.dtype)):
                raise ModelPathError(
                    f"{first!r} and {name!r} in {str(path)!r} are tied by config.json but hold different values; set "
                    '"tie_word_embeddings": false there'
                )


def model_files(source: str | os.PathLike[str] | ModelFiles) -> ModelFiles:
    """Config, tokenizer, chat template, licence and the weights' names of a model folder or checkpoint, read into
    memory: the folder may be gone when a checkpoint or an export is written. Raises OSError, ModelPathError."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    found: dict[str, bytes] = {}
    for pattern in (*COPIED, NAMES_FILE):
        for file in sorted(path.glob(pattern)):
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
                found[file.name] = file.read_bytes()
    if NAMES_FILE not in found:
        names = sorted(TensorFiles(_weight_files(_model_directory(path)), ModelPathError).shapes())
        found[NAMES_FILE] = (json.dumps(names, indent=0) + "\n").encode()
    return found


def source_dtype(source: str | os.PathLike[str] | ModelFiles) -> torch.dtype:
    """The dtype that the model's config.json names; bfloat16 where it names none."""
    if isinstance(source, Mapping):
        config = json.loads(source[CONFIG_FILE])
    else:
        config = json.loads((Path(source) / CONFIG_FILE).read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str) and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
    return torch.bfloat16


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers inside; the user's settings come back after."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


Reader: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]
"""(offsets, sizes) of a block of a tensor -> the block, on the CPU."""


@dataclass(frozen=True)
class _Piece:
    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorFiles:
    """Tensors in safetensors files, whole or in the pieces that torch.distributed.checkpoint writes. Opening reads the
    headers only; raises ``error``, naming the file, when one is damaged."""

    def __init__(self, files: Iterable[Path], error: type[MoltError]) -> None:
        self._error = error
        self._open: dict[Path, Any] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for path in files:
            file = self._file(path)
            sharding = json.loads((file.metadata() or {}).get(CUSTOM_METADATA_KEY, "{}"))
            for name in file.offset_keys():
                sizes = tuple(file.get_slice(name).get_shape())
                if sharding and name not in sharding:
                    raise error(f"{str(path)!r} does not say where in {name!r} its piece belongs; the file is damaged")
                offsets = tuple(sharding[name][SAVED_OFFSETS_KEY]) if sharding else (0,) * len(sizes)
                self._pieces.setdefault(name, []).append(_Piece(path, offsets, sizes))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the whole tensor, as far as its pieces are there."""
        return {name: self.shape(name) for name in self._pieces}

    def shape(self, name: str) -> tuple[int, ...]:
        ends = [[o + s for o, s in zip(piece.offsets, piece.sizes, strict=True)] for piece in self._pieces[name]]
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))

    def with_gaps(self) -> list[str]:
        """Names of tensors of which a piece is missing, sorted."""
        stored = {name: sum(math.prod(piece.sizes) for piece in pieces) for name, pieces in self._pieces.items()}
        return sorted(name for name, count in stored.items() if count != math.prod(self.shape(name)))

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A block of a tensor, on the CPU and in its dtype on disk. Raises ``error`` when a file cannot be read."""
        whole: Tensor | None = None
        for piece in self._pieces[name]:
            stored, wanted = _overlap(piece, offsets, sizes)
            if any(part.stop <= part.start for part in stored):
                continue
            block = self._block(piece, name, stored)
            if tuple(block.shape) == sizes:
                return block
            whole = torch.empty(sizes, dtype=block.dtype) if whole is None else whole
            whole[wanted] = block
        return torch.empty(sizes) if whole is None else whole

    def whole(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def _block(self, piece: _Piece, name: str, slices: tuple[slice, ...]) -> Tensor:
        file = self._file(piece.file)
        try:
            block: Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._error(f"{str(piece.file)!r} cannot be read: {error}") from error
        return block

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._error(
                    f"{str(path)!r} is damaged or not a safetensors file ({error}); copy or download it again"
                ) from error
        return self._open[path]


def local_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def fill(tensor: Tensor, read: Reader) -> None:
    """Overwrite this rank's part of a tensor with what ``read`` gives for it."""
    with torch.no_grad():
        local(tensor).copy_(_read_local(tensor, read))


def check_fit(
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
    where: str,
    error: type[MoltError],
    *,
    optional: Iterable[str] = (),
) -> None:
    """Raise ``error`` with the names that are missing, unexpected or of another shape in ``where``. ``optional`` names
    may be missing."""
    missing = sorted(expected.keys() - stored.keys() - set(optional))
    unexpected = sorted(stored.keys() - expected.keys())
    misshapen = sorted(name for name in expected.keys() & stored.keys() if expected[name] != stored[name])
    problems = []
    if missing:
        hints = {name: get_close_matches(name, unexpected, n=1, cutoff=0.8) for name in missing[:LISTED]}
        shown = [f"{name} (renamed? {hints[name][0]})" if hints[name] else name for name in missing[:LISTED]]
        problems.append(f"{len(missing)} missing: {_listed(shown, len(missing))}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {_listed(unexpected[:LISTED], len(unexpected))}")
    if misshapen:
        shown = [f"{name} {list(stored[name])}, expected {list(expected[name])}" for name in misshapen[:LISTED]]
        problems.append(f"{len(misshapen)} of another shape: {_listed(shown, len(misshapen))}")
    if problems:
        raise error(
            f"the tensors in {where!r} do not fit the model that its {CONFIG_FILE} describes; " + "; ".join(problems)
        )


def aliases(lm: nn.Module) -> dict[str, str]:
    """Name in ``state_dict()`` -> the name under which the same parameter is written; of tied ones, judged by identity,
    the file format keeps what the model class names as their source."""
    targets = getattr(lm, "all_tied_weights_keys", {})
    names_of: dict[int, list[str]] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    kept: dict[str, str] = {}
    for names in names_of.values():
        main = next((name for name in names if name not in targets), names[0])
        kept |= dict.fromkeys(names, main)
    return kept


@dataclass(frozen=True)
class _Group:
    """Tensors in the files that become one or more tensors of the model together."""

    name: str
    """Of the (first) tensor of the model."""
    sources: list[tuple[str, str]]
    """(name in the files, pattern of the conversion that it matches)"""
    converter: Any
    """transformers' WeightConverter; None where only the name may differ."""

    def convert(self, lm: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Names and tensors of the model, from whole stored tensors."""
        converter = deepcopy(self.converter)
        for source, pattern in self.sources:
            converter.add_tensor(self.name, source, pattern, read(source))
        made = converter.convert(self.name, model=lm, config=lm.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def tensors(self, lm: Any, files: TensorFiles) -> Iterator[tuple[str, Reader]]:
        if self.converter is None:
            source = self.sources[0][0]
            yield self.name, partial(files.read, source)
            return
        for name, whole in self.convert(lm, files.whole).items():
            yield name, partial(_block, whole)


def _groups(lm: Any, stored: Iterable[str]) -> list[_Group]:
    """How transformers' conversions lead from the names in the files to those of the model; a name that leads nowhere
    is a group of its own, under the name that was looked for."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [c for c in lm._weight_conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in lm._weight_conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = lm.state_dict()
    groups: dict[str, _Group] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, lm.base_model_prefix, targets)
        if target not in targets and name in targets:
            target, pattern = name, None
        converter = by_pattern[pattern] if pattern is not None else None
        # Two files may hold the same parameter under its old and its new name; transformers takes the first as well.
        group = groups.setdefault(target, _Group(target, [], converter))
        if group.converter is not None or not group.sources:
            group.sources.append((name, pattern or name))
    return list(groups.values())


def _check_names(lm: Any, path: Path) -> None:
    """Raise ModelPathError unless the weights of the folder fit the model; conversions that they need are marked."""
    if (path / NAMES_FILE).is_file():  # a checkpoint: its weights are in another form, checked when they are loaded
        _groups(lm, json.loads((path / NAMES_FILE).read_text(encoding="utf-8")))
        return
    stored = TensorFiles(_weight_files(path), ModelPathError).shapes()
    made: dict[str, tuple[int, ...]] = {}
    for group in _groups(lm, stored):
        if group.converter is None:
            made[group.name] = stored[group.sources[0][0]]
            continue
        try:
            converted = group.convert(lm, lambda name: torch.empty(stored[name], device="meta"))
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            names = [source for source, _ in group.sources]
            raise ModelPathError(
                f"{_listed(names[:LISTED], len(names))} in {str(path)!r} cannot be converted to {group.name!r}: {error}"
            ) from error
        made |= {name: tuple(tensor.shape) for name, tensor in converted.items()}
    kept = aliases(lm)
    expected = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    there = {kept[name] for name in made if name in kept}
    ignored = _ignored_when_unexpected(lm)
    made = {name: shape for name, shape in made.items() if name in expected or not ignored(name)}
    # Of tied names any one will do, and the one that the format keeps is the one to miss.
    optional = [name for name, main in kept.items() if main != name or main in there]
    check_fit(expected, made, str(path), ModelPathError, optional=optional)


def _ignored_when_unexpected(lm: Any) -> Callable[[str], bool]:
    """What transformers, too, leaves in the files: extra layers that the architecture has but this class does not use,
    and buffers that used to be saved."""
    patterns = [*(lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _model_directory(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise ModelPathError(f"no model directory at {str(path)!r}; give the path of a Hugging Face model folder")
    if not (path / CONFIG_FILE).is_file():
        raise ModelPathError(f"{str(path)!r} has no config.json; give a Hugging Face model folder (not a single file)")
    return path


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelPathError(f"{str(index)!r} is damaged ({error!r}); copy or download it again") from error
        if absent := [name for name in names if not (path / name).is_file()]:
            raise ModelPathError(
                f"{str(index)!r} names files that are not there: {_listed(absent[:LISTED], len(absent))}"
            )
        return [path / name for name in names]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    raise ModelPathError(f"{str(path)!r} has no *.safetensors weights; convert the model with save_pretrained first")


def _read_local(tensor: Tensor, read: Reader) -> Tensor:
    sizes = tuple(local(tensor).shape)
    return read(local_offsets(tensor), sizes) if math.prod(sizes) else torch.empty(sizes, dtype=tensor.dtype)


def _block(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def _overlap(
    piece: _Piece, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The common block of a piece and of what is wanted: in the piece's coordinates, and in the wanted block's."""
    stored, wanted = [], []
    for start, size, offset, length in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True):
        low, high = max(start, offset), min(start + size, offset + length)
        stored.append(slice(low - start, high - start))
        wanted.append(slice(low - offset, high - offset))
    return tuple(stored), tuple(wanted)


def _listed(names: list[str], count: int) -> str:
    return ", ".join(names) + (", ..." if count > len(names) else "")
