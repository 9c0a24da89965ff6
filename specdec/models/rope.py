"""RotaryTable: cosines and sines of every position, computed once from the checkpoint's rope parameters.

Owns: the table. Must not know: attention. Scaling rules come from transformers, the reference for each of them.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec.errors import ConfigError

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # types whose frequencies do not change with the sequence


class RotaryTable:
    """cos and sin, each [max_positions, head_dim / 2] float32, in the half-rotation layout of Llama checkpoints."""

    def __init__(self, hf_config: Any, *, head_dim: int, max_positions: int, device: torch.device) -> None:
        inv_freq, scale = _inverse_frequencies(hf_config, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq.float().cpu())
        self.cos = (angles.cos() * scale).to(device).contiguous()
        self.sin = (angles.sin() * scale).to(device).contiguous()


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """Return the rope parameters of a transformers config under either of its spellings."""
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    result = dict(parameters)
    result.setdefault("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    result.setdefault("rope_type", "default")
    return result


def _inverse_frequencies(hf_config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    parameters = rope_parameters(hf_config)
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (float(parameters["rope_theta"]) ** steps), 1.0
    if rope_type not in STATIC_ROPE_TYPES:
        raise ConfigError(
            f"rope_type is {rope_type!r}, which the lean model does not know", hint=f"known are {', '.join(STATIC_ROPE_TYPES)}"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
    return inv_freq, float(scale)
