"""What prompt lookup means: the longest end of a text that occurred before, and what followed it the last time.

Owns: the only copy of this semantics. Must not know: who drafts. Read next: ngram_match.py. Letters: R requests, M persistent rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class NgramMatches(NamedTuple):
    """Continuations. token_ids [R, width] int64, -1 where there is none; num_tokens [R] int64; match_lens [R] int64, 0 without a match."""

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    match_lens: torch.Tensor


def ngram_match(
    rows: torch.Tensor, limits: torch.Tensor, *, token_ids: torch.Tensor, num_tokens: torch.Tensor, shortest: int, longest: int, width: int
) -> NgramMatches:
    """Continue each text as it went on after the most recent earlier occurrence of its longest end that has one.

    An occurrence may overlap the end of the text, but a token must follow it, so the end never matches itself. The continuation
    stops at the end of the text and is never padded out.

    Args:
        rows: [R] int64. limits: [R] int64, tokens wanted of each, at most width; 0 looks nothing up.
        token_ids: [M, max_len] int32. num_tokens: [M] int64, how many of a row are text.
        shortest, longest: bounds of a match, 1 <= shortest <= longest. width: columns of the result.
    """
    found = torch.full((len(rows), width), -1, dtype=torch.int64, device=rows.device)
    counts, lengths = torch.zeros_like(rows), torch.zeros_like(rows)
    for request, (row, limit) in enumerate(zip(rows.tolist(), limits.tolist(), strict=True)):
        text = token_ids[row, : int(num_tokens[row])].tolist()
        for size in range(min(longest, len(text) - 1), shortest - 1, -1):
            followed = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
            if followed and limit > 0:
                tokens = text[followed[-1] :][:limit]
                found[request, : len(tokens)] = torch.tensor(tokens)
                counts[request], lengths[request] = len(tokens), size
                break
    return NgramMatches(found, counts, lengths)
