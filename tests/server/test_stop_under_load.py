"""SIGTERM while many streams run: each ends with its last token or a clean error, and the process with code 0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = 24
PROGRAM = """
import sys, threading
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.server.app import create_app
from specdec.server.serve import bind, run_server
from tests.server.serving import PacedRunner, served_tokenizer
from tests.toy import coin, toy_resolved

resolved = toy_resolved(num_drafts=3, max_model_len=256, num_blocks=4096, max_num_seqs=16, max_num_batched_tokens=256)
tokenizer = served_tokenizer()
runner = PacedRunner.for_config(resolved, drafter=coin(0.5))
runner.delay_s, runner.gate = 0.01, threading.Event()
runner.gate.set()
engine = AsyncEngine(EngineCore(resolved, runner, tokenizer=tokenizer))
sock = bind("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
run_server(create_app(engine, tokenizer, resolved), sock=sock, drain_s=float(sys.argv[1]))
engine.close()
print("closed", flush=True)
"""


async def ask(http: httpx.AsyncClient, index: int, begun: list[int]) -> dict[str, Any]:
    """Stream, or for every third client a whole answer; return the last event or the body."""
    body = {"prompt": f"client {index}", "max_tokens": 200 if index % 2 else 20, "ignore_eos": True}
    if index % 3 == 0:
        answer: dict[str, Any] = (await http.post("/v1/completions", json=body)).json()
        return answer
    lines: list[str] = []
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as events:
        async for line in events.aiter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
                begun.append(index)
    assert lines[-1] == "[DONE]", "every stream that began is closed as the protocol says"
    last: dict[str, Any] = json.loads(lines[-2])
    return last


async def stop_under_load(process: subprocess.Popen[str], port: str) -> list[dict[str, Any]]:
    """Start all clients, send the signal once streams run, and wait for everybody."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as http:
        until = time.monotonic() + 60
        while True:
            try:
                assert (await http.get("/ready")).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
        begun: list[int] = []
        clients = [asyncio.ensure_future(ask(http, index, begun)) for index in range(CLIENTS)]
        while len(set(begun)) < 8 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*clients)


def ending(last: dict[str, Any]) -> str:
    """How an answer ended."""
    return str(last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"])


@pytest.mark.slow
@pytest.mark.parametrize("drain_s", [30.0, 0.2], ids=["all-finish", "some-are-cut"])
def test_streams_end_cleanly_and_the_process_with_code_0(drain_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        endings = [ending(last) for last in asyncio.run(stop_under_load(process, process.stdout.readline().strip()))]
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "closed\n", "")
    if drain_s > 1:
        assert endings == ["length"] * CLIENTS
    else:
        assert set(endings) <= {"length", "shutting_down"}
        assert "shutting_down" in endings
