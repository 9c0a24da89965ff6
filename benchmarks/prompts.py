"""Print the prompts that bench_server.py measures with: python benchmarks/prompts.py chat 3

The generator itself is specdec/tools/prompts.py, where `specdec bench` finds it too.
"""

from __future__ import annotations

import sys

from specdec.tools.prompts import WORKLOADS, prompts_for

if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "chat"
    if chosen not in WORKLOADS:
        sys.exit(f"error: {chosen!r} is no workload\nhint: one of {', '.join(WORKLOADS)}")
    for prompt in prompts_for(chosen, int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        print(prompt, end="\n\n")
