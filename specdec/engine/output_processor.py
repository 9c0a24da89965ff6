"""OutputProcessor: from committed tokens to what a client gets: text, stop strings, trimmed lists, request statistics.

Owns: the per-request text state and timestamps. Must not know: KV, scheduling, the worker. Read next: engine/detokenizer.py.

The scheduler trimmed a block at stop tokens and length limits already. Stop strings need text, so they are found here,
token by token: the token that completes one is the last that is kept, in ids, logprobs, counts and usage alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.engine.detokenizer import Detokenizer, StopStrings
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import DraftTrace, EngineOutput, EngineRequest, FinishReason, SpecDecodeRequestStats
from specdec.metrics.stats import EngineStats, FinishedTimes, add_prefix
from specdec.scheduler.output import RequestOutput, TokenLogprobs
from specdec.scheduler.request import CommitResult


@dataclass(slots=True)
class RequestText:
    """Text state, timestamps (time.monotonic() seconds) and statistics of one live request."""

    request: EngineRequest
    detokenizer: Detokenizer
    stops: StopStrings
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stats: SpecDecodeRequestStats = field(default_factory=SpecDecodeRequestStats)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one step's tokens: how many, their visible text, and the stop string that cut them, if any."""

    num_tokens: int
    text: str
    stop: str | None


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step gives the client, None when nothing. cut_at: tokens (prompt and output) kept by a stop string, if one ended it."""

    output: EngineOutput | None
    cut_at: int | None = None


class Tracer(Protocol):
    """Who is told of each request that ended; see metrics/tracing.py."""

    def finished(self, request: EngineRequest, times: FinishedTimes, speculation: SpecDecodeRequestStats, /) -> None:
        """Take note of it, quickly: a step waits."""
        ...


class OutputProcessor:
    """Turns commits into EngineOutputs. Single-threaded: only the engine thread calls it."""

    def __init__(self, tokenizer: Tokenizer, stats: EngineStats) -> None:
        self.tracer: Tracer | None = None
        self._tokenizer = tokenizer
        self._stats = stats
        self._texts: dict[str, RequestText] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._texts

    @property
    def request_ids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._texts)

    def add(self, request: EngineRequest) -> None:
        """Start the text of a request."""
        sampling = request.sampling
        self._texts[request.request_id] = RequestText(
            request=request,
            detokenizer=Detokenizer(self._tokenizer, skip_special_tokens=sampling.skip_special_tokens),
            stops=StopStrings(sampling.stop, include=sampling.include_stop_str_in_output),
        )

    def mark_scheduled(self, request_id: str, now_s: float) -> None:
        """Note when a request first left the queue."""
        text = self._texts[request_id]
        if text.scheduled_s is None:
            text.scheduled_s = now_s

    def process(self, request_id: str, commit: CommitResult, *, result: RequestOutput, now_s: float) -> Emitted:
        """Return what a step added for the client: nothing while a prompt is still being read."""
        text = self._texts[request_id]
        _store_prompt_logprobs(text, result, start=commit.start)
        kept = self._keep(text, commit)
        is_first = text.num_output_tokens == 0
        reason: FinishReason | None = "stop" if kept.stop is not None else commit.finish_reason
        if not kept.num_tokens and reason is None:
            return Emitted(None)
        num_accepted = min(commit.num_accepted, kept.num_tokens)
        if kept.num_tokens:
            self._count(text, commit, num_accepted=num_accepted)
            text.stats.is_lossy |= result.is_lossy
            self._observe_tokens(text, kept.num_tokens, num_cached_tokens=commit.num_cached_tokens, now_s=now_s)
        tail = "" if kept.stop is not None or reason is None else self._flush(text)
        output = EngineOutput(
            request_id=request_id,
            text=kept.text + tail,
            token_ids=tuple(commit.token_ids[: kept.num_tokens]),
            logprobs=None if result.logprobs is None else tuple(result.logprobs[: kept.num_tokens]),
            prompt_logprobs=tuple(text.prompt_logprobs) if is_first and text.prompt_logprobs else None,
            finish_reason=reason,
            stop_reason=kept.stop if kept.stop is not None else commit.stop_reason,
            num_cached_tokens=commit.num_cached_tokens if is_first else 0,
            stats=text.stats if reason is not None else None,
            trace=_trace(text, commit, num_accepted=num_accepted, result=result),
            error=commit.error,
        )
        if reason is not None:
            self._finish(request_id, reason, now_s=now_s)
        return Emitted(output, None if kept.stop is None else len(text.request.prompt_token_ids) + text.num_output_tokens)

    def end(self, request_id: str, reason: FinishReason, *, now_s: float) -> EngineOutput:
        """End a live request outside a step and return its last output."""
        text = self._texts[request_id]
        tail = self._flush(text)
        self._finish(request_id, reason, now_s=now_s)
        return EngineOutput(request_id=request_id, text=tail, finish_reason=reason, stats=text.stats)

    def describe(self, request_id: str, now_s: float) -> dict[str, Any]:
        """Age and progress of a request, for the watchdog's report."""
        text = self._texts.get(request_id)
        if text is None:
            return {}
        return {
            "age_s": round(now_s - text.request.arrival_s, 3),
            "last_token_age_s": None if text.last_token_s is None else round(now_s - text.last_token_s, 3),
            "num_prompt_tokens": len(text.request.prompt_token_ids),
            "num_output_tokens": text.num_output_tokens,
        }

    def _keep(self, text: RequestText, commit: CommitResult) -> Kept:
        sampling = text.request.sampling
        last = len(commit.token_ids) - 1
        pieces: list[str] = []
        for index, token_id in enumerate(commit.token_ids):
            is_stop_token = index == last and commit.finish_reason == "stop"
            if is_stop_token and not sampling.include_stop_str_in_output:
                break  # a stop token is kept as an id but its text is not part of the answer
            armed = text.num_output_tokens + index + 1 >= sampling.min_tokens
            piece, stop = text.stops.feed(text.detokenizer.feed(token_id), armed=armed)
            pieces.append(piece)
            if stop is not None:
                return Kept(index + 1, "".join(pieces), stop)
        return Kept(len(commit.token_ids), "".join(pieces), None)

    def _flush(self, text: RequestText) -> str:
        shown, _ = text.stops.feed(text.detokenizer.flush(), armed=False)
        return shown + text.stops.flush()

    def _count(self, text: RequestText, commit: CommitResult, *, num_accepted: int) -> None:
        """Count the step's drafts, for the request and for the engine."""
        stats = text.stats
        stats.num_steps += 1
        if commit.num_drafts:
            stats.num_drafts += 1
            stats.num_draft_tokens += commit.num_drafts
            stats.num_accepted_tokens += num_accepted
            stats.num_verified_tokens += commit.num_verified
            add_prefix(stats.accepted_per_pos, num_accepted)
            source = stats.by_source.setdefault(commit.source, [0, 0])
            source[0] += commit.num_drafts
            source[1] += num_accepted
        self._stats.spec.observe(
            commit.source,
            commit.num_drafts,
            num_accepted=num_accepted,
            num_verified=commit.num_verified,
            num_invalid=commit.num_invalid,
        )

    def _observe_tokens(self, text: RequestText, num_tokens: int, *, num_cached_tokens: int, now_s: float) -> None:
        request = text.request
        self._stats.observe_output(num_tokens, now_s=now_s, arrival_s=request.arrival_s, last_token_s=text.last_token_s)
        if text.first_token_s is None:
            text.first_token_s = now_s
            self._stats.observe_prompt(len(request.prompt_token_ids), num_cached_tokens=num_cached_tokens)
        text.last_token_s = now_s
        text.num_output_tokens += num_tokens

    def _finish(self, request_id: str, reason: FinishReason, *, now_s: float) -> None:
        text = self._texts.pop(request_id)
        times = FinishedTimes(
            reason=reason,
            num_prompt_tokens=len(text.request.prompt_token_ids),
            num_output_tokens=text.num_output_tokens,
            arrival_s=text.request.arrival_s,
            scheduled_s=text.scheduled_s,
            first_token_s=text.first_token_s,
            last_token_s=text.last_token_s,
            finished_s=now_s,
        )
        self._stats.observe_finished(times)
        if self.tracer is not None:
            self.tracer.finished(text.request, times, text.stats)


def _store_prompt_logprobs(text: RequestText, result: RequestOutput, *, start: int) -> None:
    """Append a chunk's prompt log-probabilities; a prompt that is read again after preemption starts over.

    Such a request takes nothing from the prefix cache, so each reading of its prompt starts at row 0.
    """
    if result.prompt_logprobs is None or text.num_output_tokens:
        return
    if start == 0:
        text.prompt_logprobs.clear()
    text.prompt_logprobs.extend(result.prompt_logprobs)


def _trace(text: RequestText, commit: CommitResult, *, num_accepted: int, result: RequestOutput) -> DraftTrace | None:
    if not text.request.track_drafts or not commit.num_drafts:
        return None
    return DraftTrace(result.source, result.draft_token_ids, num_accepted)
