"""The table of engines in README.md: a row for each, a column for each load.

Owns: that table. Must not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import Marks
from specdec.tools.bench_table import load_name, ratio, value

MARKS = Marks("<!-- comparison:begin -->", "<!-- comparison:end -->")


def markdown(line: Mapping[str, Any]) -> str:
    """Return the table: tok/s, and in brackets over the first row's; engines that failed are rows too."""
    cells = line["cells"]
    header = ["engine", "weights", "drafts", *(f"{load_name(cell['load'])}, tok/s" for cell in cells)]
    rows = [header, ["---", "---", "---", *["---:"] * len(cells)]]
    for label, engine in line["engines"].items():
        rows.append([label, engine["weights"], engine["drafts"] or "none", *(_speed(cell, label) for cell in cells)])
    where = line["gpu"] or f"{line['cpu']}, {line['cores']} cores"
    requests = " and ".join(str(count) for count in sorted({cell["load"]["num_requests"] for cell in cells}))
    how = f"{requests} requests a load, greedy, at most {line['max_tokens']} new tokens; in brackets: over the first row"
    versions = f"torch {line['torch']}, transformers {line['transformers']}; commit {line['commit']}, {line['time'][:10]}"
    commands = "\n".join(f"- {label}: `{_quoted(engine)}`" for label, engine in line["engines"].items())
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}\n\n{where}; {how}; {versions}.\n\n<details><summary>Commands</summary>\n\n{commands}\n\n</details>"


def _speed(cell: Mapping[str, Any], label: str) -> str:
    if label not in cell["figures"]:
        return "did not run"
    against = ratio(cell["ratio"].get(label))
    return value(cell["figures"][label]["tok_per_s"], 0) + (f" ({against})" if against else "")


def _quoted(engine: Mapping[str, Any]) -> str:
    return engine["command"] if engine["failure"] is None else f"{engine['command']}` failed: `{engine['failure']}"
