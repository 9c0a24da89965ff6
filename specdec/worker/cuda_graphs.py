"""Which shapes are captured as CUDA graphs, whether they are, and what memory they take.

Owns: the choice of buckets, and the bytes set aside for captures before the KV cache gets the rest. Must not know: what is captured
(target_pass.py, proposers/device_chain.py). Read next: kernels/graphs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from specdec.config.engine import ResolvedConfig
from specdec.kernels.graphs import Bucket, CapturedGraphs, CudaRecorder, Graphs, NoGraphs
from specdec.models.registry import TargetModel

logger = logging.getLogger(__name__)
DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # query rows of a step
BYTES_PER_GRAPH = 8 * 2**20  # assumed for the driver's own records of a capture; the log line at start tells what was really taken
_LIVE_WIDTHS = 6  # hidden-sized tensors alive at once inside a layer, beside the wide ones


def step_buckets(resolved: ResolvedConfig) -> tuple[Bucket, ...]:
    """Return the shapes of verify steps: query lengths of 1, powers of two, and all drafts, each at every number of rows to capture."""
    limits = resolved.engine.scheduler
    found = set()
    for length in _query_lens(_max_nodes(resolved) + 1):
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens // length)
        found |= {Bucket(min(-(-size // length), most), length) for size in _sizes(resolved) if most}
    return tuple(sorted(found))


def chain_buckets(resolved: ResolvedConfig) -> tuple[Bucket, ...]:
    """Return the shapes of drafting: requests, and drafts behind the first one of each."""
    requests = {min(size, resolved.engine.scheduler.max_num_seqs) for size in _sizes(resolved)}
    return tuple(sorted(Bucket(count, length) for count in requests for length in _query_lens(_max_nodes(resolved) - 1)))


def _max_nodes(resolved: ResolvedConfig) -> int:
    return resolved.traits.max_nodes if resolved.traits else 0


def _sizes(resolved: ResolvedConfig) -> Sequence[int]:
    return resolved.engine.execution.cudagraph_capture_sizes or DEFAULT_SIZES


def _query_lens(longest: int) -> list[int]:
    """Powers of two up to the longest, and the longest: a batch is padded to less than twice its length."""
    powers = [2**i for i in range(max(longest, 1).bit_length())]
    return sorted({length for length in (*powers, longest) if 1 <= length <= longest})


def captures_target(resolved: ResolvedConfig, model: TargetModel) -> bool:
    """Whether steps of the target are captured."""
    return resolved.device == "cuda" and not resolved.engine.execution.enforce_eager and model.is_capturable and _backend_allows(resolved)


def captures_drafter(resolved: ResolvedConfig) -> bool:
    """Whether drafting is captured where the method allows: as the target, unless the speculative config says enforce_eager."""
    speculative: Any = resolved.engine.speculative
    is_eager = resolved.engine.execution.enforce_eager or speculative is None or speculative.enforce_eager
    return resolved.device == "cuda" and not is_eager and _backend_allows(resolved)


def _backend_allows(resolved: ResolvedConfig) -> bool:
    """Other backends plan on the host, or do work by the longest context that there may be."""
    return resolved.engine.execution.attention_backend in ("auto", "triton")


def make_graphs(resolved: ResolvedConfig, model: TargetModel) -> Graphs:
    """Return what captures and replays. Says why where a GPU is served without."""
    device = torch.device(resolved.device)
    if captures_target(resolved, model) or captures_drafter(resolved):
        return CapturedGraphs(lambda: CudaRecorder(device), device, counted_bytes=graph_bytes(resolved, model))
    if device.type == "cuda":
        logger.info("CUDA graphs: none (%s)", _reason(resolved, model))
    return NoGraphs()


def _reason(resolved: ResolvedConfig, model: TargetModel) -> str:
    if resolved.engine.execution.enforce_eager:
        return "--enforce-eager"
    if not _backend_allows(resolved):
        return f"attention backend {resolved.engine.execution.attention_backend}"
    return f"{type(model).__name__} may wait for the device"


def graph_bytes(resolved: ResolvedConfig, model: TargetModel) -> int:
    """Return the bytes to set aside for all captures: outputs and inputs of each, and the working memory of the widest.

    An estimate from shapes: nothing can be captured before the KV cache exists, which takes what this leaves.
    """
    total = _target_bytes(resolved, model) if captures_target(resolved, model) else 0
    return total + (_chain_bytes(resolved) if captures_drafter(resolved) else 0)


def _target_bytes(resolved: ResolvedConfig, model: TargetModel) -> int:
    config, buckets = resolved.hf_config, step_buckets(resolved)
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    element = torch.empty(0, dtype=model.dtype).element_size()
    num_outputs = 1 + len(resolved.traits.taps if resolved.traits else ())
    outputs = sum(bucket.num_rows for bucket in buckets) * config.hidden_size * num_outputs * element
    working = max(bucket.num_rows for bucket in buckets) * (_LIVE_WIDTHS * config.hidden_size + 3 * wide) * element
    return outputs + working + _fixed_bytes(resolved, buckets)


def _chain_bytes(resolved: ResolvedConfig) -> int:
    """Logits of the widest drafting pass thrice (logits, law, running sum), and the laws that are handed to verification."""
    buckets = chain_buckets(resolved)
    has_laws = resolved.traits is not None and resolved.traits.laws != "one_hot"
    laws = sum(bucket.num_rows for bucket in buckets) if has_laws else 0
    widest = max((bucket.num_requests for bucket in buckets), default=0)
    return (laws + 3 * widest) * resolved.vocab_size * 4 + _fixed_bytes(resolved, buckets)


def _fixed_bytes(resolved: ResolvedConfig, buckets: Sequence[Bucket]) -> int:
    table_bytes = 4 * -(-(resolved.max_model_len + 1) // resolved.engine.cache.block_size)
    return len(buckets) * BYTES_PER_GRAPH + sum(bucket.num_requests for bucket in buckets) * table_bytes
