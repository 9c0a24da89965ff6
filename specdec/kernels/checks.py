"""Checks that every kernel wrapper makes once, before a launch turns a mistake into a wild pointer.

Owns: the texts of these errors. Must not know: any kernel. Read next: sample.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
Rule = tuple[torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]


def check(tensors: Mapping[str, Rule]) -> torch.device:
    """Check name -> (tensor, shape, allowed dtypes): shape, dtype, rows without gaps, one device. Return that device.

    Raises:
        ValueError: the first tensor that breaks a rule, by name, with what it is and what it must be.
    """
    first_name, (first, _, _) = next(iter(tensors.items()))
    for name, (tensor, shape, dtypes) in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but it must be {shape}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} has dtype {tensor.dtype}, but it must be one of {[str(dtype) for dtype in dtypes]}")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, but {first_name} is on {first.device}: move them to one device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, but it must be contiguous: call .contiguous() on it")
    return first.device
