"""A client that measures: streams chat completions in a closed or an open loop and reads the server's counters.

Owns: the load, the clock and the arithmetic of latencies. Must not know: which engine answers; it speaks HTTP.
Tokens are the server's own count (usage), up to the end of the text.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from specdec.errors import ConfigError
from specdec.tools.prompts import Workload, prompts_for

READ_TIMEOUT_S = 600.0
# Counter -> its names on /metrics: ours, vLLM's.
COUNTERS = {
    "num_drafts": ("specdec_num_drafts_total", "vllm:spec_decode_num_drafts_total"),
    "num_draft_tokens": ("specdec_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "num_accepted_tokens": ("specdec_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. Closed loop with `concurrency` requests in flight, or open loop with `rate` Poisson arrivals a second."""

    workload: Workload = "chat"
    concurrency: int = 1
    rate: float | None = None
    num_requests: int = 16
    max_tokens: int = 128
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """One request. Times in seconds of one clock; event_s: when each piece of text came. error: why it does not count."""

    start_s: float
    event_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.event_s[0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Decode time over the tokens after the first; None for an answer of one token."""
        return (self.event_s[-1] - self.event_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between pieces of text. A piece holds several tokens when drafts were accepted, so gaps grow with speculation."""
        return [later - sooner for sooner, later in zip(self.event_s, self.event_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one run. Rates in tokens per second, times in milliseconds. None: not measurable here."""

    num_requests: int
    num_errors: int
    num_tokens: int
    wall_s: float
    tok_per_s: float
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p99: float | None
    num_drafts: float | None = None
    num_draft_tokens: float | None = None
    num_accepted_tokens: float | None = None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens per verify step that had drafts; None when nothing was drafted."""
        return 1 + (self.num_accepted_tokens or 0) / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return (self.num_accepted_tokens or 0) / self.num_draft_tokens if self.num_draft_tokens else None


class Client:
    """One server under load. Use as an async context manager.

    Raises:
        ConfigError: from `start`, when no server answers or it serves no model.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(30, read=READ_TIMEOUT_S, pool=None), limits=limits
        )

    async def __aenter__(self) -> Client:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def start(self) -> None:
        """Ask for the model's name, which every request must carry."""
        try:
            response = await self._http.get("/v1/models")
            self.model = str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
            await self._http.aclose()
            raise ConfigError(
                f"no model is served at {self.url}: {error!r}", hint="start one with `specdec serve`, or give --url"
            ) from error

    async def counters(self) -> dict[str, float]:
        """Return the speculation counters of /metrics, summed over labels; empty where the server has none."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return {}
        return parse_counters(response.text) if response.status_code == httpx.codes.OK else {}

    async def complete(self, prompt: str, max_tokens: int) -> Sample:
        """Stream one greedy answer. A failure is a sample with `error`, never an exception."""
        sample = Sample(start_s=time.perf_counter())
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    sample.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                    return sample
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (payload := line[5:].strip()) != "[DONE]":
                        _take(sample, json.loads(payload))
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            sample.error = repr(error)
        sample.end_s = time.perf_counter()
        if sample.error is None and (not sample.event_s or sample.num_tokens < 1):
            sample.error = "no text or no usage came"
        return sample


def _take(sample: Sample, event: dict[str, Any]) -> None:
    if "error" in event:
        sample.error = str(event["error"])
        return
    if any(choice.get("delta", {}).get("content") for choice in event.get("choices") or ()):
        sample.event_s.append(time.perf_counter())
    if usage := event.get("usage"):
        sample.num_tokens = int(usage["completion_tokens"])
        sample.num_prompt_tokens = int(usage.get("prompt_tokens", 0))


async def measure(client: Client, prompts: Sequence[str], load: Load, *, on_done: Callable[[], None] = lambda: None) -> Summary:
    """Send the prompts as the load says and return the figures. `on_done` is called after each request."""
    before = await client.counters()
    started_s = time.perf_counter()
    if load.rate is None:
        samples = await _closed_loop(client, prompts, load, on_done)
    else:
        samples = await _open_loop(client, prompts, load, on_done)
    wall_s = time.perf_counter() - started_s
    after = await client.counters()
    return summarise(samples, wall_s, {name: after[name] - before.get(name, 0.0) for name in after})


async def _closed_loop(client: Client, prompts: Sequence[str], load: Load, on_done: Callable[[], None]) -> list[Sample]:
    queue = iter(prompts)
    samples: list[Sample] = []

    async def worker() -> None:
        for prompt in queue:  # shared: each prompt goes to whoever is free
            samples.append(await client.complete(prompt, load.max_tokens))
            on_done()

    await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    return samples


async def _open_loop(client: Client, prompts: Sequence[str], load: Load, on_done: Callable[[], None]) -> list[Sample]:
    start_s = time.perf_counter()

    async def later(prompt: str, at_s: float) -> Sample:
        await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        sample = await client.complete(prompt, load.max_tokens)
        on_done()
        return sample

    return list(await asyncio.gather(*map(later, prompts, arrival_times(len(prompts), load.rate or 1.0, seed=load.seed))))


def arrival_times(count: int, rate: float, *, seed: int) -> list[float]:
    """Return seconds from the start of Poisson arrivals; the first request comes at once."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


def summarise(samples: Sequence[Sample], wall_s: float, counters: dict[str, float]) -> Summary:
    """Return the figures of samples; those with an error count as errors only."""
    good = [sample for sample in samples if sample.error is None]
    num_tokens = sum(sample.num_tokens for sample in good)
    ttft = [sample.ttft_s for sample in good]
    itl = [gap for sample in good for gap in sample.itl_s]
    tpot = [value for sample in good if (value := sample.tpot_s) is not None]
    return Summary(
        num_requests=len(samples),
        num_errors=len(samples) - len(good),
        num_tokens=num_tokens,
        wall_s=wall_s,
        tok_per_s=num_tokens / wall_s if wall_s > 0 else 0.0,
        ttft_ms_p50=quantile_ms(ttft, 0.5),
        ttft_ms_p99=quantile_ms(ttft, 0.99),
        itl_ms_p50=quantile_ms(itl, 0.5),
        itl_ms_p99=quantile_ms(itl, 0.99),
        tpot_ms_p50=quantile_ms(tpot, 0.5),
        tpot_ms_p99=quantile_ms(tpot, 0.99),
        **{name: counters.get(name) for name in COUNTERS},
    )


def quantile_ms(seconds: Sequence[float], q: float) -> float | None:
    """Return the q-quantile in milliseconds by linear interpolation; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return 1000 * (ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def parse_counters(text: str) -> dict[str, float]:
    """Return counter -> value from a Prometheus page, summed over labels. Our names win where both families are exported."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition(" ") if "{" not in line else (line[: line.index("{")], "", line.rpartition("}")[2])
            sums[name] = sums.get(name, 0.0) + float(value.split()[0])
    return {
        counter: next(sums[name] for name in names if name in sums)
        for counter, names in COUNTERS.items()
        if any(name in sums for name in names)
    }


def middle(summaries: Sequence[Summary], name: str) -> tuple[float, float, float] | None:
    """Return median, lowest and highest of a figure over repeats; None when no repeat has it."""
    values = [value for summary in summaries if (value := getattr(summary, name)) is not None]
    return (median(values), min(values), max(values)) if values else None


def run_and_print(url: str, load: Load, *, api_key: str | None = None) -> None:
    """Measure a server once and print a table and one JSON line: what `specdec bench` does."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import Progress

    async def go() -> tuple[Summary, str]:
        prompts = prompts_for(load.workload, load.num_requests)
        random.Random(load.seed).shuffle(prompts)
        async with Client(url, api_key=api_key) as client:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(load.workload, total=len(prompts))
                return await measure(client, prompts, load, on_done=lambda: bar.advance(task)), client.model

    summary, model = asyncio.run(go())
    arrivals = f"{load.concurrency} in flight" if load.rate is None else f"Poisson arrivals, {load.rate} a second"
    print(f"{model}: {load.workload}, {arrivals}, {summary.num_requests} requests, {summary.num_errors} errors")
    for name in ("tok_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99", "acceptance_length"):
        value = getattr(summary, name)
        print(f"  {name:<18} {'-' if value is None else f'{value:.2f}'}")
    print(json.dumps({"model": model, **asdict(load), **asdict(summary), "acceptance_length": summary.acceptance_length}))
    if summary.num_errors == summary.num_requests:
        raise ConfigError("every request failed", hint="see the server's log")
