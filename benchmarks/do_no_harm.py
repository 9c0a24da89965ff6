"""Is a server with drafting ever slower than one without, at 1 to 32 requests in flight?

    python benchmarks/do_no_harm.py                                          # the default, 14 minutes
    python benchmarks/do_no_harm.py --anti                                   # a drafter that is always wrong, under the adaptive policy
    python benchmarks/do_no_harm.py --on='--spec-method suffix --spec-tokens 8'

Two servers are alive, without speculation (off) and with it (on). A round is one pair of measurements at each number of requests in
flight, with the same chat prompts; the order is off, on in one round and on, off in the next. Rounds are added until the time is over,
but at least `--pairs` of them. Prefix caching is off, no prompt comes twice in a server's life, answers end where the model ends them.
Judged is, at each number, the lower end of the 95% interval of the ratio of tokens a second over pairs: it must be above 0.95.

Ends with 1 where it is not, or where other processes kept the machine busy (--max-others). Appends one JSON line to
benchmarks/results/do_no_harm.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import Arm, machine, parse_arm, spawned
from benchmarks.mixed import ProcessView, machine_busy_s
from specdec.errors import ConfigError, SpecdecError
from specdec.tools.bench import Cell, Side, cell_record, describe, num_errors, progress, run_repeat, started
from specdec.tools.bench_table import print_cells
from specdec.tools.loadgen import Client, Load, measure
from specdec.tools.prompts import num_prompts, warmup_prompts

RESULTS = Path(__file__).resolve().parent / "results" / "do_no_harm.jsonl"
OFF, ON = "off", "on"
ANTI = {"method": "custom_class", "model": "benchmarks.anti_drafter.AntiDrafter", "num_speculative_tokens": 4, "policy": "adaptive"}
NUM_REQUESTS = {1: 4, 4: 8, 8: 16, 16: 32, 32: 48}  # in each measurement: 6 to 12 s of a 135M model on two cores
LIMIT = 0.95


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor seconds so far of everything on the machine, and of the two servers and this client."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls, arms: Sequence[Arm]) -> Machine:
        """Read the clocks."""
        own = [os.getpid(), *(pid for arm in arms if arm.pid is not None for pid in (arm.pid, *ProcessView(arm.pid).children()))]
        return cls(time.monotonic(), machine_busy_s(), sum(ProcessView(pid).cpu_s() for pid in own))

    def others_cores(self, before: Machine) -> float:
        """Return how many cores other processes kept busy since `before`."""
        return ((self.all_s - before.all_s) - (self.own_s - before.own_s)) / (self.at_s - before.at_s)


def arms_of(args: argparse.Namespace) -> list[Arm]:
    """Return the two servers to start."""
    shared = f"--no-enable-prefix-caching --no-ui {args.serve_args}"
    drafting = f"--speculative-config '{json.dumps(ANTI)}'" if args.anti else args.on
    return [parse_arm(f"{OFF}=--no-speculation", shared), parse_arm(f"{ON}={drafting}", shared)]


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Return a cell for each number in flight, with as many rounds as there are prompts for.

    Raises:
        ConfigError: the prompts do not suffice for --pairs rounds.
    """
    counts = {size: args.num_requests or NUM_REQUESTS.get(size, 2 * size) for size in args.concurrency}
    rounds = num_prompts("chat") // sum(counts.values())
    if rounds < args.pairs:
        raise ConfigError(
            f"{args.pairs} rounds of {sum(counts.values())} prompts are asked for, but chat has {num_prompts('chat')}",
            hint="give fewer --pairs, --num-requests or --concurrency",
        )
    cells, skip = [], 0
    for size, count in counts.items():
        cells.append(Cell(Load(concurrency=size, num_requests=count, max_tokens=args.max_tokens), rounds, skip))
        skip += count * rounds
    return cells


async def warm_up(clients: Mapping[str, Client], cells: Sequence[Cell], max_tokens: int) -> None:
    """Bring both servers to each number in flight once with prompts that are never measured, so that nothing is met for the first time."""
    prompts = warmup_prompts("chat", 32)
    for cell in cells:
        size = cell.load.concurrency
        load = Load(concurrency=size, num_requests=size, max_tokens=min(max_tokens, 32))
        for client in clients.values():
            await measure(client, [prompts[index % len(prompts)] for index in range(size)], load)


