"""build_batch: from a step's plan and the persistent rows to the tensors the target is fed.

Owns: the layout of query rows. Must not know: the model. Reference of the arithmetic: kernels/reference_state.py.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from specdec.kernels.dispatch import kernel
from specdec.kernels.transfers import upload
from specdec.models.attention import Attend, AttentionMetadata, build_tree_mask
from specdec.scheduler.output import SchedulerOutput
from specdec.worker.input_batch import InputBatch
from specdec.worker.request_state import RequestState, RowInfo


def build_batch(plan: SchedulerOutput, state: RequestState, *, block_size: int) -> tuple[list[RowInfo], InputBatch]:
    """Gather the scheduled requests' rows in batch order, less the drafts that were planned and never made."""
    infos = [state.infos[request_id] for request_id in plan.num_scheduled_tokens]
    planned = [plan.num_draft_nodes.get(info.request_id, 0) for info in infos]
    num_drafts = tuple(_drafts_at_hand(info, n, block_size) for n, info in zip(planned, infos, strict=True))
    missing = [n - at_hand for n, at_hand in zip(planned, num_drafts, strict=True)]
    query_lens = tuple(n - absent for n, absent in zip(plan.num_scheduled_tokens.values(), missing, strict=True))
    seq_lens = tuple(info.num_computed + n for info, n in zip(infos, query_lens, strict=True))
    samples = [seq_len >= info.prefill_len for seq_len, info in zip(seq_lens, infos, strict=True)]
    num_logits = tuple(n + 1 if sample else 0 for n, sample in zip(num_drafts, samples, strict=True))
    device = state.device
    rows = upload([info.row for info in infos], device)  # [R]
    drafts = upload(num_drafts, device)  # [R]
    cu_query_lens = upload([0, *accumulate(query_lens)], device, dtype=torch.int32)
    cu_num_logits = upload([0, *accumulate(num_logits)], device, dtype=torch.int32)
    block_table = state.block_table[rows]
    width = max(num_drafts, default=0)
    prepared = kernel("prepare_inputs", device)(
        rows,
        state.draft_token_ids[rows, :width],
        cu_query_lens=cu_query_lens,
        cu_num_logits=cu_num_logits,
        num_drafts=drafts,
        num_computed_tokens=state.num_computed,
        token_ids=state.token_ids,
        block_table=block_table,
        block_size=block_size,
        num_query_rows=sum(query_lens),
        num_logits=sum(num_logits),
        parents=_parent_matrix(infos, num_drafts, width, device),
    )
    batch = InputBatch(
        request_ids=tuple(plan.num_scheduled_tokens),
        rows=rows,
        input_ids=prepared.input_ids,
        positions=prepared.positions,
        parents=prepared.parents,
        slot_mapping=prepared.slot_mapping,
        cu_query_lens=cu_query_lens,
        seq_lens=prepared.seq_lens,
        block_table=block_table,
        logits_indices=prepared.logits_indices,
        cu_num_logits=cu_num_logits,
        num_drafts=drafts,
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        num_drafts_cpu=num_drafts,
        num_logits_cpu=num_logits,
    )
    return infos, batch


def _drafts_at_hand(info: RowInfo, planned: int, block_size: int) -> int:
    """Drafts that get a row. A plan made before they were known (async_scheduling) counts on all that were ordered; those that
    nobody drafted cost nothing, and to the scheduler they are drafts that were not kept."""
    num_slots_behind_anchor = info.num_blocks * block_size - info.num_computed - 1
    return max(min(planned, info.num_drafts, num_slots_behind_anchor), 0)


def attention_metadata(batch: InputBatch, infos: list[RowInfo], paged_attention: Attend | None = None) -> AttentionMetadata:
    """Describe the batch's keys to the attention layers."""
    tree_mask = None
    if batch.parents is not None:
        parents = [_parents_of(info, n) for info, n in zip(infos, batch.num_drafts_cpu, strict=True)]
        tree_mask = build_tree_mask(parents, list(batch.query_lens_cpu)).to(batch.rows.device)
    return AttentionMetadata(
        cu_query_lens=batch.cu_query_lens,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        query_lens_cpu=batch.query_lens_cpu,
        seq_lens_cpu=batch.seq_lens_cpu,
        tree_mask=tree_mask,
        paged_attention=paged_attention,
    )


def _parent_matrix(infos: list[RowInfo], num_drafts: tuple[int, ...], width: int, device: torch.device) -> torch.Tensor | None:
    """[R, K] parent of every draft node, or None where all requests have chains."""
    if all(info.parents is None for info in infos):
        return None
    trees = [_parents_of(info, count) for info, count in zip(infos, num_drafts, strict=True)]
    return torch.tensor([tree + [-1] * (width - len(tree)) for tree in trees], dtype=torch.int64, device=device).view(len(infos), width)


def _parents_of(info: RowInfo, count: int) -> list[int]:
    return list(range(-1, count - 1)) if info.parents is None else info.parents[:count]
