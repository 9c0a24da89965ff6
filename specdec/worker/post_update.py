"""post_update: writes a verified step into the persistent rows, and takes rejected rows back.

Owns: the device half of the rollback (the host half is Request.commit). Reference: kernels/reference.py, post_update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.models.attention import KVPair
from specdec.worker.input_batch import InputBatch, VerifyResult
from specdec.worker.request_state import RequestState, RowInfo


def commit_rows(state: RequestState, infos: list[RowInfo], batch: InputBatch, verified: VerifyResult) -> None:
    """Append the emitted tokens, advance num_tokens by num_sampled and num_computed by query_len - num_rejected."""
    rows = batch.rows
    width = verified.token_ids.shape[1]
    column = state.num_tokens[rows][:, None] + torch.arange(width, device=rows.device)[None]  # [R, D+1]
    kept = torch.arange(width, device=rows.device)[None] < verified.num_sampled[:, None]
    kept &= column < state.token_ids.shape[1]
    owner = rows[:, None].expand_as(column)
    state.token_ids[owner[kept], column[kept]] = verified.token_ids[kept].to(torch.int32)
    state.num_tokens[rows] += verified.num_sampled
    state.num_computed[rows] += batch.cu_query_lens[1:] - batch.cu_query_lens[:-1] - verified.num_rejected
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
    sources, targets = [], []
    first_logits = batch.cu_num_logits.tolist()
    for request, (path, count) in enumerate(zip(verified.path.tolist(), verified.num_sampled.tolist(), strict=True)):
        for depth in range(1, count):
            if path[depth] != depth:
                sources.append(first_logits[request] + path[depth])
                targets.append(first_logits[request] + depth)
    if not sources:
        return
    slots = batch.slot_mapping[batch.logits_indices]
    read, write = slots[sources], slots[targets]
    for k_cache, v_cache in kv:
        for cache in (k_cache, v_cache):
            flat = cache.view(-1, *cache.shape[2:])
            flat[write] = flat[read]
