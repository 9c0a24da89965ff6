"""load_model: from a resolved checkpoint to a target ready to run.

Owns: which class serves which architecture. Must not know: what is done with the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

    @property
    def num_layers(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def kv_shape(self) -> tuple[int, int]: ...

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata, *, taps: Collection[Tap] = ()
    ) -> tuple[torch.Tensor, Mapping[Tap, torch.Tensor]]: ...


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
