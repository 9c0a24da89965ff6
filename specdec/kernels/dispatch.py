"""kernel(name, device): one implementation per operation and device, chosen by a table and never by surprise.

Owns: the three columns. Must not know: what an operation does (reference.py and its neighbours say that).
Read next: reference.py. `SPECDEC_KERNELS=reference` selects the oracle on every device, for looking into a suspicion.

An entry is a module below this package, with ":function" where the function has another name there. A CPU entry that points at a
reference module is a choice made here, in the open: the operation loops over requests but not over ids, and no faster form has
been needed yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

ENVIRONMENT = "SPECDEC_KERNELS"
_REFERENCE, _LAYERS, _STATE = "reference", "reference_layers", "reference_state"

REFERENCE: dict[str, str] = {
    "uniform": "philox",
    "target_law": _REFERENCE,
    "sample": _REFERENCE,
    "sample_logits": _REFERENCE,
    "verify_coupled": _REFERENCE,
    "rejection_sample": _REFERENCE,
    "block_verify": _REFERENCE,
    "fly": _REFERENCE,
    "typical": _REFERENCE,
    "synthetic": _REFERENCE,
    "prepare_inputs": _STATE,
    "post_update": _STATE,
    "compact_kv": _STATE,
    "ngram_match": "reference_lookup",
    "store_kv": _LAYERS,
    "paged_attention": _LAYERS,
    "rms_norm": _LAYERS,
    "add_rms_norm": _LAYERS,
    "rotate": _LAYERS,
    "silu_mul": _LAYERS,
}

CPU: dict[str, str] = (
    REFERENCE
    | {"target_law": "cpu.sampling:target_probs", "sample": "cpu.sampling:draw", "sample_logits": "cpu.sampling"}
    | {"verify_coupled": "cpu.verification", "prepare_inputs": "cpu.state", "post_update": "cpu.state", "ngram_match": "cpu.lookup"}
    | dict.fromkeys(("rejection_sample", "block_verify", "fly", "typical"), "torch_chains")
    | dict.fromkeys(("store_kv", "paged_attention", "rms_norm", "add_rms_norm", "rotate", "silu_mul"), "cpu.layer_ops")
)

TRITON: dict[str, str] = {
    "uniform": "sample",
    "target_law": "sample",
    "sample": "sample",
    "sample_logits": "sample",
    "verify_coupled": "verify_coupled",
    "rejection_sample": "rejection_sample",
    "block_verify": "block_verify",
    "fly": "lossy",
    "typical": "lossy",
    "synthetic": "lossy",
    "prepare_inputs": "input_prep",
    "post_update": "post_update",
    "compact_kv": "compact_kv",
    "ngram_match": "ngram_match",
    "store_kv": "store_kv",
    "paged_attention": "paged_attention",
    "rms_norm": "norm_rope",
    "add_rms_norm": "norm_rope",
    "rotate": "norm_rope",
    "silu_mul": "norm_rope",
}

_COLUMNS = {"reference": REFERENCE, "cpu": CPU, "triton": TRITON}
_SERVED = {"cpu": "cpu", "cuda": "triton"}  # ROCm builds of torch also call their devices cuda


def kernel(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the implementation of an operation for a device; all columns share its name, signature and result.

    Raises:
        ValueError: no such operation, no column for the device, or SPECDEC_KERNELS holds something else than "reference".
    """
    return load(name, column_of(device))


def column_of(device: torch.device) -> str:
    """Return "cpu", "triton" or "reference": the column that serves a device now."""
    asked = os.environ.get(ENVIRONMENT, "")
    if asked not in ("", "reference"):
        raise ValueError(f"{ENVIRONMENT} is {asked!r}, but it must be 'reference' or unset: the served column follows the device")
    if asked:
        return asked
    if device.type not in _SERVED:
        raise ValueError(f"no kernels for device {device.type!r}: use one of {sorted(_SERVED)}, or set {ENVIRONMENT}=reference")
    return _SERVED[device.type]


@cache
def load(name: str, column: str) -> Callable[..., Any]:
    """Return one operation of one column by name, importing its module on first use.

    Raises:
        ValueError: unknown operation or column; the message lists what there is.
    """
    if column not in _COLUMNS:
        raise ValueError(f"unknown kernel column {column!r}: choose one of {sorted(_COLUMNS)}")
    module = _COLUMNS[column].get(name)
    if module is None:
        raise ValueError(f"unknown kernel {name!r} in column {column!r}: choose one of {sorted(_COLUMNS[column])}")
    path, _, other_name = module.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"specdec.kernels.{path}"), other_name or name)
    return loaded
