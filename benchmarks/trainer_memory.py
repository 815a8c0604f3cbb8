"""Peak memory of one training step beside a hand-written loop, at a vocabulary of 150,000 tokens.

    python benchmarks/trainer_memory.py
    python benchmarks/trainer_memory.py --model MODEL_DIR --budget 4096

Counts the bytes of live tensors: those that exist before the step (weights and optimizer, whatever holds them), plus
the highest sum of what the allocator hands out during it, temporary tensors inside operators included. A first step
has been done before, so AdamW's moments are there. "loop" is minimal_loop.py; "needed" is the sum of its weights,
gradients, moments and activations: what a step cannot do without. Logits are not in it. On a GPU the same figures come
from CUDA's allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from minimal_loop import MinimalLoop, batches
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from workload import TOOL_USE, Shape, groups_of, random_llama

from molt_sdk.types import TrajectoryGroup
from trainer_backend.batch import Row, make_rows
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer

MIB = 1 << 20


def live_bytes() -> int:
    """Of all tensors that Python can reach, each storage once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would wake lazy modules
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def run(action: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes allocated during an action: at most, and at its end with its result still alive."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = action()
        torch.cuda.synchronize()
        peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        del result
        return peak, after
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = action()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    total = peak = 0
    for event in sorted(memory, key=lambda event: event["args"]["Ev Idx"]):
        total += event["args"]["Bytes"]
        peak = max(peak, total)
    return peak, total


class Use(Struct, frozen=True):
    """Bytes of live tensors."""

    before: int
    during: int

    @property
    def peak(self) -> int:
        return self.before + self.during


def of_loop(model: str, rows: Sequence[Row], budget: int, device: torch.device) -> tuple[Use, Use]:
    """What a step needs, and what the loop uses."""
    start = live_bytes()
    loop = MinimalLoop(model, device)
    loop.step(rows, budget)
    before = live_bytes() - start
    during, _ = run(lambda: loop.step(rows, budget), device)
    weights = sum(parameter.nbytes for parameter in loop.model.parameters())
    ids = torch.stack([torch.tensor(row.token_ids) for row in next(batches(rows, budget))]).to(device)

    def decoder() -> torch.Tensor:
        with torch.autocast(device.type, loop.dtype):
            return loop.hidden(ids, torch.ones_like(ids, dtype=torch.bool))

    _, activations = run(decoder, device)  # what it has allocated at its end, and not freed
    return Use(3 * weights, weights + activations), Use(before, during)


def of_trainer(model: str, groups: Sequence[TrajectoryGroup], config: TrainerConfig, device: torch.device) -> Use:
    start = live_bytes()
    trainer = Trainer(model, config)
    trainer.step(groups)
    before = live_bytes() - start
    during, _ = run(lambda: trainer.step(groups), device)
    trainer.close()
    return Use(before, during)


def measure(model: str, groups: Sequence[TrajectoryGroup], budget: int, device: torch.device) -> Table:
    title = f"one step, {budget} tokens a pass, {device.type}: MiB of live tensors"
    table = Table(title=title)
    for column in ("", "before the step", "during", "peak", "÷ loop", "÷ needed"):
        table.add_column(column, justify="right")
    needed, loop = of_loop(model, make_rows(groups, TrainerConfig().advantage), budget, device)
    uses = {"needed": needed, "loop": loop}
    for layout in ("chain", "tree"):
        config = TrainerConfig(learning_rate=0.0, layout=layout, max_tokens_per_microbatch=budget, device=device.type)
        uses[layout] = of_trainer(model, groups, config, device)
    for name, use in uses.items():
        sizes = [f"{size / MIB:.0f}" for size in (use.before, use.during, use.peak)]
        table.add_row(name, *sizes, f"{use.peak / loop.peak:.2f}", f"{use.peak / needed.peak:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face model folder; default: a random one of the sizes below")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budget", type=int, default=TrainerConfig().max_tokens_per_microbatch)
    parser.add_argument("--tokens", type=int, default=0, help="length of a sample; default: a small tool-use run")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = TOOL_USE
    if arguments.tokens:
        quarter = arguments.tokens // 4
        shape = Shape(prompt=2 * quarter, question=quarter, reply=quarter)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or random_llama(
            folder,
            hidden=arguments.hidden,
            layers=arguments.layers,
            vocab=arguments.vocab,
            heads=arguments.hidden // 64,
            kv_heads=arguments.hidden // 128,
            intermediate=3 * arguments.hidden,
        )
        # Enough for one full pass of samples on their own, and a second one that adds to its gradients.
        size = max(2, 2 * (arguments.budget // shape.tokens))
        groups = groups_of(shape, 1, size, min(arguments.vocab, 40_000))
        Console(width=120).print(measure(model, groups, arguments.budget, device))


if __name__ == "__main__":
    main()
