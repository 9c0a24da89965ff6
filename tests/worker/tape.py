"""A CUDA graph in slow motion on the CPU: operations are noted once, at fixed addresses with fixed numbers, and done again on replay.

What a capture forbids fails here too: reading a tensor on the host, or making one from the host's numbers. Kernels of ours, which a
device sees as one launch each, are noted whole; rows that no request owns get NaN from attention, as memory of any content would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specdec.kernels.cpu import layer_ops as cpu_ops
from specdec.kernels.graphs import CapturedGraphs, Tensors
from tests.worker.late import CASTS, READS

Entry = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
_open: list[list[Entry]] = []  # the tape that is being written, if one is


class HostRead(Exception):
    """A capture would have failed: the host looked at the device."""


class NoHost(TorchFunctionMode):
    """Refuses what waits for the device or uploads from unpinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or name in CASTS or name in ("tensor", "as_tensor"):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


class Noting(TorchDispatchMode):
    def __init__(self, entries: list[Entry]) -> None:
        super().__init__()
        self.entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.entries.append((func, args, kwargs or {}, out))
        return out


def launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a device sees it: one launch, whatever it does inside."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            out = kernel(*args, **kwargs)
        if _open:
            _open[-1].append((kernel, args, kwargs, out))
        return out

    return launch


class Tape:
    """A Recorder. `replays` counts what was replayed by all tapes of a list."""

    def __init__(self, replays: list[int]) -> None:
        self._replays = replays

    def record(self, compute: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        compute()
        entries: list[Entry] = []
        with _tape(entries), Noting(entries), NoHost():
            outputs = compute()
        return lambda: self._replay(entries), outputs

    def num_bytes(self) -> int:
        return 0

    @torch.inference_mode()
    def _replay(self, entries: list[Entry]) -> None:
        self._replays.append(len(entries))
        for func, args, kwargs, out in entries:
            taken = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            fresh = func(*args, **kwargs)
            for mine, new in zip(tree_leaves(out), tree_leaves(fresh), strict=True):
                if isinstance(mine, torch.Tensor) and mine.untyped_storage().data_ptr() not in taken:
                    mine.copy_(new)


@contextmanager
def _tape(entries: list[Entry]) -> Iterator[None]:
    _open.append(entries)
    try:
        yield
    finally:
        _open.pop()


def _attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = cpu_ops.paged_attention(query, *args, **kwargs)
    out[int(kwargs["device_lens"][0][-1]) :] = float("nan")
    return out


LAYER_OPS = SimpleNamespace(
    rms_norm=cpu_ops.rms_norm,
    add_rms_norm=cpu_ops.add_rms_norm,
    rotate=cpu_ops.rotate,
    silu_mul=cpu_ops.silu_mul,
    store_kv=launched(cpu_ops.store_kv),
    paged_attention=launched(_attention),
)


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let engines that are loaded from now on capture target and drafter on tapes. Returns the list that grows with each replay."""
    replays: list[int] = []
    for module in ("specdec.models.llama", "specdec.models.draft_head"):
        monkeypatch.setattr(f"{module}.layer_ops", lambda _device: LAYER_OPS)
    graphs = lambda *_: CapturedGraphs(lambda: Tape(replays), torch.device("cpu"))  # noqa: E731
    for name, value in (("make_graphs", graphs), ("captures_target", lambda *_: True), ("captures_drafter", lambda *_: True)):
        monkeypatch.setattr(f"specdec.worker.worker.{name}", value)
    return replays
