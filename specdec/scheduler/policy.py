"""DraftPolicy: how many drafts each request should get proposed at the end of a step, to be verified in its next one.

Owns: draft lengths and their limits per request. Must not know: how drafts are made, budgets, blocks.
Read next: scheduler/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.config.engine import ResolvedConfig
from specdec.config.fields import check_schedule
from specdec.scheduler.output import DraftOrder, StepTimings
from specdec.scheduler.request import CommitResult, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What a policy does now, for the metrics. draft_length: drafts per request in the newest orders, on average.

    num_switches: changes of its choice since the start. bank_s: what drafting has earned against plain decoding, in seconds,
    where that is kept (see scheduler/cost.py). is_drafting: False while drafting is switched off or only tried.
    """

    draft_length: float = 0.0
    num_switches: int = 0
    bank_s: float = 0.0
    is_drafting: bool = True


class DraftPolicy(Protocol):
    """Decides drafts for the next step, and may learn from the outcome of past ones."""

    def orders(self, requests: Sequence[Request], *, batch_size: int) -> Mapping[str, DraftOrder]:
        """Return an order for each of `requests`, those that sample in a step of `batch_size` requests."""
        ...

    def observe(self, results: Mapping[str, CommitResult], *, num_rows: int, timings: StepTimings) -> None:
        """Learn what a step of `num_rows` query rows achieved and took."""
        ...

    def state(self) -> PolicyState:
        """Return what the metrics show."""
        ...


class NoDrafts:
    """Plain decoding: a proposer, where there is one, only keeps its state up to date."""

    def orders(self, requests: Sequence[Request], *, batch_size: int) -> Mapping[str, DraftOrder]:  # noqa: ARG002 - the protocol's names
        """Order nothing from anybody."""
        return {request.request_id: DraftOrder(0) for request in requests}

    def observe(self, results: Mapping[str, CommitResult], *, num_rows: int, timings: StepTimings) -> None:
        """Nothing to learn."""

    def state(self) -> PolicyState:
        """Return that nobody drafts."""
        return PolicyState(is_drafting=False)


class FixedPolicy:
    """The same number of drafts for everybody, `max_nodes`, within what each request allows."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def orders(self, requests: Sequence[Request], *, batch_size: int) -> Mapping[str, DraftOrder]:  # noqa: ARG002 - the protocol's names
        """Order `max_nodes` drafts for each request."""
        return {request.request_id: order_for(request, self.max_nodes) for request in requests}

    def observe(self, results: Mapping[str, CommitResult], *, num_rows: int, timings: StepTimings) -> None:
        """Nothing to learn."""

    def state(self) -> PolicyState:
        """Return the one length."""
        return PolicyState(draft_length=self.max_nodes)


class BatchSizePolicy:
    """Drafts by number of requests in the step: (first, last, drafts) ranges, both ends included.

    Sizes between and past the ranges keep the drafts of the range before; nothing exceeds `max_nodes`.

    Raises:
        ConfigError: the ranges are empty, overlap, or leave batch size 1 without a length.
    """

    def __init__(self, schedule: Sequence[tuple[int, int, int]], *, max_batch_size: int, max_nodes: int) -> None:
        check_schedule(tuple(schedule))
        drafts_from = {first: drafts for first, _, drafts in schedule}
        self.drafts_at = [0]  # by batch size; no step has size 0
        for size in range(1, max_batch_size + 1):
            self.drafts_at.append(min(drafts_from.get(size, self.drafts_at[-1]), max_nodes))
        self._num_nodes = 0
        self._num_switches = -1  # the first length is none

    def orders(self, requests: Sequence[Request], *, batch_size: int) -> Mapping[str, DraftOrder]:
        """Order the drafts of this batch size for each request."""
        num_nodes = self.drafts_at[min(batch_size, len(self.drafts_at) - 1)]
        if num_nodes != self._num_nodes or self._num_switches < 0:
            self._num_nodes = num_nodes
            self._num_switches += 1
        return {request.request_id: order_for(request, num_nodes) for request in requests}

    def observe(self, results: Mapping[str, CommitResult], *, num_rows: int, timings: StepTimings) -> None:
        """Nothing to learn: the table is the user's."""

    def state(self) -> PolicyState:
        """Return the length of the newest step's size."""
        return PolicyState(draft_length=self._num_nodes, num_switches=max(self._num_switches, 0), is_drafting=self._num_nodes > 0)


def order_for(request: Request, num_nodes: int) -> DraftOrder:
    """Return the order of `num_nodes` drafts, less what the request forbids or could not use before its end."""
    wanted = request.sampling.speculation
    if not wanted.enabled:
        return DraftOrder(0)
    if wanted.num_speculative_tokens is not None:
        num_nodes = min(num_nodes, wanted.num_speculative_tokens)
    return DraftOrder(min(num_nodes, request.max_useful_drafts), wanted.method)


def build_policy(resolved: ResolvedConfig) -> DraftPolicy:
    """Return the policy that the configuration asks for."""
    if resolved.traits is None:
        return NoDrafts()
    max_nodes = resolved.traits.max_nodes
    config = resolved.engine.speculative
    if config is not None and config.policy == "adaptive":
        from specdec.scheduler.adaptive import AdaptivePolicy  # late: it builds on this file

        source = config.sources[0].method if config.method == "hybrid" else resolved.traits.method
        return AdaptivePolicy(max_nodes, source=source)
    schedule = config.num_speculative_tokens_per_batch_size if config is not None else None
    if schedule is None:
        return FixedPolicy(max_nodes)
    return BatchSizePolicy(schedule, max_batch_size=resolved.engine.scheduler.max_num_seqs, max_nodes=max_nodes)
