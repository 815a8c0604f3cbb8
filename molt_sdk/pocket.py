"""A tiny random model with a real tokenizer and a chat template, made in milliseconds, for tests and examples."""

from __future__ import annotations

import json
import os
from pathlib import Path

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
"""Built-in chat templates by name. ``chatml`` is append-only and knows nothing of tools, like SmolLM2's."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def pocket_model(
    directory: str | os.PathLike[str],
    template: str = "chatml",
    *,
    seed: int = 0,
    hidden_size: int = 64,
    layers: int = 2,
    context_length: int = 2048,
) -> str:
    """Write a random tiny Llama (tied embeddings), a byte-level tokenizer and a chat template; return the directory.

    ``template`` is a name from :data:`TEMPLATES` or Jinja text. Every byte is one token (ids 0-255), followed by the
    special tokens ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>`` (end of turn and EOS). The same arguments give
    the same bytes. Needs no torch and no download.
    """
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if "{" not in template and template not in TEMPLATES:
        from molt_sdk.errors import ConfigError

        raise ConfigError(
            f"pocket_model: no template named {template!r}; give Jinja text or one of {sorted(TEMPLATES)}"
        )
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    heads, kv_heads = 4, 2
    vocab_size = 256 + len(SPECIAL_TOKENS)
    end_of_turn = vocab_size - 1

    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": context_length,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
        "dtype": "float32",
    }
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"eos_token_id": end_of_turn, "do_sample": True, "temperature": 1.0})
    chat_template = TEMPLATES.get(template, template)
    (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_length,
            "chat_template": chat_template,
        },
    )

    rng = np.random.default_rng(seed)
    head_dim = hidden_size // heads

    def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    ones = np.ones(hidden_size, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": weight(vocab_size, hidden_size), "model.norm.weight": ones}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weight(heads * head_dim, hidden_size),
            prefix + "self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden_size),
            prefix + "self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden_size),
            prefix + "self_attn.o_proj.weight": weight(hidden_size, heads * head_dim),
            prefix + "mlp.gate_proj.weight": weight(2 * hidden_size, hidden_size),
            prefix + "mlp.up_proj.weight": weight(2 * hidden_size, hidden_size),
            prefix + "mlp.down_proj.weight": weight(hidden_size, 2 * hidden_size),
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in byte order (the byte-level BPE convention)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_in = {byte: chr(byte) for byte in printable}
    extra = 256
    for byte in range(256):
        if byte not in stand_in:
            stand_in[byte] = chr(extra)
            extra += 1
    return [stand_in[byte] for byte in range(256)]


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
