"""How much faster are answers with speculation than without, on the same server, under the same load?

Starts `specdec serve` once per arm (off and on unless --arm says otherwise) and measures the arms in turns, or measures
running servers (--url A --url B). Prints a table and appends one JSON line to benchmarks/results/server.jsonl;
--readme also writes the newest line into README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import Arm, machine, parse_arm, spawned
from benchmarks.figures import write_readme
from specdec.errors import ConfigError, SpecdecError
from specdec.tools.bench import Cell, Plan, Side, cell_record, num_errors, run_cells
from specdec.tools.bench_table import print_cells
from specdec.tools.prompts import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "server.jsonl"


def plan(args: argparse.Namespace) -> Plan:
    """Return what to measure."""
    return Plan(
        workloads=args.workload,
        concurrency=args.concurrency,
        rates=args.rate,
        num_requests=args.num_requests,
        repeats=args.repeats,
        max_tokens=args.max_tokens,
        seed=args.seed,
        warmup=args.warmup,
        skip=args.skip,
    )


def measure(arms: Sequence[Arm], cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Measure all cells on live arms, in turns."""
    sides = [Side(label=arm.label, url=arm.url, api_key=args.api_key) for arm in arms]
    asyncio.run(run_cells(sides, cells, plan(args)))


def record(arms: Sequence[Arm], cells: Sequence[Cell], args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON line: where, what, and for each cell and arm the median, lowest and highest of each figure."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "note": args.note,
        **machine(),
        "arms": {arm.label: arm.describe() for arm in arms},
        "repeats": args.repeats,
        "max_tokens": args.max_tokens,
        "cells": [cell_record(cell, baseline=arms[0].label) for cell in cells],
    }


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
    cells = plan(args).cells()
    if args.url:
        arms = [Arm(label, url=url) for label, url in zip(args.label or args.url, args.url, strict=True)]
        measure(arms, cells, args)
    else:
        arms = [parse_arm(text, args.serve_args) for text in args.arm or ["off=--no-speculation", "on="]]
        for group in [[arm] for arm in arms] if args.one_at_a_time else [arms]:
            with spawned(group):
                measure(group, cells, args)
    line = record(arms, cells, args)
    print_cells(line["cells"], title=f"median of {args.repeats} [lowest to highest]; {args.max_tokens} new tokens at most, greedy")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    if args.readme:
        write_readme(ROOT / "README.md", args.results)
    if failed := num_errors(line["cells"]):
        raise ConfigError(f"{failed} requests failed", hint="the figures leave them out; see the servers' logs")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
