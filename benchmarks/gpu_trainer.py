"""Tokens/s and model FLOP utilisation of one training step on one GPU, at a context of 16,384 tokens. Takes minutes.

    python benchmarks/gpu_trainer.py [--size 1b|3b]

A random Llama-like model trains 2 groups of 4 samples, 12,288 tokens of prompt and 4,096 sampled ones each: "chain",
every sample on its own, and "tree", each prompt once. Utilisation counts what the model must compute, not what a
program chooses to compute again: every token of the layout once (for trees, each shared one once), each query only
with the keys that it sees, logits only where a token is trained. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from workload import Shape, groups_of, random_llama

from molt_sdk.types import TrajectoryGroup
from trainer_backend.batch import Row, build_forest, cost_model, make_rows, plan
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer

PEAK_TFLOPS = {
    "H200": 989.4,
    "H100": 989.4,
    "H100 PCIe": 756.5,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.1,
    "L4": 121.0,
    "RTX 4090": 165.2,
}
"""Dense bfloat16 with float32 accumulation, from NVIDIA's data sheets ("Tensor Core GPU"; RTX: the Ada white paper).
Where a sheet states only the figure with sparsity, half of it. SXM where the name has no form factor. Of other cards
only FLOP/s are told."""

CONTEXT = Shape(prompt=0, question=12_288, reply=4_096)
BUDGET = 32_768
GIB = 1 << 30


class Size(Struct, frozen=True, kw_only=True):
    """A Llama-like model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 128_256

    @property
    def block_parameters(self) -> int:
        """Weights of the matrix products of all blocks."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * self.heads * head_dim + 2 * self.hidden * self.kv_heads * head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.hidden * self.vocab


SIZES = {
    "1b": Size(hidden=2048, layers=16, heads=16, kv_heads=8, intermediate=8192),
    "3b": Size(hidden=3072, layers=28, heads=24, kv_heads=8, intermediate=8192),
}


def model_flops(size: Size, rows: Sequence[Row], *, share: bool) -> int:
    """Of forward and backward: 6 per weight and node, 12 * layers * hidden per pair of a node and one that it sees, 6
    per weight of the head and trained token (arXiv 2204.02311, appendix B, with causal attention counted exactly)."""
    cost = cost_model(
        hidden=size.hidden,
        layers=size.layers,
        attention_width=size.hidden,
        vocab=size.vocab,
        parameters=size.block_parameters,
    )
    ((ordered,),) = plan(rows, ranks=1, max_tokens=1 << 60, share=share, cost=cost)
    forest = build_forest(ordered, share=share)
    pairs = int((forest.positions + 1).sum())
    nodes, trained = len(forest.token_ids), len(forest.target_token)
    return round(6 * size.block_parameters * (nodes + cost.attention * pairs + cost.head * trained))


def peak_flops(card: str) -> float | None:
    """Of a card as CUDA names it, such as "NVIDIA A100-SXM4-80GB"; None if it is not in the table."""
    words = set(re.split(r"[\s-]+", card))
    slower = words & {"PCIe", "NVL", "Laptop", "D"}  # other clocks or fewer cores under the same name
    known = [name for name in PEAK_TFLOPS if slower <= set(name.split()) <= words]
    return 1e12 * PEAK_TFLOPS[max(known, key=lambda name: len(name.split()))] if known else None


def measure(name: str, repeats: int) -> Table:
    size, card = SIZES[name], torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory
    peak = peak_flops(card)
    table = Table(title=f"{size.parameters / 1e9:.1f}B parameters, 8 x 16,384 tokens, {card}")
    for column in ("layout", "nodes", "passes", "seconds: min", "median", "tokens/s", "TFLOP/s", "utilisation", "GiB"):
        table.add_column(column, justify="right")
    groups = groups_of(CONTEXT, 2, 4, size.vocab)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = {field: getattr(size, field) for field in Size.__struct_fields__}
        model = random_llama(folder, **shape, dtype=torch.bfloat16, device="cuda")
        for layout in ("chain", "tree"):
            config = TrainerConfig(
                layout=layout,
                max_tokens_per_microbatch=BUDGET if layout == "tree" else BUDGET // 2,
                activation_checkpointing=memory < 16 * size.parameters + 60 * GIB,
                offload="optimizer" if memory < 16 * size.parameters + 12 * GIB else "none",
                device="cuda",
            )
            seconds[layout] = add_row(table, model, size, layout, config, groups, repeats, peak)
    table.add_row("chain / tree", "", "", "", f"{seconds['chain'] / seconds['tree']:.2f}")
    if config.activation_checkpointing or config.offload != "none":
        table.caption = f"activation_checkpointing={config.activation_checkpointing}, offload={config.offload!r}"
    return table


def add_row(
    table: Table,
    model: str,
    size: Size,
    layout: Literal["chain", "tree"],
    config: TrainerConfig,
    groups: Sequence[TrajectoryGroup],
    repeats: int,
    peak: float | None,
) -> float:
    """Measure one layout; the median seconds of a step."""
    rows = make_rows(groups, config.advantage)
    trainer = Trainer(model, config)
    result = trainer.step(groups)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = trainer.step(groups)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    trainer.close()
    median = statistics.median(seconds)
    speed = model_flops(size, rows, share=layout == "tree") / median
    table.add_row(
        layout,
        f"{result.distinct_tokens:,}",
        str(result.microbatches),
        f"{min(seconds):.2f}",
        f"{median:.2f}",
        f"{sum(len(row.token_ids) for row in rows) / median:,.0f}",
        f"{speed / 1e12:.0f}",
        "unknown card" if peak is None else f"{speed / peak:.1%}",
        f"{torch.cuda.max_memory_allocated() / GIB:.0f}",
    )
    return median


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--repeats", type=int, default=3, help="counted steps of each layout")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"gpu_trainer: nothing measured: torch {torch.__version__} sees no CUDA device here")
        return
    needed = 10 * SIZES[options.size].parameters + 8 * GIB  # weights, gradients, a bfloat16 copy; activations
    total = torch.cuda.get_device_properties(0).total_memory
    if total < needed:
        print(
            f"gpu_trainer: nothing measured: {torch.cuda.get_device_name()} has {total / GIB:.0f} GiB, and size "
            f"{options.size} needs {needed / GIB:.0f} even with the optimizer in CPU memory"
        )
        return
    Console(width=120).print(measure(options.size, options.repeats))


if __name__ == "__main__":
    main(sys.argv[1:])
