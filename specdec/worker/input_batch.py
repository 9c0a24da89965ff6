"""InputBatch and VerifyResult: what one step feeds the target, and what verification made of it.

Owns: the tensors of one step. Must not know: which proposer drafted. Letters: R requests, N query rows,
L logits rows, D depth, B blocks per request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INVALID_TOKEN = -1  # device value of a draft to refuse and of padding in an output row


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step's query rows. A decode request owns its anchor row followed by its draft nodes.

    input_ids [N] int64; positions [N] int64 (anchor + depth, for RoPE only); parents [N] int64 or None:
    index of the parent within the request's draft nodes, -1 for a child of the anchor and for non-draft rows.
    slot_mapping [N] int64: KV slot, consecutive per request, never derived from positions.
    cu_query_lens [R+1] int32, seq_lens [R] int32 (context + query), block_table [R, B] int32.
    logits_indices [L] int64: rows whose logits are needed; cu_num_logits [R+1] int32 (a request that samples
    nothing owns no row). num_drafts [R] int64. rows [R] int64: persistent row of each request.
    Host twins end in _cpu and are plain lists.
    """

    request_ids: tuple[str, ...]
    rows: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    parents: torch.Tensor | None
    slot_mapping: torch.Tensor
    cu_query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_indices: torch.Tensor
    cu_num_logits: torch.Tensor
    num_drafts: torch.Tensor
    query_lens_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    num_drafts_cpu: tuple[int, ...]
    num_logits_cpu: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What was emitted. token_ids [R, D+1] int64 and path [R, D+1] int64, padded with INVALID_TOKEN.

    path: query-row offset (from the request's first logits row) of each kept row: path[:, 0] is the anchor
    row, path[:, i] the row of the i-th accepted draft; a chain is 0, 1, 2, ...
    num_sampled [R] int64 (accepted + 1; 0 for a request that samples nothing or failed), num_rejected [R]
    (draft rows not kept), num_drafts [R] (drafts tested), num_invalid [R] (refused by the grammar before the test).
    """

    token_ids: torch.Tensor
    path: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    num_drafts: torch.Tensor
    num_invalid: torch.Tensor
