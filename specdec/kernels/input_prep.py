"""Triton: lay out a step's query rows from device state, so that no count waits for the host. Semantics: reference_state.py.

Owns: one kernel, one program per request. Must not know: the scheduler. Read next: post_update.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import check
from specdec.kernels.reference_state import PreparedInputs

BLOCK = 128  # query rows at a time
_INT = (torch.int64,)
_SHORT = (torch.int32,)


@triton.jit
def _prepare_inputs_kernel(
    rows_ptr, draft_ptr, parents_ptr, cu_query_lens_ptr, cu_num_logits_ptr, num_drafts_ptr, num_computed_ptr, token_ids_ptr,
    block_table_ptr, ids_ptr, positions_ptr, slots_ptr, above_ptr, seq_lens_ptr, logits_indices_ptr,
    K, MAX_LEN, B, BLOCK_SIZE, HAS_PARENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request: its committed tokens from the first uncomputed one, then its drafts, BLOCK rows at a time."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    start = tl.load(cu_query_lens_ptr + request)
    query_len = tl.load(cu_query_lens_ptr + request + 1) - start
    base = tl.load(num_computed_ptr + row)
    num_drafts = tl.load(num_drafts_ptr + request).to(tl.int32)
    num_committed = query_len - num_drafts
    first_logits = tl.load(cu_num_logits_ptr + request)
    num_logits = tl.load(cu_num_logits_ptr + request + 1) - first_logits
    for chunk in range(0, query_len, BLOCK):
        j = chunk + tl.arange(0, BLOCK)
        inside = j < query_len
        at = base + j
        draft = j - num_committed
        is_draft = inside & (draft >= 0)
        committed_id = tl.load(token_ids_ptr + row * MAX_LEN + at, mask=inside & (draft < 0), other=0).to(tl.int64)
        draft_id = tl.maximum(tl.load(draft_ptr + request * K + draft, mask=is_draft, other=0), 0)
        depth = draft + 1
        parent = draft - 1
        if HAS_PARENTS:
            parent = tl.load(parents_ptr + request * K + draft, mask=is_draft, other=-1).to(tl.int32)
            depth = tl.zeros([BLOCK], tl.int32) + 1
            ancestor = parent
            for _ in range(num_drafts):
                depth += (ancestor >= 0).to(tl.int32)
                ancestor = tl.load(parents_ptr + request * K + ancestor, mask=is_draft & (ancestor >= 0), other=-1).to(tl.int32)
            tl.store(above_ptr + start + j, tl.where(is_draft, parent, -1).to(tl.int64), mask=inside)
        position = tl.where(is_draft, base + num_committed - 1 + depth, at)
        block = tl.load(block_table_ptr + request * B + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        tl.store(ids_ptr + start + j, tl.where(is_draft, draft_id, committed_id), mask=inside)
        tl.store(positions_ptr + start + j, position, mask=inside)
        tl.store(slots_ptr + start + j, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=inside)
        wanted = j - (query_len - num_logits)
        tl.store(logits_indices_ptr + first_logits + wanted, (start + j).to(tl.int64), mask=inside & (wanted >= 0))
    tl.store(seq_lens_ptr + request, (base + query_len).to(tl.int32))


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
    """As reference_state.prepare_inputs."""
    num_requests, max_drafts = draft_token_ids.shape
    rules = {
        "rows": (rows, (num_requests,), _INT),
        "draft_token_ids": (draft_token_ids, (num_requests, max_drafts), _INT),
        "cu_query_lens": (cu_query_lens, (num_requests + 1,), _SHORT),
        "cu_num_logits": (cu_num_logits, (num_requests + 1,), _SHORT),
        "num_drafts": (num_drafts, (num_requests,), _INT),
        "num_computed_tokens": (num_computed_tokens, tuple(num_computed_tokens.shape), _INT),
        "token_ids": (token_ids, (num_computed_tokens.shape[0], token_ids.shape[1]), _SHORT),
        "block_table": (block_table, (num_requests, block_table.shape[1]), _SHORT),
    }
    if parents is not None:
        rules["parents"] = (parents, (num_requests, max_drafts), _INT)
    device = check(rules)
    ids, positions, slots, above = torch.zeros((4, num_query_rows), dtype=torch.int64, device=device)
    seq_lens = torch.zeros(num_requests, dtype=torch.int32, device=device)
    logits_indices = torch.zeros(num_logits, dtype=torch.int64, device=device)
    if num_requests:
        _prepare_inputs_kernel[(num_requests,)](
            rows, draft_token_ids, draft_token_ids if parents is None else parents, cu_query_lens, cu_num_logits, num_drafts,
            num_computed_tokens, token_ids, block_table, ids, positions, slots, above, seq_lens, logits_indices,
            max_drafts, token_ids.shape[1], block_table.shape[1], block_size, HAS_PARENTS=parents is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return PreparedInputs(ids, positions, slots, None if parents is None else above, seq_lens, logits_indices)
