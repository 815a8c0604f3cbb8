"""Runs and trajectories in the terminal. Whatever a model wrote is shown with control characters made visible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molt_sdk.database import MODEL
from molt_sdk.evaluate import Evaluation, sampled_tokens
from molt_sdk.progress import visible
from molt_sdk.report import Report, report_lines
from molt_sdk.run import Run
from molt_sdk.types import Message, Trajectory, Turn

LINE_STYLES = {"heading": "bold", "ok": "", "warning": "yellow", "problem": "red", "more": "dim"}
OWN_CODE = Path(__file__).parent
"""Frames of a traceback that lie here are left out, but those of the shipped agents."""
COLUMNS = ("step", "reward", "loss", "grad_norm", "tokens", "seconds", "staleness", "failures", "eval/reward")


def show_run(run: Run, console: Console, trajectories: Iterable[Trajectory]) -> None:
    """Steps with their main numbers, how many trajectories ended how, and a list of ``trajectories``."""
    console.print(f"run {run.dir}", markup=False)
    if rows := run.metrics:
        console.print(_metrics_table(rows))
    console.print("trajectories: " + (", ".join(f"{n} {s}" for s, n in run.status.items()) or "none"), markup=False)
    for checkpoint in run.checkpoints:
        console.print(f"checkpoint: step {checkpoint.step}, {checkpoint.path}", markup=False)
    if (run.dir / MODEL).exists():
        console.print(f"trained model: {run.dir / MODEL}", markup=False)
    console.print(_trajectory_table(trajectories))


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    """The summary of an evaluation and its first trajectories."""
    table = Table("", "", box=None, show_header=False)
    for name, value in evaluation.summary().items():
        table.add_row(name, _number(value))
    for status, count in evaluation.failures.items():
        table.add_row(status, str(count))
    console.print(table)
    console.print(_trajectory_table(evaluation.trajectories[:10]))


def show_report(report: Report, console: Console) -> None:
    """What a check found."""
    for kind, line in report_lines(report):
        console.print(line, style=LINE_STYLES[kind], markup=False, highlight=False, soft_wrap=True)


def show_trajectory(trajectory: Trajectory, console: Console) -> None:
    """One trajectory as the conversation(s) that were recorded, with what was trained, and why."""
    head = f"trajectory {trajectory.id}  {trajectory.status}  reward {_number(trajectory.reward)}"
    console.print(head, style="bold", markup=False)
    for name, value in {**trajectory.rewards, **trajectory.metrics}.items():
        console.print(f"  {name} {_number(value)}", markup=False)
    for agent, value in trajectory.agent_rewards.items():
        console.print(f"  agent {visible(agent, 40)}: reward {_number(value)}", markup=False)
    for turn in trajectory.turns:
        _show_turn(turn, console)
    console.print(_lines(str(trajectory.explain())), style="dim", markup=False)
    certificate = trajectory.certify()
    verdict = "exact" if certificate.ok else "NOT exact: " + "; ".join(certificate.problems)
    console.print(
        f"{certificate.trained_tokens} trained tokens, {certificate.context_tokens} context tokens in rows; {verdict}",
        markup=False,
    )
    for execution in trajectory.tool_executions:
        if execution.error:
            name = visible(execution.call["function"]["name"], 80)
            console.print(f"tool {name}: {_lines(_user_frames(execution.error))}", style="red", markup=False)
    if trajectory.error:
        console.print(_lines(_user_frames(trajectory.error)), style="red", markup=False)


def _user_frames(traceback: str) -> str:
    """A traceback without the frames of molt_sdk; the record keeps them. Any other text as it is."""
    lines: list[str] = []
    own, indent = False, 0
    for line in traceback.splitlines():
        said = line.lstrip(" |")  # a group of errors draws a frame around each
        if said.startswith('File "'):
            file, indent = Path(said.split('"')[1]), len(line) - len(said)
            own = file.is_relative_to(OWN_CODE) and not file.is_relative_to(OWN_CODE / "_agents")
        elif len(line) - len(said) <= indent:  # else it is the code of that frame
            own = False
        if not own:
            lines.append(line)
    return "\n".join(lines)


def _show_turn(turn: Turn, console: Console) -> None:
    start = f"extends turn {turn.parent}" if turn.parent is not None else f"new root: {turn.fork_reason}"
    versions = sorted({version for version, _, _ in turn.version_spans})
    reward = f", reward {_number(turn.reward)}" if turn.reward is not None else ""
    console.print(
        f"── turn {turn.id} ({turn.agent}; {start}; {len(turn.completion_i32) // 4} tokens, version "
        f"{', '.join(map(str, versions))}, {turn.finish_reason}{reward})",
        style="dim",
        markup=False,
    )
    for message in turn.new_messages:
        _show_message(message, console)
    _show_message(turn.message, console)
    for remark in turn.remarks:
        console.print(f"  {_lines(remark)}", style="yellow", markup=False)


def _show_message(message: Message, console: Console) -> None:
    text = Text(f"{message['role']}: ", style="bold")
    text.append(_lines(str(message.get("content") or "")), style="")
    for call in message.get("tool_calls") or ():
        text.append(f"\n  → {call['function']['name']}({_lines(call['function']['arguments'])})", style="cyan")
    console.print(text)


def _metrics_table(rows: Sequence[Mapping[str, float]]) -> Table:
    """The main numbers, those that any step has, in at most 80 columns without cutting one."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    columns = [column for column in COLUMNS if any(column in row for row in rows)]
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(_number(row.get(column)) for column in columns))
    return table


def _trajectory_table(trajectories: Iterable[Trajectory]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("id", "split", "task", "status", "reward", "turns", "tokens", "last reply"):
        table.add_column(column, no_wrap=column not in ("task", "last reply"))
    for t in trajectories:
        prompt = t.task.prompt if isinstance(t.task.prompt, str) else str(t.task.prompt[-1].get("content"))
        table.add_row(
            t.id[:8],
            t.split,
            Text(visible(prompt, 30)),
            t.status,
            _number(t.reward),
            str(len(t.turns)),
            str(sampled_tokens([t])),
            Text(visible(t.text, 40)),
        )
    return table


def _number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{value:.0f}" if isinstance(value, int | float) else visible(str(value), 40)


def _lines(text: str) -> str:
    """Text in which only line breaks act; other control characters are visible."""
    return "\n".join(visible(line, 100_000) for line in text.splitlines())
