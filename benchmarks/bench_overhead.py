"""What does the server cost over the engine alone? Tokens a second through HTTP over those of LLM.generate, same prompts, same batch.

Loads MODEL twice: in this process for LLM.generate, and in a `specdec serve` of its own for streams over HTTP with c clients, c =
--concurrency. Both answer the same number of tokens (ignore_eos), greedily, after a warm-up, in turns: drift of the machine meets both, and
the ratio is taken within each turn. Then it scrapes /metrics while streams run. Prints JSON and appends it to --out; exit code 1 where the
median ratio of a concurrency is under 0.95, or p99 of the scrapes is not under 20 ms. Run it on a quiet machine: some three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import Arm, machine, spawned
from specdec import LLM, SamplingParams
from specdec.config.engine import EMBEDDED_MODEL
from specdec.tools.prompts import prompts_for

PATH = "/v1/completions"
SCRAPE_EVERY_S = 0.05
MIN_RATIO = 0.95
MAX_SCRAPE_MS = 20.0


def offline(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> float:
    """Tokens a second of one batch through LLM.generate."""
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    results = llm.generate(prompts, sampling, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    return sum(len(result.outputs[0].token_ids) for result in results) / wall_s


async def through_http(url: str, prompts: list[list[int]], args: argparse.Namespace) -> float:
    """Tokens a second of the same batch as streams, all at once."""
    limits = httpx.Limits(max_connections=len(prompts) + 1)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        start_s = time.perf_counter()
        counts = await asyncio.gather(*(_stream(http, prompt, args.max_tokens) for prompt in prompts))
        return sum(counts) / (time.perf_counter() - start_s)


async def _stream(http: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    last = ""
    async with http.stream("POST", PATH, json=body) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                last = line
    count: int = json.loads(last[6:])["usage"]["completion_tokens"]
    return count


async def scrapes(url: str, prompts: list[list[int]], args: argparse.Namespace) -> list[float]:
    """Seconds of each scrape of /metrics while the batch streams."""
    waits_s: list[float] = []

    async def scrape() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            while True:
                start_s = time.perf_counter()
                (await http.get("/metrics")).raise_for_status()
                waits_s.append(time.perf_counter() - start_s)
                await asyncio.sleep(SCRAPE_EVERY_S)

    task = asyncio.ensure_future(scrape())
    await through_http(url, prompts, args)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return waits_s


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both sides for each concurrency, `repeats` times each; prompts are token ids, so that neither side tokenizes."""
    options: dict[str, Any] = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs, "enable_prefix_caching": False}
    options |= {"spec_method": args.spec_method, "spec_tokens": args.spec_tokens} if args.spec_method else {}
    arm = Arm("server", serve_args=_serve_args(args))
    with LLM(args.model, **options) as llm, spawned([arm]):
        texts = prompts_for("copy", max(args.concurrency) * (args.repeats + 1))
        ids = [list(llm.tokenizer.encode(text))[: args.max_model_len // 2] for text in texts]
        cells = [_cell(llm, arm.url, ids, c, args) for c in args.concurrency]
        waits_s = asyncio.run(scrapes(arm.url, ids[: max(args.concurrency)], args))
    return {"cells": cells, "metrics_scrape_under_load": scrape_figures(waits_s)}


def _cell(llm: LLM, url: str, ids: list[list[int]], num_clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """One concurrency; the first turn warms up, and who begins changes from turn to turn."""
    pairs: list[tuple[float, float]] = []
    for turn in range(args.repeats + 1):
        batch = ids[num_clients * turn : num_clients * (turn + 1)]
        if turn % 2:
            http = asyncio.run(through_http(url, batch, args))
            pairs.append((offline(llm, batch, args), http))
        else:
            pairs.append((offline(llm, batch, args), asyncio.run(through_http(url, batch, args))))
    return cell_figures(num_clients, pairs[1:])


def cell_figures(num_clients: int, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the figures of (offline, HTTP) tokens a second, turn by turn; ratio is the median over turns."""
    ratios = [http / offline for offline, http in pairs]
    return {
        "concurrency": num_clients,
        "offline_tok_per_s": round(median(offline for offline, _ in pairs), 2),
        "http_tok_per_s": round(median(http for _, http in pairs), 2),
        "ratio": round(median(ratios), 4),
        "ratio_from": round(min(ratios), 4),
        "ratio_to": round(max(ratios), 4),
    }


def scrape_figures(waits_s: list[float]) -> dict[str, float]:
    """Return number, median, p99 (nearest rank) and worst of the scrapes."""
    waits_ms = sorted(1000 * wait_s for wait_s in waits_s)
    p99 = waits_ms[math.ceil(0.99 * len(waits_ms)) - 1]
    return {"num": len(waits_ms), "median_ms": round(median(waits_ms), 2), "p99_ms": round(p99, 2), "worst_ms": round(waits_ms[-1], 2)}


def faults_of(found: Mapping[str, Any], *, min_ratio: float, max_scrape_ms: float) -> list[str]:
    """Return what is over the limits."""
    faults = [
        f"HTTP at concurrency {cell['concurrency']} is {cell['ratio']:.3f} of LLM.generate, the limit is {min_ratio}"
        for cell in found["cells"]
        if cell["ratio"] < min_ratio
    ]
    p99_ms = found["metrics_scrape_under_load"]["p99_ms"]
    return faults + ([f"p99 of /metrics was {p99_ms:.1f} ms, the limit is {max_scrape_ms:g} ms"] if p99_ms >= max_scrape_ms else [])


def _serve_args(args: argparse.Namespace) -> tuple[str, ...]:
    speculation = ["--spec-method", args.spec_method, "--spec-tokens", str(args.spec_tokens)] if args.spec_method else ["--no-speculation"]
    model = [] if args.model == EMBEDDED_MODEL else [args.model]
    limits = ["--max-model-len", str(args.max_model_len), "--max-num-seqs", str(args.max_num_seqs), "--no-enable-prefix-caching"]
    return (*model, *limits, *speculation, "--no-ui")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="directory, .gguf file or hub id")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--spec-method", help="draft method on both sides; left out: plain decoding")
    parser.add_argument("--spec-tokens", type=int, default=5)
    parser.add_argument("--min-ratio", type=float, default=MIN_RATIO, help="least tokens a second through HTTP, of LLM.generate's")
    parser.add_argument("--max-scrape-ms", type=float, default=MAX_SCRAPE_MS, help="p99 of /metrics must be under it")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 0: no fault."""
    args = parse(argv)
    asked = {name: getattr(args, name) for name in ("model", "repeats", "max_tokens", "spec_method", "spec_tokens")}
    origin = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **machine(), **asked}
    found = measure(args)
    record = {**origin, **found, "faults": faults_of(found, min_ratio=args.min_ratio, max_scrape_ms=args.max_scrape_ms)}
    print(json.dumps(record, indent=1))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
