"""A headless Chromium, driven by chromedriver's own protocol (W3C WebDriver over HTTP): no package beyond Debian's two is needed."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the protocol gives to elements
KEYS = {"right": "\ue014", "enter": "\ue007", "tab": "\ue004"}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,900",
)


class Browser:
    """One session. Scripts run as function bodies; `return` gives a value back."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def command(self, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.post(f"/session/{self._session}/{path}", json=body or {})
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value}"
        return value

    def open(self, url: str) -> None:
        self.command("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.command("execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Return the first true value of a script."""
        until = time.monotonic() + seconds
        while True:
            value = self.run(script)
            if value:
                return value
            assert time.monotonic() < until, (
                f"not within {seconds} s: {script}\n{self.run('return document.body.innerText')}\n{self.errors()}"
            )
            time.sleep(0.1)

    def find(self, selector: str) -> str:
        return str(self.command("element", {"using": "css selector", "value": selector})[ELEMENT])

    def click(self, selector: str) -> None:
        self.command(f"element/{self.find(selector)}/click")

    def write(self, selector: str, text: str) -> None:
        self.command(f"element/{self.find(selector)}/value", {"text": text})

    def press(self, key: str) -> None:
        """Press and release one of KEYS, wherever the focus is."""
        strokes = [{"type": kind, "value": KEYS[key]} for kind in ("keyDown", "keyUp")]
        self.command("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def devtools(self, name: str, **parameters: Any) -> Any:
        return self.command("goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, path: Path) -> None:
        answer = self._http.get(f"/session/{self._session}/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))

    def errors(self) -> list[str]:
        """Return what the console said at level SEVERE since the last call: exceptions, refused policies, failed loads."""
        return [entry["message"] for entry in self.command("se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]


def programs() -> tuple[str, str]:
    """Return the paths of Chromium and its driver, or skip the test and say so."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "chromium" if chromium is None else "chromedriver"
        pytest.skip(f"NOT TESTED: there is no {missing} on PATH (Debian: apt install chromium chromium-driver); the page was not opened")
    return chromium, driver


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser until the block ends."""
    chromium, driver = programs()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory() as profile, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90) as http:
            _wait_for(lambda: bool(http.get("/status").json()["value"]["ready"]))
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wishes = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wishes}}).json()["value"]
            assert "sessionId" in answer, answer
            try:
                yield Browser(http, answer["sessionId"])
            finally:
                http.delete(f"/session/{answer['sessionId']}")
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(is_ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            if is_ready():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, "chromedriver did not start"
        time.sleep(0.1)
