"""Does a server stay as fast and as small as it was, for as long as it runs?

Starts `specdec serve ARGS` (or takes --url) and keeps --concurrency requests of mixed parameters in flight, half of them streams, for
--minutes. Compares tokens a second and memory of the last window with the first, behind a warm-up (a minute each, less in short runs).
Prints JSON and appends it to --out; exit code 1 where throughput fell under 0.97 of the first window's, memory grew by more than 3%, a
request failed, or a repeated question got another answer.

Throughput also moves when the machine is needed elsewhere, and a disturbed first window lets any server pass. So the record has, by window,
tokens a second, the server's processor time for a token, and how many cores other processes kept busy; and it is a fault of the run,
whatever the ratio, where others took more than --max-others cores in the first or last window, or no answer ended in some window.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import Arm, machine, spawned
from benchmarks.hostile import PATH, TIMEOUT_S, settled
from benchmarks.mixed import ProcessView, body_of, machine_busy_s, texts_of

LOOK_EVERY_S = 0.5
MAX_GROWTH = 0.03
MIN_RATIO = 0.97
MAX_OTHERS = 0.25  # cores


@dataclass(frozen=True, slots=True)
class Look:
    """Processor seconds so far: of the server, and of all that is neither the server nor this client."""

    at_s: float
    server_s: float
    others_s: float


@dataclass(slots=True)
class Course:
    """What was seen over time. tokens: (second, tokens of an answer); memory: (second, bytes). Seconds count from the start."""

    tokens: list[tuple[float, int]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answers: dict[int, list[str]] = field(default_factory=dict)

    def rate(self, begin_s: float, end_s: float) -> float:
        """Tokens a second of the answers that ended in a span."""
        return sum(count for at_s, count in self.tokens if begin_s <= at_s < end_s) / (end_s - begin_s)

    def bytes_in(self, begin_s: float, end_s: float) -> float:
        """Mean memory in a span; 0 where nobody looked."""
        seen = [size for at_s, size in self.memory if begin_s <= at_s < end_s]
        return sum(seen) / len(seen) if seen else 0.0

    def window(self, begin_s: float, end_s: float) -> dict[str, float | None]:
        """What happened in a span; None where nobody looked, or no answer ended."""
        seen = [look for look in self.looks if begin_s <= look.at_s < end_s]
        rate = self.rate(begin_s, end_s)
        found: dict[str, float | None] = {"begin_s": round(begin_s, 1), "tok_per_s": round(rate, 1), "cpu_ms_per_token": None}
        if len(seen) < 2:
            return found | {"others_cores": None}
        length_s = seen[-1].at_s - seen[0].at_s
        if rate:
            found["cpu_ms_per_token"] = round(1000 * (seen[-1].server_s - seen[0].server_s) / length_s / rate, 2)
        return found | {"others_cores": round((seen[-1].others_s - seen[0].others_s) / length_s, 2)}


def verdict(
    course: Course, *, total_s: float, warmup_s: float, window_s: float, min_ratio: float, max_others: float = MAX_OTHERS
) -> dict[str, Any]:
    """Compare the window behind the warm-up with the last one; `faults` is empty where all is well.

    min_ratio: least throughput of the last window, of the first. max_others: cores that other processes may keep busy in either.
    """
    first, last = (warmup_s, warmup_s + window_s), (total_s - window_s, total_s)
    rates = [course.rate(*span) for span in (first, last)]
    sizes = [course.bytes_in(*span) for span in (first, last)]
    ratio = rates[1] / rates[0] if rates[0] else 0.0
    growth = sizes[1] / sizes[0] - 1 if sizes[0] else 0.0
    faults = list(course.failures[:5])
    if ratio < min_ratio:
        faults.append(f"throughput of the last window is {ratio:.3f} of the first, the limit is {min_ratio}")
    if growth > MAX_GROWTH:
        faults.append(f"memory grew by {growth:.1%}, the limit is {MAX_GROWTH:.0%}")
    windows = [course.window(begin_s, begin_s + window_s) for begin_s in _steps(warmup_s, total_s, window_s)]
    faults += _disturbances(windows, [course.window(*first), course.window(*last)], max_others)
    return {
        "window_s": window_s,
        "num_requests": len(course.tokens),
        "num_failures": len(course.failures),
        "tok_per_s_first": round(rates[0], 1),
        "tok_per_s_last": round(rates[1], 1),
        "throughput_ratio": round(ratio, 4),
        "memory_first_mb": round(sizes[0] / 2**20, 1),
        "memory_last_mb": round(sizes[1] / 2**20, 1),
        "memory_growth": round(growth, 4),
        "windows": windows,
        "faults": faults,
    }


def _disturbances(windows: list[dict[str, float | None]], compared: list[dict[str, float | None]], max_others: float) -> list[str]:
    """What makes the comparison void, however it came out."""
    idle = [window["begin_s"] for window in windows if not window["tok_per_s"]]
    faults = [f"no answer ended in the windows that began at {', '.join(f'{begin_s:g} s' for begin_s in idle)}"] if idle else []
    busy = [window["others_cores"] for window in compared if (window["others_cores"] or 0.0) > max_others]
    if busy:
        shown = " and ".join(f"{cores:.2f}" for cores in busy)
        faults.append(f"other processes kept {shown} cores busy, the limit is {max_others:g}: run it again on a quiet machine")
    return faults


def _steps(warmup_s: float, total_s: float, window_s: float) -> list[float]:
    """Where each whole window behind the warm-up begins."""
    return [warmup_s + index * window_s for index in range(int((total_s - warmup_s) / window_s))]


async def soak(url: str, pid: int | None, course: Course, args: argparse.Namespace) -> float:
    """Run the load; return its length in seconds. Questions come round again, so that their answers can be compared."""
    start_s = time.monotonic()
    until_s = start_s + 60 * args.minutes
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:

        async def client() -> None:
            while time.monotonic() < until_s:
                index = next(numbers)
                question = index % args.questions
                try:
                    texts, count = await _ask(http, body_of(question, max_tokens=args.max_tokens), is_stream=index % 2 == 1)
                except Exception as error:
                    course.failures.append(f"question {question}: {type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)
                    continue
                course.tokens.append((time.monotonic() - start_s, count))
                if course.answers.setdefault(question, texts) != texts:
                    course.failures.append(f"question {question}: {texts!r} instead of {course.answers[question]!r}")

        async def look() -> None:
            while pid is not None:
                at_s, server_s = time.monotonic() - start_s, ProcessView(pid).cpu_s()
                course.memory.append((at_s, ProcessView(pid).resident_bytes()))
                course.looks.append(Look(at_s, server_s, machine_busy_s() - server_s - time.process_time()))
                await asyncio.sleep(LOOK_EVERY_S)

        looking = asyncio.create_task(look())
        await asyncio.gather(*(client() for _ in range(args.concurrency)))
        looking.cancel()
    return 60.0 * float(args.minutes)


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], *, is_stream: bool) -> tuple[list[str], int]:
    """Texts by choice, and the tokens that they took."""
    if not is_stream:
        answer = (await http.post(PATH, json=body)).raise_for_status().json()
        return texts_of(answer), answer["usage"]["completion_tokens"]
    texts, num_tokens = [""] * int(body.get("n", 1)), 0
    async with http.stream("POST", PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}}) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return texts, num_tokens


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; its memory is looked at only with --pid")
    parser.add_argument("--pid", type=int, help="process of --url on this machine")
    parser.add_argument("--serve", default="", help="arguments of specdec serve, when no --url is given")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--questions", type=int, default=64, help="different requests; they come round again")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--min-ratio", type=float, default=MIN_RATIO, help="least throughput of the last window, of the first")
    parser.add_argument("--max-others", type=float, default=MAX_OTHERS, help="cores that other processes may keep busy")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run, print and write; 0: no fault."""
    args = parse(argv)
    course = Course()
    origin = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **machine()}  # the code that is served, not what it is by the end
    with ExitStack() as stack:
        url, pid = args.url, args.pid
        if url is None:
            arm = Arm("server", serve_args=tuple(shlex.split(args.serve)))
            stack.enter_context(spawned([arm]))
            url, pid = arm.url, arm.pid
        total_s = asyncio.run(soak(url, pid, course, args))
        left = settled(url, pid)
    window_s = min(60.0, total_s / 4)
    limits = {"min_ratio": args.min_ratio, "max_others": args.max_others}
    found = verdict(course, total_s=total_s, warmup_s=window_s / 2, window_s=window_s, **limits)
    found["faults"] += [
        f"{name} is {left[name]:g} at the end" for name in ("kv_cache_usage", "running", "waiting", "unfinished") if left[name]
    ]
    record = {**origin, "minutes": args.minutes, **found}
    record |= {"concurrency": args.concurrency, "serve": args.serve or args.url}
    print(json.dumps(record, indent=1))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
