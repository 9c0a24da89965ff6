"""WorkerThread: one thread for everything the worker does, in order, that nobody has to close."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest

from specdec.engine.core import EngineCore
from specdec.engine.worker_thread import WorkerThread
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import request, resolved_for, write_checkpoint


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "specdec-worker"]


def test_work_is_done_in_order_on_one_thread() -> None:
    lane = WorkerThread()
    seen: list[tuple[int, int]] = []
    futures = [lane.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(50)]
    for future in futures:
        future.result(10)
    assert [index for index, _ in seen] == list(range(50))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    lane.close()


def test_what_work_raises_reaches_who_waits_and_the_thread_goes_on() -> None:
    lane = WorkerThread()
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0).result(10)
    with pytest.raises(KeyboardInterrupt):
        lane.submit(_interrupt).result(10)
    assert lane.submit(max, 3, 4).result(10) == 4
    lane.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_closing_waits_for_what_was_handed_over() -> None:
    lane = WorkerThread()
    gate, done = threading.Event(), threading.Event()
    lane.submit(lambda: (gate.wait(10), done.set()))
    threading.Timer(0.05, gate.set).start()
    lane.close()
    assert done.is_set()


def test_a_thread_that_nobody_closed_ends_with_its_owner_and_holds_no_work() -> None:
    class Owner:
        def work(self) -> None:
            pass

    before = len(threads())
    lane, owner = WorkerThread(), Owner()
    lane.submit(owner.work).result(10)
    lane.submit(int).result(10)  # the thread has let go of the first when it runs the second
    held, thread = weakref.ref(owner), threads()[-1]
    del owner
    gc.collect()
    assert held() is None
    del lane
    gc.collect()
    thread.join(10)
    assert len(threads()) == before


def test_the_model_is_loaded_and_stepped_on_the_same_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that computes has an OpenMP team of its own."""
    import specdec.worker.worker as worker

    used: list[str] = []
    load, execute = worker.load_runner, worker.ModelRunner.execute

    def recording_load(*args: object, **options: object) -> object:
        used.append(threading.current_thread().name)
        return load(*args, **options)

    def recording_execute(*args: object) -> object:
        used.append(threading.current_thread().name)
        return execute(*args)

    monkeypatch.setattr(worker, "load_runner", recording_load)
    monkeypatch.setattr(worker.ModelRunner, "execute", recording_execute)
    path = write_checkpoint(tmp_path, seed=1)
    toy_tokenizer().hf.save_pretrained(path)
    core = EngineCore.from_config(resolved_for(path, async_scheduling=True))
    core.add_request(request("r", [1, 2, 3], max_tokens=3))
    while core.has_work:
        core.step()
    core.close()
    assert set(used) == {"specdec-worker"}
    assert len(used) >= 4
