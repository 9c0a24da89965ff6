"""HostWorker: a user's class in a process of its own, asked with a deadline; whatever it does costs drafts and nothing else.

Owns: the process, how long it may take, when it is started again, and the count of its faults. Must not know: batches or tensors.
Read next: host_child.py, custom_class.py.

No step ever waits longer than `step_s`. A call that takes longer goes on in its process: its answer is thrown away when it comes,
and until then nothing is asked. Only when it exceeds `hang_s` (`first_step_s` for the first call, which may compile) is the process
killed and started again. After each such fault nothing is asked for a while, twice as long each time, until a call succeeds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Literal

from specdec.errors import ConfigError
from specdec.logging import get_logger
from specdec.proposers.host_child import Answer, Ask, Offer, Started

logger = get_logger(__name__)

# A new interpreter that knows where we find modules. `multiprocessing` would run the user's main script again.
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from specdec.proposers.host_child import serve; serve(int(sys.argv[2]))"
FaultKind = Literal["exception", "bad_reply", "late", "hang", "crash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds: to import and construct; for a step to wait; before a late call counts as hung; and between tries."""

    start_s: float = 120.0
    step_s: float = 0.25
    hang_s: float = 5.0
    first_step_s: float = 60.0
    pause_s: float = 0.5
    longest_pause_s: float = 60.0


class HostWorker:
    """The parent's handle. faults: how often each kind of fault happened since the start. generation: grows with each new process,
    which knows nothing of what was sent to the one before."""

    def __init__(self, offer: Offer, deadlines: Deadlines) -> None:
        self.offer, self.deadlines = offer, deadlines
        self.faults: Counter[str] = Counter()  # by FaultKind
        self.generation = 0
        self._connection, self._process, self._stop = self._launch()
        self._waiting_since: float | None = None  # for the start, or for a late answer
        self._waits_for_start = False
        self._has_answered = False
        self._resume_at = 0.0
        self._strikes = 0

    def start(self) -> Literal["host", "device"]:
        """Wait until the class is constructed; return which kind of class it is.

        Raises:
            ConfigError: it cannot be imported or constructed, or not in time.
        """
        name = f"custom proposer class '{self.offer.path}'"
        try:
            if not self._connection.poll(self.deadlines.start_s):
                rule = f"{name} was not ready within {self.deadlines.start_s:g} s"
                raise ConfigError(rule, hint="do slow work in the first call of propose")
            started: Started = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise ConfigError(f"{name} ended its process with exit code {code} while it was loaded", hint="see its output above") from None
        except ConfigError:
            self.close()
            raise
        if started.kind == "error":
            self.close()
            raise ConfigError(started.text, hint="speculative_config.model must name a class: docs/guides/custom-proposer.md shows one")
        return started.kind

    def close(self) -> None:
        """End the process."""
        self._stop()

    def is_ready(self) -> bool:
        """True when the class can be asked now. Restarts a process that died, and gives up on one that hangs; never waits."""
        now = time.monotonic()
        if now < self._resume_at:
            return False
        if self._process.poll() is not None and self._waiting_since is None:
            self._restart(now)
            return False
        if self._waiting_since is None:
            return True
        try:
            has_answer = self._connection.poll(0)
            answer = self._connection.recv() if has_answer else None
        except Exception:  # a torn message can fail in any way
            self._fault("crash", f"its process ended with exit code {self._process.poll()}")
            return False
        if answer is None:
            self._give_up_if_hung(now - self._waiting_since)
            return False
        if isinstance(answer, Started) and answer.kind == "error":
            self._fault("crash", answer.text)
            return False
        self._waiting_since, self._waits_for_start = None, False
        return True

    def ask(self, ask: Ask) -> Answer | None:
        """Call the class, which must be ready; None when it gives no answer in time, or dies."""
        try:
            self._connection.send(ask)
            has_answer = self._connection.poll(self.deadlines.step_s)
            answer: Answer | None = self._connection.recv() if has_answer else None
        except Exception:  # a torn message can fail in any way
            self._fault("crash", f"its process ended with exit code {_exit_code(self._process)}")
            return None
        if answer is None:
            self._waiting_since = time.monotonic()
            self._count("late", f"it gave no answer within {self.deadlines.step_s:g} s")
            self._pause()
            return None
        self._has_answered = True
        if answer.error:
            self._count("exception" if answer.error.startswith("propose raised") else "bad_reply", answer.error)
        for fault in answer.faults:
            self._count("bad_reply", fault)
        self._strikes = 0
        return answer

    def _launch(self) -> tuple[Connection, subprocess.Popen[bytes], Callable[[], object]]:
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what the class prints must not mix with the output of a program that uses the engine
            start_new_session=True,  # Ctrl-C is for the engine, which then ends this process
        )
        theirs.close()
        stop = weakref.finalize(self, _end, ours, process)
        with suppress(OSError):  # it ended at once; whoever reads next learns why
            ours.send(self.offer)
        self.generation += 1
        return ours, process, stop

    def _restart(self, now: float) -> None:
        self._stop()
        self._connection, self._process, self._stop = self._launch()
        self._waiting_since, self._waits_for_start, self._has_answered = now, True, False

    def _give_up_if_hung(self, waited_s: float) -> None:
        late_s = self.deadlines.hang_s if self._has_answered else self.deadlines.first_step_s
        limit_s = self.deadlines.start_s if self._waits_for_start else late_s
        if waited_s > limit_s:
            self._fault("hang", f"it gave no answer within {limit_s:g} s, so its process is started again")

    def _fault(self, kind: FaultKind, text: str) -> None:
        """The process is lost: end it, and wait a while before the next one."""
        self._count(kind, text)
        self._stop()
        self._waiting_since, self._waits_for_start = None, False
        self._pause()

    def _pause(self) -> None:
        self._resume_at = time.monotonic() + min(self.deadlines.pause_s * 2**self._strikes, self.deadlines.longest_pause_s)
        self._strikes = min(self._strikes + 1, 32)

    def _count(self, kind: FaultKind, text: str) -> None:
        """Count a fault, and log the first one of its kind."""
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            told = "custom proposer class '%s' failed, requests go on without its drafts (more of this kind are counted, not logged): %s"
            logger.warning(told, self.offer.path, text)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process whose connection has closed; it may need a moment to end."""
    try:
        return process.wait(0.1)
    except subprocess.TimeoutExpired:
        return None


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()
