"""Which method, with how many drafts, pays up to which number of requests in flight?

    python benchmarks/sweep.py --seconds 1800                                 # methods x drafts x requests in flight, chat and copy
    python benchmarks/sweep.py --seconds 1800                                 # again: goes on where the time ran out
    python benchmarks/sweep.py --seconds 0                                    # table and picture of what is there
    python benchmarks/sweep.py --out /tmp/mine --config 'mine={"method": "eagle3", "model": "/path/to/head"}' --drafts 1 3 5

For each method two servers are alive: one without speculation, and one with the method and the largest number of drafts, which every
request lowers to what is measured (`"speculative": {"num_speculative_tokens": k}`). Within a round all of them get the same prompts, in
turns, each with an API key of its own, so that no side drafts from another side's answers. Rounds are added until the time is over; every
measurement is a line of OUT/points.jsonl. The table says where the gain over no speculation ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import machine, parse_arm, spawned
from benchmarks.break_even import OFF, Curve, curves
from benchmarks.plots import draw, speedup_panel
from specdec.errors import ConfigError, SpecdecError
from specdec.tools.bench import Cell, Plan, Side, describe, progress, run_cell, started, warm_up
from specdec.tools.loadgen import Load
from specdec.tools.prompts import WORKLOADS

OUT = Path(__file__).resolve().parent / "results" / "sweep"
METHODS = {
    "ngram": '{"method": "ngram"}',
    "suffix": '{"method": "suffix"}',
    "eagle3": '{"method": "eagle3", "model": "smollm2-135m-eagle3"}',
}
KEY = "sweep-{}"  # of a side; any text will do


@dataclass(frozen=True, slots=True)
class Unit:
    """What is measured in one go: one load of one method on all its sides."""

    method: str
    workload: str
    concurrency: int
    round: int


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what points must have in common to stand in one table; the first line of a file of points."""
    names = ("serve_args", "drafts", "concurrency", "workload", "max_tokens", "num_requests")
    return {"configs": args.configs, **{name: getattr(args, name) for name in names}}


