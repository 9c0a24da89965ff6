"""What `specdec bench` does: measure running servers, print a table and one JSON line.

Owns: the steps from options to output. Must not know: how loads are sent or figures made.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.errors import ConfigError
from specdec.tools.bench import Cell, Plan, Side, cell_record, num_errors, run_cells
from specdec.tools.bench_table import print_cells


def sides_of(urls: Sequence[str], *, labels: Sequence[str], models: Sequence[str], api_key: str | None) -> list[Side]:
    """Return a side for each URL.

    Raises:
        ConfigError: not as many labels or models as URLs, or two sides of one name.
    """
    for option, given in (("--label", labels), ("--model", models)):
        if given and len(given) != len(urls):
            raise ConfigError(f"{len(given)} {option} for {len(urls)} --url", hint=f"give one {option} for each --url, in the same order")
    names = labels or urls
    asked: Sequence[str | None] = models or [None] * len(urls)
    if len(set(names)) < len(names):
        raise ConfigError("two servers have the same name", hint="give each --url a --label of its own")
    return [Side(label=name, url=url, model=model, api_key=api_key) for name, url, model in zip(names, urls, asked, strict=True)]


def run(sides: Sequence[Side], plan: Plan, *, json_path: Path | None = None) -> None:
    """Measure, print the table and the JSON line, and append the line to json_path.

    Raises:
        ConfigError: a server does not answer, there are too few prompts, or no request of a server succeeded.
    """
    cells = plan.cells()
    asyncio.run(run_cells(sides, cells, plan))
    line = record(sides, cells, plan)
    failed = num_errors(line["cells"])
    repeats = f"median of {plan.repeats} [lowest to highest]; " if plan.repeats > 1 else ""
    title = f"{repeats}greedy, at most {plan.max_tokens} new tokens; {failed} requests failed"
    print_cells(line["cells"], title=title)
    text = json.dumps(line)
    print(text)
    if json_path is not None:
        with json_path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    for side in sides:
        if not any(run.num_tokens for cell in cells for run in cell.runs[side.label]):
            raise ConfigError(f"every request to {side.label} failed", hint="see the server's log")


def record(sides: Sequence[Side], cells: Sequence[Cell], plan: Plan) -> dict[str, Any]:
    """Return the run for JSON: when, what, and each cell with median, lowest and highest of each figure."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "specdec": __version__,
        "servers": {side.label: side.url for side in sides},
        "repeats": plan.repeats,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "cells": [cell_record(cell, baseline=sides[0].label) for cell in cells],
    }
