from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer_backend.folders import logits, make_folder, reference, stored
from trainer_backend.loading import empty_model, load_weights, model_files
from trainer_backend.weights import checksum, new_directory, weight_buckets, write_model_folder

CPU = torch.device("cpu")
BUCKET = 21_000
"""Bytes; the embedding alone has 20,720."""


def load(directory: str | Path) -> Any:
    lm = empty_model(directory)
    load_weights(lm, directory, CPU)
    return lm


def all_weights(lm: Any, dtype: torch.dtype = torch.float32, bucket_bytes: int = 2000) -> dict[str, Tensor]:
    return {name: tensor for bucket in weight_buckets(lm, dtype, bucket_bytes) for name, tensor in bucket}


class PeakBytes(TorchDispatchMode):
    """Most bytes alive at once of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("kind", ["tied", "untied", "no-prefix", "experts", "renamed", "float32-bias"])
def test_names_and_values_are_those_of_save_pretrained(tmp_path: Path, kind: str) -> None:
    directory = make_folder(tmp_path / "model", kind)
    reference(directory).save_pretrained(tmp_path / "expected")
    expected = stored(tmp_path / "expected")
    found = all_weights(load(directory))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_buckets_take_no_more_memory_than_one_of_them(tmp_path: Path, kind: str) -> None:
    """Each is dropped before the next is made; experts that are split again count twice while that happens."""
    lm = load(make_folder(tmp_path / "model", kind))
    sizes = []
    with PeakBytes() as memory:
        for bucket in weight_buckets(lm, torch.float32, bucket_bytes=BUCKET):
            sizes.append(sum(tensor.nbytes for _, tensor in bucket))
    assert len(sizes) >= 2
    assert 0 < min(sizes) <= max(sizes) <= BUCKET
    experts = max((t.nbytes for name, t in lm.state_dict().items() if "experts" in name), default=0)
    assert memory.peak <= BUCKET + experts


def test_a_tensor_larger_than_a_bucket_is_one(tmp_path: Path) -> None:
    lm = load(make_folder(tmp_path / "model", "tied"))
    assert [len(bucket) for bucket in weight_buckets(lm, torch.float32, bucket_bytes=1)] == [1] * len(all_weights(lm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f127_what_is_handed_out_does_not_move_with_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    lm = load(make_folder(tmp_path / "model", "tied"))
    before = all_weights(lm, dtype)
    sums = {name: checksum(tensor) for name, tensor in before.items()}
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(1.0)
    assert {name: checksum(tensor) for name, tensor in before.items()} == sums
    assert all(checksum(tensor) != sums[name] for name, tensor in all_weights(lm, dtype).items())


def test_f118_only_the_tied_name_is_left_out(tmp_path: Path) -> None:
    """Another head whose name ends the same is kept, and nothing is left out where nothing is tied."""
    for kind in ("tied", "untied"):
        lm = load(make_folder(tmp_path / kind, kind))
        lm.mtp = nn.Module()
        lm.mtp.lm_head = nn.Linear(20, 259, bias=False)
        found = {name for name in all_weights(lm) if "lm_head" in name or "embed" in name}
        heads = {"mtp.lm_head.weight", "model.embed_tokens.weight"}
        assert found == (heads if kind == "tied" else heads | {"lm_head.weight"})


def test_tensors_that_must_stay_in_float32_do(tmp_path: Path) -> None:
    lm = load(make_folder(tmp_path / "model", "float32-bias"))
    dtypes = {name: tensor.dtype for name, tensor in all_weights(lm, torch.bfloat16).items()}
    assert [name for name, dtype in dtypes.items() if dtype == torch.float32] == [
        name for name in dtypes if "e_score_correction_bias" in name
    ]


def test_checksums_see_single_bits_and_are_the_same_everywhere() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert checksum(tensor) == zlib.crc32(b"\x00\x00\x80\x3f\x00\x40\x40\x40\x80\x40\xa0\x40")
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
    assert checksum(torch.empty(0)) == 0


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_transformers_loads_an_exported_folder(tmp_path: Path, kind: str) -> None:
    directory = make_folder(tmp_path / "model", kind)
    lm = load(directory)
    named = (pair for bucket in weight_buckets(lm, torch.bfloat16) for pair in bucket)
    write_model_folder(tmp_path / "out", directory, named, torch.bfloat16)
    written = stored(tmp_path / "out")
    assert written.keys() == stored(directory).keys()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (Path(directory) / name).read_bytes()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(logits(reference(tmp_path / "out")), logits(lm))


def test_a_large_model_is_written_as_several_files(tmp_path: Path) -> None:
    directory = make_folder(tmp_path / "model", "experts")
    lm = load(directory)
    named = (named for bucket in weight_buckets(lm, torch.float32) for named in bucket)
    write_model_folder(tmp_path / "out", directory, named, torch.float32, file_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    assert torch.equal(logits(reference(tmp_path / "out")), logits(lm))
    assert torch.equal(logits(load(tmp_path / "out")), logits(lm))


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    directory = make_folder(tmp_path / "model", "tied")
    lm, files, target = load(directory), model_files(directory), tmp_path / "deep" / "out"

    def tensors(broken: bool) -> Iterator[tuple[str, Tensor]]:
        yield from all_weights(lm).items()
        if broken:
            raise OSError(28, "No space left on device")

    write_model_folder(target, files, tensors(broken=False), torch.float32)
    (target / "stale").write_text("from before")
    with pytest.raises(OSError, match="No space left"):
        write_model_folder(target, files, tensors(broken=True), torch.float32, file_bytes=1000)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "stale").exists()
    write_model_folder(target, files, tensors(broken=False), torch.float32)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert not (target / "stale").exists()


def test_what_stood_there_comes_back_when_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "out", Path.rename
    target.mkdir()
    (target / "config.json").touch()

    def fail(path: Path, to: Path) -> Path:
        if ".new-" in path.name:
            raise OSError(5, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"), new_directory(target):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "config.json").exists()


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "models"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"models' exists and is no model folder"), new_directory(target):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert (target / "thesis.txt").read_text() == "years of work"
