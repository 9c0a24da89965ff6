"""Drive: a scheduler and a ToyRunner stepped together, with the invariants of both checked after every move."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from specdec.config.engine import ResolvedConfig
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import ModelRunnerOutput, SchedulerOutput
from specdec.scheduler.policy import DraftPolicy, build_policy
from specdec.scheduler.request import CommitResult, Request, RequestStatus
from specdec.scheduler.scheduler import Scheduler
from tests.toy import Drafter, Target, ToyRunner


class Drive:
    """outputs: committed tokens by request id. ends: the last commit of each request that ended in update()."""

    def __init__(
        self, resolved: ResolvedConfig, *, drafter: Drafter | None = None, target: Target | None = None, policy: DraftPolicy | None = None
    ) -> None:
        self.resolved = resolved
        self.runner = ToyRunner.for_config(resolved, drafter=drafter, target=target)
        self.scheduler = Scheduler(resolved, self.runner.num_blocks, policy or build_policy(resolved))
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.commits: dict[str, list[CommitResult]] = {}
        self.ends: dict[str, CommitResult] = {}

    def add(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams | None = None, *, priority: int = 0) -> Request:
        request = Request(
            request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling or SamplingParams(max_tokens=8), priority=priority
        )
        self.scheduler.add(request)
        self.outputs[request_id] = []
        self.commits[request_id] = []
        return request

    def schedule(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        self._check_budget(plan)
        self.check()
        self.in_flight.append((plan, self.runner.execute(plan)))
        return plan

    def update(self) -> dict[str, CommitResult]:
        plan, output = self.in_flight.popleft()
        commits = self.scheduler.update(plan, output)
        for request_id, commit in commits.items():
            self.outputs[request_id] += commit.token_ids
            self.commits[request_id].append(commit)
            if commit.finish_reason is not None:
                self.ends[request_id] = commit
            elif commit.token_ids and self.scheduler.requests[request_id].num_in_flight_tokens == 0:
                request = self.scheduler.requests[request_id]
                assert request.num_computed_tokens == request.num_tokens - 1, f"{request_id} is decoding"
        self.check()
        return commits

    def step(self) -> tuple[SchedulerOutput, dict[str, CommitResult]]:
        return self.schedule(), self.update()

    def run(self, *, depth: int = 1, max_steps: int = 500) -> int:
        """Step to the end with up to `depth` steps in flight; returns the number of steps."""
        for num_steps in range(max_steps):
            if not (self.scheduler.has_work or self.scheduler.has_unsent_finishes or self.in_flight):
                return num_steps
            plan = self.schedule()
            while self.in_flight and (len(self.in_flight) >= depth or not plan.num_scheduled_tokens):
                self.update()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.requests}")

    def check_clean(self) -> None:
        """Nothing is left: no request, no row, no held block."""
        assert not self.scheduler.requests
        assert not self.runner.rows
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_usable
        assert self.scheduler.kv_usage == 0.0
        assert self.scheduler.num_in_flight_steps == 0

    def check(self) -> None:
        """Invariants of queues, counters and blocks."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        assert {r.request_id for r in [*scheduler.running, *scheduler.waiting]} == scheduler.requests.keys()
        assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        owners = Counter(block for request in scheduler.requests.values() for block in request.block_ids)
        assert 0 not in owners
        assert all(pool._num_owners[block] == owners[block] for block in range(1, pool.num_blocks))
        assert pool.num_free + len(owners) == pool.num_usable
        for request in scheduler.requests.values():
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        assert request.num_output_placeholders >= 0
        assert len(request.block_ids) * self.scheduler.kv.block_size >= request.num_computed_tokens
        assert request.num_computed_tokens < request.max_total_tokens
        assert request.num_tokens < request.max_total_tokens
        if request.status is not RequestStatus.RUNNING:
            assert (request.block_ids, request.num_computed_tokens, request.num_draft_nodes) == ([], 0, 0)
        if request.num_in_flight_tokens == 0:
            assert (request.num_output_placeholders, request.num_pending_outputs) == (0, 0)
            assert request.num_computed_tokens < request.num_tokens

    def _check_budget(self, plan: SchedulerOutput) -> None:
        limit, slots = self.scheduler.config.max_num_batched_tokens, self.scheduler.draft_slots
        assert plan.total_num_scheduled_tokens <= limit
        assert plan.total_num_scheduled_tokens + slots * len(plan.num_scheduled_tokens) <= limit
        assert not (plan.preempted_ids and plan.new), "nobody is admitted into blocks that were just taken from another"
        assert all(0 < plan.num_draft_nodes[i] < plan.num_scheduled_tokens[i] for i in plan.num_draft_nodes)
