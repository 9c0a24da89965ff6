"""The servers that are compared: started here on free ports and stopped again, or named by URL.

Owns: processes of our own server. Must not know: loads or figures.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from specdec import __version__
from specdec.errors import ConfigError

START_LIMIT_S = 600.0  # the first start converts the embedded model
STOP_LIMIT_S = 40.0


@dataclass(slots=True)
class Arm:
    """One side of a comparison. serve_args None: a server that somebody else runs.

    program: another engine's command, which takes serve_args, --host and --port and answers /health; () is ours.
    pid: of the process, while it was started here and runs.
    """

    label: str
    serve_args: tuple[str, ...] | None = None
    url: str = ""
    program: tuple[str, ...] = ()
    pid: int | None = None

    def describe(self) -> str:
        """Return how to get this server."""
        if self.serve_args is None:
            return self.url
        command = self.program or ("specdec serve",)
        return " ".join(
            Path(word).name if word.startswith("/") else word for word in (*command, *self.serve_args)
        )  # a path tells no reader


def parse_arm(text: str, shared: str) -> Arm:
    """Return the arm of `NAME=ARGS`, or `NAME=@COMMAND ARGS` for another engine; `shared` are arguments that every arm of ours gets.

    Raises:
        ConfigError: no name.
    """
    label, equals, args = text.partition("=")
    if not label or not equals:
        raise ConfigError(
            f"--arm is {text!r}, but it must be NAME=ARGS", hint="for example --arm 'ngram=--spec-method ngram --spec-tokens 5'"
        )
    if args.startswith("@"):
        return Arm(label, serve_args=(), program=tuple(shlex.split(args[1:])))
    return Arm(label, serve_args=(*shlex.split(shared), *shlex.split(args)))


@contextlib.contextmanager
def spawned(arms: Sequence[Arm]) -> Iterator[None]:
    """Start the arms one after the other, set their URLs, and stop them at the end. Idle servers use no processor time.

    Raises:
        ConfigError: a server ended or did not come up; the message holds the end of its log.
    """
    with contextlib.ExitStack() as stack:
        for arm in arms:
            stack.enter_context(_running(arm))
        yield


@contextlib.contextmanager
def _running(arm: Arm) -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arm.url = f"http://127.0.0.1:{port}"
    program = arm.program or (sys.executable, "-m", "specdec", "serve")
    command = [*program, *(arm.serve_args or ()), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=Path(__file__).resolve().parent.parent)
        try:
            arm.pid = process.pid
            _wait_until_ready(arm, process, log)
            yield
        finally:
            arm.pid = None
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(arm: Arm, process: subprocess.Popen[bytes], log: Any) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    print(f"starting {arm.label}: {arm.describe()}", file=sys.stderr)
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise ConfigError(f"arm {arm.label} ended with status {process.returncode}:\n{_tail(log)}", hint="fix its arguments")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{arm.url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise ConfigError(f"arm {arm.label} was not ready after {START_LIMIT_S:.0f} s:\n{_tail(log)}", hint="see why it is slow")


def _tail(log: Any) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-15:])


def machine() -> dict[str, Any]:
    """Return what a figure depends on: commit, processor, cores, and versions."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip() or None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _gpu_name(),
        "specdec": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    with contextlib.suppress(OSError):
        query = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
        return query.stdout.strip() or None
    return None
