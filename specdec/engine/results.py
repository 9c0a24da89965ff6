"""GenerationOutput: what LLM.generate returns, and the collector that builds it from a step's outputs.

Owns: the offline result records. Must not know: the engine. Read next: engine/llm.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.types import EngineOutput, EngineRequest, FinishReason, SpecDecodeRequestStats
from specdec.scheduler.output import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample. logprobs: one entry per token, when asked for. cumulative_logprob: their sum."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    speculative: SpecDecodeRequestStats = field(default_factory=SpecDecodeRequestStats)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMetrics:
    """Times of a prompt's samples in time.monotonic() seconds (the first token of any, the end of all) and their speculation."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    speculative: SpecDecodeRequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """A prompt with its samples, `outputs[0]` to `outputs[n - 1]`. prompt: the text, None when ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: GenerationMetrics


class SampleCollector:
    """Outputs of one sample, gathered until it ends."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.num_cached_tokens = 0
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.stats = SpecDecodeRequestStats()
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: EngineOutput | None = None

    def add(self, output: EngineOutput) -> None:
        """Take one output."""
        self._pieces.append(output.text)
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs or ())
        self._last = output
        self.num_cached_tokens += output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.token_ids and self.first_token_s is None:
            self.first_token_s = time.monotonic()
        if output.stats is not None:
            self.stats = output.stats
        if output.finish_reason is not None:
            self.finished_s = time.monotonic()

    def completion(self, index: int) -> CompletionOutput:
        """Return the sample as it stands."""
        wants_logprobs = self.request.sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) if wants_logprobs else None,
            cumulative_logprob=sum(entry.logprob for entry in self._logprobs) if wants_logprobs else None,
            finish_reason=None if self._last is None else self._last.finish_reason,
            stop_reason=None if self._last is None else self._last.stop_reason,
            speculative=self.stats,
            error=None if self._last is None else self._last.error,
        )


def collect(prompt: str | None, prompt_token_ids: tuple[int, ...], samples: Sequence[SampleCollector]) -> GenerationOutput:
    """Return the result of one prompt from its samples."""
    outputs = tuple(sample.completion(index) for index, sample in enumerate(samples))
    first_s = [sample.first_token_s for sample in samples if sample.first_token_s is not None]
    finished_s = [sample.finished_s for sample in samples if sample.finished_s is not None]
    first = samples[0]
    return GenerationOutput(
        request_id=first.request.request_id.rpartition("-")[0],
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=outputs,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        finished=all(output.finish_reason is not None for output in outputs),
        metrics=GenerationMetrics(
            arrival_s=first.request.arrival_s,
            first_token_s=min(first_s, default=None),
            finished_s=max(finished_s) if len(finished_s) == len(samples) else None,
            speculative=pooled([sample.stats for sample in samples]),
        ),
    )


def pooled(all_stats: Sequence[SpecDecodeRequestStats]) -> SpecDecodeRequestStats:
    """Return the sum of several requests' speculation statistics."""
    total = SpecDecodeRequestStats()
    for stats in all_stats:
        total.num_drafts += stats.num_drafts
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_accepted_tokens += stats.num_accepted_tokens
        total.num_verified_tokens += stats.num_verified_tokens
        total.num_steps += stats.num_steps
        total.is_lossy |= stats.is_lossy
        missing = len(stats.accepted_per_pos) - len(total.accepted_per_pos)
        total.accepted_per_pos.extend([0] * max(missing, 0))
        for position, count in enumerate(stats.accepted_per_pos):
            total.accepted_per_pos[position] += count
        for source, (num_drafted, num_accepted) in stats.by_source.items():
            counts = total.by_source.setdefault(source, [0, 0])
            counts[0] += num_drafted
            counts[1] += num_accepted
    return total
