"""Do rude clients harm a server, or the polite ones beside them?

Starts `specdec serve ARGS` (or takes --url), asks a set of questions alone, then lets --clients clients send --requests requests:
polite ones, streams that are read slowly, clients that leave in the middle or before the answer, half-sent, oversized and malformed
bodies. Then judges: polite answers equal those of the quiet run; bad requests got the status they deserve; nothing is left running, no
KV block, file or thread is kept, memory grew by at most 3%; and /health answered within 100 ms in 99% of the cases. Prints JSON; exit
code 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import Arm, spawned
from benchmarks.mixed import ProcessView, body_of, gauges, texts_of

PATH = "/v1/completions"
KINDS = {"whole": 6, "stream": 6, "slow": 2, "leave": 4, "cancel": 3, "half": 1, "oversized": 1, "malformed": 2, "unknown_field": 1}
MALFORMED = (b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": 1e999}', b"[" * 5000, b'{"prompt": "x", "max_tokens": -1}')
NUM_QUESTIONS = 48
MAX_GROWTH = 0.03
HEALTH_P99_S = 0.1
HEALTH_EVERY_S = 0.05
SETTLE_S = 20.0
TIMEOUT_S = 600.0


@dataclass(slots=True)
class Report:
    """What happened. outcomes: kind and result -> requests; wrong: polite answers that differ; health_ms: p50, p99, worst."""

    outcomes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    health_ms: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def judge(self, *, max_health_s: float) -> None:
        """Fill `faults`."""
        self.faults += [f"wrong answer: {text}" for text in self.wrong[:5]]
        self.faults += [f"{count} requests {name}" for name, count in self.outcomes.items() if name.endswith("unexpected")]
        self.faults += [
            f"{name} is {self.after[name]:g}, and was {self.before[name]:g}"
            for name in ("kv_cache_usage", "running", "waiting", "unfinished", "files", "threads")
            if name in self.after and self.after[name] > self.before[name]
        ]
        grown = self.after.get("resident_bytes", 0) / self.before.get("resident_bytes", 1) - 1
        if "resident_bytes" in self.after and grown > MAX_GROWTH:
            self.faults.append(f"memory grew by {grown:.1%}, the limit is {MAX_GROWTH:.0%}")
        if self.health_ms["p99"] > 1000 * max_health_s:
            self.faults.append(f"p99 of /health was {self.health_ms['p99']:.0f} ms, the limit is {1000 * max_health_s:.0f} ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """One load. url: of the server; expected: texts of each question, from the quiet run."""

    url: str
    expected: list[list[str]]
    max_tokens: int
    max_body_bytes: int

    async def run(self, report: Report, *, num_clients: int, num_requests: int, seed: int) -> None:
        """Send the requests, num_clients at a time."""
        numbers = iter(range(num_requests))
        limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, limits=limits) as http:

            async def client() -> None:
                for number in numbers:
                    rng = random.Random(f"{seed}.{number}")
                    kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
                    try:
                        outcome = await self._send(kind, http, rng, report)
                    except Exception as error:
                        outcome = f"{type(error).__name__} unexpected"
                    name = f"{kind}: {outcome}"
                    report.outcomes[name] = report.outcomes.get(name, 0) + 1

            await asyncio.gather(*(client() for _ in range(num_clients)))

    async def _send(self, kind: str, http: httpx.AsyncClient, rng: random.Random, report: Report) -> str:
        index = rng.randrange(len(self.expected))
        body = body_of(index, max_tokens=self.max_tokens)
        if kind == "whole":
            answer = await http.post(PATH, json=body)
            return self._compare(index, texts_of(answer.json()) if answer.status_code == 200 else [answer.text], report)
        if kind in ("stream", "slow"):
            pause_s = rng.uniform(0.01, 0.05) if kind == "slow" else 0.0
            return self._compare(index, await self._streamed(http, body, pause_s=pause_s), report)
        if kind == "leave":
            await self._leave(http, body, num_events=rng.randint(0, 4))
            return "left"
        if kind == "cancel":
            return await self._cancel(http, body, after_s=rng.uniform(0, 0.05))
        if kind == "half":
            return await self._half_sent(rng)
        return await self._refused(kind, http, rng, body)

    def _compare(self, index: int, texts: list[str], report: Report) -> str:
        if texts == self.expected[index]:
            return "as alone"
        report.wrong.append(f"question {index}: {texts!r} instead of {self.expected[index]!r}")
        return "unexpected"

    async def _streamed(self, http: httpx.AsyncClient, body: dict[str, Any], *, pause_s: float) -> list[str]:
        texts = [""] * int(body.get("n", 1))
        async with http.stream("POST", PATH, json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return [line]
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                    await asyncio.sleep(pause_s)
        return texts

    async def _leave(self, http: httpx.AsyncClient, body: dict[str, Any], *, num_events: int) -> None:
        async with http.stream("POST", PATH, json=body | {"stream": True, "ignore_eos": True}) as answer:
            lines = answer.aiter_lines()
            for _ in range(2 * num_events):
                with suppress(StopAsyncIteration):
                    await anext(lines)

    async def _cancel(self, http: httpx.AsyncClient, body: dict[str, Any], *, after_s: float) -> str:
        task = asyncio.ensure_future(http.post(PATH, json=body | {"ignore_eos": True}))
        await asyncio.sleep(after_s)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return "cancelled"

    async def _half_sent(self, rng: random.Random) -> str:
        """Announce a body, send a part of it, hang up."""
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n".encode())
        writer.write(b'{"prompt": "' + b"a" * rng.randint(0, 300))
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 0.05))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return "hung up"

    async def _refused(self, kind: str, http: httpx.AsyncClient, rng: random.Random, body: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if kind == "oversized":
            content, expected = b'{"prompt": "' + b"a" * self.max_body_bytes + b'"}', 413
        elif kind == "malformed":
            content, expected = rng.choice(MALFORMED), 400
        else:
            content, expected = json.dumps(body | {"no_such_field": 1}).encode(), 400
        try:
            status = (await http.post(PATH, content=content, headers=headers)).status_code
        except httpx.WriteError:  # the server answered 413 and closed while the body was still on its way
            return "closed" if kind == "oversized" else "WriteError unexpected"
        return str(status) if status == expected else f"{status} unexpected"


@contextmanager
def watched_health(url: str, waits_s: list[float]) -> Iterator[None]:
    """Ask /health all the time on a thread of its own; every wait in seconds goes to `waits_s`, failures as infinity."""
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=30) as http:
            while not over.wait(HEALTH_EVERY_S):
                start_s = time.perf_counter()
                try:
                    is_well = http.get("/health").status_code == httpx.codes.OK
                except httpx.HTTPError:
                    is_well = False
                waits_s.append(time.perf_counter() - start_s if is_well else float("inf"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def settled(url: str, pid: int | None) -> dict[str, float]:
    """The server's state once it is idle, or after SETTLE_S seconds."""
    until_s = time.monotonic() + SETTLE_S
    state = gauges(url)
    while any(state[name] for name in ("running", "waiting", "unfinished")) and time.monotonic() < until_s:
        time.sleep(0.1)
        state = gauges(url)
    if pid is None:
        return state
    time.sleep(0.5)  # sockets of clients that left close
    view = ProcessView(pid)
    return state | {
        "files": float(view.num_files()),
        "threads": float(view.num_threads()),
        "resident_bytes": float(view.resident_bytes()),
    }


