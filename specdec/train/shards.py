"""Corpus: conversations that the target answered, in files of many documents, with the target's hidden states beside them.

Owns: the format on disk. Must not know: who wrote the documents, or what is trained on them.
A directory holds shard-NNNNN.safetensors: `ids` uint16 (int32 above 65,536 ids) of all documents in a row, `doc_offsets` [D+1] int64,
`prompt_len` [D] int32, `temperature` [D] f32, `seed` [D] int64; its header says who wrote it (Origin). features-NNNNN.safetensors,
once made, holds per token `aux` [N, n, H] and `hidden` [N, H] bf16; its header says of which layers.
Letters: D documents, N tokens of a shard, T tokens of a document, n tapped layers, H hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specdec.errors import ConfigError

Split = Literal["train", "eval"]
EVAL_EVERY = 50  # one document in 50 is held out, by its place in its shard
_SHARD = re.compile(r"shard-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A conversation. ids [T] int64; the answer starts at prompt_len. temperature: of the answer, 0 for greedy.

    seed: of the answer's draws. aux [T, n, H] bf16: hidden states of the tapped layers; hidden [T, H] bf16: what the target's LM head
    reads. None without features.
    """

    ids: torch.Tensor
    prompt_len: int
    temperature: float
    seed: int = 0
    aux: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def loss_mask(self) -> torch.Tensor:
        """[T] bool: true where the token is the target's own."""
        return torch.arange(len(self.ids)) >= self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who wrote a shard. model: fingerprint of the target. source: of the prompts. seed: of the run.

    asked: keys of all prompts that were answered for it, also of those whose answers were thrown away.
    """

    model: str
    source: str
    seed: int
    asked: tuple[str, ...] = ()


class Corpus:
    """Documents of a directory, read through memory maps. features: only shards whose hidden states are there.

    layers: which layers' states the features hold; () without features.

    Raises:
        ConfigError: the directory holds no such shard, or the features of its shards are of different layers.
    """

    def __init__(self, path: str | Path, *, features: bool) -> None:
        self.path = Path(path)
        shards = [p for p in shard_paths(self.path) if not features or features_path(p).exists()]
        if not shards:
            missing = "shard with features" if features else "shard-*.safetensors"
            hint = "run specdec train features first" if features and shard_paths(self.path) else "run specdec train data first"
            raise ConfigError(f"data {str(path)!r} holds no {missing}", hint=hint)
        self.layers = _common_layers(shards) if features else ()
        self._documents: dict[Split, list[Document]] = {"train": [], "eval": []}
        for shard in shards:
            for index, document in enumerate(read_shard(shard, features=features)):
                self._documents["eval" if index % EVAL_EVERY == EVAL_EVERY - 1 else "train"].append(document)

    def documents(self, split: Split) -> Sequence[Document]:
        """All documents of a split, in the order they were written."""
        return self._documents[split]


def shard_paths(path: Path) -> list[Path]:
    """Finished shards of a directory, in order."""
    return sorted(p for p in path.glob("shard-*.safetensors") if _SHARD.fullmatch(p.name))


def features_path(shard: Path) -> Path:
    """The file of a shard's hidden states."""
    return shard.with_name(shard.name.replace("shard-", "features-"))


def layers_of(features: Path) -> tuple[int, ...]:
    """Which layers' states a file of features holds, as numbers of layers already applied.

    Raises:
        ConfigError: the file does not say.
    """
    stored = _header(features).get("layers")
    if not stored:
        raise ConfigError(f"{features} does not say which layers its states are of", hint="delete it and run specdec train features again")
    return tuple(map(int, stored.split(",")))


def read_origin(shard: Path) -> Origin | None:
    """Who wrote a shard; None where it does not say."""
    stored = _header(shard).get("origin")
    if stored is None:
        return None
    fields = json.loads(stored)
    return Origin(**fields | {"asked": tuple(fields["asked"])})


def read_shard(shard: Path, *, features: bool) -> Iterator[Document]:
    """Yield the documents of one shard."""
    stored = load_file(shard)
    states = load_file(features_path(shard)) if features else {}
    ids, offsets = stored["ids"].to(torch.int64), stored["doc_offsets"].tolist()
    seeds = stored["seed"].tolist() if "seed" in stored else [0] * (len(offsets) - 1)
    for index, (start, stop) in enumerate(pairwise(offsets)):
        yield Document(
            ids=ids[start:stop],
            prompt_len=int(stored["prompt_len"][index]),
            temperature=float(stored["temperature"][index]),
            seed=seeds[index],
            aux=states["aux"][start:stop] if features else None,
            hidden=states["hidden"][start:stop] if features else None,
        )


def write_shard(shard: Path, documents: Sequence[Document], *, vocab_size: int, origin: Origin | None = None) -> None:
    """Write a shard at once: it is either whole or not there."""
    lengths = torch.tensor([0, *(len(document.ids) for document in documents)])
    ids = torch.cat([document.ids for document in documents])
    tensors = {
        "ids": ids.to(torch.uint16 if max(vocab_size, int(ids.max()) + 1) <= 65536 else torch.int32),
        "doc_offsets": lengths.cumsum(0),
        "prompt_len": torch.tensor([document.prompt_len for document in documents], dtype=torch.int32),
        "temperature": torch.tensor([document.temperature for document in documents]),
        "seed": torch.tensor([document.seed for document in documents]),
    }
    save_atomically(tensors, shard, metadata={"origin": json.dumps(asdict(origin))} if origin else None)


def save_atomically(tensors: dict[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Save under another name first, so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.rename(path)


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _common_layers(shards: Sequence[Path]) -> tuple[int, ...]:
    found = {shard: layers_of(features_path(shard)) for shard in shards}
    first = found[shards[0]]
    for shard, layers in found.items():
        if layers != first:
            raise ConfigError(
                f"{features_path(shard)} holds states of layers {layers}, but those of {shards[0].name} are of layers {first}",
                hint="delete the features of one kind and run specdec train features again",
            )
    return first
