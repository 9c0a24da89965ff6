"""Lanes: where the worker's code runs. On the engine's own thread, or on one thread of its own while the engine plans and delivers.

Owns: the worker's thread. Must not know: plans, results. Read next: core.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Jobs = SimpleQueue[Callable[[], None] | None]


class Lane(Protocol):
    """Runs the worker's code, in the order it was handed over."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand work over; the future tells what it returned or raised."""
        ...

    def close(self) -> None:
        """Wait for what was handed over, and end."""
        ...


class OwnThread:
    """Runs work where it is handed over."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the work now."""
        future: Future[T] = Future()
        _run(future, lambda: work(*args, **kwargs))
        return future

    def close(self) -> None:
        """Nothing runs any more."""


class WorkerThread:
    """Runs everything on one thread, loading included: libgomp keeps a team for each thread that computes, and lets none of them
    spin when their threads outnumber the cores.

    The thread is a daemon, so that a step that hangs does not hang the exit; it ends with its owner when nobody closes it.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name="specdec-worker", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue the work behind what was handed over before."""
        future: Future[T] = Future()
        self._jobs.put(lambda: _run(future, lambda: work(*args, **kwargs)))
        return future

    def close(self) -> None:
        """Wait for what was handed over, and end the thread."""
        self._jobs.put(None)
        self._thread.join()


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # who waits for the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)


def _work_off(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the worker, which may be dropped while this thread waits
