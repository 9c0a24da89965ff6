"""Triton: prompt lookup over token rows that live on the device. Semantics: reference_lookup.ngram_match.

Owns: two kernels: one scores every place of a text (longest match first, then the latest), one takes the best and copies what
followed. Must not know: who drafts. Read next: post_update.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import check
from specdec.kernels.reference_lookup import NgramMatches

_INT = (torch.int64,)
BLOCK = 1024  # places of a text that one program scores


@triton.jit
def _score_matches_kernel(
    rows_ptr, limits_ptr, token_ids_ptr, num_tokens_ptr, scores_ptr, MAX_LEN, BLOCKS, SHORTEST, LONGEST, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (request, block of places): the best length * (MAX_LEN + 1) + place of its block, or -1.

    A place is the index of the token that follows an occurrence; it is compared backwards with the end of the text.
    """
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows_ptr + request)
    num = tl.load(num_tokens_ptr + row)
    best = tl.full([], -1, tl.int64)
    first = (block * BLOCK).to(tl.int64)
    if (first < num) & (tl.load(limits_ptr + request) > 0):
        place = first + tl.arange(0, BLOCK)
        text_ptr = token_ids_ptr + row * MAX_LEN
        is_alive = place < num
        length = tl.zeros([BLOCK], tl.int64)
        for k in range(LONGEST):
            is_alive = is_alive & (place - 1 - k >= 0)
            last = tl.load(text_ptr + num - 1 - k, mask=num - 1 - k >= 0, other=-1)
            token = tl.load(text_ptr + place - 1 - k, mask=is_alive, other=-2)
            is_alive = is_alive & (token == last)
            length += is_alive.to(tl.int64)
        score = tl.where(length >= SHORTEST, length * (MAX_LEN + 1) + place, -1)
        best = tl.max(score, axis=0)
    tl.store(scores_ptr + request * BLOCKS + block, best)


@triton.jit
def _copy_followers_kernel(
    rows_ptr, limits_ptr, token_ids_ptr, num_tokens_ptr, scores_ptr, found_ptr, counts_ptr, lengths_ptr,
    MAX_LEN, BLOCKS, WIDTH, BLOCKS_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request: the best score of its blocks, and the tokens from that place on."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    block = tl.arange(0, BLOCKS_BLOCK)
    best = tl.max(tl.load(scores_ptr + request * BLOCKS + block, mask=block < BLOCKS, other=-1), axis=0)
    is_found = best >= 0
    place = tl.where(is_found, best % (MAX_LEN + 1), 0)
    left = tl.load(num_tokens_ptr + row) - place
    count = tl.where(is_found, tl.minimum(tl.load(limits_ptr + request), left), 0)
    column = tl.arange(0, WIDTH_BLOCK)
    tokens = tl.load(token_ids_ptr + row * MAX_LEN + place + column, mask=column < count, other=-1)
    tl.store(found_ptr + request * WIDTH + column, tokens.to(tl.int64), mask=column < WIDTH)
    tl.store(counts_ptr + request, count)
    tl.store(lengths_ptr + request, tl.where(is_found, best // (MAX_LEN + 1), 0))


def ngram_match(
    rows: torch.Tensor, limits: torch.Tensor, *, token_ids: torch.Tensor, num_tokens: torch.Tensor, shortest: int, longest: int, width: int
) -> NgramMatches:
    """As reference_lookup.ngram_match.

    Raises:
        ValueError: shapes or dtypes disagree, or the bounds are not 1 <= shortest <= longest.
    """
    num_requests, num_rows, max_len = len(rows), len(num_tokens), token_ids.shape[1]
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}, but they must satisfy 1 <= shortest <= longest")
    device = check(
        {
            "rows": (rows, (num_requests,), _INT),
            "limits": (limits, (num_requests,), _INT),
            "token_ids": (token_ids, (num_rows, max_len), (torch.int32,)),
            "num_tokens": (num_tokens, (num_rows,), _INT),
        }
    )
    found = torch.empty((num_requests, width), dtype=torch.int64, device=device)
    counts, lengths = torch.zeros((2, num_requests), dtype=torch.int64, device=device)
    if not num_requests or not width:
        return NgramMatches(found, counts, lengths)
    blocks = triton.cdiv(max_len, BLOCK)
    scores = torch.empty((num_requests, blocks), dtype=torch.int64, device=device)
    _score_matches_kernel[(num_requests, blocks)](
        rows, limits, token_ids, num_tokens, scores, max_len, blocks, shortest, longest, BLOCK=BLOCK
    )  # fmt: skip
    _copy_followers_kernel[(num_requests,)](
        rows, limits, token_ids, num_tokens, scores, found, counts, lengths, max_len, blocks, width,
        BLOCKS_BLOCK=triton.next_power_of_2(blocks), WIDTH_BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return NgramMatches(found, counts, lengths)
