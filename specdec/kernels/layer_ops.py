"""layer_ops(device): the column of small decoder operators for a device.

Owns: the choice. The CPU column is kernels/cpu/layer_ops.py; what each operator means is in kernels/reference.py.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch


def layer_ops(device: torch.device) -> ModuleType:
    """Return the module of rms_norm, add_rms_norm, rotate, silu_mul, store_kv, paged_attention for the device."""
    return _column(device.type)


@cache
def _column(device_type: str) -> ModuleType:
    name = {"cpu": "specdec.kernels.cpu.layer_ops", "cuda": "specdec.kernels.triton_layer_ops"}.get(device_type)
    if name is None:
        raise ValueError(f"no kernels for device type {device_type!r}")
    return import_module(name)
