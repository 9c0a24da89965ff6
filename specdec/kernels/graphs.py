"""Graphs: a computation over a few fixed shapes, captured once for each and replayed over new contents.

Owns: buckets, static inputs and what pads them, torch.cuda.graph. Must not know: models, requests, or what a program computes.

A capture freezes addresses and every number that the host knew. So a program reads what changes from tensors alone, and rows that a
batch does not fill hold `pad` at its start and whatever was computed from it behind: they may be garbage, never a wild address.
Where nothing is captured (a CPU, --enforce-eager, a batch larger than every bucket), `bucket_for` is None and the caller computes as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeAlias

import torch

logger = logging.getLogger(__name__)
Tensors: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Shapes up to num_requests requests of at most query_len query rows each; num_rows in all."""

    num_requests: int
    query_len: int

    @property
    def num_rows(self) -> int:
        """Query rows when every request has as many as it may."""
        return self.num_requests * self.query_len

    def holds(self, num_requests: int, query_len: int) -> bool:
        """Whether a batch fits."""
        return num_requests <= self.num_requests and query_len <= self.query_len


@dataclass(frozen=True, slots=True)
class Field:
    """One static input: its shape in a bucket, and the value of what a batch does not fill of the first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: float = 0


class Program(Protocol):
    """What can be captured, under a name of its own."""

    @property
    def name(self) -> str:
        """Name in log lines."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The shapes to capture."""
        ...

    def fields(self, bucket: Bucket) -> Mapping[str, Field]:
        """The inputs."""
        ...

    def compute(self, inputs: Tensors, bucket: Bucket) -> Tensors:
        """Inputs of exactly the bucket's shapes -> outputs. Only tensors' contents may change from call to call."""
        ...


class Graphs(Protocol):
    """Runs programs by their captures."""

    def add(self, program: Program) -> None:
        """Let `capture` capture the program."""
        ...

    def capture(self) -> None:
        """Capture every program anew: at start, and when weights or caches have moved."""
        ...

    def drop(self) -> None:
        """Give the memory of all captures back."""
        ...

    def bucket_for(self, program: Program, num_requests: int, query_len: int) -> Bucket | None:
        """Return the smallest captured bucket that holds the batch, None where there is none."""
        ...

    def run(self, program: Program, bucket: Bucket, inputs: Tensors) -> Tensors:
        """Replay over `inputs`, each filling the start of its field. Outputs have the bucket's shapes and hold until the next run."""
        ...


