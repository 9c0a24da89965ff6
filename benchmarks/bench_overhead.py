"""What does the server cost over the engine alone? Tokens a second through HTTP over those of LLM.generate, same prompts, same batch.

Loads MODEL twice, one after the other: in this process for LLM.generate, and in a `specdec serve` of its own for streams over HTTP with
c clients, c = --concurrency. Both sides answer the same number of tokens (ignore_eos), greedily, after a warm-up. Then it scrapes /metrics
while streams run. Prints JSON and appends it to --out. No verdict: run it on a quiet machine and read it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
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
SCRAPE_EVERY_S = 0.2


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
    needed = max(args.concurrency) * (args.repeats + 1)
    options: dict[str, Any] = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs, "enable_prefix_caching": False}
    options |= {"spec_method": args.spec_method, "spec_tokens": args.spec_tokens} if args.spec_method else {}
    rates: dict[int, dict[str, list[float]]] = {c: {"offline": [], "http": []} for c in args.concurrency}
    with LLM(args.model, **options) as llm:
        ids = [list(llm.tokenizer.encode(text))[: args.max_model_len // 2] for text in prompts_for("copy", needed)]
        for c in args.concurrency:
            batches = [ids[c * repeat : c * (repeat + 1)] for repeat in range(args.repeats + 1)]
            rates[c]["offline"] = [offline(llm, batch, args) for batch in batches][1:]  # the first one warms up
    arm = Arm("server", serve_args=_serve_args(args))
    with spawned([arm]):
        for c in args.concurrency:
            batches = [ids[c * repeat : c * (repeat + 1)] for repeat in range(args.repeats + 1)]
            rates[c]["http"] = [asyncio.run(through_http(arm.url, batch, args)) for batch in batches][1:]
        waits_s = asyncio.run(scrapes(arm.url, ids[: max(args.concurrency)], args))
    cells = [
        {
            "concurrency": c,
            "offline_tok_per_s": round(median(rates[c]["offline"]), 2),
            "http_tok_per_s": round(median(rates[c]["http"]), 2),
            "ratio": round(median(rates[c]["http"]) / median(rates[c]["offline"]), 4),
        }
        for c in args.concurrency
    ]
    scrape = {"num": len(waits_s), "median_ms": round(1000 * median(waits_s), 2), "worst_ms": round(1000 * max(waits_s), 2)}
    return {"cells": cells, "metrics_scrape_under_load": scrape}


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--spec-method", help="draft method on both sides; left out: plain decoding")
    parser.add_argument("--spec-tokens", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse(argv)
    asked = {name: getattr(args, name) for name in ("model", "repeats", "max_tokens", "spec_method", "spec_tokens")}
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **machine(), **asked, **measure(args)}
    print(json.dumps(record, indent=1))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
