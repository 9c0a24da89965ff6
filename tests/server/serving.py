"""A real server on a free port for the tests: toy worker, toy tokenizer, everything between them as in production."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.scheduler.output import ModelRunnerOutput, SchedulerOutput
from specdec.server.app import create_app
from specdec.server.options import ServerOptions
from specdec.server.serve import DrainingServer, bind, make_server
from tests.engine.tokenizers_for_tests import TOY_EOS, toy_tokenizer
from tests.toy import Target, ToyRunner, coin, hash_target, toy_resolved

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


class PacedRunner(ToyRunner):
    """A toy worker whose steps take `delay_s` and wait for `gate`."""

    delay_s = 0.0
    gate: threading.Event

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.delay_s)
        assert self.gate.wait(30), "the test never opened the gate"
        return super().execute(plan)


@dataclass(frozen=True)
class Served:
    """A running server and what is behind it."""

    url: str
    engine: AsyncEngine
    runner: PacedRunner
    tokenizer: Tokenizer
    server: DrainingServer
    http: httpx.Client  # shared: making one reads certificates, which costs more than a request

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, http_client=self.http)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(self.url + path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(self.url + path, headers=headers)

    def solo_text(self, prompt: str, max_tokens: int, **sampling: Any) -> str:
        """What the toy target says, without server, batch or drafts."""
        from specdec.sampling_params import SamplingParams

        token_ids, _, _ = self.runner.solo(self.tokenizer.encode(prompt), SamplingParams(max_tokens=max_tokens, **sampling))
        return self.tokenizer.decode(token_ids)

    def wait_idle(self, seconds: float = 10) -> None:
        """Wait until no request is left in the engine."""
        until = time.monotonic() + seconds
        while self.engine.num_unfinished and time.monotonic() < until:
            time.sleep(0.01)
        assert self.engine.num_unfinished == 0


def served_tokenizer() -> Tokenizer:
    """The toy tokenizer with a chat template."""
    tokenizer = toy_tokenizer()
    tokenizer.hf.chat_template = TEMPLATE
    return tokenizer


@contextmanager
def serving(
    *,
    options: ServerOptions | None = None,
    delay_s: float = 0.0,
    is_open: bool = True,
    drain_s: float = 1.0,
    target: Target | None = None,
    tokenizer: Tokenizer | None = None,
    **toy: Any,
) -> Iterator[Served]:
    """Run a server until the block ends. Further arguments go to toy_resolved; is_open False holds the first step back."""
    toy = {"num_drafts": 3, "max_model_len": 256, "num_blocks": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 256} | toy
    resolved = toy_resolved(**{"eos_token_ids": (TOY_EOS,)} | toy)
    target = target or hash_target(eos_token_id=TOY_EOS, eos_rate=0.02)
    runner = PacedRunner.for_config(resolved, drafter=coin(0.6, vocab_size=resolved.vocab_size), target=target)
    assert isinstance(runner, PacedRunner)
    runner.delay_s = delay_s
    runner.gate = threading.Event()
    if is_open:
        runner.gate.set()
    tokenizer = tokenizer or served_tokenizer()
    engine = AsyncEngine(EngineCore(resolved, runner, tokenizer=tokenizer))
    try:
        with hosting(create_app(engine, tokenizer, resolved, options=options), drain_s=drain_s) as (url, server, http):
            try:
                yield Served(url, engine, runner, tokenizer, server, http)
            finally:
                runner.gate.set()  # before the server is asked to stop: running requests must be able to end
    finally:
        engine.close()


@contextmanager
def hosting(app: FastAPI, *, drain_s: float = 1.0) -> Iterator[tuple[str, DrainingServer, httpx.Client]]:
    """Serve an application on a free port until the block ends."""
    server = make_server(app, drain_s=drain_s)
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        with httpx.Client(timeout=60) as http:
            _wait_ready(http, url)
            yield url, server, http
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def _wait_ready(http: httpx.Client, url: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            if http.get(url + "/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.02)
