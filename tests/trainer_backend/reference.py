"""What the trainer must compute, by the definition; and what it did compute, as seen from outside."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from molt_sdk.types import TrajectoryGroup
from trainer_backend.trainer import StepResult, Trainer

EXACT: dict[str, Any] = {"compute_dtype": "float32", "grad_clip": math.inf}
"""Settings under which the gradient is that of the loss, within float32 rounding."""
READABLE: dict[str, Any] = {"learning_rate": 0.0, "betas": (0.0, 0.999), **EXACT}
"""Settings under which every step's gradient is left in the checkpoint: with beta1 = 0 AdamW's first moment is it."""


def reference(model: str, groups: Sequence[TrajectoryGroup]) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients and trained tokens: float64, one plain forward pass per sample, no packing."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = [t.reward for t in group.scored if t.reward is not None]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        for trajectory, reward in zip(group.scored, rewards, strict=True):
            advantage = (reward - mean) / std
            for sample in trajectory.samples():
                logits = policy(torch.tensor([sample.token_ids])).logits[0]
                for at in range(len(sample)):
                    if sample.loss_mask[at]:
                        scaled = logits[at - 1] / sample.temperatures[at]
                        ratio = (scaled.log_softmax(-1)[sample.token_ids[at]] - sample.rollout_logprobs[at]).exp()
                        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                        count += 1
    (total / count).backward()
    return total.item() / count, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}, count


def gradient_of(
    trainer: Trainer, groups: Sequence[TrajectoryGroup], folder: Path
) -> tuple[StepResult, dict[str, Tensor]]:
    """The gradient of a step under ``betas=(0, ...)``, read from a checkpoint of any number of ranks."""
    result = trainer.step(groups)
    trainer.save(folder)
    trainer.wait_saved()
    return result, first_moments(folder)


def first_moments(checkpoint: Path) -> dict[str, Tensor]:
    """AdamW's first moments in a checkpoint, whole, by parameter."""
    reader = HuggingFaceStorageReader(str(checkpoint / "optimizer"))
    sizes = {name: entry.size for name, entry in reader.read_metadata().state_dict_metadata.items()}
    found = {name: torch.empty(size) for name, size in sizes.items() if name.endswith(".exp_avg")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in a single process, as it is told to
        dcp.load(found, storage_reader=reader, no_dist=True)
    return {name.removesuffix(".exp_avg"): tensor for name, tensor in found.items()}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].double(), gradient, rtol=1e-3, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def norm_of(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))


def hash_of(trainer: Trainer) -> str:
    """Of all weights, by name."""
    digest = hashlib.sha256()
    for name, tensor in trainer.weights():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
