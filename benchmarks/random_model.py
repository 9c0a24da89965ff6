"""Models of published shapes with random weights, made on the device, so that no checkpoint has to be there.

Owns: shapes and weights. Must not know: what is timed.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


class RandomCheckpoint:
    """Stands in for models.loader.Checkpoint: every tensor that is asked for exists. A name always has the same values.

    keeps: hold what was made, for another model over the same weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, keeps: bool = True) -> None:
        self.device, self.dtype, self.keeps = device, dtype, keeps
        self.made: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias")

    def names(self) -> set[str]:
        """Nothing beyond what is asked for."""
        return set()

    def skip(self, *prefixes: str) -> None:
        """Nothing is left over."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal values of standard deviation 1/sqrt(inputs); norms are ones."""
        if name not in self.made:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            tensor = torch.ones(shape, device=self.device, dtype=self.dtype)
            if "norm" not in name:
                tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
            if not self.keeps:
                return tensor
            self.made[name] = tensor
        return self.made[name]


def config_of(name: str) -> Any:
    """The transformers config of a shape."""
    from transformers import AutoConfig

    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape, max_position_embeddings=8192, rms_norm_eps=1e-6)


def build(name: str, device: torch.device, dtype: torch.dtype, *, keeps: bool, max_model_len: int = 4096) -> tuple[Any, RandomCheckpoint]:
    """Our model of a shape, and its weights."""
    from specdec.models.llama import LlamaModel

    weights = RandomCheckpoint(device, dtype, keeps=keeps)
    model = LlamaModel(config_of(name), weights, dtype=dtype, device=device, max_model_len=max_model_len)  # type: ignore[arg-type]
    return model, weights


def build_transformers(name: str, weights: RandomCheckpoint) -> Any:
    """The transformers model of the same shape over the same weights."""
    from transformers import AutoModelForCausalLM

    config = config_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=weights.dtype, attn_implementation="sdpa")
    model.load_state_dict(weights.made, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(weights.device)  # its buffer is not in a state dict
    return model.eval()