def run(url: str, pid: int | None, args: argparse.Namespace) -> Report:
    """The quiet run, a storm to warm up, and the storm that counts."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        questions = (body_of(index, max_tokens=args.max_tokens) for index in range(NUM_QUESTIONS))
        expected = [texts_of(http.post(PATH, json=body).raise_for_status().json()) for body in questions]
    storm = Storm(url=url, expected=expected, max_tokens=args.max_tokens, max_body_bytes=args.max_body_bytes)
    asyncio.run(storm.run(Report(), num_clients=args.clients, num_requests=args.warmup, seed=args.seed))
    report = Report(before=settled(url, pid))
    waits_s: list[float] = []
    with watched_health(url, waits_s):
        asyncio.run(storm.run(report, num_clients=args.clients, num_requests=args.requests, seed=args.seed + 1))
    report.after = settled(url, pid)
    waits_s.sort()
    places = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    report.health_ms = {name: round(1000 * waits_s[min(int(at * len(waits_s)), len(waits_s) - 1)], 1) for name, at in places.items()}
    report.judge(max_health_s=args.health_limit)
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; its memory is looked at only with --pid")
    parser.add_argument("--pid", type=int, help="process of --url on this machine")
    parser.add_argument("--serve", default="", help="arguments of specdec serve, when no --url is given")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=200, help="requests before memory is first looked at")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-body-bytes", type=int, default=65536, help="limit of the server that is started, or of --url")
    parser.add_argument("--health-limit", type=float, default=HEALTH_P99_S, help="seconds that p99 of /health may take")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run and print; 0: no fault."""
    args = parse(argv)
    with ExitStack() as stack:
        url, pid = args.url, args.pid
        if url is None:
            arm = Arm("server", serve_args=(*shlex.split(args.serve), "--max-body-bytes", str(args.max_body_bytes)))
            stack.enter_context(spawned([arm]))
            url, pid = arm.url, arm.pid
        report = run(url, pid, args)
    print(json.dumps(asdict(report), indent=1))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
