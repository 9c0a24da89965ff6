"""Watchdog: tells when the engine is dead or stalled, and puts the states of all requests into the log, once per stall.

Owns: the verdict that /health gives. Must not know: HTTP. Read next: engine/async_engine.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from specdec.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
MAX_SHOWN = 64  # requests in an answer of /health; the log has all of them


class Watchdog:
    """Judges one engine. stall_after_s: seconds without the end of a step, while work waits, that count as a stall."""

    def __init__(self, engine: AsyncEngine, *, stall_after_s: float) -> None:
        self._engine = engine
        self._stall_after_s = stall_after_s
        self._is_reported = False

    def fault(self) -> str | None:
        """Return what is wrong, None while all is well. The first time that a stall is seen, the log gets every request's state."""
        engine = self._engine
        if not engine.is_alive:
            return engine.error.message if engine.error else "the engine is stopped"
        if engine.last_step_age_s <= self._stall_after_s:
            self._is_reported = False
            return None
        message = f"no step ended for {engine.last_step_age_s:.0f} s while {engine.num_unfinished} requests wait"
        if not self._is_reported:
            self._is_reported = True
            logger.error("%s; their states: %s", message, json.dumps(engine.describe_requests()))
        return message

    def states(self) -> list[dict[str, Any]]:
        """Return the states of at most MAX_SHOWN requests, without their ids: clients choose those, and /health is open to all."""
        return list(self._engine.describe_requests().values())[:MAX_SHOWN]

    async def run(self) -> None:
        """Look every second until cancelled, so that a stall is in the log also where nobody asks /health."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._stall_after_s))
            self.fault()