def read_points(path: Path, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the points measured so far, after writing or checking the first line.

    Raises:
        ConfigError: the file has points of other settings.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    head, *points = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if head != json.loads(json.dumps(wanted)):
        different = sorted(name for name in wanted if head.get(name) != wanted[name])
        raise ConfigError(f"{path} holds points with other {', '.join(different)}", hint="give the same options, or another --out")
    return points


def load_of(unit: Unit, args: argparse.Namespace) -> Load:
    """Return the load of a unit: answers of at least twice the requests in flight, so that the tail weighs little."""
    count = args.num_requests or max(4, 2 * unit.concurrency)
    return Load(workload=unit.workload, concurrency=unit.concurrency, num_requests=count, max_tokens=args.max_tokens)  # type: ignore[arg-type]


def cell_of(unit: Unit, args: argparse.Namespace) -> Cell:
    """Return a unit's cell; its prompts are those that no unit before had."""
    counts = {size: load_of(Unit(unit.method, unit.workload, size, 0), args).num_requests for size in args.concurrency}
    before = sum(counts[size] for size in args.concurrency[: args.concurrency.index(unit.concurrency)])
    return Cell(load_of(unit, args), 1, unit.round * sum(counts.values()) + before)


def next_round(method: str, points: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> list[Unit]:
    """Return the units that the earliest unfinished round of a method lacks."""
    done = {Unit(p["method"], p["workload"], p["concurrency"], p["round"]) for p in points}
    number = 0
    while True:
        units = [Unit(method, workload, size, number) for workload in args.workload for size in args.concurrency]
        if missing := [unit for unit in units if unit not in done]:
            return missing
        number += 1


def measure_method(method: str, points: list[dict[str, Any]], args: argparse.Namespace, *, deadline_s: float) -> None:
    """Start the two servers of a method and add rounds until the deadline, or until the prompts run out."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("".join(KEY.format(k) + "\n" for k in (OFF, *args.drafts)))
        keys.flush()
        shared = f"--no-enable-prefix-caching --no-ui --api-key-file {keys.name} {args.serve_args}"
        config = {**json.loads(args.configs[method]), "num_speculative_tokens": max(args.drafts), "policy": "fixed"}
        arms = [parse_arm(f"{OFF}=--no-speculation", shared), parse_arm(f"{method}=--speculative-config '{json.dumps(config)}'", shared)]
        with spawned(arms):
            asyncio.run(_add_rounds(method, [arm.url for arm in arms], points, args, deadline_s))


async def _add_rounds(method: str, urls: Sequence[str], points: list[dict[str, Any]], args: argparse.Namespace, deadline_s: float) -> None:
    sides = [Side(label=OFF, url=urls[0], api_key=KEY.format(OFF))]
    sides += [
        Side(label=str(k), url=urls[1], api_key=KEY.format(k), extra_body={"speculative": {"num_speculative_tokens": k}})
        for k in args.drafts
    ]
    async with started(sides) as clients:
        await warm_up(clients, Plan(workloads=args.workload, concurrency=args.concurrency, warmup=args.warmup))
        while True:
            for unit in next_round(method, points, args):
                cell = cell_of(unit, args)
                try:
                    cell.prompts(0)
                except ConfigError:
                    return  # all prompts are used
                if time.monotonic() >= deadline_s:
                    return
                # The side that goes first changes, so that drift of the machine is nobody's.
                turned = dict([*clients.items()][unit.round % len(sides) :] + [*clients.items()][: unit.round % len(sides)])
                with progress() as bar:
                    task = bar.add_task(f"{method}, {describe(cell.load)}", total=len(sides) * cell.load.num_requests)
                    await run_cell(turned, cell, on_done=lambda bar=bar, task=task: bar.advance(task))  # type: ignore[misc]
                _keep(unit, cell, points, args.out / "points.jsonl")


def _keep(unit: Unit, cell: Cell, points: list[dict[str, Any]], path: Path) -> None:
    """Append a point for each side; together, so that a file never holds half a unit."""
    commit = machine()["commit"]
    fresh = [
        {
            "method": unit.method,
            "workload": unit.workload,
            "concurrency": unit.concurrency,
            "round": unit.round,
            "num_drafts": label if label == OFF else int(label),
            "tok_per_s": round(run.tok_per_s, 2),
            "acceptance_length": run.acceptance_length,
            "num_errors": run.num_errors,
            "commit": commit,
        }
        for label, (run,) in cell.runs.items()
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(point) + "\n" for point in fresh))
    points += fresh


def print_curves(found: Sequence[Curve]) -> None:
    """Print a row for each curve: the ratios and where it stops paying."""
    sizes = sorted({size for curve in found for size in curve.ratios})
    table = Table(title="tok/s over tok/s without speculation, by requests in flight (median of rounds)")
    for name in ("workload", "method", "drafts", *map(str, sizes), "stops paying at"):
        table.add_column(name, justify="left" if name in ("workload", "method") else "right")
    for curve in sorted(found, key=lambda curve: (curve.workload, curve.method, curve.num_drafts)):
        ratios = [f"{curve.ratios[size]:.2f}" if size in curve.ratios else "-" for size in sizes]
        table.add_row(curve.workload, curve.method, str(curve.num_drafts), *ratios, curve.stops_paying())
    Console(width=140).print(table)


def draw_curves(path: Path, found: Sequence[Curve], args: argparse.Namespace) -> None:
    """Draw a row of panels for each method, a column for each workload."""
    panels = [
        [
            speedup_panel([c for c in found if (c.method, c.workload) == (method, workload)], title=f"{method}, {workload}")
            for workload in args.workload
        ]
        for method in args.configs
    ]
    here = machine()
    draw(
        path,
        panels,
        title=f"{here['gpu'] or here['cpu']}, {here['cores']} cores; commit {here['commit']}; {args.serve_args or 'embedded model'}",
    )


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; see --help. configs: name -> JSON of each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=None, help="default: all, or none beside --config")
    parser.add_argument(
        "--config", action="append", default=[], metavar="NAME=JSON", help="a --speculative-config without its number of drafts"
    )
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 5, 7])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=1800, help="no measurement begins later; 0: only print and draw what is there")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-requests", type=int, default=0, help="of each measurement; 0: twice those in flight, at least 4")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--serve-args", default="", help="arguments of both servers, for example a model")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of points.jsonl; the same one again goes on")
    parser.add_argument("--plot", type=Path, default=None, help="picture, .svg or .png; none: OUT/sweep.svg")
    args = parser.parse_args(argv)
    own = dict(text.partition("=")[::2] for text in args.config)
    names = args.methods or ([] if own else list(METHODS))
    args.configs = {**{name: METHODS[name] for name in names}, **own}
    args.concurrency, args.drafts = sorted(set(args.concurrency)), sorted(set(args.drafts))
    if min(*args.drafts, *args.concurrency, args.max_tokens) < 1:
        parser.error("drafts, requests in flight and tokens must be positive")
    return args


def main(argv: Sequence[str]) -> int:
    """Add rounds while there is time, those methods first that have fewest; print and draw."""
    args = parse_args(argv)
    end_s = time.monotonic() + args.seconds
    points = read_points(args.out / "points.jsonl", settings(args))
    methods = sorted(args.configs, key=lambda method: sum(point["method"] == method for point in points))
    for index, method in enumerate(methods):
        now_s = time.monotonic()
        if now_s < end_s:
            measure_method(method, points, args, deadline_s=now_s + (end_s - now_s) / (len(methods) - index))
    found = curves(points)
    if not found:
        raise ConfigError("nothing is measured yet", hint="give more --seconds")
    print_curves(found)
    draw_curves(args.plot or args.out / "sweep.svg", found, args)
    unfinished = [method for method in methods if not any(point["method"] == method for point in points)]
    print(json.dumps({"points": len(points), "not_measured_yet": unfinished}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
