"""The Triton column of the decoder operators under the names of cpu/layer_ops.py. Semantics: reference_layers.py."""

from specdec.kernels.norm_rope import add_rms_norm, rms_norm, rotate, silu_mul
from specdec.kernels.paged_attention import paged_attention
from specdec.kernels.store_kv import store_kv

__all__ = ["add_rms_norm", "paged_attention", "rms_norm", "rotate", "silu_mul", "store_kv"]
