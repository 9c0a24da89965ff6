"""What one request's stream looked like, and the figures of many: rates, quantiles of latencies, acceptance.

Owns: the arithmetic. Must not know: HTTP or loads. Times come from one clock; tokens are the server's own count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

LATENCIES = ("ttft", "itl", "tpot", "e2e")
QUANTILES = (50, 90, 99)
LATENCY_FIGURES = tuple(f"{name}_ms_p{q}" for name in LATENCIES for q in QUANTILES)
FIGURES = ("tok_per_s", "req_per_s", *LATENCY_FIGURES, "acceptance_length", "acceptance_rate")


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

    @property
    def e2e_s(self) -> float:
        """Time to the end of the stream."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one run. Rates per second, times in milliseconds. None: not measurable here.

    itl is over gaps of all requests, the other latencies are over requests.
    """

    num_requests: int
    num_errors: int
    num_tokens: int
    wall_s: float
    tok_per_s: float
    req_per_s: float
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p90: float | None
    itl_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    e2e_ms_p50: float | None
    e2e_ms_p90: float | None
    e2e_ms_p99: float | None
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


def summarise(samples: Sequence[Sample], wall_s: float, counters: Mapping[str, float]) -> Summary:
    """Return the figures of samples; those with an error count as errors only.

    counters: how much the server's num_drafts, num_draft_tokens and num_accepted_tokens rose; what is missing stays None.
    """
    good = [sample for sample in samples if sample.error is None]
    num_tokens = sum(sample.num_tokens for sample in good)
    seconds = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.itl_s],
        "tpot": [value for sample in good if (value := sample.tpot_s) is not None],
        "e2e": [sample.e2e_s for sample in good],
    }
    return Summary(
        num_requests=len(samples),
        num_errors=len(samples) - len(good),
        num_tokens=num_tokens,
        wall_s=wall_s,
        tok_per_s=num_tokens / wall_s if wall_s > 0 else 0.0,
        req_per_s=len(good) / wall_s if wall_s > 0 else 0.0,
        **{f"{name}_ms_p{q}": quantile_ms(seconds[name], q / 100) for name in LATENCIES for q in QUANTILES},
        num_drafts=counters.get("num_drafts"),
        num_draft_tokens=counters.get("num_draft_tokens"),
        num_accepted_tokens=counters.get("num_accepted_tokens"),
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


def middle(summaries: Sequence[Summary], name: str) -> tuple[float, float, float] | None:
    """Return median, lowest and highest of a figure over repeats; None when no repeat has it."""
    values = [value for summary in summaries if (value := getattr(summary, name)) is not None]
    return (median(values), min(values), max(values)) if values else None
