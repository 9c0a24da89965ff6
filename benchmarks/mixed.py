"""Requests of all sorts for a server under test, and what can be seen of its process from outside.

Owns: bodies whose answers are fixed (greedy or seeded), and memory, files and gauges of a server. Must not know: loads or verdicts.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

WORDS = (
    "the",
    "of",
    "river",
    "stone",
    "and",
    "light",
    "over",
    "green",
    "field",
    "sea",
    "bird",
    "night",
    "wind",
    "road",
    "to",
    "from",
    "old",
    "no",
)
GAUGES = {
    "kv_cache_usage": "specdec_kv_cache_usage_ratio",
    "running": "specdec_num_requests_running",
    "waiting": "specdec_num_requests_waiting",
}


def body_of(index: int, *, max_tokens: int) -> dict[str, Any]:
    """Completion request number `index`: its text, sampling and length follow from the number, and so does its answer."""
    rng = random.Random(index)
    words = [rng.choice(WORDS) for _ in range(rng.randint(2, 6))]
    body: dict[str, Any] = {
        "prompt": " ".join([*words, *words[:2]]),
        "max_tokens": rng.randint(max(max_tokens // 4, 1), max_tokens),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "seed": index,
    }
    extra: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 20, "min_p": 0.02},
        {"stop": ["zq", "  "]},
        {"logprobs": 2},
        {"n": 2},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"logit_bias": {"5": 2.0}},
    ]
    return body | rng.choice(extra)


def texts_of(answer: dict[str, Any]) -> list[str]:
    """The texts of a whole answer, by choice."""
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process of this machine, seen through /proc."""

    pid: int

    def resident_bytes(self) -> int:
        """Memory of its own. KV caches do not count: they are a mapping of fixed size, whose pages come as blocks are first used."""
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(r"^RssAnon:\s+(\d+)", text, re.MULTILINE)[0])

    def cpu_s(self) -> float:
        """Processor time of all its threads so far, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def children(self) -> list[int]:
        """Processes that it started and that run now."""
        lists = [task / "children" for task in Path(f"/proc/{self.pid}/task").iterdir()]
        return [int(pid) for each in lists for pid in each.read_text(encoding="ascii").split()]

    def num_files(self) -> int:
        """Open files, sockets among them."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def num_threads(self) -> int:
        """Threads."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/task").iterdir())


def machine_busy_s() -> float:
    """Processor time that all processes of this machine took so far, in seconds."""
    ticks = [int(text) for text in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks


def gauges(url: str) -> dict[str, float]:
    """What the server says that it holds: share of KV blocks, requests running and waiting, and requests not ended."""
    text = httpx.get(url + "/metrics", timeout=60).text
    found = {name: re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name, metric in GAUGES.items()}
    values = {name: float(given[0]) for name, given in found.items()}
    return values | {"unfinished": float(httpx.get(url + "/health", timeout=60).json()["num_unfinished_requests"])}
