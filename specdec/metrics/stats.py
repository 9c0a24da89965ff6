"""Counters and histograms of the engine: what was proposed, verified and emitted, and how long everything took.

Owns: every number that is exported, its bucket edges, and the rates derived from them. Must not know: Prometheus,
HTTP, the scheduler. Read next: metrics/prometheus.py.

Three counts of drafts, each by its own name: *draft tokens* were sent to verification, *verified* ones passed it,
*accepted* ones were also emitted (a stop inside the block trims them). Prefill's own token is not a speculative one.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# fmt: off
TTFT_EDGES_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_EDGES_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_EDGES_S = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
STEP_EDGES_S = (0.00001, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ITERATION_EDGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
LENGTH_EDGES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0, 200000.0)
COLLAPSE_STEPS = 200  # steps with drafts and without one kept draft, after which drafting counts as dead
STEP_PHASES = ("schedule", "prepare", "forward", "verify", "propose", "output")
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class Histogram:
    """Observations counted by bucket. counts[i] holds values <= edges[i] above the edge before; the last is the overflow."""

    edges: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Average observation, 0 when there is none."""
        count = self.count
        return self.sum / count if count else 0.0


@dataclass(slots=True)
class DraftCounts:
    """Speculation of one drafter (or of all together)."""

    num_drafts: int = 0  # verify steps that had at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted (emitted) drafts per draft, in 0..1. Falls as the draft length grows, so never compare it across lengths."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts per speculative step: 1.0 means drafting gains nothing."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def observe(self, num_drafts: int, num_accepted: int, *, num_verified: int) -> None:
        """Count one verify step of one request that tested `num_drafts` > 0 drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_verified_tokens += num_verified


@dataclass(slots=True)
class SpecDecodeStats:
    """Speculation of the whole engine. Per-position lists grow with the longest draft seen; entry i is draft i."""

    total: DraftCounts = field(default_factory=DraftCounts)
    by_source: dict[str, DraftCounts] = field(default_factory=dict)
    drafted_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)
    verified_per_pos: list[int] = field(default_factory=list)
    num_invalid_tokens: int = 0  # drafts the grammar refused before the test; not among the draft tokens
    num_decode_steps: int = 0  # target passes that emitted for a request, plain steps included, prefill's token apart
    num_decode_tokens: int = 0  # tokens those passes emitted

    def observe(self, source: str, num_drafts: int, *, num_accepted: int, num_verified: int, num_invalid: int = 0) -> None:
        """Count one verify step of one request. num_accepted <= num_verified <= num_drafts."""
        self.num_invalid_tokens += num_invalid
        if num_drafts == 0:
            return
        self.total.observe(num_drafts, num_accepted, num_verified=num_verified)
        self.by_source.setdefault(source, DraftCounts()).observe(num_drafts, num_accepted, num_verified=num_verified)
        add_prefix(self.drafted_per_pos, num_drafts)
        add_prefix(self.accepted_per_pos, num_accepted)
        add_prefix(self.verified_per_pos, num_verified)

    @property
    def acceptance_rate(self) -> float:
        """See DraftCounts.acceptance_rate."""
        return self.total.acceptance_rate

    @property
    def acceptance_length(self) -> float:
        """See DraftCounts.acceptance_length."""
        return self.total.acceptance_length

    @property
    def tokens_per_target_pass(self) -> float:
        """Emitted tokens per target pass of a request, plain steps included: the honest number (0 before the first)."""
        return self.num_decode_tokens / self.num_decode_steps if self.num_decode_steps else 0.0

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Accepted at position i per speculative step."""
        drafts = self.total.num_drafts
        return [count / drafts for count in self.accepted_per_pos] if drafts else []


