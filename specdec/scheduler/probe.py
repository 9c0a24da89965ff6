"""Probe: trying drafting again, for a few steps and requests, while the policy decodes plainly.

Owns: when to try, with whom, and how long to wait after it failed. Must not know: estimates; adaptive.py judges the answer.
"""

from __future__ import annotations

from specdec.scheduler.cost import Bank

PROBE_STEPS, PROBE_REQUESTS = 4, 4
FIRST_WAIT, LONGEST_WAIT = 64, 4096  # plain steps between probes; doubles after each that failed
PROBE_SHARE = 0.001  # of plain time may be lost to probes, so cheap ones come more often than LONGEST_WAIT


class Probe:
    """One probe after the other. may_resume: False after the estimates proved wrong, until a probe has begun."""

    def __init__(self) -> None:
        self.may_resume = True
        self._wait = self._backoff = FIRST_WAIT
        self._left = 0  # steps of the probe that runs
        self._answer_in = 0  # orders until its last drafts were verified
        self._first = 0  # index of its first request
        self._lost_s = self._plain_s = 0.0

    @property
    def is_answered(self) -> bool:
        """True when the last probe's drafts were verified and nobody has judged them yet."""
        return self._answer_in == 1

    def group(self, num_requests: int, bank: Bank, *, is_promising: bool) -> frozenset[int]:
        """Return the indices of the requests that draft in this step, mostly none.

        is_promising: by the estimates drafting pays, so it was bad luck that exhausted the bank; then less must be refilled.
        """
        if self._left == 0:
            if self._answer_in > 1:
                self._answer_in -= 1
                return frozenset()
            self._wait -= 1
            if self._wait > 0 or bank.balance_s < -(0.9 if is_promising else 0.5) * bank.floor_s:
                return frozenset()
            self._left, self._lost_s, self.may_resume = PROBE_STEPS, 0.0, True
            self._first += PROBE_REQUESTS
        self._left = 0 if bank.is_exhausted else self._left - 1
        if self._left == 0:
            self._answer_in = 3
            self._wait = self._backoff
        return frozenset((self._first + index) % num_requests for index in range(min(PROBE_REQUESTS, num_requests)))

    def charge(self, lost_s: float, plain_s: float) -> None:
        """Remember what the probe costs; only called for steps with drafts."""
        self._lost_s += lost_s
        self._plain_s = plain_s

    def fail(self) -> None:
        """Wait longer next time: twice as long, or as long as its cost takes to be a small share of plain time."""
        self._answer_in = 0
        affordable = int(max(self._lost_s, 0.0) / (PROBE_SHARE * self._plain_s)) if self._plain_s > 0 else LONGEST_WAIT
        self._backoff = min(2 * self._backoff, max(affordable, FIRST_WAIT // 2), LONGEST_WAIT)
        self._wait = self._backoff

    def hasten(self) -> None:
        """A new request: try it soon, beginning with it."""
        self._wait = min(self._wait, 1)
        self._first = -2 * PROBE_REQUESTS

    def reset(self) -> None:
        """The load has changed: what failed may now succeed."""
        self._backoff = FIRST_WAIT
        self._wait = min(self._wait, FIRST_WAIT)

    def end(self) -> None:
        """Drafting resumes."""
        self._left = self._answer_in = 0
        self.reset()

    def stop(self, wait: int, *, is_latched: bool) -> None:
        """Drafting stops now. is_latched: estimates were wrong, so only a probe may resume it."""
        self._left = self._answer_in = 0
        self._backoff, self._wait = max(wait, 1), wait
        self.may_resume = not is_latched
