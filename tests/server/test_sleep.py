"""/sleep, /wake_up, /is_sleeping, /reload_weights: who may call them, what requests see meanwhile, and that new weights answer."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.errors import ConfigError
from specdec.server.app import create_app
from specdec.server.options import ServerOptions
from specdec.worker.worker import load_runner
from tests.proposers.test_draft_model import drafted
from tests.proposers.tiny import write_checkpoint
from tests.server.serving import Served, hosting, served_tokenizer, serving

COMPLETION = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
KEY = {"Authorization": "Bearer k"}
OPTIONS = ServerOptions(enable_sleep_mode=True, api_keys=("k",))


class Kept:
    """Weights double: remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def sleep(self, level: int) -> None:
        self.told.append(level)

    def wake(self) -> None:
        self.told.append("wake")

    def reload(self, path: str | None, draft_path: str | None) -> None:
        self.told.append((path, draft_path))
        if path == "bad":
            raise ConfigError("model 'bad' was not found", hint="give a directory")


@contextmanager
def sleepy(**options: Any) -> Iterator[tuple[Served, Kept]]:
    with serving(**{"options": OPTIONS} | options) as served:
        kept = Kept()
        served.runner.weights = kept  # type: ignore[attr-defined]
        yield served, kept


def post(served: Served, path: str, body: Any = None) -> httpx.Response:
    return served.post(path, body, **KEY)


def is_sleeping(served: Served) -> bool:
    answer: bool = served.get("/is_sleeping", **KEY).json()["is_sleeping"]
    return answer


def test_the_routes_are_there_only_when_asked_for_and_only_for_holders_of_a_key(served: Served) -> None:
    assert served.post("/sleep", None).status_code == 404
    assert served.get("/is_sleeping").status_code == 404
    with pytest.raises(ConfigError, match="enable_sleep_mode is on, but there is no API key"):
        ServerOptions(enable_sleep_mode=True)
    with sleepy() as (running, kept):
        for path in ("/sleep", "/wake_up", "/reload_weights"):
            assert running.post(path, None).status_code == 401
        assert running.get("/is_sleeping").status_code == 401
        assert kept.told == []


def test_metrics_tell_the_sleep_level() -> None:
    def levels(served: Served) -> tuple[float, dict[str, float]]:
        text = served.get("/metrics").text
        own = re.findall(r"^specdec_sleep_level\{.*\} (\S+)$", text, re.MULTILINE)
        states = re.findall(r'^vllm:engine_sleep_state\{.*sleep_state="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return float(own[0]), {name: float(value) for name, value in states}

    with sleepy(options=replace(OPTIONS, metrics_compat="vllm")) as (served, _):
        assert levels(served) == (0, {"awake": 1, "weights_offloaded": 0, "discard_all": 0})
        post(served, "/sleep")
        assert levels(served) == (1, {"awake": 0, "weights_offloaded": 1, "discard_all": 0})
        post(served, "/sleep?level=2")
        assert levels(served) == (2, {"awake": 0, "weights_offloaded": 0, "discard_all": 1})
        post(served, "/wake_up")
        assert levels(served)[0] == 0
        post(served, "/sleep")
        post(served, "/reload_weights")
        assert levels(served) == (0, {"awake": 1, "weights_offloaded": 0, "discard_all": 0})


def test_a_sleeping_server_answers_503_and_wakes() -> None:
    with sleepy() as (served, kept):
        first = post(served, COMPLETION, LONG).json()["choices"][0]["text"]
        assert not is_sleeping(served)
        assert post(served, "/sleep?level=2").status_code == 200
        assert is_sleeping(served)
        refused = post(served, COMPLETION, LONG)
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "asleep", "5")
        assert post(served, COMPLETION, LONG | {"stream": True}).status_code == 503
        assert served.get("/health").status_code == 200
        assert served.get("/ready").status_code == 503
        assert post(served, "/wake_up?tags=weights&tags=kv_cache").status_code == 200
        assert served.get("/ready").status_code == 200
        assert post(served, COMPLETION, LONG).json()["choices"][0]["text"] == first
        assert kept.told == [2, "wake"]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_running_requests_end_with_an_error_or_come_to_their_end(mode: str) -> None:
    with sleepy(delay_s=0.01) as (served, kept):
        answers: dict[str, httpx.Response] = {}

        def ask(name: str) -> None:
            answers[name] = post(served, COMPLETION, LONG | {"stream": name == "stream"})

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("stream", "whole")]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while served.engine.stats.num_generation_tokens < 8 and time.monotonic() < until:
            time.sleep(0.01)
        assert post(served, f"/sleep?mode={mode}").status_code == 200
        assert kept.told == [1]
        for thread in threads:
            thread.join(20)
        events = [json.loads(line[6:]) for line in answers["stream"].text.split("\n\n") if line and line != "data: [DONE]"]
        if mode == "abort":
            assert events[-1]["error"]["code"] == "asleep"
            assert (answers["whole"].status_code, answers["whole"].json()["error"]["code"]) == (503, "asleep")
        else:
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert answers["whole"].json()["choices"][0]["text"] == served.solo_text("abc", 200, ignore_eos=True)
        served.wait_idle()
        assert served.engine.core._scheduler.kv.pool.num_free == served.engine.core._scheduler.kv.pool.num_usable
        post(served, "/wake_up")
        assert post(served, COMPLETION, LONG).status_code == 200


