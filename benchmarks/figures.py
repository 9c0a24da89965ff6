"""From a line of results to a table: for the terminal, and for the block of README.md between its two marks.

Owns: presentation. Must not know: how anything was measured.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from specdec.errors import ConfigError


class Marks(NamedTuple):
    """What a table of README.md stands between."""

    begin: str
    end: str


FIGURES = Marks("<!-- figures:begin -->", "<!-- figures:end -->")
COLUMNS = (
    ("tok/s", "tok_per_s", 1), ("TTFT p50 ms", "ttft_ms_p50", 0), ("p99", "ttft_ms_p99", 0), ("TPOT p50 ms", "tpot_ms_p50", 1),
    ("p99", "tpot_ms_p99", 1), ("ITL p50 ms", "itl_ms_p50", 1), ("p99", "itl_ms_p99", 1), ("accepted length", "acceptance_length", 2),
)  # fmt: skip


def load_name(load: dict[str, Any]) -> str:
    """Return `chat, 4 clients` or `chat, 2/s`."""
    if load["rate"] is not None:
        return f"{load['workload']}, {load['rate']:g}/s"
    return f"{load['workload']}, {load['concurrency']} client{'s' if load['concurrency'] > 1 else ''}"


def print_table(line: dict[str, Any]) -> None:
    """Print median and spread of every figure, one row for each cell and arm, and the ratio to the first arm."""
    table = Table(title=f"median of {line['repeats']} [lowest to highest of tok/s]; {line['max_tokens']} new tokens at most, greedy")
    for name in ("load", "arm", *(title for title, _, _ in COLUMNS), "ratio"):
        table.add_column(name, justify="left" if name in ("load", "arm") else "right")
    for cell in line["cells"]:
        for label, figures in cell["figures"].items():
            values = [_value(figures[name], digits, spread=name == "tok_per_s") for _, name, digits in COLUMNS]
            table.add_row(load_name(cell["load"]), label, *values, _ratio(cell["ratio"].get(label)))
    Console(width=170).print(table)


def _value(figure: list[float] | None, digits: int, *, spread: bool) -> str:
    if figure is None:
        return "-"
    middle, low, high = figure
    return f"{middle:.{digits}f}" + (f" \\[{low:.{digits}f} to {high:.{digits}f}]" if spread else "")


def _ratio(ratios: list[float] | None) -> str:
    """Return median, lowest and highest of the ratios of the repeats, and what the ratio is at least."""
    if not ratios:
        return ""
    bound = lower_bound(ratios)
    known = "" if bound is None else f", at least {bound:.2f}"
    return f"{median(ratios):.2f} \\[{min(ratios):.2f} to {max(ratios):.2f}{known}]"


def lower_bound(ratios: list[float]) -> float | None:
    """Lower end of the two-sided 95% interval of the geometric mean ratio (Student's t over pairs); None below 5 pairs."""
    if len(ratios) < 5:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    quantile = _T975[min(len(logs) - 1, len(_T975) + 3) - 4]
    return math.exp(fmean(logs) - quantile * stdev(logs) / math.sqrt(len(logs)))


_T975 = (2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)  # from 4 degrees


def markdown(line: dict[str, Any]) -> str:
    """Return the README's table: tok/s of each arm, the ratio, and the acceptance length; losing rows stay in."""
    labels = list(line["cells"][0]["figures"])
    others = labels[1:]
    drafting = [label for label in others if any(cell["figures"][label]["acceptance_length"] for cell in line["cells"])]
    header = [
        "load",
        *(f"{label}, tok/s" for label in labels),
        *(f"{label} / {labels[0]}" for label in others),
        *(f"{label}, accepted length" for label in drafting),
    ]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for cell in line["cells"]:
        speeds = [_value(cell["figures"][label]["tok_per_s"], 0, spread=False) for label in labels]
        ratios = [_ratio(cell["ratio"].get(label)).partition(" ")[0] for label in others]
        lengths = [_value(cell["figures"][label]["acceptance_length"], 2, spread=False) for label in drafting]
        rows.append([load_name(cell["load"]), *speeds, *ratios, *lengths])
    where = line["gpu"] or f"{line['cpu']}, {line['cores']} cores"
    how = f"median of {line['repeats']}; greedy, at most {line['max_tokens']} new tokens; commit {line['commit']}, {line['time'][:10]}"
    footer = f"{where}; torch {line['torch']}; {how}."
    arms = "; ".join(f"{label}: `{command}`" for label, command in line["arms"].items())
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{footer}\n{arms}."


def write_readme(readme: Path, results: Path, marks: Marks = FIGURES) -> None:
    """Replace what stands between the marks by the newest line of results.

    Raises:
        ConfigError: no results, or no marks.
    """
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    if not lines:
        raise ConfigError(f"{results} holds no results", hint="run benchmarks/bench_server.py first")
    text = readme.read_text(encoding="utf-8")
    if marks.begin not in text or marks.end not in text:
        raise ConfigError(f"{readme} lacks the marks {marks.begin} and {marks.end}", hint="put them where the table belongs")
    head, _, rest = text.partition(marks.begin)
    table = markdown(json.loads(lines[-1]))
    readme.write_text(f"{head}{marks.begin}\n{table}\n{marks.end}{rest.partition(marks.end)[2]}", encoding="utf-8")
