"""What the benchmarks compute and compare, without timing anything."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_backend.batch import make_rows
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_flops_of_trees_and_chains_by_hand(benchmark: Any) -> None:
    """One layer, hidden 8 in 2 heads of 4 with 1 head of keys and values, intermediate 10: 2 * 8 * 8 + 2 * 8 * 4 + 3 *
    8 * 10 = 432 weights. Two samples of 2 context and 3 sampled tokens: 4 inputs each. Chain: 8 nodes, 2 * (1 + 2 + 3 +
    4) = 20 pairs. Tree: 2 + 2 * 2 = 6 nodes, 3 + 2 * 7 = 17 pairs. 6 trained tokens, a head of 8 * 20 weights."""
    module, workload = benchmark("gpu_trainer"), benchmark("workload")
    size = module.Size(hidden=8, layers=1, heads=2, kv_heads=1, intermediate=10, vocab=20)
    assert (size.block_parameters, size.parameters) == (432, 432 + 160)
    groups = workload.groups_of(workload.Shape(prompt=0, question=2, reply=3), 1, 2, 20, seed=1)
    rows = make_rows(groups, TrainerConfig().advantage)
    assert rows[0].token_ids[2] != rows[1].token_ids[2]
    head = 6 * 160 * 6
    assert module.model_flops(size, rows, share=False) == 6 * 432 * 8 + 12 * 8 * 20 + head
    assert module.model_flops(size, rows, share=True) == 6 * 432 * 6 + 12 * 8 * 17 + head


def test_the_default_sizes_are_dense_models_of_1_to_4_billion_parameters(benchmark: Any) -> None:
    sizes = benchmark("gpu_trainer").SIZES
    assert [round(size.parameters / 1e9, 1) for size in sizes.values()] == [1.3, 3.2]


@pytest.mark.parametrize(
    ("card", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peak_of_a_known_card(benchmark: Any, card: str, tflops: float) -> None:
    assert benchmark("gpu_trainer").peak_flops(card) == pytest.approx(1e12 * tflops)


@pytest.mark.parametrize("card", ["Tesla T4", "NVIDIA H100 NVL", "NVIDIA A1000", "NVIDIA RTX 4090X", ""])
def test_an_unknown_card_has_no_peak(benchmark: Any, card: str) -> None:
    assert benchmark("gpu_trainer").peak_flops(card) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_gpu_benchmark_says_why_it_measures_nothing() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_trainer.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no CUDA device" in done.stdout


def test_the_hand_written_loop_computes_what_the_trainer_does(benchmark: Any, tmp_path: Path) -> None:
    """Same loss and gradient norm in float32, for samples of two lengths: speed is compared at the same work."""
    workload = benchmark("workload")
    model = workload.random_llama(
        tmp_path / "model", hidden=32, layers=2, vocab=300, heads=4, kv_heads=2, intermediate=64
    )
    shapes = workload.TOOL_USE, workload.Shape(prompt=5, question=4, reply=9)
    groups = [group for shape in shapes for group in workload.groups_of(shape, 2, 4, 300)]
    config = TrainerConfig(learning_rate=0.0, compute_dtype="float32", max_tokens_per_microbatch=700, device="cpu")
    loop = benchmark("minimal_loop").MinimalLoop(model, torch.device("cpu"), dtype=torch.float32)
    loss, norm = loop.step(make_rows(groups, config.advantage), 700)
    trainer = Trainer(model, config)
    result = trainer.step(groups)
    trainer.close()
    assert (loss, norm) == pytest.approx((result.loss, result.grad_norm), rel=1e-4)
    assert norm > 0
