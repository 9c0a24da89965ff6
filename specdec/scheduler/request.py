"""Request: one request's tokens and counters, and commit(), which applies a verified step to them.

Owns: token accounting and the stop test. Must not know: queues, budgets, the worker. Read next: scheduler/scheduler.py.

Letters of the accounting: `num_computed_tokens` runs ahead while a step is in flight (every draft is assumed kept) and is
rolled back by commit(). `num_output_placeholders` counts the tokens that steps in flight may still bring, drafts included.
Without a step in flight a decoding request has exactly one uncomputed token: num_computed_tokens == num_tokens - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import RequestOutput

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(Enum):
    """Where a request is. PREEMPTED is waiting again, with its tokens kept and its KV given up."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """What one step did to one request.

    token_ids: kept tokens, cut at the first stop. num_drafts: drafts tested. num_accepted: drafts kept and emitted.
    num_verified: drafts the target kept before the cut. start: position of the step's first query row.
    stop_reason: the stop token id that ended it. num_cached_tokens: prompt tokens that the prefix cache held.
    """

    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    num_invalid: int = 0
    source: str = ""
    start: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request; only the scheduler changes it. Lengths in tokens, arrival_s is time.monotonic().

    num_draft_nodes: drafts that wait to be verified (their ids live with the worker).
    num_in_flight_tokens: query rows scheduled and not yet committed. num_pending_outputs: steps in flight that sample.
    epoch: generation of its worker row; results of another epoch are dropped.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0
    tenant: str = ""
    track_drafts: bool = False

    eos_token_ids: frozenset[int] = frozenset()  # this and the next are set by Scheduler.add
    max_model_len: int = 0
    seq: int = 0

    output_token_ids: list[int] = field(default_factory=list, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    epoch: int = field(default=-1, init=False)
    block_ids: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    num_hashed_blocks: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=-1, init=False)  # -1: never admitted
    num_draft_nodes: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_output_placeholders: int = field(default=0, init=False)
    num_in_flight_tokens: int = field(default=0, init=False)
    num_pending_outputs: int = field(default=0, init=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Committed tokens and the drafts that wait."""
        return self.num_tokens + self.num_draft_nodes

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute next, drafts aside: committed ones and the one that steps in flight will bring."""
        return self.num_tokens + self.num_output_placeholders - self.num_computed_tokens

    @property
    def num_processed_tokens(self) -> int:
        """Tokens whose KV is computed by steps that are committed."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def max_total_tokens(self) -> int:
        """Tokens at which the request ends by length."""
        limit = self.max_model_len
        if self.sampling.max_tokens is not None:
            limit = min(limit, self.num_prompt_tokens + self.sampling.max_tokens)
        return limit

    @property
    def max_useful_drafts(self) -> int:
        """Drafts worth proposing after the steps in flight: each of those emits a token, and verification emits one more."""
        return max(self.max_total_tokens - (self.num_tokens + self.num_pending_outputs) - 1, 0)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return committed tokens of positions start to stop - 1."""
        num_prompt = len(self.prompt_token_ids)
        outputs = self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return [*self.prompt_token_ids[start:stop], *outputs]

    def schedule(self, num_rows: int, *, num_drafts: int, samples: bool) -> None:
        """Run the counters ahead by a scheduled step; the drafts that waited are used up."""
        self.num_computed_tokens += num_rows
        self.num_in_flight_tokens += num_rows
        self.num_draft_nodes = 0
        if samples:
            self.num_output_placeholders += 1 + num_drafts
            self.num_pending_outputs += 1

    def reset_progress(self) -> None:
        """Forget all KV and everything in flight; tokens stay."""
        self.block_ids = []
        self.num_hashed_blocks = 0
        self.num_draft_nodes = self.num_computed_tokens = 0
        self.num_output_placeholders = self.num_in_flight_tokens = self.num_pending_outputs = 0

    def commit(self, result: RequestOutput, *, num_rows: int, num_drafts: int) -> CommitResult:
        """Apply the result of the oldest step in flight, which scheduled `num_rows` rows, `num_drafts` drafts among them.

        Tokens are appended up to the first stop, and rows of drafts that were not kept are taken back.
        """
        start = self.num_processed_tokens
        samples = start + num_rows >= self.num_tokens
        self.num_in_flight_tokens -= num_rows
        if samples:
            self.num_output_placeholders -= 1 + num_drafts
            self.num_pending_outputs -= 1
        assert self.num_in_flight_tokens >= 0, f"{self.request_id}: {self.num_in_flight_tokens} rows in flight"
        assert self.num_output_placeholders >= 0, f"{self.request_id}: {self.num_output_placeholders} placeholders"
        error = result.error
        if error is None and samples and not result.token_ids:
            error = "the step returned no token, though verification always emits one"
        if error is None and samples:
            return self._append(result, start=start, num_drafts=num_drafts)
        reason: FinishReason | None = None if error is None else "error"
        return CommitResult(start=start, num_cached_tokens=max(self.num_cached_tokens, 0), finish_reason=reason, error=error)

    def _append(self, result: RequestOutput, *, start: int, num_drafts: int) -> CommitResult:
        num_kept_drafts = len(result.token_ids) - 1 - result.num_target_tokens
        assert num_kept_drafts <= num_drafts, f"{self.request_id}: {num_kept_drafts} drafts kept of {num_drafts} scheduled"
        self.num_computed_tokens -= num_drafts - num_kept_drafts
        self.num_computed_tokens += result.num_target_tokens  # each was drawn by a pass that computed the token before it
        kept, finish_reason, stop_reason = self._cut(result.token_ids)
        self.output_token_ids.extend(kept)
        self.num_computed_tokens -= len(result.token_ids) - len(kept)
        return CommitResult(
            token_ids=kept,
            num_drafts=result.num_drafts,
            num_accepted=min(num_kept_drafts, len(kept)),
            num_verified=num_kept_drafts,
            num_invalid=result.num_invalid,
            source=result.source,
            start=start,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Return the tokens up to the first stop, why they stop, and the stop token id if it was one the user named."""
        sampling = self.sampling
        for index, token_id in enumerate(token_ids):
            num_output = self.num_output_tokens + index + 1
            kept = token_ids[: index + 1]
            is_late_enough = num_output >= sampling.min_tokens
            # a structured answer that is complete before min_tokens allows nothing but its end
            if token_id in self.eos_token_ids and not sampling.ignore_eos and (is_late_enough or sampling.structured is not None):
                return kept, "stop", None
            if token_id in sampling.stop_token_ids and is_late_enough:
                return kept, "stop", token_id
            if self.num_prompt_tokens + num_output >= self.max_total_tokens:
                return kept, "length", None
        return token_ids, None, None
