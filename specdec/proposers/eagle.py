"""EagleProposer: a head on the target's hidden states drafts a chain (methods `eagle`, `eagle3`, `mtp`).

Owns: when the head runs and over which rows. Must not know: what the head computes (models/eagle.py, eagle3.py, mtp.py).

Row j of the head joins the feature of position j with the token of position j + 1, so each step runs it over exactly the rows that
the step committed: the newest of them holds the anchor and gives the first draft. Further drafts feed the head's own output, one
position each; their KV, made from estimates, is written over with true features once they are text. A step that drafts nothing
still extends, so draft KV reaches as far as the target's, under the same block ids: a prefix hit brings it along, and since
blocks are hashed with one token past their end (`prefill_lookahead`), their last row was made with the same successor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from specdec.models.draft_head import DraftHead, HeadSetting
from specdec.models.eagle import EagleModel
from specdec.models.eagle3 import Eagle3Model
from specdec.models.loader import Checkpoint
from specdec.models.mtp import first_module
from specdec.proposers.base import AdmitInfo, DraftBatch, Outcome, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.compiled_chain import chain_batch, grow_chains, lay_out
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.head_proposer import HeadProposer
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.paged import PagedRows, Span, StepLengths, paged_rows, step_lengths
from specdec.proposers.pending_rows import PendingRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.config.engine import ResolvedConfig
    from specdec.models.fused_chain import FusedChain

_HEADS: dict[str, Callable[[Any, Checkpoint, HeadSetting], DraftHead]] = {"eagle": EagleModel, "eagle3": Eagle3Model, "mtp": first_module}


class EagleProposer(HeadProposer[DraftHead]):
    """Drafts with a head of the EAGLE family.

    Raises:
        ConfigError: the head's checkpoint cannot be loaded or does not fit the target.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        super().__init__(resolved, build=_HEADS[resolved.traits.method])
        self._pending = PendingRows()
        self._least_trust = float(getattr(resolved.engine.speculative, "draft_confidence_threshold", 0.0))

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Rows begin anew."""
        self._pending.forget(rows)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Forget the rows."""
        self._pending.forget(rows)

    def propose(self, step: StepView) -> DraftBatch:
        """Run the head over the rows that became text, then draft from its own output."""
        chain = self._awake().chain
        if chain is not None and chain.fits(self._bound().kv):
            return self._propose_compiled(step, chain)
        lengths = step_lengths(step)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        anchors = {request: lengths[request].num_computed for request in wanted}
        sampling = self.vocabulary.sampling(step.sampling)
        draws = ChainDraws(sampling, anchors, method=self._draft_sample_method, least_trust=self._least_trust)
        features = self._extend(step, lengths, draws)
        self._continue(step, draws, wanted, features)
        return draws.batch(len(lengths), source=self.traits.method, id_map=self.vocabulary.id_map)

    def _propose_compiled(self, step: StepView, chain: FusedChain) -> DraftBatch:
        """The same in one call. Drafts that are drawn, or bound by a grammar, go on from its first states pass by pass."""
        rail, head = self._bound(), self._awake()
        rows = lay_out(step, block_size=rail.block_size, max_len=self.max_len)
        is_greedy = self._draft_sample_method == "greedy" and step.sampling.token_mask is None
        taps, persistent = [step.taps[tap] for tap in self.traits.taps], step.rows.tolist()
        if self._pending.may_wait(rows):
            self._pending.put_off(persistent, rows, taps)
            return ChainDraws(step.sampling, {}, method="greedy").batch(len(persistent), source=self.traits.method)
        rows, taps = self._pending.join(persistent, rows, taps)
        grown = grow_chains(chain, rail, step, rows, taps=taps, is_greedy=is_greedy, least_trust=self._least_trust)
        if is_greedy:
            return chain_batch(step, rows, grown, source=self.traits.method)
        requests = rows.chains.tolist()
        anchors = dict(zip(requests, rows.anchors.tolist(), strict=True))
        sampling = self.vocabulary.sampling(step.sampling)
        draws = ChainDraws(sampling, anchors, method=self._draft_sample_method, least_trust=self._least_trust)
        if requests:
            draws.draw(requests, head.compute_logits(grown.scored))
            self._continue(step, draws, dict(zip(requests, rows.wanted.tolist(), strict=True)), grown.fed_back)
        return draws.batch(len(step.rows), source=self.traits.method, id_map=self.vocabulary.id_map)

    def _extend(self, step: StepView, lengths: Sequence[StepLengths], draws: ChainDraws) -> torch.Tensor | None:
        """Run over all committed rows and draw each first draft. Returns the features [drafting requests, H] of the next step."""
        spans = [Span(i, x.context, x.num_computed) for i, x in enumerate(lengths) if x.context < x.num_computed]
        if not spans:
            return None
        head, rail = self._awake(), self._bound()
        rows = paged_rows(rail, step, spans)
        at = kept_rows(step)
        features = head.combine({tap: step.taps[tap][at] for tap in self.traits.taps})
        states = head.forward(self._successors(step, rows), features, rows.positions, rail.kv, rows.meta)
        places = {span.request: index for index, span in enumerate(spans)}
        requests = list(draws.anchors)
        if not requests:
            return None
        newest = rows.last[[places[request] for request in requests]]
        draws.draw(requests, head.compute_logits(states.scored[newest]))
        return states.fed_back[newest]

    def _successors(self, step: StepView, rows: PagedRows) -> torch.Tensor:
        """The committed tokens [N] behind the rows' positions."""
        return step.token_ids[step.rows[rows.owner], rows.positions + 1].long()

    def _continue(self, step: StepView, draws: ChainDraws, wanted: Mapping[int, int], features: torch.Tensor | None) -> None:
        """Feed each newest draft with the head's own feature, at the position before the draft's."""
        head, rail = self._awake(), self._bound()
        active = list(draws.anchors)
        for depth in range(1, max(wanted.values(), default=1)):
            assert features is not None, "requests that draft have committed rows"
            left = draws.going_on(active, wanted)
            if not left:
                return
            features = features[[active.index(request) for request in left]]
            places = [draws.anchors[request] - 1 + depth for request in left]
            rows = paged_rows(rail, step, [Span(request, place, place + 1) for request, place in zip(left, places, strict=True)])
            ids = torch.tensor(self.vocabulary.to_target(draws.newest(left)), device=rail.device)
            states = head.forward(ids, features, rows.positions, rail.kv, rows.meta)
            draws.draw(left, head.compute_logits(states.scored))
            active, features = left, states.fed_back
