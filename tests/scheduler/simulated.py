"""A decoding engine without a model: requests whose drafts are kept by a coin, and a clock that charges rows and drafting.

World(lambda step, request: 0.6).run(policy, num_requests=4, num_steps=1000) is a Run; its rate() is to be compared with plain_rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import StepTimings
from specdec.scheduler.policy import DraftPolicy
from specdec.scheduler.request import CommitResult, Request

Acceptance = Callable[[int, int], float]  # (step, request) -> probability that a draft is kept, given that those before were


@dataclass(frozen=True)
class Curve:
    """Seconds of a step: flat up to `flat` rows, then `per_row` of the first step more for each; `per_draft` of it for each draft pass."""

    base_s: float = 0.015
    flat: int = 16
    per_row: float = 0.03
    per_draft: float = 0.0
    per_context: float = 0.0

    def step_s(self, rows: int, context: int = 0) -> float:
        return self.base_s * (1 + self.per_row * max(rows - self.flat, 0) + self.per_context * context)

    def draft_s(self, longest: int) -> float:
        return self.base_s * self.per_draft * longest


@dataclass
class Run:
    """What a simulated run came to. seconds and tokens: per step; expected: tokens on average over the coins.

    lengths: drafts ordered in each step, summed over requests.
    """

    plain_step_s: float
    num_requests: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    least_bank_s: float = 0.0
    most_bank_s: float = 0.0

    def rate(self, *, skip: int = 0) -> float:
        return sum(self.tokens[skip:]) / sum(self.seconds[skip:])

    def expected_rate(self, *, skip: int = 0) -> float:
        return sum(self.expected[skip:]) / sum(self.seconds[skip:])

    @property
    def plain_rate(self) -> float:
        return self.num_requests / self.plain_step_s


@dataclass
class World:
    """One load. existence: probability that a lookup finds anything at all in a step. noise: relative spread of step times.

    later: acceptance of all drafts of a request but its first, where it differs (Run.expected does not know it).
    """

    acceptance: Acceptance
    curve: Curve = Curve()
    existence: float = 1.0
    noise: float = 0.0
    seed: int = 1
    later: float | None = None

    def run(self, policy: DraftPolicy, *, num_requests: int, num_steps: int, sampling: SamplingParams | None = None) -> Run:
        rng = random.Random(self.seed)
        requests = [
            Request(request_id=f"r{i}", prompt_token_ids=(1,) * 32, sampling=sampling or SamplingParams(), max_model_len=10**9)
            for i in range(num_requests)
        ]
        run = Run(self.curve.step_s(num_requests), num_requests)
        waiting = [0] * num_requests
        first = True
        for step in range(num_steps):
            orders = policy.orders(requests, batch_size=num_requests)
            wanted = [orders[request.request_id].max_nodes for request in requests]
            results, rows, expected = {}, 0, 0.0
            for index, request in enumerate(requests):
                drafts = waiting[index] if self.existence >= 1 or rng.random() < self.existence else 0
                rows += 1 + drafts
                rate, kept = self.acceptance(step, index), 0
                expected += sum(rate**depth for depth in range(drafts + 1))
                while kept < drafts and rng.random() < (rate if kept == 0 or self.later is None else self.later):
                    kept += 1
                results[request.request_id] = CommitResult(
                    token_ids=(7,) * (kept + 1),
                    num_drafts=drafts,
                    num_accepted=kept,
                    num_verified=kept,
                    source="ngram" if drafts else "",
                    start=32,
                )
            blur = 1 + self.noise * rng.uniform(-1, 1)
            forward_s, draft_s = self.curve.step_s(rows) * blur, self.curve.draft_s(max(wanted))
            timings = StepTimings(forward_s=forward_s, propose_s=draft_s)
            policy.observe(results, num_rows=rows, timings=timings)
            if not first:  # the first tokens come from reading the prompts
                run.seconds.append(forward_s + draft_s)
                run.tokens.append(sum(len(result.token_ids) for result in results.values()))
                run.expected.append(expected)
                run.lengths.append(sum(wanted))
            first = False
            waiting = wanted
            bank_s = policy.state().bank_s
            run.least_bank_s, run.most_bank_s = min(run.least_bank_s, bank_s), max(run.most_bank_s, bank_s)
        return run

    def best_fixed_rate(self, *, num_requests: int, max_nodes: int, acceptance: float) -> float:
        """Return the rate of the best single length for everybody, in the long run."""
        rates = []
        for length in range(max_nodes + 1):
            tokens = num_requests * sum(acceptance**depth for depth in range(length + 1))
            rates.append(tokens / (self.curve.step_s(num_requests * (1 + length)) + self.curve.draft_s(length)))
        return max(rates)
