"""Write a draft model that knows nothing: the embedded model's tokenizer and vocabulary on one layer of random weights.

It is wrong on purpose, to see with `specdec verify` that even such drafts leave the law of the answers alone:
    python benchmarks/random_draft.py random-draft
    specdec verify -sc '{"method": "draft_model", "model": "random-draft", "num_speculative_tokens": 3}'
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.config.engine import EMBEDDED_MODEL
from specdec.models.source import locate_target, read_json

INITIALIZER_RANGE = 0.3  # laws far from uniform: drafts are drawn with confidence, and are wrong


def write(directory: Path) -> None:
    """Save config, weights and tokenizer of the random model; the same weights every time."""
    target = locate_target(EMBEDDED_MODEL)
    config = LlamaConfig(
        vocab_size=read_json(Path(target.model_path) / "config.json")["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(target.tokenizer_path).save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/random_draft.py DIRECTORY")
    write(Path(sys.argv[1]))
