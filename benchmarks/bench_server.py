"""How much faster are answers with speculation than without, on the same server, under the same load?

Starts `specdec serve` once per arm (off and on unless --arm says otherwise) and measures the arms in turns, or measures
running servers (--url A --url B). Prints a table and appends one JSON line to benchmarks/results/server.jsonl;
--readme also writes the newest line into README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import Arm, machine, parse_arm, spawned
from benchmarks.figures import lower_bound, print_table, write_readme
from specdec.errors import ConfigError, SpecdecError
from specdec.tools.loadgen import Client, Load, Summary, measure, middle
from specdec.tools.prompts import WORKLOADS, prompts_for, warmup_prompts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "server.jsonl"
FIGURES = (
    "tok_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "acceptance_length",
    "acceptance_rate",
)  # fmt: skip


@dataclass(slots=True)
class Cell:
    """One load, measured on every arm, `repeats` times. runs: label -> one summary a repeat."""

    load: Load
    repeats: int
    skip: int  # prompts of the workload that earlier cells used up
    runs: dict[str, list[Summary]] = field(default_factory=dict)

    def prompts(self, repeat: int) -> list[str]:
        """Return the prompts of a repeat: the same for each arm, and never used before in this server's life."""
        return prompts_for(self.load.workload, self.load.num_requests, skip=self.skip + repeat * self.load.num_requests)


def plan(args: argparse.Namespace) -> list[Cell]:
    """Return the cells in order, with the prompts dealt so that none is used twice.

    Raises:
        ConfigError: a workload has too few prompts for all cells.
    """
    cells: list[Cell] = []
    for workload in args.workload:
        skip = args.skip
        loads = [Load(workload=workload, concurrency=c, num_requests=args.num_requests or max(6, 2 * c)) for c in args.concurrency]
        loads += [
            Load(workload=workload, rate=r, num_requests=args.num_requests or max(6, round(20 * r)), seed=args.seed) for r in args.rate
        ]
        for load in loads:
            load = Load(**{**asdict(load), "max_tokens": args.max_tokens})
            cells.append(Cell(load, args.repeats, skip))
            cells[-1].prompts(args.repeats - 1)  # refuses now rather than in an hour
            skip += load.num_requests * args.repeats
    return cells


