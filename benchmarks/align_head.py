"""Is a head aligned as it was trained? Its acceptance must fall when it reads other layers than its own.

    python benchmarks/align_head.py dspark specdec/assets/smollm2-135m-dspark

A wrong alignment costs acceptance and no test of losslessness notices, so each exported head goes through this: the same weights with the
layer ids of config.json moved by -2, -1, 0, +1, +2, on held-out chat prompts, greedy. Prints a table; exit code 1 when 0 is not best.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from bench_acceptance import measure

MOVES = (-2, -1, 0, 1, 2)
KEYS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")


def moved(head: Path, move: int, out: Path) -> Path:
    """A copy of the head that reads layers `move` further on."""
    shutil.copytree(head, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for key in KEYS:
        if key in config:
            config[key] = [layer + move for layer in config[key]]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def main() -> int:
    """Measure every move; return 0 when the head's own layers are best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("head", type=Path)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--count", type=int, default=16, help="prompts")
    args = parser.parse_args()
    lengths = {}
    print("| layers moved by | mean acceptance length |\n|---:|---:|")
    with tempfile.TemporaryDirectory() as work:
        for move in MOVES:
            path = moved(args.head, move, Path(work) / f"by{move}")
            config = {"method": args.method, "model": str(path), "num_speculative_tokens": args.drafts}
            lengths[move] = measure(config, "chat", count=args.count, temperature=0.0, max_tokens=96).total.acceptance_length
            print(f"| {move:+d} | {lengths[move]:.2f} |", flush=True)
    return 0 if max(lengths, key=lambda move: lengths[move]) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