class NoGraphs:
    """Nothing is captured: everybody computes as ever."""

    def add(self, program: Program) -> None:
        """Nothing to keep."""

    def capture(self) -> None:
        """Nothing to capture."""

    def drop(self) -> None:
        """Nothing to drop."""

    def bucket_for(self, program: Program, num_requests: int, query_len: int) -> Bucket | None:  # noqa: ARG002
        """No bucket."""
        return None

    def run(self, program: Program, bucket: Bucket, inputs: Tensors) -> Tensors:  # noqa: ARG002
        """Never called: there is no bucket."""
        raise AssertionError(f"{program.name} was not captured for {bucket}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """How a program is captured. buckets: its shapes; num_blocks B: width of the block table; block_size in tokens."""

    graphs: Graphs
    buckets: Sequence[Bucket]
    num_blocks: int
    block_size: int


EAGER = CapturePlan(graphs=NoGraphs(), buckets=(), num_blocks=0, block_size=1)


class Recorder(Protocol):
    """Captures a call."""

    def record(self, compute: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Return what replays the call, and the outputs that each replay writes."""
        ...

    def num_bytes(self) -> int:
        """Device memory in use by anybody."""
        ...


class CudaRecorder:
    """torch.cuda.graph, all captures in one memory pool: they are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, compute: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Call once outside a capture, so that kernels are compiled and libraries set up, and then inside one."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (the server's, pinned copies) may go on calling CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = compute()
        return graph.replay, outputs

    def num_bytes(self) -> int:
        """Bytes of the device that are taken."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: dict[str, torch.Tensor]
    pads: dict[str, float]
    replay: Callable[[], None]
    outputs: Tensors


class CapturedGraphs:
    """Programs captured by a recorder. make_recorder: called at every capture, since a memory pool ends with its graphs.

    counted_bytes: what was set aside for captures before the KV cache was made.
    """

    def __init__(self, make_recorder: Callable[[], Recorder], device: torch.device, *, counted_bytes: int = 0) -> None:
        self._make_recorder, self._device, self._counted_bytes = make_recorder, device, counted_bytes
        self._programs: dict[str, Program] = {}
        self._captured: dict[str, dict[Bucket, _Captured]] = {}

    def add(self, program: Program) -> None:
        """Keep the program for `capture`."""
        self._programs[program.name] = program

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all, widest first, so that narrower captures fit into the memory pool of wider ones."""
        self.drop()
        recorder = self._make_recorder()
        start, before = perf_counter(), recorder.num_bytes()
        for program in self._programs.values():
            wide_first = sorted(program.buckets, key=lambda bucket: bucket.num_rows, reverse=True)
            self._captured[program.name] = {bucket: self._record(recorder, program, bucket) for bucket in wide_first}
            logger.info("CUDA graphs of %s: %s", program.name, _shown(program.buckets))
        self._tell(perf_counter() - start, recorder.num_bytes() - before)

    def drop(self) -> None:
        """Forget all captures, and with them their pool."""
        self._captured.clear()

    def bucket_for(self, program: Program, num_requests: int, query_len: int) -> Bucket | None:
        """The captured bucket with the fewest rows that holds the batch."""
        fitting = [bucket for bucket in self._captured.get(program.name, ()) if bucket.holds(num_requests, query_len)]
        return min(fitting, key=lambda bucket: (bucket.num_rows, bucket.query_len), default=None)

    def run(self, program: Program, bucket: Bucket, inputs: Tensors) -> Tensors:
        """Fill the static inputs, pad what is left of them, replay."""
        captured = self._captured[program.name][bucket]
        assert inputs.keys() == captured.inputs.keys(), f"{program.name} takes {sorted(captured.inputs)}, not {sorted(inputs)}"
        for name, value in inputs.items():
            static, count = captured.inputs[name], len(value)
            static[:count].copy_(value, non_blocking=True)
            if count < len(static):
                static[count:].fill_(captured.pads[name])
        captured.replay()
        return captured.outputs

    def _record(self, recorder: Recorder, program: Program, bucket: Bucket) -> _Captured:
        fields = program.fields(bucket)
        inputs = {name: torch.full(x.shape, x.pad, dtype=x.dtype, device=self._device) for name, x in fields.items()}
        replay, outputs = recorder.record(lambda: program.compute(inputs, bucket))
        return _Captured(inputs, {name: field.pad for name, field in fields.items()}, replay, outputs)

    def _tell(self, seconds: float, num_bytes: int) -> None:
        count = sum(map(len, self._captured.values()))
        mib = 2**20
        logger.info("CUDA graphs: %d captured in %.1f s, %d MiB (%d counted)", count, seconds, num_bytes // mib, self._counted_bytes // mib)
        if num_bytes > self._counted_bytes:
            logger.warning("CUDA graphs took more memory than was counted: if requests run out of it, lower --memory-fraction")


def _shown(buckets: Sequence[Bucket]) -> str:
    """`1, 2, 4 requests x 6 rows; ...`: buckets by query length."""
    lengths = sorted({bucket.query_len for bucket in buckets})
    by_length = {length: sorted(x.num_requests for x in buckets if x.query_len == length) for length in lengths}
    return "; ".join(f"{', '.join(map(str, sizes))} requests x {length} rows" for length, sizes in by_length.items())
