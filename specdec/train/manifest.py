"""manifest.json of a directory of shards: which target wrote them, from which prompts, how many tokens, with a hash each.

Owns: the summary, and the check that a model is the one that wrote the texts. Must not know: how texts are made.
It is derived from the shards alone, so it can be lost or late without harm.
"""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specdec.errors import ConfigError
from specdec.train.shards import read_origin, shard_paths

NAME = "manifest.json"
PAGE, PAGES = 4096, 256  # bytes of a weight file that are looked at: reading all of a large model takes minutes


def model_fingerprint(path: Path) -> str:
    """32 hex digits that tell models apart: of config.json, and of the size and 256 evenly spaced pages of every weight file."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(chain(path.glob("*.safetensors"), path.glob("*.bin"))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for page in range(PAGES):
                weights.seek(page * size // PAGES)
                digest.update(weights.read(PAGE))
    return digest.hexdigest()[:32]


def check_written_by(data: Path, model: Path) -> None:
    """Refuse texts of another target: their law is not the one to learn. Shards that do not say who wrote them are taken as they are.

    Raises:
        ConfigError: there are no texts, or a shard was written by another model.
    """
    if not shard_paths(data):
        raise ConfigError(f"data {str(data)!r} holds no shard-*.safetensors", hint="run specdec train data first")
    fingerprint = model_fingerprint(model)
    for shard in shard_paths(data):
        origin = read_origin(shard)
        if origin and origin.model != fingerprint:
            raise ConfigError(
                f"{shard} was written by another model: fingerprint {origin.model}, but that of {str(model)!r} is {fingerprint}",
                hint="give the --model that wrote it, or let this one write its own texts in another directory",
            )


def write_manifest(data: Path) -> dict[str, Any]:
    """Write and return the manifest of what a directory holds now."""
    rows = [_row(shard) for shard in shard_paths(data)]
    manifest = {
        "model": sorted({row["model"] for row in rows if row["model"]}),
        "documents": sum(row["documents"] for row in rows),
        "answer_tokens": sum(row["answer_tokens"] for row in rows),
        "asked": sum(row["asked"] for row in rows),
        "shards": rows,
    }
    partial = data / f"{NAME}.partial"
    partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.rename(data / NAME)
    return manifest


def _row(shard: Path) -> dict[str, Any]:
    origin, stored = read_origin(shard), load_file(shard)
    return {
        "name": shard.name,
        "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
        "documents": len(stored["prompt_len"]),
        "tokens": len(stored["ids"]),
        "answer_tokens": len(stored["ids"]) - int(stored["prompt_len"].sum(dtype=torch.int64)),
        "greedy_documents": int((stored["temperature"] == 0).sum()),
        "model": origin.model if origin else None,
        "source": origin.source if origin else None,
        "seed": origin.seed if origin else None,
        "asked": len(origin.asked) if origin else 0,
    }
