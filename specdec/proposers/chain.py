"""extend_chains: K drafts, each drawn and fed back into the model that made the one before.

Owns: the loop over depths for requests that stop at different lengths. Must not know: which model runs, or whose KV it writes.
Letters: R requests of the batch, N rows of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specdec.proposers.base import DraftRail, StepView
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.paged import PagedRows, Span, paged_rows

Forward = Callable[[torch.Tensor, PagedRows], torch.Tensor]  # (input_ids [N], rows) -> logits [N, V] of all rows


def extend_chains(rail: DraftRail, step: StepView, draws: ChainDraws, *, wanted: Mapping[int, int], forward: Forward) -> None:
    """Continue chains that hold their first draft. wanted: by batch index, drafts in all, at least 1.

    Draft i is fed at position anchor + i, so that KV is written there for all drafts but a request's last.
    """
    for depth in range(1, max(wanted.values(), default=1)):
        left = draws.going_on(draws.tokens, wanted)
        if not left:
            return
        places = [draws.anchors[request] + depth for request in left]
        rows = paged_rows(rail, step, [Span(request, place, place + 1) for request, place in zip(left, places, strict=True)])
        draws.draw(left, forward(torch.tensor(draws.newest(left), device=rail.device), rows))


def wanted_drafts(step: StepView, num_sampled: list[int], *, num_tokens: list[int], max_len: int) -> dict[int, int]:
    """Return, by batch index, how many drafts to make: none while a prompt is read, and none past `max_len` positions."""
    wanted = {}
    for request, (sampled, most) in enumerate(zip(num_sampled, step.max_nodes, strict=True)):
        count = min(most, max_len - num_tokens[request])
        if sampled and count > 0:
            wanted[request] = count
    return wanted
