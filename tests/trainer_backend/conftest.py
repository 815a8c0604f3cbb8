"""Records for the trainer's tests, and a pocket model to train."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from molt_sdk.packed import pack_floats, pack_ints, to_spans
from molt_sdk.testing import pocket_model
from molt_sdk.types import SamplingParams, Status, Task, Trajectory, TrajectoryGroup, Turn

TurnSpec = dict[str, Any]
"""context, completion: token ids; logprobs (default -1.0 each), agent, parent (default: the turn before), temperature,
trainable."""


@pytest.fixture(scope="session")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random two-layer Llama with tied embeddings and 259 tokens."""
    return pocket_model(tmp_path_factory.mktemp("pocket"))


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    def make(
        id: str, turns: Sequence[TurnSpec], reward: float | None, *, status: Status = "ok", **fields: Any
    ) -> Trajectory:
        made: list[Turn] = []
        for spec in turns:
            parent = spec.get("parent", len(made) - 1)
            completion = spec["completion"]
            made.append(
                Turn(
                    id=len(made),
                    parent=None if parent is None or parent < 0 else parent,
                    parent_turn=None if parent is None or parent < 0 else made[parent],
                    fork_reason="first call" if parent is None or parent < 0 else "",
                    agent=spec.get("agent", "main"),
                    trainable=spec.get("trainable", True),
                    new_messages=[],
                    tools=(),
                    sampling=SamplingParams(temperature=spec.get("temperature", 1.0)),
                    message={"role": "assistant", "content": ""},
                    finish_reason="stop",
                    context_i32=pack_ints(spec["context"]),
                    completion_i32=pack_ints(completion),
                    logprobs_f32=pack_floats(spec.get("logprobs", [-1.0] * len(completion))),
                    version_spans=to_spans([0] * len(completion)),
                )
            )
        return Trajectory(id=id, task=Task(prompt="q"), turns=tuple(made), reward=reward, status=status, **fields)

    return make


@pytest.fixture(scope="session")
def make_group() -> Callable[..., TrajectoryGroup]:
    def make(trajectories: Sequence[Trajectory], position: int = 0) -> TrajectoryGroup:
        task = trajectories[0].task if trajectories else Task(prompt="q")
        return TrajectoryGroup(task=task, position=position, epoch=0, trajectories=tuple(trajectories))

    return make


@pytest.fixture
def checkpoint_directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "step-1"


@pytest.fixture(scope="session")
def make_groups(
    make_trajectory: Callable[..., Trajectory], make_group: Callable[..., TrajectoryGroup]
) -> Callable[..., list[TrajectoryGroup]]:
    """Random groups that share prompts, one to three turns, forks, temperatures; rewards 0, 1, 4, ... in a group."""

    def make(seed: int = 0, groups: int = 2, size: int = 3) -> list[TrajectoryGroup]:
        rng = random.Random(seed)
        system = ids(rng, 5)
        made = []
        for position in range(groups):
            question = ids(rng, 3)
            members = []
            for index in range(size):
                turns = [sampled(rng, system + question, parent=None)]
                turns += [sampled(rng, ids(rng, rng.randint(0, 4))) for _ in range(rng.randint(0, 2))]
                if rng.random() < 0.5:
                    turns.append(sampled(rng, ids(rng, 2), parent=0))
                members.append(make_trajectory(f"{position}-{index}", turns, float(index**2)))
            made.append(make_group(members, position))
        return made

    return make


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def sampled(rng: random.Random, context: list[int], **fields: Any) -> dict[str, Any]:
    completion = ids(rng, rng.randint(1, 6))
    logprobs = [-5.55 + rng.uniform(-0.3, 0.3) for _ in completion]  # ln(1 / 259) = -5.56: some ratios are clipped
    return {
        "context": context,
        "completion": completion,
        "logprobs": logprobs,
        "temperature": rng.choice([0.7, 1.0]),
        **fields,
    }
