"""A Hugging Face causal LM from a directory, and what must hold before its prefixes may be shared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from safetensors import SafetensorError
from torch import Tensor, nn

from molt_sdk.errors import ModelPathError, TrainingError
from trainer_backend.attention import TREE_ATTENTION, tree_attention
from trainer_backend.batch import Forest, Ints, Row, build_forest, pack
from trainer_backend.logprobs import forest_logits


def load_model(directory: str | os.PathLike[str], device: torch.device) -> Any:
    """A ``PreTrainedModel`` with float32 master weights, tree attention and no dropout (as in the sampler). No pickle.

    Raises ModelPathError when the directory is missing, has no config.json, or holds no safetensors weights that fit.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    path = Path(directory)
    if not path.is_dir():
        raise ModelPathError(f"no model directory at {str(path)!r}; give the path of a Hugging Face model folder")
    if not (path / "config.json").is_file():
        raise ModelPathError(f"{str(path)!r} has no config.json; give a Hugging Face model folder (not a single file)")
    if not any(path.glob("*.safetensors")):
        raise ModelPathError(
            f"{str(path)!r} has no *.safetensors weights; convert the model with save_pretrained first"
        )
    auto_class: Any = AutoModelForCausalLM
    with quiet_transformers():
        try:
            model, info = auto_class.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation="eager",  # every model has it, and the layout check needs it
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelPathError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    if info["missing_keys"]:
        raise ModelPathError(
            f"the weights in {str(path)!r} lack {sorted(info['missing_keys'])[:5]}; the model is damaged"
        )
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    model.set_attn_implementation(TREE_ATTENTION)
    return model.to(device).eval()


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


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of transformer blocks: the one whose length is the config's number of layers, and the largest such."""
    config: Any = model.config
    layers = config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if not found:
        raise TrainingError(f"{type(model).__name__} has no list of {layers} decoder blocks to shard")
    return max(found, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def attention_chunk(model: nn.Module) -> int | None:
    """Tokens per attention chunk where some layer sees only its own chunk of the sequence (Llama 4), which forests do
    not imitate; None for other models. Sliding windows need no such limit."""
    config: Any = model.config
    size: int | None = getattr(config.get_text_config(), "attention_chunk_size", None)
    return size


class LayoutCheck(Struct, frozen=True, kw_only=True):
    """Root-mean-square differences between log-probabilities of all tokens, in nats."""

    tree: float
    """Shared prefixes against packed samples, both in tree attention."""
    chain: float
    """Packed samples against single ones in the model's own eager attention."""
    wrong: float
    """Attention that is wrong on purpose (siblings see each other) against single samples: what a mistake can do to
    this model. In bfloat16 rounding reaches a tenth of it."""
    dtype: torch.dtype
    """Of the logits."""

    @property
    def chain_agrees(self) -> bool:
        """Far below what a mistake does, as far as the precision allows to tell."""
        return self.chain < (0.5 if self.dtype == torch.bfloat16 else 0.01) * self.wrong

    @property
    def tree_agrees(self) -> bool:
        """Not more than the rounding seen between packed and single samples, whose kernels differ more."""
        return self.chain_agrees and self.tree <= self.chain + 1e-3 * self.wrong


def check_layouts(model: Any, device: torch.device, seed: int = 0) -> LayoutCheck:
    """Run a small random tree through the (sharded) model in each layout, and one sample at a time with the model's own
    eager attention."""
    rows = _random_tree(model.get_input_embeddings().num_embeddings, seed)
    tree, chain = build_forest(rows, share=True), build_forest(rows, share=False)

    def eager(tokens: Ints, **arguments: Tensor) -> Tensor:
        logits: Tensor = model(
            input_ids=torch.from_numpy(tokens).to(device)[None], use_cache=False, **arguments
        ).logits[0]
        return logits

    def by_row(logits: Tensor, forest: Forest) -> Tensor:
        return logits[torch.from_numpy(np.concatenate(forest.row_nodes)).to(device)]

    def all_logits(forest: Forest) -> Tensor:
        return forest_logits(model, forest, device, torch.arange(len(forest.token_ids), device=device))

    with torch.no_grad():
        found = [by_row(all_logits(forest), forest) for forest in (tree, chain)]
        model.set_attn_implementation("eager")
        found.append(torch.cat([eager(row.inputs) for row in rows]))
        count = len(tree.token_ids)
        # In eager attention a mask is added to the scores: here, each node sees all nodes before it.
        causal = torch.full((count, count), -torch.inf, device=device).triu(1)[None, None]
        positions = torch.from_numpy(tree.positions).to(device)[None]
        found.append(by_row(eager(tree.token_ids, attention_mask=causal, position_ids=positions), tree))
        model.set_attn_implementation(TREE_ATTENTION)
        shared, packed, single, wrong = (logits.float().log_softmax(-1) for logits in found)

    def rms(left: Tensor, right: Tensor) -> float:
        return float((left - right).square().mean().sqrt())

    return LayoutCheck(
        tree=rms(shared, packed), chain=rms(packed, single), wrong=rms(wrong, single), dtype=found[0].dtype
    )


def _random_tree(vocab_size: int, seed: int) -> list[Row]:
    """Three samples: two branches from a common trunk, one of which forks again, so that masks are tried at two
    depths. Only the last token is trained; the check looks at all of them."""
    rng = np.random.default_rng(seed)
    trunk, fork, twig, other = (rng.integers(vocab_size, size=size) for size in (6, 12, 6, 6))
    branches = [np.concatenate([fork, twig]), np.concatenate([fork, other]), rng.integers(vocab_size, size=18)]
    rows = []
    for branch in branches:
        token_ids = np.concatenate([trunk, branch]).astype(np.int64)
        length = len(token_ids)
        rows.append(
            Row(
                trajectory_id="layout-check",
                token_ids=token_ids,
                trained=np.arange(length) == length - 1,
                turn_ids=np.zeros(length, dtype=np.int64),
                rollout_logprobs=np.zeros(length, dtype=np.float32),
                temperatures=np.ones(length, dtype=np.float32),
                advantages=np.ones(length, dtype=np.float32),
            )
        )
    return next(pack(rows, 1 << 20, share=True))
