"""ParallelDraftProposer: a draft model that was trained to fill masks drafts all its tokens in one pass (PARD).

Owns: the mask rows behind the anchor. Must not know: the model. Source: PARD (2504.18583).

Behind the committed tokens and the anchor stand masks, one fewer than drafts are wanted. The anchor's row gives the first draft, each
mask's row the next one; no row reads a drafted token, so each draft's law is its row's own. The KV of masks is written over later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec.models.mask_token import mask_token_of
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.paged import PagedRows, Span, committed_ids, paged_rows, step_lengths

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


def build_draft_model(resolved: ResolvedConfig) -> DraftModelProposer:
    """The draft model's proposer, step by step or in one pass, as asked."""
    config: Any = resolved.engine.speculative
    return ParallelDraftProposer(resolved) if config.parallel_drafting else DraftModelProposer(resolved)


class ParallelDraftProposer(DraftModelProposer):
    """Drafts a block in one pass. The checkpoint's config names the mask token.

    Raises:
        ConfigError: the draft's checkpoint cannot be loaded, or names no mask token in its vocabulary.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.mask_token_id = mask_token_of(resolved.draft_hf_config, resolved.draft_hf_config.get_text_config().vocab_size)

    def propose(self, step: StepView) -> DraftBatch:
        """Feed what the draft has not read, the anchor and the masks, and draw from their rows."""
        lengths = step_lengths(step)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        spans = []
        for request, (start, length) in enumerate(zip(self._extent.valid(step, lengths), lengths, strict=True)):
            stop = min(length.num_computed + wanted.get(request, 0), self.max_len)  # the anchor, and a mask for each further draft
            if start < stop:
                spans.append(Span(request, start, stop))
        draws = ChainDraws(
            self.vocabulary.sampling(step.sampling), {i: lengths[i].num_computed for i in wanted}, method=self._draft_sample_method
        )
        if spans:
            self._fill(step, spans, draws, wanted)
        for request, (row, length) in enumerate(zip(step.rows.tolist(), lengths, strict=True)):
            self._extent.record(row, min(length.num_computed + (request in wanted), self.max_len))
        return draws.batch(len(lengths), source=self.traits.method, id_map=self.tokens.id_map)

    def _fill(self, step: StepView, spans: list[Span], draws: ChainDraws, wanted: dict[int, int]) -> None:
        rows = paged_rows(self.rail, step, spans)
        hidden, _ = self._model().forward(self._input_ids(step, rows), rows.positions, self.rail.kv, rows.meta)
        first = {span.request: int(last) + 1 - wanted.get(span.request, 0) for span, last in zip(spans, rows.last, strict=True)}
        for depth in range(max(wanted.values(), default=0)):
            left = [request for request in draws.tokens if wanted[request] > depth]
            logits = self._model().compute_logits(hidden[[first[request] + depth for request in left]])
            draws.draw(left, self.tokens.known(logits))

    def _input_ids(self, step: StepView, rows: PagedRows) -> torch.Tensor:
        """[N]: committed tokens up to the anchor, masks behind it."""
        is_mask = rows.positions > step.num_computed[rows.owner]
        return torch.where(is_mask, self.mask_token_id, self.tokens.committed(committed_ids(step, rows)))