def test_new_requests_are_refused_while_an_order_waits_and_a_second_order_too() -> None:
    with sleepy(is_open=False) as (served, kept):
        running = threading.Thread(target=lambda: post(served, COMPLETION, LONG))
        running.start()
        until = time.monotonic() + 10
        while not served.engine.num_unfinished and time.monotonic() < until:
            time.sleep(0.01)
        order = threading.Thread(target=lambda: post(served, "/sleep?mode=wait"))
        order.start()
        while served.engine.takes_requests and time.monotonic() < until:
            time.sleep(0.01)
        assert post(served, COMPLETION, LONG).json()["error"]["code"] == "asleep"
        second = post(served, "/reload_weights", {"weights_path": "w"})
        assert second.status_code == 400
        assert "another order" in second.json()["error"]["message"]
        served.runner.gate.set()
        running.join(20)
        order.join(20)
        assert kept.told == [1]
        assert is_sleeping(served)


def test_a_stop_while_an_order_waits_leaves_nobody_waiting() -> None:
    with sleepy(is_open=False, drain_s=0.2) as (served, _):
        answers: list[int] = []
        running = threading.Thread(target=lambda: post(served, COMPLETION, LONG))
        running.start()
        until = time.monotonic() + 10
        while not served.engine.num_unfinished and time.monotonic() < until:
            time.sleep(0.01)
        order = threading.Thread(target=lambda: answers.append(post(served, "/sleep?mode=wait").status_code))
        order.start()
        while served.engine.takes_requests and time.monotonic() < until:
            time.sleep(0.01)
        served.runner.raises = RuntimeError("the device is gone")
        served.runner.gate.set()
        running.join(20)
        order.join(20)
        assert answers == [503]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/sleep?level=3", None, "level"),
        ("/sleep?mode=keep", None, "mode"),
        ("/wake_up?tags=weights", None, "kv_cache and weights wake together"),
        ("/reload_weights", {"weights_path": "bad"}, "model 'bad' was not found (hint: give a directory)"),
        ("/reload_weights", {"weights_path": ""}, "weights_path"),
        ("/reload_weights", {"path": "x"}, "path"),
    ],
)
def test_what_cannot_be_done_is_400_and_the_server_goes_on(path: str, body: Any, message: str) -> None:
    with sleepy() as (served, _):
        refused = post(served, path, body)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert post(served, COMPLETION, LONG).status_code == 200


@contextmanager
def tiny(target: Path, draft: Path) -> Iterator[tuple[str, httpx.Client]]:
    """A served tiny model with a draft model."""
    resolved, tokenizer = drafted(target, draft, 3), served_tokenizer()
    engine = AsyncEngine(EngineCore(resolved, load_runner(resolved), tokenizer=tokenizer))
    try:
        with hosting(create_app(engine, tokenizer, resolved, options=OPTIONS)) as (url, _, http):
            http.headers.update(KEY)
            yield url, http
    finally:
        engine.close()


def test_after_a_reload_answers_are_those_of_a_fresh_start(tmp_path: Path) -> None:
    targets = [write_checkpoint(tmp_path / f"t{seed}", seed=seed) for seed in (1, 2)]
    drafts = [write_checkpoint(tmp_path / f"d{seed}", seed=seed, num_layers=1) for seed in (3, 4)]
    bodies = [
        {
            "prompt": [5, 6, 7, 8, 9, 10, 11, 12, index],
            "max_tokens": 24,
            "temperature": 0.7 * (index % 2),
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(1, 5)
    ]

    def ask(url: str, http: httpx.Client) -> list[tuple[Any, ...]]:
        answers = [http.post(url + COMPLETION, json=body | {"return_token_ids": True}).json() for body in bodies]
        return [tuple(answer["choices"][0]["token_ids"]) for answer in answers]

    with tiny(targets[0], drafts[0]) as (url, http):
        before = ask(url, http)
        assert http.post(url + "/sleep?level=2").status_code == 200
        body = {"weights_path": str(targets[1]), "draft_weights_path": str(drafts[1])}
        assert http.post(url + "/reload_weights", json=body).status_code == 200
        after = ask(url, http)
    with tiny(targets[1], drafts[1]) as (url, http):
        expected = ask(url, http)
    assert after == expected
    assert all(old != new for old, new in zip(before, after, strict=True))
