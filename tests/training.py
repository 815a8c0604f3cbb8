"""A small run whose every bit is determined: a scripted engine that answers by the request alone, no staleness."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from safetensors import safe_open

import molt_sdk as molt
from molt_sdk.testing import ScriptedEngine
from trainer_backend.config import TrainerConfig

QUESTIONS = [{"prompt": f"question {i}"} for i in range(5)]
FALLING = TrainerConfig(compute_dtype="float32", schedule="linear", warmup_steps=2, decay_steps=60)


def chatter(prompt: list[int], sampling: molt.SamplingParams) -> str:
    """What it says depends on the request alone."""
    dice = random.Random(sampling.seed)
    return "".join(dice.choice("ab") for _ in range(dice.randint(1, 4)))


def moody(task: molt.Task, trajectory: molt.Trajectory) -> float:
    """Fails for some replies; question 3 teaches nothing, so that a step with it alone is skipped."""
    if trajectory.text == "a":
        raise ValueError("a single a")
    return 0.5 if task.prompt == "question 3" else float(len(trajectory.text) % 2)


def arguments(model: str, run_dir: Path, /, **changes: Any) -> dict[str, Any]:
    """Batches of one group, checkpoints every third step, a learning rate that changes with every step."""
    return {
        "tasks": QUESTIONS,
        "rewards": [moody],
        "model": model,
        "engine": ScriptedEngine(model, chatter),
        "steps": 8,
        "group_size": 4,
        "groups_per_step": 1,
        "max_staleness": 0,
        "learning_rate": 1e-3,
        "run_dir": run_dir,
        "config": molt.FitConfig(checkpoint_every=3, trainer=FALLING),
        **changes,
    }


def fit(model: str, run_dir: Path, /, **changes: Any) -> molt.Run:
    return molt.fit(**arguments(model, run_dir, **changes))


def state_hash(folder: Path) -> str:
    """Of every tensor in a folder: weights and, in a checkpoint, the optimizer's moments. Not the random number
    generators, of which training draws nothing: each process has its own."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.safetensors") if path.parent.name != "rng"):
        with safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                digest.update(f"{path.relative_to(folder)} {name}".encode() + file.get_tensor(name).tobytes())
    return digest.hexdigest()
