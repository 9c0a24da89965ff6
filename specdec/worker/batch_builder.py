"""build_batch: from a step's plan and the persistent rows to the tensors the target is fed.

Owns: the layout of query rows. Must not know: the model. Reference of the arithmetic: kernels/reference.py, input_prep.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from specdec.models.attention import AttentionMetadata, build_tree_mask
from specdec.scheduler.output import SchedulerOutput
from specdec.worker.input_batch import InputBatch
from specdec.worker.request_state import RequestState, RowInfo


def build_batch(plan: SchedulerOutput, state: RequestState, *, block_size: int) -> tuple[list[RowInfo], InputBatch]:
    """Gather the scheduled requests' rows in batch order; drafts replace their placeholders on the device."""
    infos = [state.infos[request_id] for request_id in plan.num_scheduled_tokens]
    query_lens = tuple(plan.num_scheduled_tokens.values())
    num_drafts = tuple(plan.num_draft_nodes.get(info.request_id, 0) for info in infos)
    seq_lens = tuple(info.num_computed + n for info, n in zip(infos, query_lens, strict=True))
    samples = [seq_len >= info.prefill_len for seq_len, info in zip(seq_lens, infos, strict=True)]
    num_logits = tuple(n + 1 if sample else 0 for n, sample in zip(num_drafts, samples, strict=True))
    device = state.device
    rows = torch.tensor([info.row for info in infos], device=device)  # [R]
    lens = torch.tensor(query_lens, device=device)  # [R]
    drafts = torch.tensor(num_drafts, device=device)  # [R]
    total = sum(query_lens)
    cu_query_lens = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    owner = torch.repeat_interleave(torch.arange(len(infos), device=device), lens, output_size=total)  # [N] batch index
    offset = torch.arange(total, device=device) - cu_query_lens[owner]  # [N] within the query
    row = rows[owner]
    cache_index = state.num_computed[row] + offset  # [N] place in the sequence's KV
    node = offset - (lens - drafts)[owner]  # [N] draft node, negative for committed rows
    committed = state.token_ids[row, cache_index].long()
    drafted = state.draft_token_ids[row, node.clamp(min=0)].clamp(min=0)  # a refused draft still needs a legal id to embed
    positions, parents = _tree_positions(infos, num_drafts, cache_index, node)
    block_table = state.block_table[rows]
    slots = block_table[owner, cache_index // block_size].long() * block_size + cache_index % block_size
    batch = InputBatch(
        request_ids=tuple(info.request_id for info in infos),
        rows=rows,
        input_ids=torch.where(node >= 0, drafted, committed),
        positions=positions,
        parents=parents,
        slot_mapping=slots,
        cu_query_lens=cu_query_lens,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=block_table,
        logits_indices=_logits_indices(query_lens, num_logits, device),
        cu_num_logits=torch.tensor([0, *accumulate(num_logits)], dtype=torch.int32, device=device),
        num_drafts=drafts,
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        num_drafts_cpu=num_drafts,
        num_logits_cpu=num_logits,
    )
    return infos, batch


def attention_metadata(batch: InputBatch, infos: list[RowInfo]) -> AttentionMetadata:
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
    )


def _logits_indices(query_lens: tuple[int, ...], num_logits: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[L] int64: the last num_logits rows of each query."""
    ends = accumulate(query_lens)
    return torch.tensor([i for end, n in zip(ends, num_logits, strict=True) for i in range(end - n, end)], dtype=torch.int64, device=device)


def _tree_positions(
    infos: list[RowInfo], num_drafts: tuple[int, ...], cache_index: torch.Tensor, node: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions [N] and parents [N] or None: siblings of a tree share a position though each has its own slot."""
    if all(info.parents is None for info in infos):
        return cache_index, None
    parents, depths = [], []
    for info, count in zip(infos, num_drafts, strict=True):
        nodes = _parents_of(info, count)
        depth: list[int] = []
        for parent in nodes:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        parents += nodes
        depths += depth
    is_draft = node >= 0
    all_parents = torch.full_like(cache_index, -1)
    all_parents[is_draft] = torch.tensor(parents, dtype=torch.int64, device=cache_index.device)
    positions = cache_index.clone()
    # node i of a request lies i + 1 slots past its anchor but depth[i] positions past it
    positions[is_draft] += torch.tensor(depths, dtype=torch.int64, device=cache_index.device) - node[is_draft] - 1
    return positions, all_parents


def _parents_of(info: RowInfo, count: int) -> list[int]:
    return list(range(-1, count - 1)) if info.parents is None else info.parents[:count]
