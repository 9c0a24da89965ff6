"""Tiny checkpoints on disk for tests of resolving: configs, a header-only weight file, a word-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENS = ("<unk>", "<eos>", "a", "b", "c", "d", "e", "f")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "torch_dtype": "float32",
}


def write_weights(path: Path) -> None:
    """Write a safetensors file with one tensor of four bytes."""
    header = json.dumps({"norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)


def write_tokenizer(path: Path, tokens: Sequence[str] = TOKENS) -> None:
    """Write tokenizer.json and tokenizer_config.json of a word-level tokenizer."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": tokens.index("<eos>"), "content": "<eos>", **special}],
        "model": {"type": "WordLevel", "vocab": {token: index for index, token in enumerate(tokens)}, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}))


def write_checkpoint(path: Path, keys: Mapping[str, Any] | None = None, *, base: Mapping[str, Any] = LLAMA) -> str:
    """Write a checkpoint whose config.json is `base` overlaid with `keys` (None removes a key). Returns the directory."""
    path.mkdir(parents=True)
    config = {key: value for key, value in {**base, **(keys or {})}.items() if value is not None or key == "bos_token_id"}
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path / "model.safetensors")
    return str(path)


def write_model(path: Path, keys: Mapping[str, Any] | None = None, tokens: Sequence[str] = TOKENS) -> str:
    """Write a checkpoint with a tokenizer beside it."""
    directory = write_checkpoint(path, keys)
    write_tokenizer(path, tokens)
    return directory
