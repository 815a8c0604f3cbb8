from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from molt_sdk.errors import ModelPathError
from tests.trainer_backend.folders import logits, make_folder, reference
from trainer_backend.loading import empty_model, load_weights, model_files, quiet_transformers, source_dtype

CPU = torch.device("cpu")
KINDS = ["tied", "untied", "no-prefix", "experts", "renamed", "float32-bias"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_folder(tmp_path / "model", "tied"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the only weights file; "__" in a keyword stands for a dot, None deletes."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_one_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    """Any dtype on disk, files with an index, experts that are fused, other names, a missing prefix, tied or not."""
    directory = make_folder(tmp_path / "model", kind)
    lm = empty_model(directory)
    load_weights(lm, directory, CPU)
    expected = reference(directory)
    found = lm.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert found[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(found[name], tensor), name
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in lm.named_buffers())
    assert torch.equal(logits(lm), logits(expected))


def test_an_empty_model_takes_no_memory_for_weights(folder: Path) -> None:
    lm = empty_model(folder)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in lm.parameters())
    assert not any(buffer.is_meta for buffer in lm.buffers())
    assert not lm.training
    assert lm.config._attn_implementation == "eager"


def test_f116_tied_names_are_one_parameter_before_and_after_loading(folder: Path) -> None:
    lm = empty_model(folder)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    load_weights(lm, folder, CPU)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert not lm.lm_head.weight.is_meta


def test_what_is_no_model_folder_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match="no model directory"):
        empty_model(tmp_path / "missing")
    (folder / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(ModelPathError, match=r"no \*\.safetensors weights"):
        empty_model(folder)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelPathError, match="cannot load a causal language model"):
        empty_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelPathError, match=r"no config\.json"):
        empty_model(folder)


def test_quantized_weights_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelPathError, match="quantized"):
        empty_model(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelPathError, match=r"model\.safetensors' is damaged"):
        empty_model(folder)


def test_a_damaged_index_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = Path(make_folder(tmp_path / "model", "untied"))
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelPathError, match=gone.name):
        empty_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(ModelPathError, match=r"index\.json' is damaged"):
        empty_model(folder)


def test_f119_names_that_do_not_fit_are_listed(folder: Path) -> None:
    """A wrong prefix, as after a training framework's export: nothing is silently left at its initial value."""
    tensors = load_file(folder / "model.safetensors")
    save_file({f"policy.{name}": t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelPathError) as raised:
        empty_model(folder)
    count = len(tensors)
    assert f"{count} missing: model.embed_tokens.weight (renamed? policy.model.embed_tokens.weight)" in str(
        raised.value
    )
    assert f"{count} unexpected: policy.model.embed_tokens.weight" in str(raised.value)


def test_missing_unexpected_and_misshapen_tensors_are_told_apart(folder: Path) -> None:
    rewrite(
        folder,
        model__norm__weight=None,
        model__extra__weight=torch.ones(2),
        model__embed_tokens__weight=torch.ones(3, 20),
    )
    with pytest.raises(ModelPathError) as raised:
        empty_model(folder)
    message = str(raised.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 unexpected: model.extra.weight" in message
    assert "1 of another shape: model.embed_tokens.weight [3, 20], expected [259, 20]" in message


def test_experts_that_cannot_be_fused_are_named(tmp_path: Path) -> None:
    folder = Path(make_folder(tmp_path / "model", "renamed"))
    rewrite(folder, model__layers__0__block_sparse_moe__experts__1__w1__weight=torch.ones(36, 21))
    with pytest.raises(ModelPathError, match=r"experts\.0\.w1\.weight.*cannot be converted"):
        empty_model(folder)


def test_tied_names_with_different_values_are_refused(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lm_head__weight=embedding.clone())
    load_weights(lm := empty_model(folder), folder, CPU)  # the same values twice do no harm
    assert torch.equal(lm.lm_head.weight, embedding)
    rewrite(folder, lm_head__weight=embedding + 1)
    with pytest.raises(ModelPathError, match="tie_word_embeddings"):
        load_weights(empty_model(folder), folder, CPU)


def test_either_of_two_tied_names_will_do(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, model__embed_tokens__weight=None, lm_head__weight=embedding)
    load_weights(lm := empty_model(folder), folder, CPU)
    assert torch.equal(lm.model.embed_tokens.weight, embedding)


def test_config_and_tokenizer_outlive_the_folder(folder: Path) -> None:
    files = model_files(folder)
    shutil.rmtree(folder)
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"} <= files.keys()
    assert "model.embed_tokens.weight" in json.loads(files["weight_names.json"])
    assert model_files(files) is files


def test_the_dtype_of_the_source_is_read_from_its_config(folder: Path) -> None:
    assert source_dtype(folder) == torch.float32
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    for content, expected in (
        (config, torch.bfloat16),
        (config | {"torch_dtype": "float16"}, torch.float16),
        ({"text_config": {"dtype": "float32"}}, torch.float32),
    ):
        (folder / "config.json").write_text(json.dumps(content))
        assert source_dtype(folder) == expected


def test_the_users_logging_settings_come_back() -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    with quiet_transformers():
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
