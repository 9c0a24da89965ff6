"""specdec train token-map: which ids a head that shares the target's LM head should score, by how often they are written.

Owns: counting, ranking, and writing the file. Must not know: heads. Read next: config/token_map.py, which reads it.
Source: FR-Spec (2502.14856). Counts of the target's own answers (`train data`) tell more than those of a corpus that others wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdec.errors import ConfigError

MULTIPLE = 64  # whole tiles of matrix units


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMap:
    """ids [Vd] int64, the most frequent first. coverage: share of the counted tokens that these ids are."""

    ids: torch.Tensor
    coverage: float


def count_texts(encode: Callable[[str], Sequence[int]], texts: Iterable[str], vocab_size: int) -> torch.Tensor:
    """How often each id occurs in texts, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.tensor(encode(text), dtype=torch.int64), minlength=vocab_size)
    return counts


def rank(counts: torch.Tensor, size: int, *, always: Sequence[int] = ()) -> TokenMap:
    """Choose `size` ids: `always`, and then the most frequent; both by count, the lower id first where counts are equal.

    Raises:
        ConfigError: size is not in 1..V, or too small for `always`, or nothing was counted.
    """
    forced = sorted(set(always))
    if not len(forced) <= size <= len(counts) or not size:
        least = max(len(forced), 1)
        raise ConfigError(f"size is {size}, but it must lie in {least}..{len(counts)}: special ids always count, and ids end there")
    if not int(counts.sum()):
        raise ConfigError("no token was counted", hint="name a corpus with text in it, or run specdec train data longer")
    weighed = counts.clone()
    weighed[forced] += int(counts.max()) + 1
    chosen = weighed.argsort(descending=True, stable=True)[:size]
    ranked = chosen[counts[chosen].argsort(descending=True, stable=True)]
    return TokenMap(ids=ranked, coverage=float(counts[ranked].sum() / counts.sum()))


def write(ids: torch.Tensor, out: Path) -> None:
    """Write a file that config/token_map.py reads: `.pt` for SGLang too, `.json`, or `.safetensors`.

    Raises:
        ConfigError: another ending.
    """
    writers: dict[str, Callable[[], object]] = {
        ".pt": lambda: torch.save(ids.tolist(), out),
        ".json": lambda: out.write_text(json.dumps(ids.tolist()), encoding="utf-8"),
        ".safetensors": lambda: save_file({"token_map": ids}, out),
    }
    check_ending(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    writers[out.suffix]()


def check_ending(out: Path) -> None:
    """Refuse a file name whose ending names no format."""
    if out.suffix not in (".pt", ".json", ".safetensors"):
        raise ConfigError(f"out is {str(out)!r}, but it must end in .pt, .json or .safetensors")
