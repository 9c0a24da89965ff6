"""StepClock: how long the phases of a step take, on the clock of whoever runs them.

Owns: the marks between phases. Must not know: what happens in a phase.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import TypeAlias

import torch

from specdec.scheduler.output import StepTimings

Mark: TypeAlias = "float | torch.cuda.Event"
_PHASES = ("prepare_s", "forward_s", "verify_s", "propose_s")


class StepClock:
    """Marks prepare, forward, verify and propose. On a GPU marks are events in its queue: the host is long done when it gets there."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._marks: list[Mark] = []
        self.mark()

    def mark(self) -> None:
        """End a phase; the first mark is the start of the step."""
        if not self._on_device:
            self._marks.append(perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def timings(self) -> StepTimings:
        """Return the phases in seconds. On a GPU it waits for the last mark, which comes right behind the step's last copy."""
        if isinstance(self._marks[-1], torch.cuda.Event):
            self._marks[-1].synchronize()
        seconds = [_seconds(start, end) for start, end in pairwise(self._marks)]
        return StepTimings(**dict(zip(_PHASES, seconds, strict=False)))


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        assert isinstance(end, float), "a step has one clock"
        return end - start
    assert isinstance(end, torch.cuda.Event), "a step has one clock"
    return float(start.elapsed_time(end)) / 1000
