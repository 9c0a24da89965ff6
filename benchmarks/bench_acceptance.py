"""How many drafts are accepted: mean acceptance length and share by position of each method, on prompts nobody trained on.

    python benchmarks/bench_acceptance.py 'eagle3={"method": "eagle3", "model": "my-head", "num_speculative_tokens": 4}'

Offline, `policy: fixed`, prompts of specdec/tools/prompts.py. Prints a Markdown table and one JSON line for each row. Times nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from specdec import LLM, SamplingParams
from specdec.metrics.stats import SpecDecodeStats
from specdec.tools.prompts import WORKLOADS, Workload, prompts_for


def measure(config: dict[str, Any], workload: Workload, *, count: int, temperature: float, max_tokens: int) -> SpecDecodeStats:
    """Answer the prompts once and return the counts."""
    sampling = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=index) for index in range(count)]
    with LLM(speculative_config={"policy": "fixed", **config}, max_model_len=1024, max_num_seqs=16) as llm:
        llm.chat([[{"role": "user", "content": text}] for text in prompts_for(workload, count)], sampling)
        return llm.stats.spec


def as_row(name: str, workload: str, temperature: float, stats: SpecDecodeStats) -> dict[str, Any]:
    """The figures of one run."""
    return {
        "name": name,
        "workload": workload,
        "temperature": temperature,
        "mean_acceptance_length": round(stats.total.acceptance_length, 3),
        "tokens_per_target_pass": round(stats.tokens_per_target_pass, 3),
        "accepted_by_position": [round(share, 3) for share in stats.acceptance_rate_per_pos],
        "num_drafts": stats.total.num_drafts,
    }


def main() -> None:
    """Measure every method and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="NAME=JSON", help="a speculative config")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["chat"])
    parser.add_argument("--count", type=int, default=80, help="prompts")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    rows = []
    for text in args.methods:
        name, _, config = text.partition("=")
        for workload in args.workload:
            for temperature in args.temperature:
                stats = measure(json.loads(config), workload, count=args.count, temperature=temperature, max_tokens=args.max_tokens)
                rows.append(as_row(name, workload, temperature, stats))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("| drafts | prompts | temperature | mean acceptance length | tokens per target pass | accepted by position |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        by_position = " ".join(f"{share:.2f}" for share in row["accepted_by_position"])
        figures = f"{row['mean_acceptance_length']:.2f} | {row['tokens_per_target_pass']:.2f} | {by_position}"
        print(f"| {row['name']} | {row['workload']} | {row['temperature']:g} | {figures} |")


if __name__ == "__main__":
    main()
