"""Tiny random checkpoints and the oracle beside them: transformers' own model with the same weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 97
EOS = 96
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": EOS}
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# name -> (model type, changes); what each is there for is in its name
LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_untied": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_stray_window": ("llama", {"sliding_window": 4}),
    "llama_head_dim": ("llama", {"head_dim": 16}),
    "llama_rope_llama3": ("llama", {"rope_parameters": {**_ROPE, **_LLAMA3}}),
    "llama_rope_linear": ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}),
    "llama_rope_yarn": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 4.0}}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2_bias": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_norms": ("qwen3", {"head_dim": 16}),
    "smollm3_nope": ("smollm3", {"no_rope_layer_interval": 2}),
}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2_learned_positions": ("gpt2", {}),
    "opt_offset_positions": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi_partial_rotary": ("phi", {}),
    "nemotron_drops_keywords": ("nemotron", {}),
    "gemma_scaled_embedding": ("gemma", {"head_dim": 16}),
    "gemma2_capped_logits": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
    ),
    "gemma3_two_windows": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2}),
    "granite_scaled_logits": ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "mixtral_experts": ("mixtral", {"num_local_experts": 4}),
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a small configuration object of a model type."""
    sizes = _GPT2 if model_type == "gpt2" else _SIZES
    return transformers.AutoConfig.for_model(model_type, **{**sizes, **changes})


def save_random(config: Any, path: Path, *, seed: int = 0) -> Any:
    """Save a model with random weights, biases and norms included, wide enough that logits differ clearly; return it."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.2 * noise
    model.tie_weights()
    model.save_pretrained(path)
    return model


def saved(name: str, path: Path) -> Any:
    """Save one of the listed checkpoints and return its oracle."""
    model_type, changes = {**LEAN, **FALLBACK}[name]
    return save_random(tiny_config(model_type, **changes), path)


def read_config(path: Path) -> Any:
    """Return the configuration as a server reads it."""
    return transformers.AutoConfig.from_pretrained(path)


@torch.inference_mode()
def oracle_logits(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """[N, V] of one whole sequence, without a cache."""
    logits: torch.Tensor = oracle(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


@torch.inference_mode()
def oracle_greedy(oracle: Any, token_ids: list[int], num_tokens: int, *, eos: int | list[int] | None = None) -> list[int]:
    """What transformers' generate adds to a prompt; `eos` ends it and is kept."""
    prompt = torch.tensor([token_ids])
    settings = transformers.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    oracle.generation_config = settings
    output = oracle.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    added: list[int] = output[0, len(token_ids) :].tolist()
    return added


def random_prompt(length: int, *, seed: int) -> list[int]:
    """Ids that are neither padding nor the end."""
    return torch.randint(2, EOS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
