"""EarlyExitProposer: the target's first layers, its final norm and its head draft a chain.

Owns: running part of the target. Must not know: requests. Source: Draft & Verify 2309.08168, LayerSkip 2404.16710.

Those layers' KV of committed text is the target's own, so there is nothing to catch up with: a step feeds the anchor and then
its drafts, and writes their KV into the slots that the next verification overwrites with the same values.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import MethodTraits
from specdec.errors import ConfigError
from specdec.models.llama import LlamaModel
from specdec.proposers.base import BaseProposer, DraftBatch, DraftRail, StepView
from specdec.proposers.chain import extend_chains, wanted_drafts
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.paged import PagedRows, Span, committed_ids, paged_rows, step_lengths

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class EarlyExitProposer(BaseProposer):
    """Drafts with the first `exit_layer` layers of the target.

    Raises:
        ConfigError: an adapter was asked for, which is not built; or (in bind) the target runs through transformers' code.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        if config.model is not None:
            raise ConfigError(
                f"speculative_config.model is {config.model!r}, but adapters of `early_exit` are not built yet",
                hint="drop model: the target's own norm and head are used",
            )
        self.traits: MethodTraits = resolved.traits
        self._first: LlamaModel | None = None
        self.exit_layer: int = config.exit_layer
        self._draft_sample_method = config.draft_sample_method
        self._least_trust = float(config.draft_confidence_threshold)
        self.max_len = min(resolved.max_model_len, config.max_model_len or resolved.max_model_len)

    def bind(self, rail: DraftRail) -> None:
        """Take the first layers of the target."""
        target: Any = rail.target
        if not isinstance(target, LlamaModel):
            raise ConfigError(
                f"method `early_exit` cannot run part of a {type(target).__name__}: it serves the Llama family only",
                hint="use method `ngram` or `suffix`, which need nothing of the model",
            )
        self.rail, self.target = rail, target
        self._first_kv = rail.target_kv[: self.exit_layer]
        self._borrow()

    def sleep(self) -> None:
        """Let go of the target's layers."""
        self._first = None

    def wake(self) -> None:
        """Borrow the target's layers again."""
        self._borrow()

    def reload(self, draft_path: str | None = None, /) -> None:
        """The target's layers are others now."""
        self._borrow()

    def _borrow(self) -> None:
        self._first = copy.copy(self.target)  # shares all weights
        self._first.layers = self.target.layers[: self.exit_layer]

    def propose(self, step: StepView) -> DraftBatch:
        """Feed each drafting request's anchor, then its drafts."""
        lengths = step_lengths(step)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        draws = ChainDraws(
            step.sampling, {i: lengths[i].num_computed for i in wanted}, method=self._draft_sample_method, least_trust=self._least_trust
        )
        if wanted:
            rows = paged_rows(self.rail, step, [Span(i, anchor, anchor + 1) for i, anchor in draws.anchors.items()])
            draws.draw(list(wanted), self._forward(committed_ids(step, rows), rows))
            extend_chains(self.rail, step, draws, wanted=wanted, forward=self._forward)
        return draws.batch(len(lengths), source=self.traits.method)

    def _forward(self, input_ids: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """[N] -> logits [N, V], from the stream after exit_layer layers."""
        target, kv = self.target, self.rail.target_kv
        if target.fused is not None and target.fused.fits(kv):
            stream = target.embed_tokens(input_ids)
            hidden, _ = target.fused.run(stream, rows.positions, kv, rows.meta, last=self.exit_layer)
        else:
            assert self._first is not None, "early exit sleeps; call wake() first"
            hidden, _ = self._first.forward_eager(input_ids, rows.positions, self._first_kv, rows.meta)
        return target.compute_logits(hidden)
