"""DraftModelProposer: a small language model with the target's vocabulary drafts a chain.

Owns: the draft's weights and how far its KV reaches. Must not know: the target. Source: Leviathan et al. 2211.17192.

A step first feeds what the draft has not seen: a prompt chunk, or after full acceptance the last draft and the anchor. Its KV
lies in the target's blocks under the same ids, so a prefix hit brings draft KV along and a preempted request loses both. To
keep that true, every step extends the draft's KV up to the target's, whether or not anybody drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import MethodTraits
from specdec.config.vocabulary_overlap import overlap_of
from specdec.models.registry import TargetModel, load_model
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, DraftRail, MemoryNeed, Outcome, StepView
from specdec.proposers.chain import extend_chains, wanted_drafts
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.draft_tokens import DraftTokens
from specdec.proposers.draft_vocabulary import DraftVocabulary
from specdec.proposers.paged import DraftExtent, PagedRows, Span, StepLengths, committed_ids, paged_rows, step_lengths

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class DraftModelProposer(BaseProposer):
    """Drafts with a model of its own.

    Raises:
        ConfigError: the draft's checkpoint cannot be loaded.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        assert resolved.draft_model_path is not None, "resolve() found the draft's checkpoint"
        self.traits: MethodTraits = resolved.traits
        self._resolved = resolved
        self.draft_path: str = resolved.draft_model_path
        limits = (resolved.max_model_len, getattr(resolved.draft_hf_config, "max_position_embeddings", None), config.max_model_len)
        self.max_len = min(limit for limit in limits if limit is not None)
        self._draft_sample_method = config.draft_sample_method
        self._least_trust = float(config.draft_confidence_threshold)
        self.tokens = _tokens_of(resolved)
        self.vocabulary = DraftVocabulary(self.tokens.id_map)
        self.model: TargetModel | None = self._load()
        self._extent = DraftExtent()

    def memory(self) -> MemoryNeed:
        """Weights, and KV for every layer in each of the target's blocks."""
        model = self._model()
        heads, head_dim = model.kv_shape()
        element = torch.empty(0, dtype=model.dtype).element_size()
        block_size = self._resolved.engine.cache.block_size
        return MemoryNeed(
            weights_bytes=model.num_bytes,
            kv_bytes_per_block=2 * model.num_layers * block_size * heads * head_dim * element,
            kv_layers=((heads, head_dim),) * model.num_layers,
        )

    def bind(self, rail: DraftRail) -> None:
        """Keep the caches."""
        self.rail = rail

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Rows begin anew: what a prefix hit brought counts as computed."""
        self._extent.forget(rows)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Forget the rows."""
        self._extent.forget(rows)

    def propose(self, step: StepView) -> DraftBatch:
        """Catch up with the target, the anchor included where drafts are wanted, and continue from there."""
        lengths = step_lengths(step)
        starts = self._extent.valid(step, lengths)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        stops = [min(length.num_computed + (i in wanted), self.max_len) for i, length in enumerate(lengths)]
        spans = [Span(i, start, stop) for i, (start, stop) in enumerate(zip(starts, stops, strict=True)) if start < stop]
        draws = ChainDraws(
            self.vocabulary.sampling(step.sampling),
            {i: lengths[i].num_computed for i in wanted},
            method=self._draft_sample_method,
            least_trust=self._least_trust,
        )
        self._catch_up(step, spans, draws)
        extend_chains(self.rail, step, draws, wanted=wanted, forward=self._forward)
        self._record(step, lengths, draws.tokens)
        return draws.batch(len(lengths), source=self.traits.method, id_map=self.tokens.id_map)

    def sleep(self) -> None:
        """Drop the weights."""
        self.model = None

    def wake(self) -> None:
        """Load the weights again."""
        if self.model is None:
            self.model = self._load()

    def reload(self, draft_path: str | None = None, /) -> None:
        """Read the draft's checkpoint again, or another one of the same shapes."""
        self.model = self._load(draft_path)
        self.draft_path = draft_path or self.draft_path

    def _load(self, path: str | None = None) -> TargetModel:
        resolved = self._resolved
        dtype = getattr(torch, resolved.dtype)
        device = torch.device(resolved.device)
        return load_model(path or self.draft_path, resolved.draft_hf_config, dtype=dtype, device=device, max_model_len=self.max_len)

    def _model(self) -> TargetModel:
        assert self.model is not None, "the draft model sleeps; call wake() first"
        return self.model

    def _forward(self, input_ids: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """Drafts [N] -> logits [N, V'] of the ids that both models know."""
        hidden, _ = self._model().forward(self.tokens.fed_back(input_ids), rows.positions, self.rail.kv, rows.meta)
        return self.tokens.known(self._model().compute_logits(hidden))

    def _catch_up(self, step: StepView, spans: list[Span], draws: ChainDraws) -> None:
        """Feed the committed tokens of `spans`; draw the first draft of each drafting request, whose span ends with its anchor."""
        if not spans:
            return
        rows = paged_rows(self.rail, step, spans)
        hidden, _ = self._model().forward(self.tokens.committed(committed_ids(step, rows)), rows.positions, self.rail.kv, rows.meta)
        requests = [span.request for span in spans]
        chosen = [i for i, request in enumerate(requests) if request in draws.tokens]
        if chosen:
            logits = self._model().compute_logits(hidden[rows.last[chosen]])
            draws.draw([requests[i] for i in chosen], self.tokens.known(logits))

    def _record(self, step: StepView, lengths: list[StepLengths], drafts: dict[int, list[int]]) -> None:
        for request, (row, length) in enumerate(zip(step.rows.tolist(), lengths, strict=True)):
            chain = drafts.get(request)
            stop = min(length.num_computed + (chain is not None), self.max_len)
            self._extent.record(row, stop, self.vocabulary.to_target([max(token, 0) for token in chain[:-1]]) if chain else ())


def _tokens_of(resolved: ResolvedConfig) -> DraftTokens:
    config: Any = resolved.engine.speculative
    sizes = (resolved.draft_hf_config.get_text_config().vocab_size, resolved.vocab_size)
    if not config.use_heterogeneous_vocab:
        return DraftTokens.shared(*sizes, device=torch.device(resolved.device))
    assert resolved.draft_model_path is not None
    eos = resolved.draft_hf_config.get_text_config().eos_token_id
    overlap = overlap_of(
        Path(resolved.draft_model_path),
        Path(resolved.tokenizer_path),
        draft_eos=[eos] if isinstance(eos, int) else list(eos or ()),
        target_eos=resolved.eos_token_ids,
        sizes=sizes,
    )
    return DraftTokens.overlapping(overlap, sizes[1], device=torch.device(resolved.device))
