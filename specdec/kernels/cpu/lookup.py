"""The CPU column of prompt lookup: one compiled walk over each text, from its end backwards. Semantics: reference_lookup.py."""

from __future__ import annotations

import torch
from numba import njit

from specdec.kernels.reference_lookup import NgramMatches


def ngram_match(
    rows: torch.Tensor, limits: torch.Tensor, *, token_ids: torch.Tensor, num_tokens: torch.Tensor, shortest: int, longest: int, width: int
) -> NgramMatches:
    """As reference_lookup.ngram_match."""
    found = torch.full((len(rows), width), -1, dtype=torch.int64)
    counts, lengths = torch.zeros_like(rows), torch.zeros_like(rows)
    _match(
        rows.numpy(), limits.numpy(), token_ids.numpy(), num_tokens.numpy(), shortest, longest, found.numpy(), counts.numpy(),
        lengths.numpy(),
    )  # fmt: skip
    return NgramMatches(found, counts, lengths)


@njit(cache=True, nogil=True)
def _match(rows, limits, token_ids, num_tokens, shortest, longest, found, counts, lengths):  # type: ignore[no-untyped-def]
    for request in range(len(rows)):
        if limits[request] <= 0:
            continue
        text, num = token_ids[rows[request]], num_tokens[rows[request]]
        best, start = shortest - 1, 0
        for end in range(num - 1, 0, -1):
            size = 0
            while size < longest and size < end and text[end - 1 - size] == text[num - 1 - size]:
                size += 1
            if size > best:
                best, start = size, end
                if size == longest:
                    break
        if start:
            lengths[request] = best
            counts[request] = min(limits[request], num - start)
            for i in range(counts[request]):
                found[request, i] = text[start + i]
