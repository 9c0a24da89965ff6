"""HiddenHeadProposer: heads that start from the target's last hidden state and keep no KV (methods `medusa` and `mlp_speculator`).

Owns: which row a chain starts from, and the walk over its places. Must not know: what a head computes.

The chain behind an anchor starts from the state that the anchor was drawn from: the last row that became text. Nothing is kept from
step to step, so chunked prompts, prefix hits and preemption need no care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec.config.methods import FINAL_NORM
from specdec.errors import ConfigError
from specdec.models.medusa import MedusaHeads
from specdec.models.mlp_speculator import MlpSpeculator
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.head_proposer import HeadProposer
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.paged import step_lengths

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig

_HEADS: dict[str, type[MedusaHeads] | type[MlpSpeculator]] = {"medusa": MedusaHeads, "mlp_speculator": MlpSpeculator}


class HiddenHeadProposer(HeadProposer["MedusaHeads | MlpSpeculator"]):
    """Drafts with heads on the last hidden state.

    Raises:
        ConfigError: the checkpoint cannot be loaded, does not fit the target, or has fewer heads than drafts are asked for.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        super().__init__(resolved, build=_HEADS[resolved.traits.method])
        asked, heads = resolved.traits.max_nodes, self._awake().num_heads
        if asked > heads:
            message = f"speculative_config.num_speculative_tokens is {asked}, but the draft checkpoint has {heads} heads"
            raise ConfigError(message, hint=f"use at most {heads}")

    def propose(self, step: StepView) -> DraftBatch:
        """Draft behind every request's newest state."""
        lengths = step_lengths(step)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        anchors = {request: lengths[request].num_computed for request in wanted}
        draws = ChainDraws(self.vocabulary.sampling(step.sampling), anchors, method=self._draft_sample_method)
        if wanted:
            self._walk(step, draws, wanted)
        return draws.batch(len(lengths), source=self.traits.method, id_map=self.vocabulary.id_map)

    def _walk(self, step: StepView, draws: ChainDraws, wanted: dict[int, int]) -> None:
        head, requests = self._awake(), list(draws.anchors)
        last = (step.cu_query_lens.diff().long() - step.num_rejected).cumsum(0)[requests] - 1
        state = head.begin(step.taps[FINAL_NORM][kept_rows(step)[last]])
        places = torch.tensor(list(draws.anchors.values()), device=state.device)
        previous = step.token_ids[step.rows[requests], places].long()
        for depth in range(max(wanted.values())):
            kept = [index for index, request in enumerate(requests) if wanted[request] > depth]
            if len(kept) < len(requests):
                requests, state, previous = [requests[index] for index in kept], state[kept], previous[kept]
            logits, state = head.step(depth, state, previous)
            draws.draw(requests, logits)
            previous = torch.tensor(self.vocabulary.to_target(draws.newest(requests)), device=state.device)
