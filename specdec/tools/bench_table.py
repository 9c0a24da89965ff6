"""Recorded cells as a table for the terminal, and the words and numbers that other tables of them use.

Owns: presentation. Must not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.tools.bench import lower_bound
from specdec.tools.samples import LATENCIES

QUANTILES = ("p50", "p90", "p99")
TABLE_WIDTH = 170


def load_name(load: Mapping[str, Any]) -> str:
    """Return `chat, 4 clients` or `chat, 2/s`."""
    if load["rate"] is not None:
        return f"{load['workload']}, {load['rate']:g}/s"
    return f"{load['workload']}, {load['concurrency']} client{'s' if load['concurrency'] > 1 else ''}"


def print_cells(cells: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Print one row for each cell and side: medians over repeats, quantiles as p50 / p90 / p99, and tok/s against the first side."""
    several = any(len(cell["figures"]) > 1 for cell in cells)
    table = Table(title=title, caption="TTFT, TPOT, ITL and end to end: " + " / ".join(QUANTILES) + " in ms")
    headings = ("tok/s", *(name if name == "e2e" else name.upper() for name in LATENCIES), "accepted length")
    for name in ("load", "server", *headings, *(["ratio"] if several else [])):
        table.add_column(name, justify="left" if name in ("load", "server") else "right")
    for cell in cells:
        for label, figures in cell["figures"].items():
            row = [spread(figures["tok_per_s"], 1), *(_quantiles(figures, name) for name in LATENCIES)]
            row.append(value(figures["acceptance_length"], 2))
            table.add_row(load_name(cell["load"]), label, *row, *([ratio(cell["ratio"].get(label))] if several else []))
    Console(width=TABLE_WIDTH).print(table)


def _quantiles(figures: Mapping[str, Any], name: str) -> str:
    middles = [figures[f"{name}_ms_{q}"] for q in QUANTILES]
    largest = max((figure[0] for figure in middles if figure is not None), default=0.0)
    return " / ".join(value(figure, 1 if largest < 100 else 0) for figure in middles)


def value(figure: Sequence[float] | None, digits: int) -> str:
    """Return the median of (median, lowest, highest); `-` of nothing."""
    return "-" if figure is None else f"{figure[0]:.{digits}f}"


def spread(figure: Sequence[float] | None, digits: int) -> str:
    """Return median, lowest and highest."""
    if figure is None or figure[1] == figure[2]:
        return value(figure, digits)
    return f"{figure[0]:.{digits}f} \\[{figure[1]:.{digits}f} to {figure[2]:.{digits}f}]"


def ratio(ratios: Sequence[float] | None) -> str:
    """Return median, lowest and highest of the ratios of the repeats, and what the ratio is at least."""
    if not ratios:
        return ""
    bound = lower_bound(ratios)
    known = "" if bound is None else f", at least {bound:.2f}"
    extent = f" \\[{min(ratios):.2f} to {max(ratios):.2f}{known}]" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}{extent}"
