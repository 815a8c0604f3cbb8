"""Tiny random model folders. Their tensors do not divide evenly among ranks; some have fewer rows than there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHAPES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 20,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}


def make_folder(directory: Path, kind: str) -> str:
    """``tied``, ``untied`` (bfloat16 in many files), ``no-prefix`` (names without "model."), ``experts`` (stored one by
    one, fused in the module; bfloat16 in many files), ``renamed`` (other names as well), ``float32-bias`` (one tensor
    that stays in float32)."""
    torch.manual_seed(0)
    model: Any
    saving: dict[str, Any] = {}
    match kind:
        case "tied":
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPES, tie_word_embeddings=True))
        case "untied":
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPES, tie_word_embeddings=False)).bfloat16()
            saving = {"max_shard_size": "10KB"}
        case "no-prefix":
            model = LlamaModel(LlamaConfig(**SHAPES, tie_word_embeddings=True))
        case "experts":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPES, **EXPERTS, num_experts=3)).bfloat16()
            saving = {"max_shard_size": "10KB"}
        case "renamed":
            model = MixtralForCausalLM(MixtralConfig(**SHAPES, num_local_experts=3))
        case "float32-bias":
            groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
            model = Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPES, **EXPERTS, **groups, n_routed_experts=3))
    model.save_pretrained(directory, **saving)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "LICENSE").write_text("as you like")
    return str(directory)


def reference(directory: str | Path) -> Any:
    """The model as transformers itself loads it."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def stored(directory: str | Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.offset_keys()}
    return found


def logits(lm: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = lm(torch.arange(6)[None], use_cache=False).logits
    return result
