"""TokenBudget: how many query rows one step may still schedule.

Owns: the two budgets of a step. Must not know: requests or blocks. Read next: scheduler/scheduler.py.
"""

from __future__ import annotations


class TokenBudget:
    """Rows left in one step: target rows, and input rows, of which a request costs `draft_slots` more for its drafter.

    All counts are in tokens. `num_tokens` bounds the sum of scheduled rows, `num_inputs` the sum of rows and draft slots.
    """

    __slots__ = ("draft_slots", "num_inputs", "num_tokens")

    def __init__(self, num_tokens: int, num_inputs: int, *, draft_slots: int = 0) -> None:
        self.num_tokens = num_tokens
        self.num_inputs = num_inputs
        self.draft_slots = draft_slots

    @property
    def available(self) -> int:
        """The most rows one more request can get."""
        return max(min(self.num_tokens, self.num_inputs - self.draft_slots), 0)

    def take(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` rows are granted, and charge them; zero costs nothing."""
        granted = min(num_tokens, self.available)
        if granted > 0:
            self.num_tokens -= granted
            self.num_inputs -= granted + self.draft_slots
        return max(granted, 0)
