"""load_model: from a resolved checkpoint to a target ready to run.

Owns: which class serves which architecture. Must not know: what is done with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from specdec.config.methods import Tap
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.llama import LlamaModel, is_lean, require_text_model
from specdec.models.loader import Checkpoint


class TargetModel(Protocol):
    """What the runner asks of a target, whichever class serves it."""

    config: Any
    dtype: torch.dtype
    device: torch.device
    is_capturable: bool  # whether forward only queues work, so that a CUDA graph may hold it

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        ...

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer."""
        ...

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, H]."""
        ...

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm before the head."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed [L, H] -> [L, V] float32."""
        ...

    def reduced_head(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """compute_logits of the ids [n] alone: [L, H] -> [L, n] float32."""
        ...

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata, *, taps: Collection[Tap] = ()
    ) -> tuple[torch.Tensor, Mapping[Tap, torch.Tensor]]:
        """Run rows of several requests; return normed hidden [N, H] and the tapped states."""
        ...


def load_model(model_path: str, hf_config: Any, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> TargetModel:
    """Load the target of a directory with config.json and safetensors, strictly.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or is left over; or the architecture cannot be served.
    """
    require_text_model(hf_config)
    if not is_lean(hf_config):
        from specdec.models.hf import HfModel

        return HfModel(model_path, hf_config, dtype=dtype, device=device, max_model_len=max_model_len)
    with Checkpoint(model_path) as checkpoint:
        model = LlamaModel(hf_config, checkpoint, dtype=dtype, device=device, max_model_len=max_model_len)
        checkpoint.finish()
    return model
