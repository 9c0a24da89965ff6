"""AdaptivePolicy: the engine chooses draft lengths by what drafts bring and cost just now, and stops where they do not pay.

Owns: when to decide anew, when to stop drafting and when to try again. Must not know: how drafts are made, the worker.
Read next: goodput.py (the choice), acceptance.py and cost.py (what it is made from), probe.py.

Lengths depend on committed tokens and times only, never on the drafts they admit, so verification keeps the target's law.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.logging import get_logger
from specdec.scheduler.acceptance import (
    GLOBAL_MEMORY,
    REQUEST_MEMORY,
    Outlook,
    Rates,
    Surprise,
    Tally,
    global_rates,
    mixed,
    outlook_of,
    request_outlook,
)
from specdec.scheduler.cost import Bank, DraftCost, StepCost
from specdec.scheduler.goodput import Candidate, Choice, Load, best_choice, drafts_at, rate_of
from specdec.scheduler.output import DraftOrder, StepTimings
from specdec.scheduler.policy import PolicyState
from specdec.scheduler.probe import FIRST_WAIT, Probe
from specdec.scheduler.request import CommitResult, Request

logger = get_logger(__name__)

DECIDE_EVERY = 32  # steps; a change of load or acceptance is answered at once
HASTY_EVERY, HASTY_DECISIONS = 6, 8  # steps between the decisions after a change of acceptance, and how many they are
GAIN_TO_SWITCH = 1.03  # a new choice must promise this much more than the present one, and drafting than not drafting
LEAST_GAIN = 0.995  # below this share of plain decoding, drafting stops at once; it may cost a little, to see what comes
PLAIN_EVERY = 256  # steps with drafts after which one without refreshes the cost of a plain step
KNOWN_STEPS = 2  # plain steps of a number of requests that come before it drafts: nobody knows else what drafting must beat
EXPLORE_EVERY, EXPLORE_KNOWN_EVERY = 32, 256  # a request's orders, one of which is two drafts longer, to learn what lies there
KNOWN_TRIES = 64.0
CHANGED_MEMORY = 4.0  # verifications that the past weighs after acceptance has changed
FLOOR_STEPS, CAP_STEPS = 6.0, 32.0  # plain steps that the bank may at least be overdrawn by, and hold
_NONE = DraftOrder(0)
_FIRST = -1  # stands in for the order before a request's first token, which tests no drafts


@dataclass(slots=True)
class _Tracked:
    """What the policy keeps of a request. ordered: orders not answered yet, oldest first; sources: its record by drafter."""

    request: Request
    epoch: int
    limit: int
    end: int  # tokens at which it ends, less what each verification adds by itself
    source: str
    ordered: deque[int]
    sources: dict[str, Tally]
    length: int = 0
    order: DraftOrder = _NONE
    num_orders: int = 0
    last_step: int = 0


class AdaptivePolicy:
    """Draft lengths of at most `max_nodes` per request, chosen for throughput. `source` names who drafts when nobody said.

    Every DECIDE_EVERY steps, and at once when load or acceptance changes, the lengths that promise the most tokens per second
    are worked out; they replace the present ones when they are 3% better. A Bank bounds what drafting may ever cost.
    """

    def __init__(self, max_nodes: int, *, source: str) -> None:
        self.max_nodes = max_nodes
        self.bank = Bank()
        self.step_cost = StepCost()
        self.draft_cost = DraftCost()
        self.num_switches = 0
        self.is_drafting = True
        self._source = source
        self._tracked: dict[str, _Tracked] = {}
        self._totals: dict[str, Tally] = {}
        self._rates: dict[str, Rates] = {}
        self._surprises: dict[str, Surprise] = {}
        self._unknown: dict[str, Outlook] = {}
        self._choice = Choice(0, max_nodes, 0.0)
        self._probe = Probe()
        self._explore_every = EXPLORE_EVERY
        self._num_hasty = 0
        self._step = self._decide_at = self._decided_requests = self._last_plain = 0
        self._context = self._bonus = self._mean_length = 0.0
        self._is_startled = self._is_first_call = self._is_promising = False

    def state(self) -> PolicyState:
        """Return what the metrics show."""
        return PolicyState(
            draft_length=self._mean_length, num_switches=self.num_switches, bank_s=self.bank.balance_s, is_drafting=self.is_drafting
        )

    # -- before a step -------------------------------------------------------------------------------------------

    def orders(self, requests: Sequence[Request], *, batch_size: int) -> Mapping[str, DraftOrder]:  # noqa: ARG002 - counts prefills too
        """Order drafts of the chosen lengths, or those of a probe, or none."""
        self._step += 1
        known = self._tracked
        tracked = []
        for request in requests:
            found = known.get(request.request_id)
            tracked.append(found if found is not None and found.epoch == request.epoch else self._track(request))
        if self._is_due(len(requests)):
            self._decide(tracked)
        if not self.is_drafting:
            probing = self._probe.group(len(tracked), self.bank, is_promising=self._is_promising)
            if not probing:
                return self._order_none(tracked)
            return self._order_lengths(tracked, [max(found.length, 1) if index in probing else 0 for index, found in enumerate(tracked)])
        if self.bank.is_exhausted:
            self._stop("the bank is exhausted", wait=0, is_latched=True)
            return self._order_none(tracked)
        if self._step - self._last_plain > PLAIN_EVERY or self.step_cost.num_seen(len(tracked)) < KNOWN_STEPS:
            self._last_plain = self._step
            return self._order_none(tracked)
        return self._order_lengths(tracked, self._lengths(tracked))

    def _track(self, request: Request) -> _Tracked:
        """Begin with a request, or begin again after its preemption: what was ordered then is not answered."""
        before = self._tracked.get(request.request_id)
        wish = request.sampling.speculation
        limit = self.max_nodes if wish.num_speculative_tokens is None else min(wish.num_speculative_tokens, self.max_nodes)
        found = _Tracked(
            request,
            request.epoch,
            limit=limit if wish.enabled else 0,
            end=request.max_total_tokens - request.num_prompt_tokens - 1,
            source=wish.method or self._source,
            ordered=deque((_FIRST,)),
            sources=before.sources if before is not None else {},
            last_step=self._step,
        )
        self._tracked[request.request_id] = found
        self._set_length(found, self._length_of(found, Candidate(self._outlook_unknown(found.source), found.limit)))
        if not self.is_drafting:
            self._probe.hasten()
        return found

    def _lengths(self, tracked: Sequence[_Tracked]) -> list[int]:
        """Return the chosen lengths, one in `explore_every` of a request two longer."""
        every = self._explore_every
        lengths = []
        for found in tracked:
            length = found.length
            found.num_orders += 1
            if length and found.num_orders % every == 0:
                length = min(length + 2, found.limit)
            lengths.append(length)
        return lengths

    def _order_none(self, tracked: Sequence[_Tracked]) -> dict[str, DraftOrder]:
        self._mean_length = 0.0
        for found in tracked:
            found.ordered.append(0)
        return {found.request.request_id: _NONE for found in tracked}

    def _order_lengths(self, tracked: Sequence[_Tracked], lengths: Sequence[int]) -> dict[str, DraftOrder]:
        orders = {}
        total = 0
        for found, length in zip(tracked, lengths, strict=True):
            request = found.request
            useful = found.end - len(request.output_token_ids) - request.num_pending_outputs
            if useful < length or length > found.limit:
                length = max(min(useful, found.limit), 0)
            found.ordered.append(length)
            total += length
            if length == found.length:
                orders[request.request_id] = found.order
            else:
                orders[request.request_id] = DraftOrder(length, request.sampling.speculation.method) if found.limit else _NONE
        self._mean_length = total / len(orders) if orders else 0.0
        return orders

    # -- after a step --------------------------------------------------------------------------------------------

    def observe(self, results: Mapping[str, CommitResult], *, num_rows: int, timings: StepTimings) -> None:  # noqa: ARG002 - rows are counted from the results, without those of drafts that were never made
        """Learn what the step's drafts came to and what it took."""
        num_requests = num_drafts = num_drafting = num_extra = rows = context = emitted = longest = 0
        is_decoding = True  # and nothing else: a step that also reads prompts says nothing about the cost of decoding
        for request_id, commit in results.items():
            num_tokens = len(commit.token_ids)
            found = self._tracked.get(request_id)
            if not num_tokens or found is None or len(found.ordered) < 2:
                is_decoding = False
                continue
            ordered = found.ordered.popleft()
            drafted = commit.num_drafts
            if ordered == _FIRST:
                is_decoding = False
            elif ordered or drafted:
                self._count(found, ordered, commit)
            if found.ordered[0] > longest:
                longest = found.ordered[0]
            if found.ordered[0]:
                num_drafting += 1
                num_extra += num_tokens - 1 - commit.num_accepted if commit.finish_reason is None else 0
            num_requests += 1
            num_drafts += drafted
            rows += 1 + drafted + commit.num_invalid
            context += commit.start
            emitted += num_tokens
            if commit.finish_reason is not None:
                self._fold(self._tracked.pop(request_id))
        if any(surprise.is_surprised for surprise in self._surprises.values()):
            self._is_startled = True
        target_s = timings.prepare_s + timings.forward_s + timings.verify_s
        self.bank.earn(target_s + timings.propose_s)
        if num_drafting:
            self._bonus += 0.02 * (num_extra / num_drafting - self._bonus)
        if is_decoding and num_requests and target_s > 0:
            self._learn_cost(rows, context=context, target_s=target_s)
            self._settle(num_requests, emitted, num_drafts=num_drafts, target_s=target_s, draft_s=timings.propose_s, longest=longest)

    def _count(self, found: _Tracked, ordered: int, commit: CommitResult) -> None:
        drafted = min(commit.num_drafts, self.max_nodes)
        if drafted and commit.source:
            found.source = commit.source
        tally = found.sources.get(found.source)
        if tally is None:
            tally = found.sources[found.source] = Tally(self.max_nodes)
        verified = min(commit.num_verified, drafted)
        tally.add(max(ordered, drafted), drafted, num_verified=verified)
        surprise = self._surprises.get(found.source)
        if drafted and surprise is not None:
            surprise.add(drafted, verified)

    def _learn_cost(self, rows: int, *, context: int, target_s: float) -> None:
        self._context = context
        num_bins = self.step_cost.num_bins
        self._is_first_call = not self.step_cost.observe(rows, context, target_s)
        if self.step_cost.num_bins > num_bins:
            self._is_startled = True  # a guess became a measurement

    def _settle(self, num_requests: int, emitted: int, *, num_drafts: int, target_s: float, draft_s: float, longest: int) -> None:
        if not self._is_first_call:
            self.draft_cost.observe(num_requests, longest, draft_s)
        idle_s = self.draft_cost.predict(num_requests, 0)
        if not num_drafts:
            self._last_plain = self._step
            if longest:
                self.bank.settle(idle_s, max(draft_s, idle_s))
            return
        if self._is_first_call:
            return
        plain_s = self.step_cost.predict(num_requests, self._context) + idle_s
        self.bank.floor_s, self.bank.cap_s = max(0.02, FLOOR_STEPS * plain_s), max(0.25, CAP_STEPS * plain_s)
        before_s = self.bank.balance_s
        self.bank.settle(plain_s * emitted / num_requests, target_s + draft_s)
        self._probe.charge(before_s - self.bank.balance_s, plain_s)

    # -- the choice ----------------------------------------------------------------------------------------------

    def _is_due(self, num_requests: int) -> bool:
        if self._is_startled or self._step >= self._decide_at or self._probe.is_answered:
            return True
        return 4 * abs(num_requests - self._decided_requests) > self._decided_requests

    def _decide(self, tracked: Sequence[_Tracked]) -> None:
        """Work out the best lengths, and take them where that is worth a switch."""
        for found in tracked:
            found.last_step = self._step
        self._refresh()
        load = Load(len(tracked), self._context, self.step_cost, self.draft_cost, self._bonus)
        candidates = [Candidate(self._outlook(found), found.limit) for found in tracked]
        best = best_choice(load, candidates, self.max_nodes)
        if 4 * abs(len(tracked) - self._decided_requests) > self._decided_requests:
            self._probe.reset()
            self._context *= len(tracked) / max(self._decided_requests, 1)
        self._decided_requests = len(tracked)
        self._num_hasty = max(self._num_hasty - 1, 0)
        self._decide_at = self._step + (HASTY_EVERY if self._num_hasty else DECIDE_EVERY)
        if best is None:  # nobody may draft
            if self._probe.is_answered:
                self._probe.fail()
            return
        plain = load.plain_rate()
        if self.is_drafting:
            self._revise(load, candidates, tracked, best=best, plain=plain)
        else:
            self._reconsider(candidates, tracked, best=best, plain=plain)
        depth = max((found.length for found in tracked), default=0) + 1
        totals = self._totals.get(self._source)
        is_known = totals is not None and (depth > self.max_nodes or totals.tries[depth] >= KNOWN_TRIES)
        self._explore_every = EXPLORE_KNOWN_EVERY if is_known else EXPLORE_EVERY

    def _revise(self, load: Load, candidates: Sequence[Candidate], tracked: Sequence[_Tracked], *, best: Choice, plain: float) -> None:
        present = rate_of(load, candidates, [found.length for found in tracked])
        floor = max(present, LEAST_GAIN * plain)
        if best.rate < LEAST_GAIN * plain:
            self._choice = best
            self._stop(f"drafts promise {best.rate / plain:.2f} of plain decoding", wait=FIRST_WAIT)
            self._assign(candidates, tracked)
        elif best.rate >= GAIN_TO_SWITCH * present or (present < floor and best.rate > present):
            self._choice = best
            self._assign(candidates, tracked)
            self.num_switches += 1
            logger.debug("draft lengths %s promise %.3f times the rate of those before", [f.length for f in tracked], best.rate / present)

    def _reconsider(self, candidates: Sequence[Candidate], tracked: Sequence[_Tracked], *, best: Choice, plain: float) -> None:
        """Resume drafting where it promises a gain; else a probe that was just answered failed."""
        self._choice = best
        self._assign(candidates, tracked)  # what a probe would order
        self._is_promising = best.rate >= GAIN_TO_SWITCH * plain
        if self._is_promising and self._probe.may_resume and not self.bank.is_exhausted:
            self.is_drafting = True
            self._probe.end()
            self.num_switches += 1
            self._last_plain = self._step
            logger.debug("drafting again: it promises %.2f of plain decoding", best.rate / plain)
        elif self._probe.is_answered:
            self._probe.fail()

    def _assign(self, candidates: Sequence[Candidate], tracked: Sequence[_Tracked]) -> None:
        for candidate, found in zip(candidates, tracked, strict=True):
            self._set_length(found, self._length_of(found, candidate))

    def _length_of(self, found: _Tracked, candidate: Candidate) -> int:
        return drafts_at(candidate, price=self._choice.price, longest=self._choice.longest) if found.limit else 0

    def _set_length(self, found: _Tracked, length: int) -> None:
        found.length = length
        found.order = DraftOrder(length, found.request.sampling.speculation.method) if found.limit else _NONE

    def _stop(self, reason: str, *, wait: int, is_latched: bool = False) -> None:
        self.is_drafting = False
        self.num_switches += 1
        self._probe.stop(wait, is_latched=is_latched)
        logger.debug("drafting stops: %s", reason)

    # -- estimates -----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Bring estimates up to date and drop records of requests that are gone (an abort is not heard of)."""
        for source, surprise in self._surprises.items():
            if surprise.is_surprised:
                self._forget(source)  # before the newest counts are added: those are of the new time
        for request_id, found in list(self._tracked.items()):
            if found.last_step < self._step - 4 * DECIDE_EVERY:
                del self._tracked[request_id]
            self._fold(found)
        for source, totals in self._totals.items():
            totals.fold(GLOBAL_MEMORY)
            self._rates[source] = global_rates(totals)
            self._unknown[source] = outlook_of(self._rates[source])
            surprise = self._surprises.setdefault(source, Surprise(self.max_nodes))
            if surprise.is_over:
                surprise.expect(self._rates[source])
        self.step_cost.refresh()
        self._is_startled = False

    def _fold(self, found: _Tracked) -> None:
        for source, tally in found.sources.items():
            tally.fold(REQUEST_MEMORY, into=self._totals.setdefault(source, Tally(self.max_nodes)))

    def _forget(self, source: str) -> None:
        """Acceptance has changed: what was learnt before counts little, and what comes now counts soon."""
        self._num_hasty = HASTY_DECISIONS
        self._totals[source].forget(CHANGED_MEMORY)
        for found in self._tracked.values():
            if source in found.sources:
                found.sources[source].forget(CHANGED_MEMORY)

    def _outlook(self, found: _Tracked) -> Outlook:
        parts = [(tally.asked[1], request_outlook(tally, self._rates[source])) for source, tally in found.sources.items() if tally.asked[1]]
        return mixed(parts) if parts else self._outlook_unknown(found.source)

    def _outlook_unknown(self, source: str) -> Outlook:
        known = self._unknown.get(source)
        if known is None:
            known = self._unknown[source] = outlook_of(global_rates(Tally(self.max_nodes)))
        return known
