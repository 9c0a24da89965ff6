"""StepViews by hand, for tests of one proposer without an engine."""

from __future__ import annotations

import torch

from specdec.proposers.base import DraftSampling, StepView


def view(num_requests: int, **fields: object) -> StepView:
    """A step after which every request may get two drafts."""
    ones = torch.ones(num_requests, dtype=torch.int64)
    sampling = DraftSampling(temperature=ones.float(), seed=ones, top_k=ones, top_p=ones.float())
    values = {
        "request_ids": tuple(f"r{i}" for i in range(num_requests)),
        "rows": torch.arange(num_requests),
        "cu_query_lens": torch.arange(num_requests + 1, dtype=torch.int32),
        "target_token_ids": ones,
        "target_positions": ones,
        "path": ones[:, None] * 0,
        "sampled_token_ids": ones[:, None],
        "num_sampled": ones,
        "num_rejected": ones * 0,
        "num_computed": ones,
        "token_ids": torch.ones(num_requests, 8, dtype=torch.int32),
        "num_tokens": ones * 2,
        "max_nodes": [2] * num_requests,
        "sources": [None] * num_requests,
        "can_draw_target": [True] * num_requests,
        "taps": {},
        "block_table": torch.zeros(num_requests, 1, dtype=torch.int32),
        "sampling": sampling,
    }
    return StepView(**(values | fields))