async def run_rounds(arms: Sequence[Arm], cells: Sequence[Cell], args: argparse.Namespace) -> float:
    """Measure rounds until the time is over; return how many cores other processes kept busy meanwhile."""
    deadline_s = time.monotonic() + args.seconds
    async with started([Side(label=arm.label, url=arm.url) for arm in arms]) as clients:
        await warm_up(clients, cells, args.max_tokens)
        before = Machine.now(arms)
        longest_s = 0.0
        with progress() as bar:
            task = bar.add_task("pairs", total=None)
            for number in range(cells[0].repeats):
                begun_s = time.monotonic()
                if number >= args.pairs and begun_s + longest_s > deadline_s:
                    break
                for cell in cells:
                    bar.update(task, description=f"round {number + 1}, {describe(cell.load)}", advance=1)
                    await run_repeat(clients, cell, number)
                longest_s = max(longest_s, time.monotonic() - begun_s)
        return Machine.now(arms).others_cores(before)


def faults_of(cells: Sequence[Mapping[str, Any]], others_cores: float, max_others: float) -> list[str]:
    """Return why recorded cells do not show that drafting does no harm; empty where they do."""
    faults = []
    for cell in cells:
        name, bound = f"{cell['load']['concurrency']} in flight", cell["ratio_at_least"][ON]
        if bound is None:
            faults.append(f"{name}: {len(cell['ratio'][ON])} pairs are too few for an interval")
        elif bound <= LIMIT:
            faults.append(f"{name}: the ratio is at least {bound:.3f}, which is not above {LIMIT}")
    if failed := num_errors(cells):
        faults.append(f"{failed} requests failed")
    if others_cores > max_others:
        faults.append(f"other processes kept {others_cores:.2f} cores busy, the limit is {max_others:g}: run it again on a quiet machine")
    return faults


def record(arms: Sequence[Arm], cells: Sequence[Cell], others_cores: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON line."""
    described = [cell_record(cell, baseline=OFF) for cell in cells]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **machine(),
        "arms": {arm.label: arm.describe() for arm in arms},
        "max_tokens": args.max_tokens,
        "pairs": len(cells[0].runs[ON]),
        "others_cores": round(others_cores, 2),
        "cells": described,
        "faults": faults_of(described, others_cores, args.max_others),
    }


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--on", default="", help="options of the drafting server; none: its default")
    what.add_argument("--anti", action="store_true", help="draft with benchmarks/anti_drafter.py under the adaptive policy")
    parser.add_argument("--serve-args", default="", help="arguments of both servers, for example a model")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(NUM_REQUESTS), help="requests in flight")
    parser.add_argument("--num-requests", type=int, default=0, help="of each measurement; 0: by requests in flight")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=7, help="least number of rounds, whatever the time")
    parser.add_argument("--seconds", type=float, default=840.0, help="time for rounds; none begins that would not end in it")
    parser.add_argument("--max-others", type=float, default=0.25, help="cores that other processes may keep busy")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that the JSON line is appended to")
    args = parser.parse_args(argv)
    if min([args.pairs, args.max_tokens, *args.concurrency]) <= 0 or len(set(args.concurrency)) < len(args.concurrency):
        parser.error("pairs, max tokens and concurrency must be positive, and no concurrency may come twice")
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, print, append, judge; return the exit status."""
    args = parse_args(argv)
    arms, cells = arms_of(args), cells_of(args)
    with spawned(arms):
        others_cores = asyncio.run(run_rounds(arms, cells, args))
    line = record(arms, cells, others_cores, args)
    print_cells(
        line["cells"], title=f"{line['pairs']} interleaved pairs, median [lowest to highest]; {args.max_tokens} new tokens at most, greedy"
    )
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    for fault in line["faults"]:
        print(fault, file=sys.stderr)
    return 1 if line["faults"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
