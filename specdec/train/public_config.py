"""Keys that every exported head's config.json has, taken over from the target.

Owns: the spelling. Must not know: heads.
"""

from __future__ import annotations

from typing import Any


def shared_keys(target: Any, *, num_layers: int, draft_vocab: int) -> dict[str, Any]:
    """Sizes of the head's layers, which are the target's own, and its vocabularies."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": head_dim_of(target),
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": theta_of(target),
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def head_dim_of(target: Any) -> int:
    """Size of one attention head."""
    return int(getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads)


def theta_of(target: Any) -> float:
    """Base of the rotary angles."""
    return float((getattr(target, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
