from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import GemmaConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config
from transformers.utils import logging

from molt_sdk.errors import ModelPathError
from trainer_backend.model import check_layouts, decoder_blocks, load_model
from trainer_backend.parallel import inline_mesh, shard

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "gemma": GemmaConfig(**SMALL),
    "mistral with a window of 5": MistralConfig(**SMALL, sliding_window=5),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_agree_for_common_families_also_beyond_a_window(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config: PretrainedConfig = FAMILIES[family]
    Auto.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, CPU)
    shard(model, decoder_blocks(model), inline_mesh(CPU), dtype)
    check = check_layouts(model, CPU)
    assert check.tree_agrees
    assert check.chain_agrees
    assert check.wrong > 0.01
    if dtype == torch.float32:
        assert max(check.tree, check.chain) < 1e-4 * check.wrong


def test_the_check_sees_a_model_that_leaks_between_packed_rows(pocket: str) -> None:
    """As a recurrent layer does: each token's embedding depends on the token before it in the batch."""
    model = load_model(pocket, CPU)
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))
    check = check_layouts(model, CPU)
    assert not check.chain_agrees


def test_the_check_sees_a_model_that_counts_positions_itself(pocket: str) -> None:
    """Positions counted from the last start of a row are right for packed rows and wrong for shared prefixes."""
    model = load_model(pocket, CPU)

    def count(_: Any, __: Any, arguments: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if "position_ids" in arguments:
            starts = torch.where(arguments["position_ids"] == 0, torch.arange(arguments["input_ids"].shape[1]), 0)
            arguments["position_ids"] = torch.arange(starts.shape[1])[None] - starts.cummax(dim=1).values
        return (), arguments

    model.register_forward_pre_hook(count, with_kwargs=True)
    check = check_layouts(model, CPU)
    assert check.chain_agrees
    assert not check.tree_agrees


def test_master_weights_are_float32_whatever_the_folder_holds(pocket: str, tmp_path: Path) -> None:
    Auto.from_pretrained(pocket, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in load_model(tmp_path, CPU).parameters()} == {torch.float32}


def test_loading_is_quiet_and_leaves_the_users_log_level(pocket: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(pocket, CPU)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_a_missing_or_incomplete_folder_is_named(pocket: str, tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match=re.escape(repr(str(tmp_path / "nowhere")))):
        load_model(tmp_path / "nowhere", CPU)
    with pytest.raises(ModelPathError, match=r"no config\.json"):
        load_model(tmp_path, CPU)
    shutil.copy(f"{pocket}/config.json", tmp_path)
    with pytest.raises(ModelPathError, match=r"no \*\.safetensors"):
        load_model(tmp_path, CPU)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelPathError, match="cannot load"):
        load_model(tmp_path, CPU)


def test_a_folder_that_lacks_a_tensor_is_refused(pocket: str, tmp_path: Path) -> None:
    """transformers would fill it with random numbers and only warn."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(pocket, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelPathError, match=r"lack .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, CPU)
