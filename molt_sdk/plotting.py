"""Curves as an image, without pyplot's global state and without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from molt_sdk.errors import StoreError


def draw(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, *, title: str) -> Path:
    """Write one line per curve of (step, value) points; the suffix of ``path`` names the format, PNG without one.

    Raises:
        StoreError: there are no points, or the file cannot be written.
    """
    if not curves:
        raise StoreError(f"{title}: nothing to plot yet; no step has a reward")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([step for step, _ in points], [value for _, value in points], marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel="optimizer step", ylabel="mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    place = path if path.suffix else path.with_suffix(".png")
    try:
        figure.savefig(place, dpi=120)
    except (OSError, ValueError) as error:
        raise StoreError(f"the plot cannot be written to {place}: {error}") from error
    return place
