"""Seconds of one training step: shared prefixes computed once (tree) against every sample on its own (chain).

    python benchmarks/trainer_step.py --model MODEL_DIR --repeats 3

The batch has the shape of a small tool-use run: 8 groups of 8 trajectories; a system prompt that all share, a question
per group, two sampled turns with a tool result between them. Both layouts train the same tokens on the same weights and
take turns in one process, so that a busy machine disturbs both alike. The first, cold step of each is not counted.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from molt_sdk.packed import pack_floats, pack_ints
from molt_sdk.testing import pocket_model
from molt_sdk.types import SamplingParams, Task, Trajectory, TrajectoryGroup, Turn
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import StepResult, Trainer

PROMPT, QUESTION, FIRST, RESULT, SECOND = 170, 15, 26, 12, 8
"""Tokens: shared prompt, question of a group, first reply, tool result, second reply."""


def synthetic_groups(groups: int, size: int, vocab_size: int, seed: int = 0) -> list[TrajectoryGroup]:
    """Random tokens in the shape above; rewards alternate, so that every trajectory has a gradient."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    prompt = tokens(PROMPT)
    made = []
    for position in range(groups):
        task = Task(prompt=f"question {position}")
        question = tokens(QUESTION)
        members = []
        for index in range(size):
            first = _turn(0, None, prompt + question, tokens(FIRST))
            second = _turn(1, first, tokens(RESULT), tokens(SECOND))
            name = f"{position}-{index}"
            members.append(Trajectory(id=name, task=task, turns=(first, second), reward=float(index % 2)))
        made.append(TrajectoryGroup(task=task, position=position, epoch=0, trajectories=tuple(members)))
    return made


def _turn(index: int, parent: Turn | None, context: list[int], completion: list[int]) -> Turn:
    return Turn(
        id=index,
        parent=parent.id if parent else None,
        parent_turn=parent,
        fork_reason="" if parent else "first call",
        agent="main",
        trainable=True,
        new_messages=[],
        tools=(),
        sampling=SamplingParams(),
        message={"role": "assistant", "content": ""},
        finish_reason="stop",
        context_i32=pack_ints(context),
        completion_i32=pack_ints(completion),
        logprobs_f32=pack_floats([-5.0] * len(completion)),
        version_spans=((0, 0, len(completion)),),
    )


def measure(model: str, dtypes: Sequence[Literal["bfloat16", "float32"]], repeats: int, budget: int) -> Table:
    """One line per compute dtype and layout, and the ratio of the two."""
    table = Table(title=f"one step of 8 x 8 trajectories, {torch.get_num_threads()} threads, {model}")
    for column in ("dtype", "layout", "tokens", "micro-batches", "seconds: min", "median", "max"):
        table.add_column(column, justify="right")
    for dtype in dtypes:
        config = TrainerConfig(learning_rate=0.0, compute_dtype=dtype, max_tokens_per_microbatch=budget)
        trainer = Trainer(model, config)
        if trainer.layout != "tree":
            raise SystemExit(f"{model} cannot share prefixes; there is nothing to compare")
        groups = synthetic_groups(8, 8, trainer.vocab_size)
        results: dict[Literal["tree", "chain"], list[StepResult]] = {"tree": [], "chain": []}
        for _ in range(repeats + 1):
            for layout in results:
                trainer.layout = layout
                results[layout].append(trainer.step(groups))
        for layout, steps in results.items():
            row = _spread([step.seconds for step in steps[1:]])
            table.add_row(dtype, layout, str(steps[0].distinct_tokens), str(steps[0].microbatches), *row)
        pairs = zip(results["chain"][1:], results["tree"][1:], strict=True)
        table.add_row(dtype, "chain / tree", "", "", *_spread([chain.seconds / tree.seconds for chain, tree in pairs]))
        trainer.close()
    return table


def _spread(values: list[float]) -> list[str]:
    return [f"{value:.2f}" for value in (min(values), statistics.median(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face model folder; default: a random pocket model")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3, help="counted steps per layout")
    parser.add_argument("--budget", type=int, default=TrainerConfig().max_tokens_per_microbatch)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or pocket_model(folder)
        Console(width=120).print(measure(model, arguments.dtypes, arguments.repeats, arguments.budget))


if __name__ == "__main__":
    main()
