"""Which query rows of a step became text, for heads that read the target's hidden states there.

Owns: the arithmetic between a step's rows and committed positions. Must not know: what is read.
Letters: R requests of the batch, N query rows, P kept rows.
"""

from __future__ import annotations

import torch

from specdec.proposers.base import StepView


def kept_rows(step: StepView) -> torch.Tensor:
    """Return the query rows [P] int64 of all committed positions, request by request and by position.

    Rows up to the anchor's stand in order; behind it `path` names the row of each draft that was kept, so trees work as chains do.
    """
    device = step.rows.device
    query_lens = step.cu_query_lens.diff().long()
    kept = query_lens - step.num_rejected  # [R] positions that have become text
    owner = torch.repeat_interleave(torch.arange(len(kept), device=device), kept)  # [P]
    place = torch.arange(len(owner), device=device) - (kept.cumsum(0) - kept)[owner]  # 0 for a request's first row
    before = (kept - step.num_sampled)[owner]  # rows ahead of the anchor's
    on_path = step.path[owner, (place - before).clamp(0, step.path.shape[1] - 1)]
    return step.cu_query_lens[owner].long() + torch.where(place < before, place, before + on_path)
