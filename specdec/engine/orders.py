"""Order: work on the engine itself, done on its thread when no request runs. Read next: engine/async_engine.py.

Owns: one such order and who waits for it. Must not know: what the work does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from specdec.errors import EngineAsleep, SpecdecError

PauseMode = Literal["abort", "wait"]  # what becomes of requests that run: they end with an error now, or end as they would have


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order. done: its end, for whoever waits; a SpecdecError is theirs, anything else is the engine's end too."""

    work: Callable[[], None]
    mode: PauseMode
    done: Future[None] = field(default_factory=Future)

    def run(self) -> SpecdecError | None:
        """Do it, and return what went wrong on purpose. Nobody is told yet: the engine must first take requests again."""
        try:
            self.work()
        except SpecdecError as error:
            return error
        return None

    def end(self, error: SpecdecError | None = None) -> None:
        """Tell who waits how it went; the first word counts."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def asleep() -> EngineAsleep:
    """The error of requests that come, or run, at the wrong time."""
    return EngineAsleep("the engine sleeps or changes its weights", hint="send the request again when it is awake")
