"""Seconds of one training step, beside a hand-written loop; and how they grow with the number of tokens.

    python benchmarks/trainer_step.py --model MODEL_DIR --repeats 3
    python benchmarks/trainer_step.py --scaling

The batch has the shape of a small tool-use run: 8 groups of 8 trajectories; a system prompt that all share, a question
per group, two sampled turns with a tool result between them. "loop" is minimal_loop.py, "chain" the trainer with every
sample on its own, "tree" the trainer with shared prefixes computed once. All train the same tokens on the same weights
and take turns in one process, so that a busy machine disturbs all alike. The first, cold step of each is not counted.

With ``--scaling`` a step of N tokens in samples of 256 is one forward pass, whatever N: the time per token should not
grow with N.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from minimal_loop import MinimalLoop
from rich.console import Console
from rich.table import Table
from workload import TOOL_USE, Shape, groups_of

from molt_sdk.testing import pocket_model
from trainer_backend.batch import make_rows
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer

Layout = Literal["tree", "chain"]
COLUMNS = ("tokens", "passes", "seconds: min", "median", "max", "trained tokens/s")


def measure(
    model: str, dtypes: Sequence[Literal["bfloat16", "float32"]], repeats: int, budget: int, count: int
) -> Table:
    """Three lines per compute dtype, and their ratios."""
    table = Table(title=f"one step of {count} x 8 trajectories, {torch.get_num_threads()} threads, {model}")
    for column in ("dtype", "", *COLUMNS):
        table.add_column(column, justify="right")
    for dtype in dtypes:
        trainers = {layout: make_trainer(model, layout, budget, dtype) for layout in ("chain", "tree")}
        loop = MinimalLoop(model, torch.device("cpu"), dtype=getattr(torch, dtype))
        groups = groups_of(TOOL_USE, count, 8, trainers["tree"].vocab_size)
        rows = make_rows(groups, TrainerConfig().advantage)
        steps: dict[str, Callable[[], object]] = {"loop": lambda rows=rows, loop=loop: loop.step(rows, budget)}
        results = {}
        for layout, trainer in trainers.items():
            results[layout] = trainer.step(groups)
            steps[layout] = lambda trainer=trainer, groups=groups: trainer.step(groups)
        seconds = take_turns(steps, repeats)
        trained = sum(row.trained_tokens for row in rows)
        for name, values in seconds.items():
            sizes = ["", ""]
            if name in results:
                sizes = [str(results[name].distinct_tokens), str(results[name].microbatches)]
            table.add_row(dtype, name, *sizes, *spread(values), f"{trained / statistics.median(values):.0f}")
        for name, above, below in (("loop / chain", "loop", "chain"), ("tree / chain", "tree", "chain")):
            ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
            table.add_row(dtype, name, "", "", *spread(ratios), "")
        for trainer in trainers.values():
            trainer.close()
    return table


def measure_scaling(model: str, layout: Layout, repeats: int) -> Table:
    """Step time by the number of tokens in one forward pass, in samples of 256 tokens that share nothing (chain) or
    half of them with 7 others (tree)."""
    title = f"{layout}: one pass over samples of 256 tokens, {torch.get_num_threads()} threads, {model}"
    table = Table(title=title)
    for column in (*COLUMNS, "ms per token"):
        table.add_column(column, justify="right")
    trainer = make_trainer(model, layout, 1 << 20, "bfloat16")
    for thousands in (1, 2, 4, 8, 16):
        if layout == "chain":
            shape, groups, size = Shape(prompt=0, question=1, reply=255), thousands * 2, 2
        else:
            shape, groups, size = Shape(prompt=0, question=128, reply=112), thousands, 8  # 1,024 nodes a group
        batch = groups_of(shape, groups, size, trainer.vocab_size)
        result = trainer.step(batch)
        seconds = take_turns({"": lambda batch=batch: trainer.step(batch)}, repeats)[""]
        median = statistics.median(seconds)
        table.add_row(
            str(result.distinct_tokens),
            str(result.microbatches),
            *spread(seconds),
            f"{result.trained_tokens / median:.0f}",
            f"{1000 * median / result.distinct_tokens:.3f}",
        )
    trainer.close()
    return table


def make_trainer(model: str, layout: Layout, budget: int, dtype: Literal["bfloat16", "float32"]) -> Trainer:
    config = TrainerConfig(
        learning_rate=0.0, compute_dtype=dtype, layout=layout, max_tokens_per_microbatch=budget, device="cpu"
    )
    return Trainer(model, config)


def take_turns(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each; one uncounted round first."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


def spread(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in (min(values), statistics.median(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face model folder; default: a random pocket model")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3, help="counted steps of each")
    parser.add_argument("--groups", type=int, default=8, help="of 8 trajectories each")
    parser.add_argument("--budget", type=int, default=TrainerConfig().max_tokens_per_microbatch)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scaling", action="store_true", help="1k to 16k tokens instead of the comparison")
    parser.add_argument("--layout", choices=["chain", "tree"], default="chain", help="of --scaling")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or pocket_model(folder)
        if arguments.scaling:
            table = measure_scaling(model, arguments.layout, arguments.repeats)
        else:
            table = measure(model, arguments.dtypes, arguments.repeats, arguments.budget, arguments.groups)
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
