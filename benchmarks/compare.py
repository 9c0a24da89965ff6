"""Question: how fast are other engines with the same weights, prompts and machine? Losses stay in the table.

    scripts/install-vllm /somewhere/vllm                                  # optional, an environment of its own
    python benchmarks/compare.py --vllm /somewhere/vllm --readme

Starts one engine at a time, each with its own defaults in bfloat16, and sends all the same chat and copy prompts, greedy. Engines:
specdec plain and with its default drafting; `transformers serve` of this environment with continuous batching; vLLM's CPU build, plain
and with its n-gram lookup; llama.cpp's server, if --llama-server names the program, with --gguf (by default the embedded model's own
file, from which all others get their weights). Appends a JSON line to benchmarks/results/compare.jsonl; --readme writes it into
README.md. About two minutes an engine; --count makes it shorter or longer.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import bench_server
from benchmarks.figures import Marks, write_readme
from specdec.config.engine import EMBEDDED_MODEL
from specdec.errors import SpecdecError
from specdec.models.source import embedded_gguf, locate_target

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compare.jsonl"
MARKS = Marks("<!-- comparison:begin -->", "<!-- comparison:end -->")
MAX_LEN = 2048
VLLM_LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


def arms(args: argparse.Namespace) -> list[str]:
    """The --arm options of bench_server, the first of which is the baseline."""
    found = ["plain=--no-speculation --no-enable-prefix-caching", "default=--no-enable-prefix-caching"]
    model = locate_target(EMBEDDED_MODEL).model_path
    if not args.no_transformers:
        program = Path(sys.executable).with_name("transformers")
        found.append(
            _command("transformers", [str(program), "serve", model, "--device", "cpu", "--dtype", "bfloat16", "--continuous-batching"])
        )
    if args.vllm:
        serve = [str(args.vllm / "bin" / "vllm"), "serve", model, "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN)]
        serve += ["--no-enable-prefix-caching", "--max-num-seqs", "64"]
        found.append(_command("vllm", serve))
        found.append(_command("vllm-ngram", [*serve, "--speculative-config", json.dumps(VLLM_LOOKUP)]))
    if args.llama_server:
        gguf = str(args.gguf or embedded_gguf())
        slots = str(max(args.concurrency))
        serve = [
            str(args.llama_server),
            "-m",
            gguf,
            "-c",
            str(MAX_LEN * max(args.concurrency)),
            "-np",
            slots,
            "-t",
            "2",
            "--no-cache-prompt",
        ]
        found.append(_command("llama.cpp", serve))
    return found


def _command(name: str, words: Sequence[str]) -> str:
    return f"{name}=@{shlex.join(words)}"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="environment that scripts/install-vllm made")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server program")
    parser.add_argument("--gguf", type=Path, help="weights for it; none: the embedded model's file")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
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
        options = ["--one-at-a-time", "--repeats", "1", "--max-tokens", str(args.max_tokens), "--num-requests", str(args.count)]
        options += ["--concurrency", *map(str, args.concurrency), "--results", str(args.results)]
        for arm in arms(args):
            options += ["--arm", arm]
        bench_server.main(options)
    if args.readme:
        write_readme(ROOT / "README.md", args.results, MARKS)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
