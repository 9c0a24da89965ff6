"""What the bookkeeping kernels mean: a step's query rows before the forward, counters and cache after verification.

Owns: the only copy of these semantics. Must not know: the scheduler or any draft method. Read next: input_prep.py.
Letters: R requests, N query rows, L logits rows, K drafts at most, D depth, M persistent rows, B blocks per request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PreparedInputs(NamedTuple):
    """input_ids, positions, slot_mapping [N] int64; parents [N] int64 or None; seq_lens [R] int32; logits_indices [L] int64."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    parents: torch.Tensor | None
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor


def prepare_inputs(
    rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_query_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_drafts: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_query_rows: int,
    num_logits: int,
    parents: torch.Tensor | None = None,
) -> PreparedInputs:
    """Lay out a step: each request's committed tokens from its first uncomputed one, then its drafts.

    Args:
        rows: [R] int64, persistent row of each request. draft_token_ids: [R, K] int64; a refused draft (-1) still owns its
            query row, with input id 0.
        cu_query_lens: [R+1] int32. num_drafts: [R] int64, the last rows of each query. cu_num_logits: [R+1] int32, whose
            rows are the last ones of the query.
        num_computed_tokens: [M] int64. token_ids: [M, max_len] int32. block_table: [R, B] int32.
        num_query_rows, num_logits: N and L, known to the host.
        parents: [R, K] int64 or None for chains. A draft's position is the anchor's plus its depth; its slot follows its
            row, so siblings share a position and never a slot.
    """
    device = rows.device
    ids, positions, slots, above = (torch.zeros(num_query_rows, dtype=torch.int64, device=device) for _ in range(4))
    seq_lens = torch.zeros(len(rows), dtype=torch.int32, device=device)
    logits_indices = torch.zeros(num_logits, dtype=torch.int64, device=device)
    for request, row in enumerate(rows.tolist()):
        start, end = int(cu_query_lens[request]), int(cu_query_lens[request + 1])
        base, drafts = int(num_computed_tokens[row]), int(num_drafts[request])
        num_committed = end - start - drafts
        depths: list[int] = []
        for j in range(end - start):
            slot_block, slot_offset = divmod(base + j, block_size)
            slots[start + j] = int(block_table[request, slot_block]) * block_size + slot_offset
            if j < num_committed:
                ids[start + j], positions[start + j], above[start + j] = int(token_ids[row, base + j]), base + j, -1
                continue
            draft = j - num_committed
            parent = draft - 1 if parents is None else int(parents[request, draft])
            depths.append(1 if parent < 0 else depths[parent] + 1)
            ids[start + j] = max(int(draft_token_ids[request, draft]), 0)
            positions[start + j] = base + num_committed - 1 + depths[draft]
            above[start + j] = parent
        seq_lens[request] = base + end - start
        first, last = int(cu_num_logits[request]), int(cu_num_logits[request + 1])
        logits_indices[first:last] = torch.arange(end - (last - first), end)
    return PreparedInputs(ids, positions, slots, None if parents is None else above, seq_lens, logits_indices)


def post_update(
    rows: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    *,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    cu_query_lens: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Commit a step in place: append each request's tokens, count them, and count the query rows that were kept.

    Args:
        rows: [R] int64. sampled_token_ids: [R, D+1] int64. num_sampled, num_rejected: [R] int64. cu_query_lens: [R+1] int32.
        token_ids: [M, max_len] int32, written from num_tokens on, never past its end. num_tokens: [M] int64.
        num_computed_tokens: [M] int64, grows by query_len - num_rejected, so a decoding request is left with exactly one
            uncomputed token.
    """
    for request, row in enumerate(rows.tolist()):
        count, at = int(num_sampled[request]), int(num_tokens[row])
        room = max(min(count, token_ids.shape[1] - at), 0)
        token_ids[row, at : at + room] = sampled_token_ids[request, :room].to(token_ids.dtype)
        num_tokens[row] += count
        query_len = int(cu_query_lens[request + 1]) - int(cu_query_lens[request])
        num_computed_tokens[row] += query_len - int(num_rejected[request])


def compact_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    first_row: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Move the kept rows of each tree together in place, so that the cache looks as if a chain had been verified.

    Row i of the kept path goes to the slot of query row first_row + i. A path rises and path[i] >= i, so copying in order
    never overwrites a row that is still to be moved; a chain copies nothing.

    Args:
        k_cache, v_cache: [num_blocks, block_size, Hkv, Dh]. path: [R, D+1] int64. num_sampled: [R] int64, kept rows.
        first_row: [R] int64, query row of each anchor. slot_mapping: [N] int64.
    """
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if keys.data_ptr() != k_cache.data_ptr() or values.data_ptr() != v_cache.data_ptr():
        raise ValueError("k_cache and v_cache must be contiguous over blocks and slots: a copy would not be updated")
    for request in range(path.shape[0]):
        for i in range(1, int(num_sampled[request])):
            source = slot_mapping[first_row[request] + path[request, i]]
            target = slot_mapping[first_row[request] + i]
            keys[target], values[target] = keys[source].clone(), values[source].clone()
