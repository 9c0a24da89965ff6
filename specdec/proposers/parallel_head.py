"""ParallelHeadProposer: an EAGLE-3 head that drafts all its tokens in one pass (P-EAGLE, `parallel_drafting`).

Owns: the mask rows behind the committed ones. Must not know: what the head computes (models/peagle.py).

Rows of committed positions join feature and next token, as in eagle.py; the newest of them holds the anchor and gives the first draft.
Behind it stand masks at the next positions, one fewer than drafts are wanted, each with the mask's feature and giving one more draft.
No row reads a drafted token, so each draft's law is its row's own. The KV of masks is written over once their positions are text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec.models.peagle import PEagleModel
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.head_proposer import HeadProposer
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.paged import PagedRows, Span, paged_rows, step_lengths

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


def build_eagle3(resolved: ResolvedConfig) -> EagleProposer | ParallelHeadProposer:
    """The proposer of an EAGLE-3 head, step by step or in one pass, as asked."""
    config: Any = resolved.engine.speculative
    return ParallelHeadProposer(resolved) if config.parallel_drafting else EagleProposer(resolved)


class ParallelHeadProposer(HeadProposer[PEagleModel]):
    """Drafts in one pass of the head.

    Raises:
        ConfigError: the head's checkpoint cannot be loaded, does not fit the target, or was not trained for one pass.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved, build=PEagleModel)

    def propose(self, step: StepView) -> DraftBatch:
        """Run the head over the rows that became text and over the masks behind them, and draw from the newest rows."""
        lengths = step_lengths(step)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        anchors = {request: lengths[request].num_computed for request in wanted}
        draws = ChainDraws(self.vocabulary.sampling(step.sampling), anchors, method=self._draft_sample_method)
        stops = [x.num_computed + max(wanted.get(request, 0) - 1, 0) for request, x in enumerate(lengths)]
        spans = [Span(i, x.context, stop) for i, (x, stop) in enumerate(zip(lengths, stops, strict=True)) if x.context < x.num_computed]
        if spans:
            self._fill(step, spans, draws, wanted)
        return draws.batch(len(lengths), source=self.traits.method, id_map=self.vocabulary.id_map)

    def _fill(self, step: StepView, spans: list[Span], draws: ChainDraws, wanted: dict[int, int]) -> None:
        head, rail = self._awake(), self._bound()
        rows = paged_rows(rail, step, spans)
        states = head.forward(*self._inputs(step, rows), rows.positions, rail.kv, rows.meta)
        first = {span.request: int(last) + 1 - wanted.get(span.request, 0) for span, last in zip(spans, rows.last, strict=True)}
        for depth in range(max(wanted.values(), default=0)):
            left = [request for request in draws.tokens if wanted[request] > depth]
            draws.draw(left, head.compute_logits(states.scored[[first[request] + depth for request in left]]))

    def _inputs(self, step: StepView, rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [N], features [N, H]): committed rows hold the token behind their position and its feature, the others the mask's."""
        head = self._awake()
        is_mask = rows.positions >= step.num_computed[rows.owner]
        places = torch.where(is_mask, 0, rows.positions + 1)
        ids = torch.where(is_mask, head.mask_token_id, step.token_ids[step.rows[rows.owner], places].long())
        at = kept_rows(step)
        features = head.mask_feature().expand(len(ids), -1).clone()
        features[~is_mask] = head.combine({tap: step.taps[tap][at] for tap in self.traits.taps})
        return ids, features
