"""Warm start: training goes on from a head that was exported before, when its run is gone or its data have grown.

Owns: reading public weights back into a head in training. Must not know: the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file

from specdec.errors import ConfigError


class Weighted(Protocol):
    """A head in training whose live weights have public names."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters by the names of the exported file."""
        ...


def public_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is exported: bf16 copies."""
    return {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def exported_draft_ids(directory: Path) -> torch.Tensor:
    """Return the draft vocabulary [Vd] of an exported head.

    Raises:
        ConfigError: the directory holds no such head.
    """
    tensors = _read(directory)
    if "token_map" in tensors:
        return tensors["token_map"].long()
    if "d2t" not in tensors:
        raise ConfigError(f"init is {str(directory)!r}, whose weights hold no d2t", hint="name a head that specdec train export wrote")
    return tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))


@torch.no_grad()
def begin_from(head: Weighted, directory: Path) -> None:
    """Copy an exported head's weights into one of the same method and sizes.

    Raises:
        ConfigError: a weight is missing or has another shape.
    """
    tensors = _read(directory)
    for name, weight in head.weights().items():
        given = tensors.get(name)
        if given is None or given.shape != weight.shape:
            found = "nothing" if given is None else str(tuple(given.shape))
            raise ConfigError(
                f"init is {str(directory)!r}, whose {name} is {found}, but this head has {tuple(weight.shape)}",
                hint="name an exported head of the same method and target, or leave --init away",
            )
        weight.copy_(given)


def _read(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"init is {str(directory)!r}, which has no model.safetensors", hint="name a head that specdec train export wrote")
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors
