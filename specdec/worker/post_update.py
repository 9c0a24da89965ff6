"""post_update: writes a verified step into the persistent rows, and takes rejected rows back.

Owns: the device half of the rollback (the host halves are StepRecord.settle_emitted and Request.commit).
Reference: kernels/reference_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.kernels.dispatch import kernel
from specdec.models.attention import KVPair
from specdec.worker.input_batch import InputBatch, VerifyResult
from specdec.worker.request_state import RequestState


def commit_rows(state: RequestState, batch: InputBatch, verified: VerifyResult) -> None:
    """Append the emitted tokens, advance num_tokens by num_sampled and num_computed by query_len - num_rejected."""
    kernel("post_update", state.device)(
        batch.rows,
        verified.token_ids,
        num_sampled=verified.num_sampled,
        num_rejected=verified.num_rejected,
        cu_query_lens=batch.cu_query_lens,
        token_ids=state.token_ids,
        num_tokens=state.num_tokens,
        num_computed_tokens=state.num_computed,
    )


def commit_target_tokens(state: RequestState, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Append one token per request, [R] int64 with -1 for none, that a drafting pass drew from the target's law.

    That pass wrote the target's KV of the anchor, so num_tokens and num_computed both advance by one and the drawn token
    is the new anchor.
    """
    drawn = token_ids >= 0
    places = state.num_tokens[rows].clamp(max=state.token_ids.shape[1] - 1)
    state.token_ids[rows, places] = torch.where(drawn, token_ids.to(torch.int32), state.token_ids[rows, places])
    state.num_tokens[rows] += drawn
    state.num_computed[rows] += drawn


def compact_kv(kv: Sequence[KVPair], batch: InputBatch, verified: VerifyResult) -> None:
    """Move the KV of kept tree nodes together behind their anchor; for a chain every row is in place already."""
    ends = batch.cu_query_lens[1:].long()
    first_row = ends - (batch.cu_num_logits[1:] - batch.cu_num_logits[:-1])  # [R] query row of each anchor
    move = kernel("compact_kv", batch.rows.device)
    for k_cache, v_cache in kv:
        move(
            k_cache,
            v_cache,
            path=verified.path,
            num_sampled=verified.num_sampled,
            first_row=first_row,
            slot_mapping=batch.slot_mapping,
        )
