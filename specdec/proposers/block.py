"""BlockProposer: one pass fills a block of drafts behind the anchor (methods `dflash` and `dspark`).

Owns: when the block runs and over which rows, and the walk through its slots. Must not know: what the block computes.

The target's states at committed positions become the head's keys and values as soon as they are known, so the context never runs
through the head, and every step, drafting or not, extends it as far as the target's own KV. The block's rows stand at the anchor and
behind it, over slots that the next step's context overwrites. Slot i of DSpark predicts the token behind its place; a block with a
bonus row (DFlash) begins with the anchor and its other slots predict the tokens at their own places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specdec.models.block_head import BlockHead
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.head_proposer import HeadProposer
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.paged import PagedRows, Span, paged_rows, step_lengths

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class BlockProposer(HeadProposer[BlockHead]):
    """Drafts with a block head.

    Raises:
        ConfigError: the head's checkpoint cannot be loaded, or does not fit the target.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved, build=BlockHead)
        self.num_bonus_rows = self.traits.lookahead - self.traits.max_nodes

    def propose(self, step: StepView) -> DraftBatch:
        """Write the context of the rows that became text, then fill and walk the blocks."""
        lengths = step_lengths(step)
        self._extend(step, [Span(i, x.context, x.num_computed) for i, x in enumerate(lengths) if x.context < x.num_computed])
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        anchors = {request: lengths[request].num_computed for request in wanted}
        draws = ChainDraws(self.vocabulary.sampling(step.sampling), anchors, method=self._draft_sample_method)
        trust = self._fill(step, draws, wanted) if wanted else {}
        batch = draws.batch(len(lengths), source=self.traits.method, id_map=self.vocabulary.id_map)
        return replace(batch, confidence=_padded(trust, batch.token_ids)) if trust else batch

    def _extend(self, step: StepView, spans: list[Span]) -> None:
        if not spans:
            return
        rail, at = self._bound(), kept_rows(step)
        positions = step.target_positions[at]
        owner = torch.repeat_interleave(
            torch.tensor([span.request for span in spans], device=rail.device),
            torch.tensor([span.stop - span.start for span in spans], device=rail.device),
        )
        positions = positions.long()
        slots = step.block_table[owner, positions // rail.block_size].long() * rail.block_size + positions % rail.block_size
        self._awake().write_context({tap: step.taps[tap][at] for tap in self.traits.taps}, positions, rail.kv, slots)

    def _fill(self, step: StepView, draws: ChainDraws, wanted: Mapping[int, int]) -> dict[int, list[float]]:
        """Run all blocks in one pass, then choose slot by slot: each choice corrects the next slot's law.

        Returns the confidences by request, where the head has some.
        """
        head, rail, bonus = self._awake(), self._bound(), self.num_bonus_rows
        spans = [Span(request, place, place + wanted[request] + bonus) for request, place in draws.anchors.items()]
        rows = paged_rows(rail, step, spans, is_causal=False)
        first = {span.request: int(last) + 1 - (span.stop - span.start) + bonus for span, last in zip(spans, rows.last, strict=True)}
        anchors = step.token_ids[step.rows[list(draws.anchors)], torch.tensor(list(draws.anchors.values()), device=rail.device)]
        normed = head.forward(self._block_ids(rows, anchors.long()), rows.positions, rail.kv, rows.meta)
        base = head.compute_logits(normed)  # of all slots at once: the LM head is read once
        previous = dict(zip(draws.anchors, anchors.tolist(), strict=True))
        places = {request: place for place, request in enumerate(draws.anchors)}
        state = None if head.markov is None else head.markov.begin(len(places))
        trust: dict[int, list[float]] = {}
        for depth in range(max(wanted.values())):
            left = [request for request in draws.anchors if wanted[request] > depth]
            at, embedded = [first[request] + depth for request in left], None
            logits = base[at]
            if head.markov is not None and state is not None:
                embedded = head.markov.embed(torch.tensor([previous[request] for request in left], device=rail.device))
                kept = [places[request] for request in left]
                bias, state[kept] = head.markov.correct(embedded, normed[at], state[kept])
                logits = logits + bias
            if head.confidence is not None:
                for request, share in zip(left, head.confidence(normed[at], embedded).tolist(), strict=True):
                    trust.setdefault(request, []).append(share)
            draws.draw(left, logits)
            previous |= zip(left, self.vocabulary.to_target(draws.newest(left)), strict=True)
        return trust

    def _block_ids(self, rows: PagedRows, anchors: torch.Tensor) -> torch.Tensor:
        """[N]: each block's anchor, then masks."""
        ids = torch.full_like(rows.positions, self._awake().mask_token_id)
        starts = torch.cat((rows.last.new_zeros(1), rows.last[:-1] + 1))
        ids[starts] = anchors
        return ids


def _padded(trust: Mapping[int, list[float]], token_ids: torch.Tensor) -> torch.Tensor:
    """[R, K] f32, zero where nothing was drafted."""
    padded = torch.zeros(token_ids.shape)
    for request, shares in trust.items():
        padded[request, : len(shares)] = torch.tensor(shares)
    return padded.to(token_ids.device)
