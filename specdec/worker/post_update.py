"""post_update: writes a verified step into the persistent rows, and takes rejected rows back.

Owns: the device half of the rollback (the host half is Request.commit). Reference: kernels/reference_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.kernels.dispatch import kernel
from specdec.models.attention import KVPair
from specdec.worker.input_batch import InputBatch, VerifyResult
from specdec.worker.request_state import RequestState, RowInfo


def commit_rows(state: RequestState, infos: list[RowInfo], batch: InputBatch, verified: VerifyResult) -> None:
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
    counts = torch.stack((verified.num_sampled, verified.num_rejected)).tolist()
    for info, query_len, sampled, rejected in zip(infos, batch.query_lens_cpu, *counts, strict=True):
        info.num_tokens += sampled
        info.num_computed += query_len - rejected
        info.num_drafts = 0


def commit_target_tokens(state: RequestState, infos: list[RowInfo], rows: torch.Tensor, token_ids: torch.Tensor) -> list[int]:
    """Append one token per request, [R] int64 with -1 for none, that a drafting pass drew from the target's law.

    That pass wrote the target's KV of the anchor, so num_tokens and num_computed both advance by one and the drawn token
    is the new anchor. Returns the tokens on the host.
    """
    token_ids = token_ids.to(rows.device)
    drawn = token_ids >= 0
    chosen = rows[drawn]
    state.token_ids[chosen, state.num_tokens[chosen]] = token_ids[drawn].to(torch.int32)
    state.num_tokens[chosen] += 1
    state.num_computed[chosen] += 1
    tokens: list[int] = token_ids.tolist()
    for info, token in zip(infos, tokens, strict=True):
        if token >= 0:
            info.num_tokens += 1
            info.num_computed += 1
    return tokens


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
