"""The CPU column of a step's bookkeeping: compiled loops over the few rows of a step, where a torch operator costs more than the work.

Semantics: kernels/reference_state.py. Letters as there.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from specdec.kernels.reference_state import PreparedInputs


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
    """Lay out a step. Arguments and result as in the reference."""
    drafts = draft_token_ids.numpy()
    tree = np.zeros((0, 0), dtype=np.int64) if parents is None else parents.numpy()
    rows_of = np.empty((4, num_query_rows), dtype=np.int64)  # ids, positions, slots, parents
    seq_lens = np.empty(len(rows), dtype=np.int32)
    logits_indices = np.empty(num_logits, dtype=np.int64)
    _lay_out(
        rows.numpy(), drafts, tree, cu_query_lens.numpy(), cu_num_logits.numpy(), num_drafts.numpy(), num_computed_tokens.numpy(),
        token_ids.numpy(), block_table.numpy(), block_size, rows_of, seq_lens, logits_indices,
    )  # fmt: skip
    ids, positions, slots, above = torch.from_numpy(rows_of)
    return PreparedInputs(
        ids, positions, slots, None if parents is None else above, torch.from_numpy(seq_lens), torch.from_numpy(logits_indices)
    )


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
    """Commit a step in place. Arguments as in the reference."""
    _commit(
        rows.numpy(), sampled_token_ids.numpy(), num_sampled.numpy(), num_rejected.numpy(), cu_query_lens.numpy(),
        token_ids.numpy(), num_tokens.numpy(), num_computed_tokens.numpy(),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _lay_out(rows, drafts, tree, starts, logits, num_drafts, computed, tokens, table, block_size, out, seq_lens, indices):  # type: ignore[no-untyped-def]
    depths = np.zeros(max(drafts.shape[1], 1), dtype=np.int64)
    for request in range(len(rows)):
        row, start, end = rows[request], np.int64(starts[request]), np.int64(starts[request + 1])
        base = computed[row]
        committed = end - start - num_drafts[request]
        for j in range(end - start):
            place = base + j
            out[2, start + j] = np.int64(table[request, place // block_size]) * block_size + place % block_size
            if j < committed:
                out[0, start + j], out[1, start + j], out[3, start + j] = tokens[row, place], place, -1
                continue
            draft = j - committed
            parent = tree[request, draft] if tree.shape[0] else draft - 1
            depths[draft] = 1 if parent < 0 else depths[parent] + 1
            out[0, start + j] = max(drafts[request, draft], 0)
            out[1, start + j] = base + committed - 1 + depths[draft]
            out[3, start + j] = parent
        seq_lens[request] = base + end - start
        first, last = np.int64(logits[request]), np.int64(logits[request + 1])
        for k in range(first, last):
            indices[k] = end - last + k


@njit(cache=True, nogil=True)
def _commit(rows, sampled, counts, rejected, starts, tokens, num_tokens, computed):  # type: ignore[no-untyped-def]
    for request in range(len(rows)):
        row = rows[request]
        at = num_tokens[row]
        for i in range(min(counts[request], tokens.shape[1] - at)):
            tokens[row, at + i] = sampled[request, i]
        num_tokens[row] += counts[request]
        computed[row] += starts[request + 1] - starts[request] - rejected[request]
