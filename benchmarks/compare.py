"""Question: how fast are other engines with the same weights, prompts and machine? Losses stay in the table.

    scripts/install-vllm /somewhere/vllm                                  # optional, each into a directory of its own
    scripts/install-llama-cpp /somewhere/llama.cpp
    python benchmarks/compare.py --vllm /somewhere/vllm --llama-cpp /somewhere/llama.cpp --readme

Starts one engine at a time, warms it up, measures it and stops it; all get the same chat and copy prompts, greedy, 128 new tokens at most.
specdec, transformers and vLLM have the embedded model's weights in bfloat16; llama.cpp's server has its GGUF file as it is (4 bits), and
the same weights in bfloat16. Each engine runs plain and, where it can on the CPU without another checkpoint, with its own drafting. An
engine that does not start is said so in the table. Appends a JSON line to benchmarks/results/compare.jsonl; --readme writes it into
README.md. About a minute for each engine and its start; --count makes it shorter or longer.
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

from benchmarks import engines
from benchmarks.arms import machine, spawned
from benchmarks.bf16_gguf import as_bf16
from benchmarks.compare_table import MARKS, markdown
from benchmarks.engines import Engine
from benchmarks.figures import write_readme
from specdec.config.engine import EMBEDDED_MODEL
from specdec.errors import ConfigError, SpecdecError
from specdec.models.source import embedded_gguf, locate_target
from specdec.tools.bench import Cell, Plan, Side, cell_record, num_errors, run_cells
from specdec.tools.bench_table import print_cells
from specdec.tools.prompts import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compare.jsonl"


def chosen(args: argparse.Namespace) -> list[Engine]:
    """Return the engines to run, ours first."""
    model = locate_target(EMBEDDED_MODEL).model_path
    found = engines.ours()
    if args.llama_cpp:
        program = args.llama_cpp / "build" / "bin" / "llama-server"
        slots = max(args.concurrency)
        bf16 = as_bf16(embedded_gguf(), args.llama_cpp / "smollm2-135m-instruct-bf16.gguf")
        found += engines.llama_cpp(program, bf16, "bf16", slots=slots)
        found += engines.llama_cpp(program, embedded_gguf(), "Q4_1", slots=slots)
    if args.vllm:
        found += engines.vllm(args.vllm, model)
    if not args.no_transformers:
        found += engines.transformers(model)
    return found


def measure(found: Sequence[Engine], cells: Sequence[Cell], plan: Plan) -> dict[str, str]:
    """Start, warm up, measure and stop each engine; return why those failed that did.

    Raises:
        ConfigError: the first engine fails: nothing would be left to compare with.
    """
    failures: dict[str, str] = {}
    for engine in found:
        try:
            with spawned([engine.arm]):
                asyncio.run(run_cells([Side(label=engine.arm.label, url=engine.arm.url)], cells, plan))
        except ConfigError as error:
            if engine is found[0]:
                raise
            print(error.message, file=sys.stderr)
            failures[engine.arm.label] = error.message.splitlines()[-1].strip()  # the end of its log
            for cell in cells:
                cell.runs.pop(engine.arm.label, None)  # half a row misleads
    return failures


def record(found: Sequence[Engine], cells: Sequence[Cell], plan: Plan, failures: dict[str, str]) -> dict[str, Any]:
    """Return the JSON line: where, the engines, and their figures in each load."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **machine(),
        "max_tokens": plan.max_tokens,
        "engines": {
            engine.arm.label: {
                "command": engine.arm.describe(),
                "weights": engine.weights,
                "drafts": engine.drafts,
                "failure": failures.get(engine.arm.label),
            }
            for engine in found
        },
        "cells": [cell_record(cell, baseline=found[0].arm.label) for cell in cells],
    }


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="directory that scripts/install-vllm made")
    parser.add_argument("--llama-cpp", type=Path, help="directory that scripts/install-llama-cpp made")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--only", nargs="+", default=[], help="names of engines to run, beside the first")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--count", type=int, default=0, help="requests in each cell; 0: twice the requests in flight, at least 6")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md; alone: the newest line, measure nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure every engine, print, append."""
    args = parse_args(argv)
    if list(argv) != ["--readme"]:
        plan = Plan(workloads=args.workload, concurrency=args.concurrency, num_requests=args.count, max_tokens=args.max_tokens)
        cells = plan.cells()
        found = [engine for index, engine in enumerate(chosen(args)) if not args.only or index == 0 or engine.arm.label in args.only]
        line = record(found, cells, plan, measure(found, cells, plan))
        print_cells(line["cells"], title=f"greedy, at most {plan.max_tokens} new tokens; one engine at a time")
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line))
        if failed := num_errors(line["cells"]):
            raise ConfigError(f"{failed} requests failed", hint="the figures leave them out; see the engines' logs")
    if args.readme:
        write_readme(ROOT / "README.md", args.results, MARKS, markdown)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
