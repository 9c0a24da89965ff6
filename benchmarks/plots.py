"""Pictures of measurements, as SVG or PNG by the file's ending. Needs matplotlib, the extra `plot`.

Owns: drawing. Must not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.break_even import Curve
from specdec.errors import ConfigError

PANEL_INCHES = (4.2, 3.2)


def draw(path: Path, panels: Sequence[Sequence[Callable[[Any], None]]], *, title: str) -> None:
    """Write a picture of panels, row by row; each is a function that draws into matplotlib axes.

    Raises:
        ConfigError: matplotlib is not installed, or the ending is of no kind that it writes.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: no windows, no global state
    except ImportError as error:
        raise ConfigError("pictures need matplotlib", hint="pip install 'specdec[plot]', or leave --plot out") from error
    rows, columns = len(panels), max(map(len, panels))
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, line in zip(axes, panels, strict=True):
        for ax, panel in zip(row, line, strict=True):
            panel(ax)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as error:
        raise ConfigError(f"{path} has no ending of a picture: {error}", hint="name it .svg or .png") from error


def speedup_panel(curves: Sequence[Curve], *, title: str) -> Callable[[Any], None]:
    """Return a panel of speed over speed without drafts against requests in flight, a line for each number of drafts."""

    def panel(ax: Any) -> None:
        sizes = sorted({size for curve in curves for size in curve.ratios})
        for curve in sorted(curves, key=lambda curve: curve.num_drafts):
            label = f"k={curve.num_drafts} (stops at {curve.stops_paying()})"
            ax.plot(list(curve.ratios), list(curve.ratios.values()), marker="o", markersize=3, label=label)
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.set(title=title, xlabel="requests in flight", ylabel="speed / speed without drafts")
        if curves:
            ax.legend(fontsize=6)

    return panel


def fit_panel(
    x: Sequence[float], measured: Sequence[float], fitted: Sequence[float], *, title: str, xlabel: str, ylabel: str
) -> Callable[[Any], None]:
    """Return a panel of measured points and the fit through them, in the order of x."""

    def panel(ax: Any) -> None:
        order = sorted(range(len(x)), key=lambda index: x[index])
        ax.plot([x[index] for index in order], [fitted[index] for index in order], linewidth=1, label="fit")
        ax.plot(x, measured, "o", markersize=4, label="measured")
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=7)

    return panel
