"""Weights out: whole tensors in the names of the Hugging Face checkpoint format, in buckets; and model folders of them.

The names are those that ``save_pretrained`` writes and that transformers and inference engines load: where a module's
parameters are named or laid out differently (fused experts, say), transformers' conversions are applied backwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer_backend.loading import (
    CONFIG_FILE,
    INDEX_FILE,
    NAMES_FILE,
    SINGLE_FILE,
    ModelFiles,
    aliases,
    model_files,
)
from trainer_backend.parallel import local, rank_of_ranks

BUCKET_BYTES = 256 << 20
FILE_BYTES = 2 << 30

Bucket = list[tuple[str, Tensor]]


def weight_buckets(lm: Any, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """All weights as (name, whole CPU tensor) in lists of at most ``bucket_bytes``, or of one group of tensors that
    are converted together where that is larger. Floating-point ones are in ``dtype``, save those that transformers
    keeps in float32. Of tied names the one that the file format keeps.

    Every rank must iterate to the end: gathering is collective. Rank 0 gets the tensors, copies that later steps do not
    change; other ranks get as many empty lists. Extra memory: one bucket, as each list is emptied when the next one is
    asked for, and on the model's device the largest tensor.
    """
    tensors = lm.state_dict(keep_vars=True)
    main = rank_of_ranks()[0] == 0

    def fetch(name: str) -> Tensor | None:
        whole = _whole(tensors[name].detach(), dtype_in_files(lm, name, tensors[name], dtype))
        return whole if main else None

    return named_buckets(lm, fetch, lambda name: dtype_in_files(lm, name, tensors[name], dtype).itemsize, bucket_bytes)


def named_buckets(
    lm: Any, fetch: Callable[[str], Tensor | None], itemsize: Callable[[str], int], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Buckets under the names of the file format, of the tensors that ``fetch`` gives for the model's own names, each
    asked for once; None leaves it out. ``lm`` gives names and shapes."""
    shapes = {name: tensor.shape for name, tensor in lm.state_dict().items()}
    bucket: Bucket = []
    size = groups = 0
    for group in _groups(lm):
        group_size = sum(shapes[name].numel() * itemsize(name) for name in group.names)
        if groups and size + group_size > bucket_bytes:
            yield bucket
            bucket.clear()
            size = groups = 0
        bucket += group.convert(lm, {name: fetch(name) for name in group.names})
        size, groups = size + group_size, groups + 1
    if groups:
        yield bucket


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)


def write_model_folder(
    directory: str | os.PathLike[str],
    source: str | os.PathLike[str] | ModelFiles,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write ``tensors`` as a Hugging Face model folder: safetensors files of at most ``file_bytes`` each, of which one
    at a time is in memory, with their index; config.json as in ``source`` but naming ``dtype``; generation config,
    tokenizer, chat template and licence of ``source``.

    All or nothing: the folder appears when it is complete and on disk, and what stood there before stays until then.
    Raises OSError.
    """
    files = model_files(source)
    with new_directory(directory) as folder:
        for name, content in files.items():
            if name == CONFIG_FILE:
                content = _config_with_dtype(content, dtype)
            if name != NAMES_FILE:
                (folder / name).write_bytes(content)
        parts: list[list[str]] = []
        total = 0
        for part in _parts(tensors, file_bytes):
            write_tensors(folder / _part_name(len(parts)), part, {"format": "pt"})
            parts.append(list(part))
            total += sum(tensor.nbytes for tensor in part.values())
        if len(parts) == 1:
            (folder / _part_name(0)).rename(folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(parts):
            file = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
            (folder / _part_name(index)).rename(folder / file)
            weight_map |= dict.fromkeys(names, file)
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_directory(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden sibling of ``target`` to write into. At the end it is flushed to disk and renamed, replacing what stood
    there; after an exception it is removed."""
    folder = hidden_directory(Path(target))
    try:
        yield folder
        publish(folder, Path(target))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file. Raises OSError for whatever went wrong."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error


def hidden_directory(target: Path, *, owned: bool = False) -> Path:
    """Make the empty folder in which what will be ``target`` is written. Raises FileExistsError where something stands
    that is neither empty nor a model folder, since it will be replaced; not if the place is ``owned``."""
    known = any((target / name).is_file() for name in (CONFIG_FILE, NAMES_FILE))
    if not owned and target.exists() and not known and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{str(target)!r} exists and is no model folder; give a folder that does not exist yet")
    folder = target.absolute().with_name(f".{target.name}.new-{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    return folder


def publish(folder: Path, target: Path) -> None:
    """Flush all of ``folder`` to disk and make it ``target``. What stood there is moved aside before and removed after;
    should the process be killed in between, ``remove_torn`` moves it back."""
    for path in (*sorted(folder.rglob("*")), folder):
        flush(path)
    previous = folder.with_name(folder.name.replace(".new-", ".old-"))
    if target.exists():
        target.rename(previous)
    try:
        folder.rename(target)
    except OSError:
        if previous.exists():
            previous.rename(target)
        raise
    flush(target.absolute().parent)
    shutil.rmtree(previous, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file or folder is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that become one or more tensors of the file format together."""

    name: str
    """The (first) name in the file format."""
    sources: list[tuple[str, str]]
    """(name in the model, pattern of the conversion that it matches)"""
    converter: Any
    """transformers' WeightConverter; None where only the name may differ."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.sources]

    def convert(self, lm: Any, tensors: dict[str, Tensor | None]) -> Bucket:
        if self.converter is None:
            return [(self.name, tensor) for tensor in tensors.values() if tensor is not None]
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            if (tensor := tensors.pop(name)) is None:
                return []
            converter.add_tensor(self.name, name, pattern, tensor)
        made = converter.convert(self.name, model=lm, config=lm.config)
        return [(name, (t[0] if isinstance(t, list) else t).contiguous()) for name, t in made.items()]


def _groups(lm: Any) -> list[_Group]:
    """The model's tensors, tied ones once, by what they become in the file format. The conversions are those that led
    from the source's files to the model."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    kept = aliases(lm)
    names = [name for name in kept if kept[name] == name]
    if not lm._weight_conversions:
        return [_Group(name, [(name, name)], None) for name in names]
    reversed_ = [conversion.reverse_transform() for conversion in lm._weight_conversions[::-1]]
    renamings = [c for c in reversed_ if isinstance(c, WeightRenaming)]
    converters = [c for c in reversed_ if isinstance(c, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, _Group(target, [], converter)).sources.append((name, pattern or name))
    return list(groups.values())


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor on the CPU, never sharing memory with the model. Collective."""
    held = local(tensor)
    converted = tensor.to(dtype)
    whole = converted.full_tensor() if isinstance(converted, DTensor) else converted
    shared = whole.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return whole.to("cpu", copy=shared).contiguous()


def dtype_in_files(lm: Any, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Of a tensor in files of ``dtype``: transformers keeps some in float32, others are no floating-point ones."""
    if not tensor.is_floating_point():
        return tensor.dtype
    in_float32 = getattr(lm, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(re.search(module, name) for module in in_float32) else dtype


def _parts(tensors: Iterable[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > file_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _part_name(index: int) -> str:
    return f"model-{index + 1:05}.safetensors"


def _config_with_dtype(content: bytes, dtype: torch.dtype) -> bytes:
    config = json.loads(content)
    name = str(dtype).removeprefix("torch.")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = name
    return (json.dumps(config, indent=2) + "\n").encode()
