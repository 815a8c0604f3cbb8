"""What a user sees while a run goes on: a live line on a terminal, one quiet line a step elsewhere; other trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from loguru import logger

from molt_sdk.run import Run
from molt_sdk.types import Trajectory

if TYPE_CHECKING:
    from rich.console import Console


class Tracker(Protocol):
    """Anything that takes metrics. ``step`` counts from 0 (before the first update)."""

    def start(self, run: Run) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


class Trackers:
    """Several trackers as one; those that were started are finished, in reverse order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._started: list[Tracker] = []

    def start(self, run: Run) -> None:
        for tracker in self._trackers:
            tracker.start(run)
            self._started.append(tracker)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A tracker that fails (a service that is down) is reported and the run goes on: the store has everything."""
        for tracker in self._started:
            try:
                tracker.log(step, metrics)
            except Exception:
                logger.exception("tracker {} failed in log() at step {}", type(tracker).__name__, step)

    def finish(self) -> None:
        while self._started:
            tracker = self._started.pop()
            try:
                tracker.finish()
            except Exception:  # a run that is over must not fail for it, and the others have to finish too
                logger.exception("tracker {} failed in finish()", type(tracker).__name__)


class Display:
    """Progress on stderr: steps, reward, staleness, speed, queue, failures, and the latest reply."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._steps = steps
        self._console = console or Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("starting", total=steps)
        self._count = 0

    def start(self, run: Run) -> None:
        self._print(f"run {run.dir}")
        self._progress.start()

    def trajectory(self, trajectory: Trajectory) -> None:
        """One more finished; its last reply is shown, control characters made visible."""
        self._count += 1
        reward = "-" if trajectory.reward is None else f"{trajectory.reward:.2f}"
        from rich.markup import escape

        shown = escape(visible(trajectory.text, max(8, min(40, self._console.width - 84))))
        self._progress.update(
            self._bar,
            description=f"{self._count} {trajectory.split} trajectories; latest {trajectory.status} {reward} {shown}",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "loss" in metrics:
            self._print(f"step {step}/{self._steps}  {_training_line(metrics)}")
            self._progress.update(self._bar, completed=step)
        else:
            self._print(f"step {step}/{self._steps}  {_evaluation_line(metrics)}")
        self._count = 0

    def note(self, line: str) -> None:
        """A line of its own, above the progress."""
        self._print(line)

    def finish(self) -> None:
        self._progress.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def visible(text: str, width: int) -> str:
    """At most ``width`` characters in one line; whatever could move a cursor or hide text is shown as an escape."""
    flat = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii", "replace") for c in text)
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _training_line(metrics: Mapping[str, float]) -> str:
    parts = [f"reward {metrics['reward']:.3f}" if "reward" in metrics else "reward -"]
    parts += [f"{k.removeprefix('reward/')} {v:.2f}" for k, v in metrics.items() if k.startswith("reward/")]
    parts.append(f"loss {metrics['loss']:+.4f} grad {metrics['grad_norm']:.2f}")
    seconds = metrics.get("seconds", 0.0)
    if seconds:
        parts.append(f"{metrics.get('tokens', 0) / seconds:.0f} tok/s")
    parts.append(
        f"{seconds:.1f}s (sample {metrics.get('seconds/wait', 0):.1f} "
        f"train {metrics.get('seconds/train', 0):.1f} update {metrics.get('seconds/update', 0):.1f})"
    )
    parts.append(f"staleness {metrics.get('staleness', 0):.0f} queue {metrics.get('queue', 0):.0f}")
    if metrics.get("failures"):
        parts.append(f"failures {metrics['failures']:.0f}")
    if metrics.get("tool_errors"):
        parts.append(f"tool errors {metrics['tool_errors']:.0f}")
    if metrics.get("skipped"):
        parts.append("SKIPPED")
    return "  ".join(parts)


def _evaluation_line(metrics: Mapping[str, float]) -> str:
    shown = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.startswith("eval/")}
    parts = ["evaluation"]
    parts += [f"{k} {v:.3f}" for k, v in shown.items() if k.startswith("reward")]
    parts.append(f"{shown.get('trajectories', 0):.0f} trajectories in {shown.get('seconds', 0):.1f}s")
    if shown.get("failures"):
        parts.append(f"failures {shown['failures']:.0f}")
    return "  ".join(parts)
