"""SchedulerOutput: one step's plan, frozen, the only thing the worker learns from the scheduler.

Owns: the shapes of the scheduler-worker seam. Must not know: torch. Read next: worker/model_runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from specdec.sampling_params import SamplingParams

DRAFT_PLACEHOLDER = -1  # host stand-in for a draft id that lives on the device


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request the worker does not know: first scheduled, or resumed after preemption (then with its output).

    token_ids: prompt and output so far. num_prompt_tokens: how many of them are prompt (penalties, min_tokens).
    block_ids: all blocks it holds. num_computed_tokens: before this step. tenant: API key or "" (sharing of caches).
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    tenant: str = ""
    track_drafts: bool = False  # copy the tested drafts to the host, for a client that wants to see them


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """What changed for a request the worker knows. num_computed_tokens is the host's (optimistic) count before this step."""

    request_id: str
    new_block_ids: tuple[int, ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """How many drafts to propose for the next step (0: extend draft KV only) and from which source (None: the proposer's)."""

    max_nodes: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Why a request left ("stop", "length", "abort", "error") and how many of its tokens (prompt and output) were kept."""

    reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step. Mappings are keyed by request id; iteration order of num_scheduled_tokens is batch order.

    num_scheduled_tokens: query rows of each request this step, drafts included.
    num_draft_nodes: drafts verified this step (absent: none). drafts_next: what to propose after it.
    epoch: generation of each request, bumped at preemption; a result of an older epoch is dropped.
    grammar_ids: structured requests of this batch. finished, preempted_ids: rows to free before this step; of one
    that was preempted earlier and ends now there is no row any more.
    """

    new: tuple[NewRequestData, ...] = ()
    cached: tuple[CachedRequestData, ...] = ()
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    num_draft_nodes: Mapping[str, int] = field(default_factory=dict)
    drafts_next: Mapping[str, DraftOrder] = field(default_factory=dict)
    epoch: Mapping[str, int] = field(default_factory=dict)
    grammar_ids: tuple[str, ...] = ()
    finished: Mapping[str, FinishedRequest] = field(default_factory=dict)
    preempted_ids: tuple[str, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Query rows of the whole step."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token: its own, its rank (1 is the most likely), and the top alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The worker's result for one request of the step, on the host.

    token_ids: emitted tokens (accepted drafts, then one sampled token); empty for a prefill chunk that samples nothing.
    num_target_tokens: tokens at their end that the drafting pass drew from the target's law; each was computed by that pass.
    num_drafts: drafts tested. num_invalid: drafts the grammar refused before the test (not counted as proposed).
    num_next: drafts waiting for the next step. source: who drafted the tested ones ("" when none).
    is_lossy: a rule that does not keep the target's law tested drafts here.
    error: the request cannot continue (for example no finite logit); it is finished as "error".
    """

    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0
    num_invalid: int = 0
    num_next: int = 0
    num_target_tokens: int = 0
    source: str = ""
    is_lossy: bool = False
    draft_token_ids: tuple[int, ...] = ()  # the tested drafts, only where the request asked to see them
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # rows of this chunk
    error: str | None = None

    @property
    def num_accepted(self) -> int:
        """Drafts that were kept before any trimming at a stop."""
        return max(len(self.token_ids) - 1 - self.num_target_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Wall time of one step's phases in seconds."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    propose_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """All results of one step, keyed by request id, with the epochs they belong to.

    num_rows: query rows that ran, which is less than planned where drafts were planned and never made.
    """

    results: Mapping[str, RequestOutput]
    epoch: Mapping[str, int]
    num_rows: int
    timings: StepTimings = StepTimings()

    def result(self) -> ModelRunnerOutput:
        """Return the results: these are here already."""
        return self


class StepResult(Protocol):
    """Results of a step that may still be on its way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the results, and return them."""
        ...
