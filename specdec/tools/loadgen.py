"""A client that measures: streams chat completions in a closed or an open loop and reads the server's counters.

Owns: the load and the clock. Must not know: which engine answers; it speaks HTTP. Read next: samples.py for the figures.
Tokens are the server's own count (usage), up to the end of the text.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from specdec.errors import ConfigError
from specdec.tools.prompts import Workload
from specdec.tools.samples import Sample, Summary, summarise

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


class Client:
    """One server under load. Use as an async context manager.

    model: to ask for; none: the first that the server lists. extra_body: fields that every request carries besides.

    Raises:
        ConfigError: from `start`, when no server answers or it serves no model.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, extra_body: Mapping[str, Any] | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self._extra_body = dict(extra_body or {})
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
            self.model = self.model or str(response.raise_for_status().json()["data"][0]["id"])
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
            **self._extra_body,
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
