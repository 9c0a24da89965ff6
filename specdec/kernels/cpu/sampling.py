"""The CPU column of sampling: a row's processed law and its inverse-CDF draw, without sorting a row.

Owns: filling the call table of sampling_rows.py, and the choice of torch_sampling.py where that cannot be compiled or the logits
are not float32 rows. Semantics: kernels/reference.py, target_law and sample_logits. Letters: L logits rows, V vocabulary.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import numpy as np
import torch

from specdec.kernels.cpu import team, torch_sampling

logger = logging.getLogger(__name__)
draw = torch_sampling.draw


def target_probs(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the law [L, V] float32 of plain sampling, greedy rows one-hot. A cut that no row asks for costs nothing."""
    rows = _compiled_for(logits)
    if rows is None:
        return torch_sampling.target_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    laws = torch.empty(logits.shape, dtype=torch.float32)
    _run(rows, logits, laws=laws, ids=None, u=None, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return laws


def sample_logits(
    logits: torch.Tensor, u: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Draw one id per row of logits [L, V]; greedy rows take the lowest id of the largest logit, -1 where none is finite."""
    rows = _compiled_for(logits)
    if rows is None:
        return torch_sampling.sample_logits(logits, u, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    _run(rows, logits, laws=None, ids=ids, u=u, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return ids


@cache
def _compiled() -> ModuleType | None:
    """The compiled rows; None, after a warning, where they cannot be built, and without an OpenMP runtime to run them on."""
    if not team.register_symbols():
        return None
    try:
        from specdec.kernels.cpu import sampling_rows  # compiles, or reads numba's cache, on first use
    except RuntimeError as error:  # numba finds no folder to cache in
        logger.warning("sampling is not compiled, plain torch samples instead: %s; set NUMBA_CACHE_DIR to a writable folder", error)
        return None
    return sampling_rows


def _compiled_for(logits: torch.Tensor) -> ModuleType | None:
    fits = logits.dtype == torch.float32 and logits.numel() > 0 and logits.stride(1) == 1
    return _compiled() if fits else None


def _run(
    rows: ModuleType,
    logits: torch.Tensor,
    *,
    laws: torch.Tensor | None,
    ids: torch.Tensor | None,
    u: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    num_rows, vocab = logits.shape
    num_threads = torch.get_num_threads() if num_rows > 1 else 1
    floats = [tensor.to(torch.float32).contiguous() for tensor in (temperature, top_p, min_p)]
    noise = floats[0] if u is None else u.to(torch.float32).contiguous()
    limits = top_k.to(torch.int64).contiguous()
    _check_lengths(num_rows, temperature=floats[0], top_p=floats[1], min_p=floats[2], u=noise, top_k=limits)
    scratch = torch.empty((num_threads, vocab), dtype=torch.float32)
    table = np.zeros(rows.NUM_SLOTS, dtype=np.int64)
    table[rows.LOGITS], table[rows.ROW_STRIDE] = logits.data_ptr(), logits.stride(0)
    table[rows.NUM_ROWS], table[rows.VOCAB], table[rows.NUM_THREADS] = num_rows, vocab, num_threads
    table[rows.NOISE], table[rows.TOP_K] = noise.data_ptr(), limits.data_ptr()
    table[rows.TEMPERATURE], table[rows.TOP_P], table[rows.MIN_P] = (tensor.data_ptr() for tensor in floats)
    table[rows.SCRATCH] = scratch.data_ptr()
    table[rows.IDS] = 0 if ids is None else ids.data_ptr()
    table[rows.LAWS] = 0 if laws is None else laws.data_ptr()
    team.run(rows.rows_entry.address, table.ctypes.data, num_threads)


def _check_lengths(num_rows: int, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != (num_rows,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but there are {num_rows} rows: give one entry per row")