def add_prefix(counts: list[int], length: int) -> None:
    """Add one to the first `length` entries, growing the list where needed."""
    if length > len(counts):
        counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGauges:
    """State of the scheduler after a step. Counters are totals since the start, tokens; kv_cache_usage is in 0..1."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    draft_length: float = 0.0  # drafts per request in the newest orders, on average
    num_draft_length_changes: int = 0
    draft_bank_s: float = 0.0  # what drafting has earned against plain decoding, where the policy keeps account
    drafter_bytes: int = 0  # host memory of drafters that grow with what they read
    drafter_faults: Mapping[str, int] = field(default_factory=dict)  # by kind: what went wrong in a drafter of the user's own
    sleep_level: int = 0  # 0: awake; 1: KV caches are given back; 2: weights too


@dataclass(slots=True)
class CollapseWatch:
    """Tells when drafting is dead: COLLAPSE_STEPS steps in a row tested drafts and kept none. One kept draft revives it.

    Wrong draft weights look like this: the text is right, only every step is slower. It is warned of once per engine.
    """

    num_dead_steps: int = 0
    was_warned: bool = False
    _num_drafts: int = 0
    _num_verified: int = 0

    @property
    def is_collapsed(self) -> bool:
        """True while drafting is dead."""
        return self.num_dead_steps >= COLLAPSE_STEPS

    def observe_step(self, total: DraftCounts) -> None:
        """Look at the counts after a step; warns when drafting has just died for the first time."""
        if total.num_drafts == self._num_drafts:
            return
        self.num_dead_steps = self.num_dead_steps + 1 if total.num_verified_tokens == self._num_verified else 0
        self._num_drafts, self._num_verified = total.num_drafts, total.num_verified_tokens
        if self.is_collapsed and not self.was_warned:
            self.was_warned = True
            logger.warning(
                "no draft was accepted in the last %d steps that had any: check that the drafter belongs to this model, or run with "
                "--no-speculation",
                COLLAPSE_STEPS,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTimes:
    """What is known of a request when it leaves. Times are time.monotonic() seconds, None where it never got so far."""

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float


@dataclass(slots=True)
class EngineStats:
    """All numbers of one engine. The engine thread writes while it holds `lock`; others read a `snapshot()`."""

    spec: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    gauges: StepGauges = field(default_factory=StepGauges)
    collapse: CollapseWatch = field(default_factory=CollapseWatch)
    num_prompt_tokens: int = 0  # of requests whose prompt was read, tokens found in the prefix cache included
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0  # kept tokens, after trimming at a stop
    num_steps: int = 0
    num_requests_by_reason: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_EDGES_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_EDGES_S))  # one sample per output event
    time_per_output_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_EDGES_S))  # decode time / (tokens - 1)
    e2e_latency_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_EDGES_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_EDGES_S))
    prefill_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_EDGES_S))
    decode_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_EDGES_S))
    step_duration_s: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram(STEP_EDGES_S) for phase in STEP_PHASES})
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_EDGES))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_EDGES))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_EDGES))
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def observe_output(self, num_tokens: int, *, now_s: float, arrival_s: float, last_token_s: float | None) -> None:
        """Count one output event of `num_tokens` > 0 kept tokens. last_token_s None: it is the request's first."""
        self.num_generation_tokens += num_tokens
        if last_token_s is None:
            self.time_to_first_token_s.observe(now_s - arrival_s)
            return
        self.inter_token_latency_s.observe(now_s - last_token_s)
        self.spec.num_decode_steps += 1
        self.spec.num_decode_tokens += num_tokens

    def observe_prompt(self, num_prompt_tokens: int, *, num_cached_tokens: int) -> None:
        """Count a prompt once it is read."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_prompt_tokens += num_cached_tokens

    def observe_step(self, num_tokens: int, *, durations_s: Sequence[tuple[str, float]], gauges: StepGauges) -> None:
        """Count one step of `num_tokens` query rows and its wall time by phase."""
        self.num_steps += 1
        self.iteration_tokens.observe(num_tokens)
        for phase, seconds in durations_s:
            self.step_duration_s[phase].observe(seconds)
        self.gauges = gauges
        self.collapse.observe_step(self.spec.total)

    def observe_finished(self, times: FinishedTimes) -> None:
        """Count a request that leaves, for whatever reason. Latencies of aborted and failed ones are left out: they measure the client."""
        self.num_requests_by_reason[times.reason] += 1
        if times.reason in ("abort", "error"):
            return
        self.e2e_latency_s.observe(times.finished_s - times.arrival_s)
        self.request_prompt_tokens.observe(times.num_prompt_tokens)
        self.request_generation_tokens.observe(times.num_output_tokens)
        if times.scheduled_s is not None:
            self.queue_time_s.observe(times.scheduled_s - times.arrival_s)
            if times.first_token_s is not None:
                self.prefill_time_s.observe(times.first_token_s - times.scheduled_s)
        if times.first_token_s is not None and times.last_token_s is not None:
            decode_s = times.last_token_s - times.first_token_s
            self.decode_time_s.observe(decode_s)
            if times.num_output_tokens > 1:
                self.time_per_output_token_s.observe(decode_s / (times.num_output_tokens - 1))

    def snapshot(self) -> EngineStats:
        """Return a consistent copy that no thread writes to."""
        with self.lock:
            copies = {name: deepcopy(getattr(self, name)) for name in self.__slots__ if name != "lock"}
        return EngineStats(**copies)


class IntervalLog:
    """One INFO line every `interval_s` seconds while the engine works; silent while it idles."""

    def __init__(self, stats: EngineStats, *, now_s: float, interval_s: float = 10.0) -> None:
        self._stats = stats
        self._interval_s = interval_s
        self._since_s = now_s
        self._mark = _Mark.of(stats)

    def tick(self, now_s: float) -> str | None:
        """Log and return the line when the interval is over and anything happened in it."""
        elapsed_s = now_s - self._since_s
        if elapsed_s < self._interval_s:
            return None
        before, after = self._mark, _Mark.of(self._stats)
        self._since_s, self._mark = now_s, after
        if after == before:
            return None
        line = _line(before, after, elapsed_s, self._stats.gauges)
        logger.info(line)
        return line


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters at the start of a log interval."""

    num_prompt_tokens: int
    num_generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @classmethod
    def of(cls, stats: EngineStats) -> _Mark:
        drafts = stats.spec.total
        return cls(
            stats.num_prompt_tokens, stats.num_generation_tokens, drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens
        )


def _line(before: _Mark, after: _Mark, elapsed_s: float, gauges: StepGauges) -> str:
    prompt_rate = (after.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s
    generation_rate = (after.num_generation_tokens - before.num_generation_tokens) / elapsed_s
    line = (
        f"running {gauges.num_running}, waiting {gauges.num_waiting}, KV cache {gauges.kv_cache_usage:.1%} used, "
        f"prompt {prompt_rate:.1f} tok/s, generation {generation_rate:.1f} tok/s"
    )
    num_drafts = after.num_drafts - before.num_drafts
    if num_drafts == 0:
        return line
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return f"{line}, acceptance length {1 + accepted / num_drafts:.2f}, accepted {accepted} of {drafted} drafts ({accepted / drafted:.1%})"
