"""What ``check`` found: one sentence per finding, and the next step where something is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from molt_sdk.explain import counted
from molt_sdk.progress import visible
from molt_sdk.types import Trajectory

Verdict = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    area: str
    """Heading it stands under."""
    name: str
    verdict: Verdict = "ok"
    """``warning``: training works, but costs more or differs from what one may expect. ``problem``: training would fail
    or learn from something wrong."""
    text: str
    advice: str = ""
    """The next step; "" if there is nothing to do."""
    details: tuple[str, ...] = ()
    """Lines that show more."""


class Report(Struct, frozen=True, kw_only=True):
    """Result of ``check``. ``str()`` gives it as lines."""

    model: str
    findings: tuple[Finding, ...]
    trajectories: tuple[Trajectory, ...] = ()
    """The simulated episodes of the agent, in the order in which they ran; none without an agent."""

    @property
    def ok(self) -> bool:
        """No finding is a problem; there may be warnings."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "problem"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "warning"]

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        counts = {"problem": len(self.problems), "warning": len(self.warnings)}
        told = ", ".join(counted(number, noun) for noun, number in counts.items() if number)
        return f"{'usable' if self.ok else 'not usable as it is'}: {told or 'all is well'}"

    def __repr__(self) -> str:
        return f"Report({self.summary}, {len(self.findings)} findings, {len(self.trajectories)} episodes)"

    def __str__(self) -> str:
        return "\n".join(text for _, text in report_lines(self))


def report_lines(report: Report) -> Iterator[tuple[Verdict | Literal["heading", "more"], str]]:
    """The report line by line, each with what it is. Control characters of models and agents are visible."""
    yield "heading", visible(f"Check of {report.model}", 1000)
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            yield "heading", f"\n{area}"
        yield finding.verdict, visible(f"  {finding.verdict:<8} {finding.name}: {finding.text}", 10_000)
        for line in finding.details:
            yield "more", visible(f"             {line}", 10_000)
        if finding.advice:
            yield "more", visible(f"           → {finding.advice}", 10_000)
    yield ("ok" if report.ok else "problem"), f"\n{report.summary}"