async def run_cells(arms: Sequence[Arm], cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Measure all cells on live arms, taking turns inside each cell; the order turns round with each repeat."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {arm.label: await stack.enter_async_context(Client(arm.url, api_key=args.api_key)) for arm in arms}
        bar = stack.enter_context(_progress())
        task = bar.add_task("warm-up", total=len(arms) * sum(cell.load.num_requests * cell.repeats for cell in cells))
        for client in clients.values():
            await _warm_up(client, args)
        for cell in cells:
            for repeat in range(cell.repeats):
                for label, client in list(clients.items())[:: 1 if repeat % 2 == 0 else -1]:
                    bar.update(task, description=f"{describe(cell.load)}, {label}")
                    summary = await measure(client, cell.prompts(repeat), cell.load, on_done=lambda: bar.advance(task))
                    cell.runs.setdefault(label, []).append(summary)


async def _warm_up(client: Client, args: argparse.Namespace) -> None:
    for workload in args.workload:
        prompts = warmup_prompts(workload, args.warmup)
        for width in {1, min(len(prompts), max(args.concurrency, default=1))} if prompts else ():
            await measure(client, prompts, Load(workload=workload, concurrency=width, max_tokens=32))


def _progress() -> Progress:
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def describe(load: Load) -> str:
    """Return a load in words: `chat, 4 in flight`."""
    return f"{load.workload}, {load.concurrency} in flight" if load.rate is None else f"{load.workload}, Poisson {load.rate:g}/s"


def record(arms: Sequence[Arm], cells: Sequence[Cell], args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON line: where, what, and for each cell and arm the median, lowest and highest of each figure."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "note": args.note,
        **machine(),
        "arms": {arm.label: arm.describe() for arm in arms},
        "repeats": args.repeats,
        "max_tokens": args.max_tokens,
        "cells": [_cell_record(cell, baseline=arms[0].label) for cell in cells],
    }


def _cell_record(cell: Cell, *, baseline: str) -> dict[str, Any]:
    figures = {label: {name: _rounded(middle(runs, name)) for name in FIGURES} for label, runs in cell.runs.items()}
    tokens = {label: [run.num_tokens for run in runs] for label, runs in cell.runs.items()}
    ratios: dict[str, list[float]] = {}
    for label, runs in cell.runs.items():  # by repeat: both arms of a repeat had the same prompts minutes apart at most
        if label != baseline:
            pairs = zip(runs, cell.runs[baseline], strict=True)
            ratios[label] = [round(run.tok_per_s / base.tok_per_s, 3) for run, base in pairs if base.tok_per_s > 0]
    return {
        "load": {key: value for key, value in asdict(cell.load).items() if key != "seed"},
        "figures": figures,
        "num_tokens": tokens,
        "num_errors": {label: sum(run.num_errors for run in runs) for label, runs in cell.runs.items()},
        "ratio": ratios,
        "ratio_at_least": {label: _rounded_bound(values) for label, values in ratios.items()},
    }


def _rounded_bound(ratios: list[float]) -> float | None:
    bound = lower_bound(ratios)
    return None if bound is None else round(bound, 3)


def _rounded(values: tuple[float, float, float] | None) -> list[float] | None:
    return [round(value, 3) for value in values] if values else None


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_argument_group("what to measure")
    where.add_argument(
        "--url", action="append", default=[], help="a running OpenAI-compatible server; repeat to compare, the first is the baseline"
    )
    where.add_argument("--label", action="append", default=[], help="a name for each --url, in the same order")
    where.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=ARGS",
        help="start `specdec serve ARGS` as NAME, or `COMMAND ARGS` with NAME=@COMMAND; default: off=--no-speculation and on=",
    )
    where.add_argument("--serve-args", default="", help="arguments that every started server gets, for example a model")
    where.add_argument(
        "--one-at-a-time", action="store_true", help="start an arm only when the one before has stopped (saves memory, adds drift)"
    )
    where.add_argument("--api-key", default=None)
    load = parser.add_argument_group("load")
    load.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    load.add_argument("--concurrency", nargs="*", type=int, default=[1, 4, 8, 16], help="closed loop: requests in flight")
    load.add_argument("--rate", nargs="*", type=float, default=[], help="open loop: Poisson arrivals a second")
    load.add_argument("--num-requests", type=int, default=0, help="in each cell and repeat; 0: twice the requests in flight, at least 6")
    load.add_argument("--repeats", type=int, default=3)
    load.add_argument("--max-tokens", type=int, default=128, help="answers end earlier where the model ends them")
    load.add_argument("--warmup", type=int, default=4, help="prompts of warm-up for each workload; never measured ones")
    load.add_argument("--skip", type=int, default=0, help="prompts that this server has answered before, so that none comes twice")
    load.add_argument("--seed", type=int, default=0, help="of arrival times")
    out = parser.add_argument_group("output")
    out.add_argument("--results", type=Path, default=RESULTS, help="file that the JSON line is appended to")
    out.add_argument("--note", default="", help="free text kept in the JSON line")
    out.add_argument("--readme", action="store_true", help="write the newest line of the results into README.md; alone, measure nothing")
    args = parser.parse_args(argv)
    if args.url and args.arm:
        parser.error("--url measures running servers and --arm starts some; give one of them")
    if args.label and len(args.label) != len(args.url):
        parser.error(f"{len(args.label)} --label for {len(args.url)} --url; give one for each")
    if min([args.repeats, args.max_tokens, *args.concurrency, *args.rate], default=1) <= 0 or not (args.concurrency or args.rate):
        parser.error("repeats, max tokens, concurrency and rate must be positive, and there must be a load")
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, print, append; return the exit status."""
    if list(argv) == ["--readme"]:
        write_readme(ROOT / "README.md", RESULTS)
        return 0
    args = parse_args(argv)
    cells = plan(args)
    if args.url:
        arms = [Arm(label, url=url) for label, url in zip(args.label or args.url, args.url, strict=True)]
        asyncio.run(run_cells(arms, cells, args))
    else:
        arms = [parse_arm(text, args.serve_args) for text in args.arm or ["off=--no-speculation", "on="]]
        for group in [[arm] for arm in arms] if args.one_at_a_time else [arms]:
            with spawned(group):
                asyncio.run(run_cells(group, cells, args))
    line = record(arms, cells, args)
    print_table(line)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    if args.readme:
        write_readme(ROOT / "README.md", args.results)
    num_errors = sum(sum(cell["num_errors"].values()) for cell in line["cells"])
    if num_errors:
        raise ConfigError(f"{num_errors} requests failed", hint="the figures leave them out; see the servers' logs")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
