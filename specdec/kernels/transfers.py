"""Transfers: small values on their way between host and device, without stopping either.

Owns: pinned buffers, the copy stream, and the only wait for a step's results. Must not know: what the values mean.
On a CPU both sides are the same memory: nothing is copied and everything is there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


def upload(values: Sequence[int], device: torch.device, *, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return host numbers as a tensor on the device; the copy is queued from pinned memory, and nobody waits for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download(Protocol):
    """Tensors on their way to the host."""

    @property
    def is_here(self) -> bool:
        """True when `lists` would not wait."""
        ...

    def lists(self) -> list[Any]:
        """Wait for the copy, and return each tensor as nested lists. Any thread may call it, more than once."""
        ...


class Downloads(Protocol):
    """Starts copies to the host. is_late: they arrive some time after they were started."""

    is_late: bool

    def start(self, *tensors: torch.Tensor) -> Download:
        """Copy int64 tensors as they are at this place of the device's queue; they may be overwritten behind it."""
        ...


def downloads_for(device: torch.device) -> Downloads:
    """Return how results come from the device."""
    return HostReads() if device.type == "cpu" else PinnedCopies(device)


class HostReads:
    """Results of a CPU: read where they lie, at once."""

    is_late = False

    def start(self, *tensors: torch.Tensor) -> Download:
        """Return the values as they are now."""
        return _Here([tensor.tolist() for tensor in tensors])


class PinnedCopies:
    """Results of a GPU: one copy for all tensors, on a stream of its own, into pinned memory, its end marked by an event."""

    is_late = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, *tensors: torch.Tensor) -> Download:
        """Queue the copy behind what computes the tensors; what the device does next runs beside it."""
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            packed.record_stream(self._stream)  # its memory is not given to others before the copy is done
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return _Pinned(host, arrived, [tensor.shape for tensor in tensors])


class _Here:
    is_here = True

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def lists(self) -> list[Any]:
        return self._values


class _Pinned:
    def __init__(self, host: torch.Tensor, arrived: torch.cuda.Event, shapes: list[torch.Size]) -> None:
        self._host, self._arrived, self._shapes = host, arrived, shapes

    @property
    def is_here(self) -> bool:
        return bool(self._arrived.query())

    def lists(self) -> list[Any]:
        self._arrived.synchronize()
        parts = self._host.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self._shapes, strict=True)]
