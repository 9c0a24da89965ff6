"""From a line of results to the block of README.md between its two marks.

Owns: that table. Must not know: how anything was measured. Read next: specdec/tools/bench_table.py for the one of the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import ConfigError
from specdec.tools.bench_table import load_name, ratio, value


class Marks(NamedTuple):
    """What a table of README.md stands between."""

    begin: str
    end: str


FIGURES = Marks("<!-- figures:begin -->", "<!-- figures:end -->")


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
        speeds = [value(cell["figures"][label]["tok_per_s"], 0) for label in labels]
        ratios = [ratio(cell["ratio"].get(label)).partition(" ")[0] for label in others]
        lengths = [value(cell["figures"][label]["acceptance_length"], 2) for label in drafting]
        rows.append([load_name(cell["load"]), *speeds, *ratios, *lengths])
    where = line["gpu"] or f"{line['cpu']}, {line['cores']} cores"
    how = f"median of {line['repeats']}; greedy, at most {line['max_tokens']} new tokens; commit {line['commit']}, {line['time'][:10]}"
    footer = f"{where}; torch {line['torch']}; {how}."
    arms = "; ".join(f"{label}: `{command}`" for label, command in line["arms"].items())
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{footer}\n{arms}."


def write_readme(readme: Path, results: Path, marks: Marks = FIGURES, table_of: Callable[[dict[str, Any]], str] = markdown) -> None:
    """Replace what stands between the marks by a table of the newest line of results.

    Raises:
        ConfigError: no results, or no marks.
    """
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    if not lines:
        raise ConfigError(f"{results} holds no results", hint="measure first, without --readme")
    text = readme.read_text(encoding="utf-8")
    if marks.begin not in text or marks.end not in text:
        raise ConfigError(f"{readme} lacks the marks {marks.begin} and {marks.end}", hint="put them where the table belongs")
    head, _, rest = text.partition(marks.begin)
    table = table_of(json.loads(lines[-1]))
    readme.write_text(f"{head}{marks.begin}\n{table}\n{marks.end}{rest.partition(marks.end)[2]}", encoding="utf-8")
