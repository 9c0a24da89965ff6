"""draft_chain: K greedy drafts, each fed back into the model that made the one before.

Owns: the loop over depths for requests that stop at different lengths. Must not know: which model runs, or whose KV it writes.
Letters: R requests of the batch, N rows of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specdec.proposers.base import DraftRail, StepView
from specdec.proposers.paged import PagedRows, Span, paged_rows

Forward = Callable[[torch.Tensor, PagedRows], torch.Tensor]  # (input_ids [N], rows) -> logits [N, V] of all rows


def draft_chain(
    rail: DraftRail, step: StepView, newest: Mapping[int, int], *, anchors: Mapping[int, int], wanted: Mapping[int, int], forward: Forward
) -> dict[int, list[int]]:
    """Continue each request's first draft.

    newest: by batch index, the first draft. anchors: position of the anchor it follows. wanted: drafts in all, at least 1.
    Draft i is fed at position anchor + i, so that KV is written there for all drafts but a request's last.
    """
    drafts = {request: [token] for request, token in newest.items()}
    for depth in range(1, max(wanted.values(), default=1)):
        left = [request for request in drafts if wanted[request] > depth]
        rows = paged_rows(rail, step, [Span(request, anchors[request] + depth, anchors[request] + depth + 1) for request in left])
        input_ids = torch.tensor([drafts[request][-1] for request in left], device=rail.device)
        for request, token in zip(left, forward(input_ids, rows).argmax(-1).tolist(), strict=True):
            drafts[request].append(token)
    return drafts


def wanted_drafts(step: StepView, num_sampled: list[int], *, num_tokens: list[int], max_len: int) -> dict[int, int]:
    """Return, by batch index, how many drafts to make: none while a prompt is read, and none past `max_len` positions."""
    wanted = {}
    for request, (sampled, most) in enumerate(zip(num_sampled, step.max_nodes, strict=True)):
        count = min(most, max_len - num_tokens[request])
        if sampled and count > 0:
            wanted[request] = count
    return wanted
