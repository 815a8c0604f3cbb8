"""Teach SmolLM2-135M-Instruct to use a calculator, on the CPU, and show what changed.

Run it with ``make quickstart``. It trains the program in agents/calculator.py for a few optimizer steps and compares
the success on held-out questions before and after.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import molt_sdk as molt
from molt_sdk.load import load_agent

ROOT = Path(__file__).resolve().parent.parent

# Names in run.metrics.
SUCCESS = "eval/reward/correct"
CALLED = "eval/reward/called"
REWARD = "eval/reward"
QUESTIONS = "eval/trajectories"
TOKENS = ("tokens", "eval/tokens")


def smollm2() -> str:
    """Directory of SmolLM2-135M-Instruct, converted in a process of its own the first time."""
    command = [sys.executable, str(ROOT / "scripts" / "smollm2.py")]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of task order and sampling (default 0)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--questions", type=int, default=128, help="held-out questions (default 128)")
    parser.add_argument("--model", help="model directory (default: SmolLM2-135M-Instruct, converted once)")
    parser.add_argument("--run-dir", type=Path, help="where to keep the run (default: a new folder in runs/)")
    arguments = parser.parse_args()
    for name in ("steps", "questions"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def show(run: molt.Run, seconds: float, console: Console) -> None:
    """Table, curve, and where to look further."""
    rows = run.metrics
    before, after = evaluations(run)
    failed = sum(n for status, n in run.status.items() if status not in ("ok", "truncated"))
    table = Table("", "before", "after", title=f"{before[QUESTIONS]:.0f} held-out questions", title_justify="left")
    for label, key in (("answered right", SUCCESS), ("first call right", CALLED), ("reward", REWARD)):
        table.add_row(label, f"{before[key]:.3f}", f"{after[key]:.3f}")
    table.add_section()
    table.add_row("optimizer steps", f"{before['step']}", f"{after['step']}")
    table.add_row("seconds", "", f"{seconds:.0f}")
    table.add_row("sampled tokens", "", f"{sum(row.get(key, 0) for row in rows for key in TOKENS):,.0f}")
    table.add_row("failed trajectories", "", f"{failed}")
    console.print(table)

    curve = run.plot(run.dir / "curve.png", metrics=("reward/correct", SUCCESS))
    last = list(run.trajectories(split="eval", step=rows[-1]["step"], limit=1))
    console.print(f"curve          {curve}", f"run            {run.dir}", sep="\n", soft_wrap=True)
    console.print(f"look further   .venv/bin/molt-sdk show {run.dir}", soft_wrap=True)
    if last:
        console.print(f"one answer     .venv/bin/molt-sdk show {run.dir} {last[0].id}", soft_wrap=True)


def evaluations(run: molt.Run) -> tuple[dict[str, float], dict[str, float]]:
    """The first and the last evaluation of a run."""
    rows = [row for row in run.metrics if SUCCESS in row]
    if len(rows) < 2:
        sys.exit(f"quickstart: {run.dir} holds {len(rows)} scored evaluations instead of 2; see its failures")
    return rows[0], rows[-1]


def main() -> None:
    arguments = parse_arguments()
    console = Console(highlight=False)
    agent = load_agent(str(ROOT / "agents" / "calculator.py"))
    model = arguments.model
    if model is None:
        console.print("preparing SmolLM2-135M-Instruct (about half a minute the first time)")
        model = smollm2()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-quickstart-seed{arguments.seed}"
    started = time.perf_counter()
    run = molt.fit(
        agent.policy,
        agent.environment,
        model=model,
        steps=arguments.steps,
        group_size=8,
        groups_per_step=8,
        learning_rate=1e-5,
        max_staleness=0,
        engine="torch",
        seed=arguments.seed,
        eval_tasks=agent.environment.tasks("eval")[: arguments.questions],
        run_dir=arguments.run_dir or ROOT / "runs" / name,
    )
    run = molt.open_run(os.path.relpath(run.dir))  # shorter to show and to type
    show(run, time.perf_counter() - started, console)
    before, after = (row[SUCCESS] for row in evaluations(run))
    if after <= before:
        sys.exit(
            f"quickstart: success did not improve ({before:.3f} before, {after:.3f} after {arguments.steps} steps)"
        )
    console.print(f"success on {arguments.questions} held-out questions went from {before:.2f} to {after:.2f}")


if __name__ == "__main__":
    main()
