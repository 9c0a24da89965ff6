"""`specdec serve` as the README starts it: its commands do what it says, bad requests are 400, and it lives on and stops cleanly."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from specdec.errors import ConfigError
from specdec.models.source import embedded_gguf

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240.0  # on a machine with other work; the first start also compiles and converts
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of a server without any option but a free port."""
    try:
        embedded_gguf()
    except ConfigError as error:
        pytest.skip(f"THE EMBEDDED MODEL IS NOT TESTED: {error.message}")
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0"]
    with log.open("w") as stderr:
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, text=True, env={**os.environ})
    try:
        until = time.monotonic() + START_LIMIT_S
        while not (found := re.search(r"serving .* on (http://[\w.:-]+)", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        while not _is_ready(found[1]):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield found[1], server
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait(10)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def url(process: tuple[str, subprocess.Popen[str]]) -> str:
    return process[0]


def readme_commands() -> list[str]:
    """The two commands of the README's `Try it` block, each as one line of shell."""
    block = re.search(r"```bash\n(curl .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no block that begins with curl"
    chat, metrics = block[1].strip().rsplit("\n", 1)
    return [chat, metrics]


def counters(url: str) -> dict[str, float]:
    """Sums of the speculation counters over their labels."""
    sums: dict[str, float] = {}
    for name, value in re.findall(
        r"^specdec_num_(\w+)_total(?:\{.*\})? (\S+)$", httpx.get(url + "/metrics", timeout=30).text, re.MULTILINE
    ):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_the_copy_prompt_of_the_readme_is_answered_with_accepted_drafts(url: str) -> None:
    before = counters(url)
    chat, metrics = readme_commands()
    words = shlex.split(chat)
    body = json.loads(words[words.index("-d") + 1])
    path = next(word for word in words if word.startswith("localhost:8000")).removeprefix("localhost:8000")
    answer = httpx.post(url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert "lighthouse keeper" in text
    after = counters(url)
    assert after["accepted_tokens"] - before.get("accepted_tokens", 0) > 0
    assert after["draft_tokens"] >= after["accepted_tokens"]
    pattern = re.search(r"grep -E '(.*)'", metrics)
    assert pattern
    shown = [line for line in httpx.get(url + "/metrics", timeout=30).text.splitlines() if re.search(pattern[1], line)]
    assert len(shown) >= 3, "the README's grep shows drafts, draft tokens and accepted tokens"


def test_a_streamed_chat_answer_is_the_whole_one(url: str) -> None:
    body = {"temperature": 0, "max_tokens": 24, "messages": [{"role": "user", "content": "Name three colours."}]}
    whole = httpx.post(url + "/v1/chat/completions", json=body, timeout=120).json()["choices"][0]["message"]["content"]
    pieces = []
    with httpx.stream("POST", url + "/v1/chat/completions", json=body | {"stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    assert "".join(pieces) == whole != ""


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b'{"messages": [', "JSON"),
        (json.dumps({"messages": [{"role": "user", "content": "word " * 20000}]}).encode(), "maximum context length"),
        (json.dumps({"messages": MESSAGES, "temprature": 0}).encode(), "did you mean `temperature`?"),
        (json.dumps({"messages": MESSAGES, "temperature": "hot"}).encode(), "temperature"),
        (json.dumps({"messages": MESSAGES, "speculative": {"num_speculative_tokens": 4000}}).encode(), "num_speculative_tokens"),
        (json.dumps({"messages": MESSAGES, "logit_bias": {"60000": 1}}).encode(), "logit_bias"),
        (b"\x00\xff", "JSON"),
    ],
    ids=["broken JSON", "too long", "misspelt", "wrong type", "too many drafts", "no such token", "no text"],
)
def test_a_bad_request_is_400_and_the_next_one_is_answered(url: str, raw: bytes, part: str) -> None:
    refused = httpx.post(url + "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}, timeout=60)
    assert refused.status_code == 400, refused.text
    assert part in refused.json()["error"]["message"]
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=client.models.list().data[0].id, messages=MESSAGES, max_tokens=3, temperature=0)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert httpx.get(url + "/health", timeout=10).status_code == 200


def test_a_stop_signal_ends_the_server_with_code_0(process: tuple[str, subprocess.Popen[str]]) -> None:
    """Last in the file: the server is gone afterwards."""
    _, server = process
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
