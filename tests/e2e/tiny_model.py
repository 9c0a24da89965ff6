"""A tiny random model with a tokenizer, as a directory that `specdec serve` takes."""

from __future__ import annotations

from pathlib import Path

from tests.proposers.tiny import write_checkpoint
from tests.server.serving import served_tokenizer


def write_model(path: Path, *, seed: int = 5) -> Path:
    """Write checkpoint and tokenizer; float32 ids are exact in any batch."""
    write_checkpoint(path, seed=seed)
    served_tokenizer().hf.save_pretrained(path)
    return path
