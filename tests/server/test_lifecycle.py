"""Clients that leave, queues that fill, engines that die, servers that stop: nobody hangs and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specdec.errors import ConfigError
from specdec.server.options import ServerOptions
from specdec.server.serve import bind
from tests.server.serving import Served, serving

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "abc", "max_tokens": 240, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_aborts_its_request() -> None:
    with serving(delay_s=0.02) as served:
        with httpx.stream("POST", served.url + COMPLETION, json=LONG | {"stream": True}, timeout=30) as response:
            chunks = response.iter_bytes()
            next(chunks)
            assert served.engine.num_unfinished == 1
        served.wait_idle(3)
        assert served.engine.stats.num_requests_by_reason["abort"] == 1
        assert served.engine.stats.gauges.kv_cache_usage == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_aborts_its_requests(stream: bool) -> None:
    body = LONG | {"n": 3, "stream": stream, "prompt": ["a", "b"]}
    with serving(is_open=False) as served:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(served.url + COMPLETION, json=body, timeout=0.3)
        time.sleep(0.2)
        served.runner.gate.set()
        served.wait_idle(3)
        assert served.engine.stats.num_requests_by_reason["abort"] == 6


def test_a_full_queue_is_429_with_a_time_to_come_back() -> None:
    with serving(is_open=False, max_waiting=2, max_num_seqs=1) as served:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(served.post(COMPLETION, {"prompt": "abc", "max_tokens": 4}))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        until = time.monotonic() + 5
        refused = served.post(COMPLETION, {"prompt": "abc", "max_tokens": 4, "n": 3, "stream": True})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        hopeless = served.post(COMPLETION, {"prompt": "abc", "max_tokens": 4, "n": 4})
        assert hopeless.status_code == 400, "four sequences never fit into one place to run and two to wait"
        assert "holds 3" in hopeless.json()["error"]["message"]
        served.runner.gate.set()
        for thread in threads:
            thread.join(max(until - time.monotonic(), 1))
        assert [answer.status_code for answer in answers] == [200] * 3
        served.wait_idle()


def test_a_dead_engine_is_503_everywhere_and_never_shows_a_traceback() -> None:
    with serving(delay_s=0.01) as served:
        events: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST", served.url + CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
            ) as r:
                events.extend(r.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.2)
        served.runner.raises = RuntimeError("the accelerator is on fire")
        reader.join(10)
        data = [line.removeprefix("data: ") for line in events if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == "engine_dead"
        assert served.get("/health").status_code == 503
        assert served.get("/ready").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            served.client.completions.create(model="toy", prompt="abc")
        assert caught.value.status_code == 503
        assert "Traceback" not in str(caught.value)
        assert served.get("/metrics").status_code == 200


def test_a_request_that_fails_alone_is_500_and_the_others_go_on() -> None:
    with serving() as served:
        served.runner.errors["cmpl-mine"] = "no finite logit"
        failed = served.post(COMPLETION, {"prompt": "abc", "request_id": "mine"})
        assert failed.status_code == 500
        assert "no finite logit" in failed.json()["error"]["message"]
        assert served.post(COMPLETION, {"prompt": "abc", "request_id": "other"}).status_code == 200


def test_an_id_in_use_is_refused() -> None:
    body = LONG | {"request_id": "twice"}
    with serving(delay_s=0.02) as served, httpx.stream("POST", served.url + COMPLETION, json=body | {"stream": True}) as response:
        chunks = response.iter_bytes()
        next(chunks)
        again = served.post(COMPLETION, body)
        assert again.status_code == 400
        assert again.json()["error"]["param"] == "request_id"


def test_health_turns_red_when_work_waits_and_no_step_ends() -> None:
    with serving(is_open=False, options=ServerOptions(stall_after_s=0.3)) as served:
        thread = threading.Thread(target=lambda: served.post(COMPLETION, {"prompt": "abc", "max_tokens": 2}))
        assert served.get("/health").status_code == 200
        thread.start()
        time.sleep(0.6)
        stalled = served.get("/health")
        assert stalled.status_code == 503
        assert "no step ended" in stalled.json()["status"]
        served.runner.gate.set()
        thread.join(10)
        assert served.get("/health").status_code == 200


def _lines(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize(("drain_s", "is_cut"), [(20.0, False), (0.3, True)], ids=["finishes", "is-cut"])
def test_a_stop_lets_streams_finish_within_the_limit(drain_s: float, is_cut: bool) -> None:
    with serving(delay_s=0.02, drain_s=drain_s) as served:
        answers: dict[str, httpx.Response] = {}

        def ask(name: str, body: dict[str, Any]) -> None:
            answers[name] = served.post(COMPLETION, body)

        threads = [threading.Thread(target=ask, args=(name, LONG | {"stream": name == "stream"})) for name in ("stream", "whole")]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        served.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
        lines = _lines(answers["stream"])
        assert lines[-1] == "[DONE]"
        if is_cut:
            assert json.loads(lines[-2])["error"]["code"] == "shutting_down"
            assert answers["whole"].status_code == 503
            assert answers["whole"].json()["error"]["code"] == "shutting_down"
        else:
            assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
            assert answers["whole"].json()["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url + "/health")


def test_sixty_four_clients_at_once_all_get_their_own_answer(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        if index % 2:
            answer = await client.completions.create(model="toy", prompt=f"client {index}", max_tokens=24)
            return answer.choices[0].text
        stream = await client.completions.create(model="toy", prompt=f"client {index}", max_tokens=24, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(64)))

    assert asyncio.run(run()) == [served.solo_text(f"client {index}", 24) for index in range(64)]
    served.wait_idle()


def test_bodies_over_the_limit_are_413() -> None:
    with serving(options=ServerOptions(max_body_bytes=2000)) as served:
        announced = served.post(COMPLETION, {"prompt": "x" * 3000})

        def parts() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(30):
                yield b"x" * 100
            yield b'"}'

        chunked = served.http.post(served.url + COMPLETION, content=parts(), headers={"content-type": "application/json"})
        for refused in (announced, chunked):
            assert refused.status_code == 413
            assert "2000 bytes" in refused.json()["error"]["message"]
        assert served.post(COMPLETION, {"prompt": "x"}).status_code == 200


def test_api_keys_guard_all_but_the_probes() -> None:
    with serving(options=ServerOptions(api_keys=("first-key", "second-key"))) as served:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert served.get(path).status_code == 200
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}, {"Authorization": "Bearer \xe9"}):
            encoded = {name: value.encode("latin-1") for name, value in header.items()}
            refused = served.http.post(served.url + COMPLETION, json={"prompt": "x"}, headers=encoded)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        for key in ("first-key", "second-key"):
            client = openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0)
            assert client.completions.create(model="toy", prompt="x", max_tokens=2).choices
        tenants = {new.tenant for plan in served.runner.plans for new in plan.new}
        assert len(tenants) == 2
        assert not any("key" in tenant for tenant in tenants)


def test_cors_is_off_unless_an_origin_is_given(served: Served) -> None:
    asks = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert served.http.options(served.url + COMPLETION, headers=asks).status_code == 405
    with serving(options=ServerOptions(cors_origins=("https://app.example",), api_keys=("k",))) as open_to_one:
        allowed = httpx.options(open_to_one.url + COMPLETION, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        refused = httpx.post(open_to_one.url + COMPLETION, json={}, headers={"Origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_a_port_in_use_is_a_configuration_error() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on '127.0.0.1' is already in use") as caught:
            bind("127.0.0.1", port)
        assert caught.value.hint is not None
    with pytest.raises(ConfigError, match="not an address"):
        bind("no-such-host.invalid", 1)
    with pytest.raises(ConfigError, match="port"):
        bind("127.0.0.1", 70000)


@pytest.mark.parametrize("bad", [{"max_body_bytes": 1}, {"stall_after_s": 0}, {"metrics_compat": "x"}, {"api_keys": ("",)}])
def test_bad_options_stop_the_start(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ServerOptions(**bad)


PROGRAM = """
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.server.app import create_app
from specdec.server.serve import bind, run_server
from tests.server.serving import served_tokenizer
from tests.toy import ToyRunner, toy_resolved

resolved, tokenizer = toy_resolved(num_drafts=2), served_tokenizer()
engine = AsyncEngine(EngineCore(resolved, ToyRunner.for_config(resolved), tokenizer=tokenizer))
sock = bind("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
run_server(create_app(engine, tokenizer, resolved), sock=sock, drain_s=5)
engine.close()
print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_process_with_code_0(which: signal.Signals) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        _wait_ready(f"http://127.0.0.1:{port}/ready")
        process.send_signal(which)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "closed\n", "")


def _wait_ready(url: str) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            assert httpx.get(url).status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < until
            time.sleep(0.2)
