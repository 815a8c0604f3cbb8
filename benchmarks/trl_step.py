"""Seconds of one optimizer step, generation and training together, beside TRL's GRPOTrainer on the same work.

    python benchmarks/trl_step.py [--model DIR] [--steps 3]

The work is the quickstart's in a single turn: 8 additions, 8 samples each, of SmolLM2-135M-Instruct, which has to call
a calculator; at most 48 tokens at temperature 1; GRPO with PPO-clip, AdamW at 1e-5, bfloat16 over float32 weights, no
gradient checkpointing. Rewards get a little noise, so that every sample has an advantage and neither side may leave
any out. Each side runs in a process of its own, one after the other, on the same tasks; the first step of each is a
warm-up. TRL gets a virtual environment in .cache, made on first use. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRL = "trl==1.16.*"
VENV = ROOT / ".cache" / "trl-1.16"
LEARNING_RATE = 1e-5
FIGURES = ("seconds", "train", "tokens", "reward")
MARKER = "RESULT "


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def task(rng: random.Random) -> tuple[list[dict[str, str]], int]:
    """Messages, and the number that the call has to compute."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return [
        {"role": "system", "content": f"You have a calculator. To use it, reply with {call('...')}."},
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": call("12 + 30")},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ], a + b


def reward(text: str, answer: int) -> float:
    """1 for a call that computes the answer, 0.1 for another well-formed one; and noise."""
    found = re.fullmatch(re.escape(call("SUM")).replace("SUM", r"(\d+) \+ (\d+)"), text.strip())
    right = found is not None and int(found[1]) + int(found[2]) == answer
    return (1.0 if right else 0.1 if found else 0.0) + random.uniform(0.0, 0.01)


def ours(options: argparse.Namespace) -> list[dict[str, float]]:
    import molt_sdk as molt

    @molt.policy
    async def solver(task: molt.Task, model: molt.Model) -> float:
        reply = await model.chat(task.prompt, max_tokens=options.tokens)
        return reward(reply.text, task.answer)

    rng = random.Random(0)
    tasks = [molt.Task(*task(rng)) for _ in range(options.groups * (options.steps + 1))]
    with tempfile.TemporaryDirectory() as folder:
        run = molt.fit(
            solver,
            tasks,
            model=options.model,
            steps=options.steps + 1,
            group_size=options.size,
            groups_per_step=options.groups,
            learning_rate=LEARNING_RATE,
            max_staleness=0,
            engine="torch",
            run_dir=Path(folder) / "run",
        )
        return [
            {
                name: row[key]
                for name, key in zip(FIGURES, ("seconds", "seconds/train", "tokens", "reward"), strict=True)
            }
            for row in run.metrics
            if "seconds/train" in row
        ]


def theirs(options: argparse.Namespace) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def rewards(completions: list[Any], answer: list[int], completion_ids: list[Any], **_: Any) -> list[float]:
        found = [reward(completion[0]["content"], a) for completion, a in zip(completions, answer, strict=True)]
        tokens = sum(map(len, completion_ids))
        rows.append({"reward": statistics.fmean(found), "tokens": tokens, "generated": time.perf_counter()})
        return found

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            rows[-1] |= {"seconds": now - self.started, "train": now - rows[-1].pop("generated")}

    rows: list[dict[str, float]] = []
    rng = random.Random(0)
    tasks = [task(rng) for _ in range(options.groups * (options.steps + 1))]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps + 1,
            per_device_train_batch_size=options.size,
            gradient_accumulation_steps=options.groups,
            num_generations=options.size,
            max_completion_length=options.tokens,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            save_strategy="no",
            report_to="none",
            shuffle_dataset=False,
        )
        GRPOTrainer(
            model=options.model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": messages, "answer": answer} for messages, answer in tasks]),
            callbacks=[Clock()],
        ).train()
    return rows


def trl_python() -> str:
    """The Python of TRL's own environment, made if it is not there; torch and transformers as pinned here."""
    python = VENV / "bin" / "python"
    complete = VENV / "complete"
    if not complete.is_file():
        print(f"installing {TRL} into {VENV}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        packages = [TRL, "torch", "transformers", "accelerate", "datasets"]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *packages], check=True)
        complete.touch()
    return str(python)


def in_process(python: str, side: str, options: argparse.Namespace) -> list[dict[str, float]]:
    command = [python, __file__, "--side", side]
    for name in ("model", "steps", "groups", "size", "tokens"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [line for line in process.stdout if line.startswith(MARKER)]
    if process.returncode or len(lines) != 1:
        sys.exit(f"trl_step: the {side} side ended with code {process.returncode}")
    rows: list[dict[str, float]] = json.loads(lines[0].removeprefix(MARKER))
    return rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face model folder; default: SmolLM2-135M-Instruct, converted once")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each")
    parser.add_argument("--groups", type=int, default=8, help="tasks in a step")
    parser.add_argument("--size", type=int, default=8, help="samples of a task")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a reply")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        rows = ours(options) if options.side == "ours" else theirs(options)
        print(MARKER + json.dumps(rows), flush=True)
        return
    if options.model is None:
        command = [sys.executable, str(ROOT / "scripts" / "smollm2.py")]
        options.model = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    sides = {
        "TRL": in_process(trl_python(), "theirs", options),
        "molt_sdk": in_process(sys.executable, "ours", options),
    }

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one step of {options.groups} x {options.size} samples, {options.threads} threads")
    for column in ("", "seconds: min", "median", "max", "of which training", "sampled tokens", "mean reward"):
        table.add_column(column, justify="right")
    medians = {}
    for name, rows in sides.items():
        figures = {figure: [row[figure] for row in rows] for figure in FIGURES}
        medians[name] = statistics.median(figures["seconds"])
        seconds = min(figures["seconds"]), medians[name], max(figures["seconds"]), statistics.median(figures["train"])
        tokens, score = statistics.fmean(figures["tokens"]), statistics.fmean(figures["reward"])
        table.add_row(name, *(f"{value:.1f}" for value in seconds), f"{tokens:.0f}", f"{score:.2f}")
    table.add_row("TRL / molt_sdk", "", f"{medians['TRL'] / medians['molt_sdk']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
