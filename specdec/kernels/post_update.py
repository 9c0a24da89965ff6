"""Triton: commit a step to the persistent rows on the device. Semantics: reference_state.post_update.

Owns: one kernel, one program per request; rows of a batch are distinct, so no two programs meet. Must not know: rules.
Read next: compact_kv.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import check

_INT = (torch.int64,)
_SHORT = (torch.int32,)


@triton.jit
def _post_update_kernel(
    rows_ptr, sampled_ptr, num_sampled_ptr, num_rejected_ptr, cu_query_lens_ptr, token_ids_ptr, num_tokens_ptr, num_computed_ptr,
    WIDTH, MAX_LEN, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request: append its tokens inside its row, then move both counters."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    count = tl.load(num_sampled_ptr + request)
    at = tl.load(num_tokens_ptr + row)
    column = tl.arange(0, WIDTH_BLOCK)
    is_new = (column < count) & (column < WIDTH)
    tokens = tl.load(sampled_ptr + request * WIDTH + column, mask=is_new, other=0)
    tl.store(token_ids_ptr + row * MAX_LEN + at + column, tokens.to(tl.int32), mask=is_new & (at + column < MAX_LEN))
    query_len = tl.load(cu_query_lens_ptr + request + 1) - tl.load(cu_query_lens_ptr + request)
    computed = tl.load(num_computed_ptr + row) + query_len - tl.load(num_rejected_ptr + request)
    tl.store(num_tokens_ptr + row, at + count)
    tl.store(num_computed_ptr + row, computed)


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
    """As reference_state.post_update."""
    num_requests, width = sampled_token_ids.shape
    num_rows = num_tokens.shape[0]
    check(
        {
            "rows": (rows, (num_requests,), _INT),
            "sampled_token_ids": (sampled_token_ids, (num_requests, width), _INT),
            "num_sampled": (num_sampled, (num_requests,), _INT),
            "num_rejected": (num_rejected, (num_requests,), _INT),
            "cu_query_lens": (cu_query_lens, (num_requests + 1,), _SHORT),
            "token_ids": (token_ids, (num_rows, token_ids.shape[1]), _SHORT),
            "num_tokens": (num_tokens, (num_rows,), _INT),
            "num_computed_tokens": (num_computed_tokens, (num_rows,), _INT),
        }
    )
    if num_requests:
        _post_update_kernel[(num_requests,)](
            rows, sampled_token_ids, num_sampled, num_rejected, cu_query_lens, token_ids, num_tokens, num_computed_tokens,
            width, token_ids.shape[1], WIDTH_BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
