"""EngineRequest and EngineOutput: what a front end hands the engine and what it gets back, per step.

Owns: the front-end seam. Must not know: HTTP. Read next: engine/core.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A tokenized request. arrival_s is time.monotonic(); 0 means when the engine takes it.

    Lower priority values run first (policy "priority"). trace_parent: the caller's W3C traceparent, for exported traces.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0
    tenant: str = ""
    track_drafts: bool = False  # deliver per-step draft details (which tokens were accepted drafts, which were rejected)
    trace_parent: str = ""


@dataclass(slots=True)
class SpecDecodeRequestStats:
    """Speculation of one request. accepted counts are emitted ones (trimmed at a stop), verified before trimming."""

    num_drafts: int = 0  # verify steps that had at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_tokens: int = 0
    num_steps: int = 0  # target passes that emitted for this request
    accepted_per_pos: list[int] = field(default_factory=list)
    is_lossy: bool = False  # drafts were verified by a rule that does not keep the target's law
    by_source: dict[str, list[int]] = field(default_factory=dict)  # source -> [draft tokens, accepted tokens]


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One step's drafts, for clients that asked: the first num_accepted emitted tokens of the step were drafts."""

    source: str
    draft_token_ids: tuple[int, ...]
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one step added to one request. `text` is what may be shown now (held back while a stop string may still complete).

    token_ids and logprobs: this step's kept tokens. finish_reason None: more will come. stop_reason: the stop string or
    token id that ended it. num_cached_tokens: prompt tokens found in the prefix cache (first output only, else 0).
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with the first output
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    stats: SpecDecodeRequestStats | None = None  # with the last output
    trace: DraftTrace | None = None
    error: str | None = None
