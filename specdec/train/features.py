"""The target's hidden states over known text, computed on the serving path, so that a head is trained on what it will be served.

Owns: packing documents into passes. Must not know: what reads the states.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from specdec.errors import ConfigError
from specdec.models.attention import AttentionMetadata, allocate_kv
from specdec.models.registry import TargetModel
from specdec.train.shards import Document, features_path, layers_of, read_shard, save_atomically, shard_paths

ROWS_PER_PASS = 2048
BLOCK_SIZE = 16


def taps_of(num_layers: int) -> tuple[int, ...]:
    """Layers already applied whose states a head reads: an early, a middle and a late one, as EAGLE-3 has them."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def make_features(path: Path, model: TargetModel, layers: Sequence[int], *, advance: Callable[[int], None] = lambda _: None) -> int:
    """Write the hidden states of every shard that lacks them; returns how many shards were done.

    layers: numbers of layers already applied, as EAGLE-3 counts; advance(n) is told of n more tokens.

    Raises:
        ConfigError: a layer is not one of the target's, or shards have states of other layers.
    """
    check_layers(path, layers, num_layers=model.num_layers)
    missing = [shard for shard in shard_paths(path) if not features_path(shard).exists()]
    for shard in missing:
        states: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in _passes(list(read_shard(shard, features=False))):
            states += _run(model, batch, layers)
            advance(sum(map(len, batch)))
        aux, hidden = (torch.cat(parts) for parts in zip(*states, strict=True))
        save_atomically({"aux": aux, "hidden": hidden}, features_path(shard), metadata={"layers": ",".join(map(str, layers))})
    return len(missing)


def check_space(path: Path, *, num_tokens: int, token_bytes: int) -> None:
    """Refuse to begin what does not fit on the disk.

    Raises:
        ConfigError: too little is free.
    """
    needed, free = num_tokens * token_bytes, shutil.disk_usage(path).free
    if needed > free:
        raise ConfigError(
            f"the states of {num_tokens} tokens take {needed / 1e9:.1f} GB, but the disk of {str(path)!r} has {free / 1e9:.1f} GB free",
            hint="free some space, or move some shards away",
        )


def check_layers(path: Path, layers: Sequence[int], *, num_layers: int) -> None:
    """Refuse layers that the target does not have, and others than a directory's features were made of."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > num_layers:
        raise ConfigError(
            f"layers is {','.join(map(str, layers))!r}, but it must be ascending numbers from 1 to {num_layers}: layers already applied",
            hint="leave it out for an early, a middle and a late layer",
        )
    for shard in shard_paths(path):
        made = layers_of(features_path(shard)) if features_path(shard).exists() else tuple(layers)
        if made != tuple(layers):
            raise ConfigError(
                f"layers is {tuple(layers)}, but {features_path(shard).name} holds states of layers {made}",
                hint="delete the features to make them anew, or ask for the layers that are there",
            )


def _passes(documents: Sequence[Document]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    for document in documents:
        if batch and sum(map(len, batch)) + len(document.ids) > ROWS_PER_PASS:
            yield batch
            batch = []
        batch.append(document.ids)
    yield batch


@torch.inference_mode()
def _run(model: TargetModel, batch: Sequence[torch.Tensor], layers: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (aux [T, n, H], hidden [T, H]) of each document."""
    device, lens = model.device, [len(ids) for ids in batch]
    blocks = [-(-length // BLOCK_SIZE) for length in lens]
    table = torch.zeros(len(batch), max(blocks), dtype=torch.int32)
    slots, first = [], 0
    for row, (count, length) in enumerate(zip(blocks, lens, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(length) + first * BLOCK_SIZE)
        first += count
    kv = allocate_kv(model.num_layers, (first, BLOCK_SIZE, *model.kv_shape()), dtype=model.dtype, device=device)
    meta = AttentionMetadata(
        cu_query_lens=torch.tensor([0, *lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_lens_cpu=tuple(lens),
        seq_lens_cpu=tuple(lens),
    )
    positions = torch.cat([torch.arange(length) for length in lens]).to(device)
    hidden, taps = model.forward(torch.cat(list(batch)).to(device), positions, kv, meta, taps=tuple(layers))
    aux = torch.stack([taps[layer] for layer in layers], dim=1).to("cpu", torch.bfloat16)
    yield from zip(torch.split(aux, lens), torch.split(hidden.to("cpu", torch.bfloat16), lens), strict=True)
