"""Scheduler: continuous batching without phases; drafts are tokens like any other until verification refuses them.

Owns: the queues, admission, preemption, and every Request. Must not know: torch, the worker, text.
Read next: worker/model_runner.py.

Each step lets num_computed_tokens of every request catch up with the tokens it has and the drafts that wait: a prompt
schedules chunks, a decoding request its newest token and its drafts. Under async_scheduling the next step is planned
before the last one is known; counters then run ahead and update() sets them right.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from specdec.config.engine import ResolvedConfig
from specdec.errors import ConfigError, QueueFull, RequestRejected
from specdec.scheduler.budget import TokenBudget
from specdec.scheduler.kv_cache import KVCacheManager
from specdec.scheduler.output import (
    CachedRequestData,
    DraftOrder,
    FinishedRequest,
    ModelRunnerOutput,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
)
from specdec.scheduler.policy import DraftPolicy
from specdec.scheduler.request import CommitResult, FinishReason, Request, RequestStatus

_NOTHING = RequestOutput()


@dataclass(slots=True)
class _Step:
    """A plan in the making. `sampling` are the requests that get a token, `undraftable` those without room to draft."""

    budget: TokenBudget
    new: list[NewRequestData] = field(default_factory=list)
    cached: list[CachedRequestData] = field(default_factory=list)
    num_scheduled: dict[str, int] = field(default_factory=dict)
    num_drafts: dict[str, int] = field(default_factory=dict)
    epoch: dict[str, int] = field(default_factory=dict)
    sampling: list[Request] = field(default_factory=list)
    undraftable: set[str] = field(default_factory=set)
    preempted: list[str] = field(default_factory=list)


class Scheduler:
    """Decides what runs in each step. Single-threaded: only the engine thread calls it.

    num_blocks: KV blocks of the worker, padding block included.

    Raises:
        ConfigError: the token budget cannot hold one request's smallest step.
    """

    def __init__(self, resolved: ResolvedConfig, num_blocks: int, policy: DraftPolicy) -> None:
        self.config = resolved.engine.scheduler
        self.policy = policy
        self.traits = resolved.traits
        self.max_model_len = resolved.max_model_len
        self.eos_token_ids = frozenset(resolved.eos_token_ids)
        self.kv = KVCacheManager(
            num_blocks,
            resolved.engine.cache.block_size,
            max_model_len=resolved.max_model_len,
            enable_prefix_caching=resolved.engine.cache.enable_prefix_caching,
            hash_lookahead=resolved.traits.prefill_lookahead if resolved.traits else 0,
        )
        self.num_lookahead_tokens = resolved.num_lookahead_tokens
        self.prefill_lookahead = resolved.traits.prefill_lookahead if resolved.traits else 0
        self.draft_slots = resolved.traits.draft_slots if resolved.traits else 0
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # both sorted by _rank: served from the front, preempted from the back
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_stale_results = 0  # results dropped because their request was preempted or gone
        self.num_in_flight_steps = 0
        self._finished: dict[str, FinishedRequest] = {}  # not yet told to the worker
        self._seq = count()
        self._epochs = count()
        self._check_budget()

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejected: it is empty, already here, or can never fit. QueueFull: too many wait already.
        """
        request.eos_token_ids = self.eos_token_ids
        request.max_model_len = self.max_model_len
        self._check_request(request)
        if self.config.max_waiting and len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting, and max_waiting is {self.config.max_waiting}",
                hint="retry later, or raise max_waiting",
            )
        request.seq = next(self._seq)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=self._rank)

    def abort(self, request_id: str) -> bool:
        """End a request at the client's wish; False when it is not here (any more)."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason, *, num_tokens: int | None = None) -> bool:
        """End a request; `num_tokens` (prompt and output) of it are kept, all by default. False when it is not here.

        A request that update() ended in the step that is being delivered may still be cut shorter, for example because
        a stop string ends before its last token: the worker has not been told yet.
        """
        request = self.requests.get(request_id)
        if request is not None:
            if num_tokens is not None:
                del request.output_token_ids[max(num_tokens - request.num_prompt_tokens, 0) :]
            self._end(request, reason)
            return True
        told = self._finished.get(request_id)
        if told is not None and num_tokens is not None:
            self._finished[request_id] = FinishedRequest(reason, min(num_tokens, told.num_tokens))
        return False

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step and run all counters ahead to its end. May be empty but for requests that ended."""
        assert self.config.async_scheduling or not self.num_in_flight_steps, (
            f"{self.num_in_flight_steps} steps are not committed, and async_scheduling is off"
        )
        max_rows = self.config.max_num_batched_tokens
        step = _Step(TokenBudget(max_rows, max_rows, draft_slots=self.draft_slots))
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        drafts_next = self._order_drafts(step)
        finished, self._finished = self._finished, {}
        if step.num_scheduled:
            self.num_in_flight_steps += 1
        return SchedulerOutput(
            new=tuple(step.new),
            cached=tuple(step.cached),
            num_scheduled_tokens=step.num_scheduled,
            num_draft_nodes=step.num_drafts,
            drafts_next=drafts_next,
            epoch=step.epoch,
            grammar_ids=tuple(request.request_id for request in step.sampling if request.sampling.structured is not None),
            finished=finished,
            preempted_ids=tuple(step.preempted),
        )

    def update(self, planned: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, CommitResult]:
        """Commit a step's results, oldest step first; results of ended or preempted requests are dropped.

        Returns:
            What was committed, by request id. A request with a finish_reason has left the scheduler.
        """
        if not planned.num_scheduled_tokens:
            return {}
        self.num_in_flight_steps -= 1
        commits: dict[str, CommitResult] = {}
        for request_id, num_rows in planned.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.epoch != planned.epoch[request_id]:
                self.num_stale_results += 1
                continue
            result = output.results.get(request_id, _NOTHING)
            assert request_id not in output.results or output.epoch[request_id] == request.epoch, (
                f"{request_id}: the worker answered for epoch {output.epoch[request_id]}, planned was {request.epoch}"
            )
            commits[request_id] = self._commit(request, result, num_rows=num_rows, num_drafts=planned.num_draft_nodes.get(request_id, 0))
        self.policy.observe(commits, num_rows=output.num_rows, timings=output.timings)
        return commits

    # -- what the engine shows -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.requests)

    @property
    def has_unsent_finishes(self) -> bool:
        """True while the worker holds rows of ended requests; one more schedule() tells it, also without other work."""
        return bool(self._finished)

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by requests, in 0..1."""
        return self.kv.usage

    def num_cached_tokens(self, request_id: str) -> int:
        """Return how many prompt tokens a live request found in the prefix cache when it was admitted."""
        return max(self.requests[request_id].num_cached_tokens, 0)

    # -- running requests ----------------------------------------------------------------------------------------

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.budget.available:
            request = self.running[index]
            index += 1
            num_new = self._num_new_tokens(request, step.budget, num_behind=len(self.running) - index)
            if num_new == 0:
                continue
            num_computed = request.num_computed_tokens  # before the step, as the worker is told
            reserved = self._reserve_running(request, num_new, step)
            if reserved is None:
                return  # it preempted itself, and it was the last
            num_new, blocks = reserved
            step.cached.append(CachedRequestData(request.request_id, blocks, num_computed))
            self._grant(request, num_new, step)

    def _num_new_tokens(self, request: Request, budget: TokenBudget, *, num_behind: int) -> int:
        """Rows for a running request; `num_behind` requests come after it, and it leaves each of them one row."""
        # The last token of a request is never fed back, so no row reaches its position. That also ends planning ahead when
        # steps in flight reach the limit even without their drafts: each of them counts at least one row.
        num_left = min(request.num_uncomputed + request.num_draft_nodes, request.max_total_tokens - 1 - request.num_computed_tokens)
        room = min(max(budget.available - num_behind * (1 + self.draft_slots), 1), budget.available)
        if request.num_uncomputed > 1:
            return self._prompt_chunk(num_left, room)
        return max(min(num_left, room), 0)

    def _prompt_chunk(self, num_left: int, room: int) -> int:
        """At most `room` rows of a prompt that has `num_left` tokens to compute.

        A chunk ends the prompt or leaves at least prefill_lookahead tokens, which the drafter reads past its end.
        """
        num_new = num_left
        threshold = self.config.long_prefill_token_threshold
        if threshold > 0 and len(self.running) + len(self.waiting) > 1:
            num_new = min(num_new, max(threshold, self.prefill_lookahead))
        num_new = min(num_new, room)
        if 0 < num_left - num_new < self.prefill_lookahead:
            num_new = num_left - self.prefill_lookahead
        return max(num_new, 0)

    def _reserve_running(self, request: Request, num_new: int, step: _Step) -> tuple[int, tuple[int, ...]] | None:
        """Return rows and new blocks; gives up room to draft, then drafts, then the newest request, then (None) its own place."""
        while True:
            for num_rows in (num_new, min(num_new, request.num_uncomputed)):
                blocks = self._reserve(request, num_rows, step)
                if blocks is not None:
                    return num_rows, blocks
            victim = self.running.pop()
            assert victim is not request or self.running, f"{request.request_id} does not fit although it runs alone"
            self._preempt(victim, step)
            if victim is request:
                return None

    def _reserve(self, request: Request, num_rows: int, step: _Step, *, computed_blocks: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Return new blocks for `num_rows` rows, with room to draft after them if there is any, or None."""
        least = self._num_ahead(request, num_rows)
        for num_lookahead in dict.fromkeys((max(self.num_lookahead_tokens, least), least)):
            blocks = self.kv.allocate_slots(request, num_rows, num_lookahead_tokens=num_lookahead, computed_blocks=computed_blocks)
            if blocks is not None:
                if num_lookahead < self.num_lookahead_tokens:
                    step.undraftable.add(request.request_id)
                return blocks
        return None

    def _num_ahead(self, request: Request, num_rows: int) -> int:
        """Slots past the rows for a token that the step in flight may draw from the target's law beside its drafts."""
        if not request.num_pending_outputs:
            return 0
        return max(min(1, self.num_lookahead_tokens, request.max_total_tokens - 1 - request.num_computed_tokens - num_rows), 0)

    def _preempt(self, victim: Request, step: _Step) -> None:
        """Take a request's blocks; it is computed again from its tokens, and results on their way are dropped."""
        self.kv.free(victim)
        victim.reset_progress()
        victim.epoch = next(self._epochs)
        victim.status = RequestStatus.PREEMPTED
        insort(self.waiting, victim, key=self._rank)
        step.preempted.append(victim.request_id)
        self.num_preemptions += 1

    # -- waiting requests ----------------------------------------------------------------------------------------

    def _schedule_waiting(self, step: _Step) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs and step.budget.available:
            request = self.waiting[0]
            computed_blocks = self.kv.get_computed_blocks(request)
            num_computed = len(computed_blocks) * self.kv.block_size
            num_new = self._prompt_chunk(request.num_tokens - num_computed, step.budget.available)
            # Each running request may need a block soon; admission that takes the last ones would only be preempted again.
            if num_new == 0 or not self.kv.can_admit(request, computed_blocks, num_spare=len(self.running)):
                return
            blocks = self._reserve(request, num_new, step, computed_blocks=computed_blocks)
            assert blocks is not None, f"{request.request_id}: no room for {num_new} rows after the check for all its tokens"
            del self.waiting[0]
            self._admit(request, num_computed, num_new=num_new, step=step)

    def _admit(self, request: Request, num_computed: int, *, num_new: int, step: _Step) -> None:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            self.kv.count_lookup(request)
        request.status = RequestStatus.RUNNING
        request.epoch = next(self._epochs)
        request.num_computed_tokens = num_computed
        insort(self.running, request, key=self._rank)
        step.new.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=tuple(request.tokens(0, request.num_tokens)),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_ids=tuple(request.block_ids),
                num_computed_tokens=num_computed,
                tenant=request.tenant,
                track_drafts=request.track_drafts,
            )
        )
        self._grant(request, num_new, step)

    # -- shared parts --------------------------------------------------------------------------------------------

    def _grant(self, request: Request, num_new: int, step: _Step) -> None:
        """Enter a request with its rows into the step, and run its counters ahead."""
        granted = step.budget.take(num_new)
        assert granted == num_new, f"{request.request_id}: {num_new} rows planned, {granted} left"
        num_known = request.num_tokens + request.num_output_placeholders
        num_drafts = max(request.num_computed_tokens + num_new - num_known, 0)
        samples = request.num_computed_tokens + num_new >= num_known
        request_id = request.request_id
        step.num_scheduled[request_id] = num_new
        step.epoch[request_id] = request.epoch
        if num_drafts:
            step.num_drafts[request_id] = num_drafts
        if samples:
            step.sampling.append(request)
        request.schedule(num_new, num_drafts=num_drafts, samples=samples)

    def _order_drafts(self, step: _Step) -> dict[str, DraftOrder]:
        """Ask the policy what to propose after this step; under async_scheduling those drafts wait from now on."""
        if self.traits is None or not step.sampling:
            return {}
        orders = dict(self.policy.orders(step.sampling, batch_size=len(step.num_scheduled)))
        for request_id in step.undraftable & orders.keys():
            orders[request_id] = DraftOrder(0, orders[request_id].source)
        if self.config.async_scheduling:
            for request in step.sampling:
                request.num_draft_nodes = orders[request.request_id].max_nodes
        return orders

    def _commit(self, request: Request, result: RequestOutput, *, num_rows: int, num_drafts: int) -> CommitResult:
        commit = request.commit(result, num_rows=num_rows, num_drafts=num_drafts)
        if commit.token_ids and request.num_in_flight_tokens == 0:
            request.num_draft_nodes = result.num_next  # nothing newer is in flight, so these are the drafts that wait
            assert request.num_computed_tokens == request.num_tokens - 1, (
                f"{request.request_id}: {request.num_computed_tokens} of {request.num_tokens} tokens computed after a commit"
            )
        if commit.error is None:
            self.kv.cache_blocks(request)
        if commit.finish_reason is not None:
            self._end(request, commit.finish_reason)
        return commit

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Let a request go: its blocks now, its worker row with the next step."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request)
        else:
            self.waiting.remove(request)
        if request.status is not RequestStatus.WAITING:  # of a preempted one the worker still keeps the seed
            self._finished[request.request_id] = FinishedRequest(reason, request.num_tokens)
        request.status = RequestStatus.FINISHED
        request.reset_progress()
        del self.requests[request.request_id]

    def _rank(self, request: Request) -> tuple[int, float, int]:
        if self.config.policy == "priority":
            return (request.priority, request.arrival_s, request.seq)
        return (0, 0.0, request.seq)

    def _check_request(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if request.request_id in self.requests:
            raise RequestRejected(
                f"request_id {request.request_id!r} is already running", param="request_id", hint="give each request its own id"
            )
        if num_prompt == 0:
            raise RequestRejected("the prompt has 0 tokens, but it must have at least 1", param="prompt")
        if num_prompt >= self.max_model_len:
            raise RequestRejected(
                f"the prompt has {num_prompt} tokens, but with one output token it must fit max_model_len {self.max_model_len}",
                param="prompt",
                hint="shorten the prompt, or serve with a larger max_model_len",
            )
        # The last token is never fed back, so it needs no slot.
        num_needed = self.kv.num_blocks_for(request.max_total_tokens - 1)
        if num_needed > self.kv.pool.num_usable:
            num_slots = self.kv.pool.num_usable * self.kv.block_size
            raise RequestRejected(
                f"prompt and output may reach {request.max_total_tokens} tokens in {num_needed} KV blocks, but the cache has "
                f"{self.kv.pool.num_usable} blocks",
                param="max_tokens",
                hint=f"keep prompt plus max_tokens within {num_slots + 1} tokens, or serve with more num_blocks",
            )

    def _check_budget(self) -> None:
        num_least = max(self.prefill_lookahead, 1) + self.draft_slots
        if self.config.max_num_batched_tokens < num_least:
            raise ConfigError(
                f"max_num_batched_tokens is {self.config.max_num_batched_tokens}, but one request's step needs {num_least}",
                hint="raise max_num_batched_tokens",
            )
