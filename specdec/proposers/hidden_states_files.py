"""HiddenStatesFiles: one safetensors file per request, written beside the engine, with a lock that says when it is whole.

Owns: names, locks, writer threads, and counts. Must not know: layers, caches, steps. Read next: extract_hidden_states.py.

While a request is to be written, `NAME.safetensors.lock` exists and is held with flock. A reader that finds it takes a shared lock,
which waits until the file is whole; one that does not find it may read at once. The file itself appears by one rename.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdec.config.hidden_states import hidden_states_path
from specdec.errors import ConfigError
from specdec.logging import get_logger

logger = get_logger(__name__)

WRITER_THREADS = 4
MAX_WAITING = 64  # files that wait for a thread; beyond that the engine waits, so that memory is bounded
LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What has been written since the start; num_failed counts files that could not be."""

    num_files: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_failed: int = 0


class HiddenStatesFiles:
    """The files of one engine.

    Raises:
        ConfigError: nothing can be written into the directory.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, str]) -> None:
        self.directory = directory
        self.progress = Progress()
        self._metadata = dict(metadata)
        self._locks: dict[str, int] = {}  # request id -> descriptor of its lock file
        self._guard = threading.Lock()
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._threads = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="hidden-states")
        self._logged_s = time.monotonic()
        _check_writable(directory)

    def path_of(self, request_id: str) -> Path:
        """Where a request's states go."""
        return hidden_states_path(self.directory, request_id)

    def open(self, request_id: str) -> None:
        """Take the lock of a request that will be written."""
        if request_id in self._locks:
            return
        try:
            descriptor = os.open(_lock_path(self.path_of(request_id)), os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a full disk, or a reader of a file of the same name
            self._failed(request_id, error)
            return
        self._locks[request_id] = descriptor

    def drop(self, request_id: str) -> None:
        """Give the lock up without a file."""
        descriptor = self._locks.pop(request_id, None)
        if descriptor is not None:
            _unlock(descriptor, self.path_of(request_id))

    def write(self, request_id: str, hidden_states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write hidden_states [T, layers, H] and token_ids [T] int64, both on the host, and give the lock up afterwards."""
        self._room.acquire()
        self._threads.submit(self._save, request_id, hidden_states, token_ids, self._locks.pop(request_id, None))

    def wait(self) -> None:
        """Return when everything is written; nothing can be written afterwards."""
        self._threads.shutdown(wait=True)

    def _save(self, request_id: str, hidden_states: torch.Tensor, token_ids: torch.Tensor, descriptor: int | None) -> None:
        path = self.path_of(request_id)
        part = path.with_name(f"{path.name}.part")
        try:
            save_file({"hidden_states": hidden_states, "token_ids": token_ids}, part, metadata=self._metadata)
            part.replace(path)
            self._written(len(token_ids), hidden_states.nbytes + token_ids.nbytes)
        except Exception as error:  # whatever the file system does, the request has its answer
            part.unlink(missing_ok=True)
            self._failed(request_id, error)
        finally:
            if descriptor is not None:
                _unlock(descriptor, path)
            self._room.release()

    def _written(self, num_tokens: int, num_bytes: int) -> None:
        with self._guard:
            done = self.progress
            self.progress = done = replace(
                done,
                num_files=done.num_files + 1,
                num_tokens=done.num_tokens + num_tokens,
                num_bytes=done.num_bytes + num_bytes,
            )
            is_due = done.num_files == 1 or time.monotonic() - self._logged_s >= LOG_INTERVAL_S
            self._logged_s = time.monotonic() if is_due else self._logged_s
        if is_due:
            mib = done.num_bytes / 2**20
            logger.info("hidden states: %d files, %d tokens, %.1f MiB in %s", done.num_files, done.num_tokens, mib, self.directory)

    def _failed(self, request_id: str, error: Exception) -> None:
        with self._guard:
            self.progress = replace(self.progress, num_failed=self.progress.num_failed + 1)
        if self.progress.num_failed == 1:
            logger.warning("hidden states of request %s were not written (more such failures are only counted): %s", request_id, error)


def _check_writable(directory: Path) -> None:
    name = "speculative_config.shared_storage_path"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} is {str(directory)!r}, which cannot be made: {error}", hint="name a directory") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} is {str(directory)!r}, which cannot be written to", hint="name a directory of yours")


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _unlock(descriptor: int, path: Path) -> None:
    _lock_path(path).unlink(missing_ok=True)
    os.close(descriptor)
