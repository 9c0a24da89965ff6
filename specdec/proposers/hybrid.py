"""HybridProposer: a proposer over proposers; at each step every request gets the drafts that promise most.

Owns: who drafts for whom, and merging the results by row. Must not know: how any source drafts.
Letters: R requests, K draft nodes.

Sources without KV cost next to nothing, so they are asked first, for everybody. A source with KV is asked to draft only where
its running acceptance promises more than the best of those lookups; elsewhere it gets max_nodes 0 and only extends its KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import DraftKV, MethodTraits
from specdec.errors import ConfigError
from specdec.proposers.acceptance import AcceptanceBook, expected_accepted
from specdec.proposers.base import (
    AdmitInfo,
    BaseProposer,
    DraftBatch,
    DraftLaw,
    DraftRail,
    MemoryNeed,
    Outcome,
    Proposer,
    StepView,
    build_proposer,
)

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class HybridProposer(BaseProposer):
    """Chooses per request between its sources, which are named by their methods.

    Raises:
        ConfigError: two sources return laws of sampled drafts, which one batch cannot hold.
    """

    def __init__(self, resolved: ResolvedConfig, *, sources: Sequence[Proposer] | None = None) -> None:
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        self.traits: MethodTraits = resolved.traits
        built = [build_proposer(part) for part in resolved.sources] if sources is None else sources
        self.sources: list[Proposer] = [source for source in built if source is not None]
        self.names = [source.traits.method for source in self.sources]
        sampled = [source.traits.method for source in self.sources if source.traits.laws != "one_hot"]
        if len(sampled) > 1:
            raise ConfigError(
                f"speculative_config.sources has several with sampled drafts ({', '.join(sampled)}), but it must have at most 1",
                hint='set "draft_sample_method": "greedy"',
            )
        self.book = AcceptanceBook(len(self.sources))
        self._drafted_by: dict[int, int] = {}  # row -> source of the drafts that wait

    @property
    def corpora(self) -> Any:
        """The shelf of the source that has one, else None."""
        return next((source.corpora for source in self.sources if hasattr(source, "corpora")), None)

    @property
    def num_bytes(self) -> int:
        """Host memory of sources that grow with what they read."""
        return sum(getattr(source, "num_bytes", 0) for source in self.sources)

    @property
    def faults(self) -> Mapping[str, int]:
        """Faults of the sources together, by kind."""
        return sum((Counter(getattr(source, "faults", {})) for source in self.sources), Counter())

    def memory(self) -> MemoryNeed:
        """The needs of all sources together."""
        needs = [source.memory() for source in self.sources]
        return MemoryNeed(
            weights_bytes=sum(need.weights_bytes for need in needs),
            kv_bytes_per_block=sum(need.kv_bytes_per_block for need in needs),
            row_bytes=sum(need.row_bytes for need in needs),
            kv_layers=tuple(layer for need in needs for layer in need.kv_layers),
        )

    def bind(self, rail: DraftRail) -> None:
        """Give each source its part of the caches."""
        start = 0
        for source in self.sources:
            stop = start + len(source.memory().kv_layers)
            source.bind(replace(rail, kv=list(rail.kv[start:stop])))
            start = stop

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Tell every source."""
        self._forget(rows)
        for source in self.sources:
            source.admit(rows, infos)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Tell every source."""
        self._forget(rows)
        for source in self.sources:
            source.release(rows, outcomes)

    def sleep(self) -> None:
        """All sources sleep."""
        for source in self.sources:
            source.sleep()

    def wake(self) -> None:
        """All sources wake."""
        for source in self.sources:
            source.wake()

    def reload(self, draft_path: str | None = None, /) -> None:
        """All sources read their weights again; a path is meant for the one that has a draft checkpoint."""
        for source in self.sources:
            if draft_path is not None and hasattr(source, "draft_path"):
                source.reload(draft_path)
            else:
                source.reload()

    def propose(self, step: StepView) -> DraftBatch:
        """Learn from the verification, ask the lookups, elect models where they promise more, and let everybody extend."""
        rows, num_sampled = step.rows.tolist(), step.num_sampled.tolist()
        self._learn(rows, num_sampled, step.num_rejected.tolist())
        limits = [limit if sampled else 0 for limit, sampled in zip(step.max_nodes, num_sampled, strict=True)]
        chosen: list[int | None] = [None] * len(rows)
        scores = [0.0] * len(rows)
        batches: dict[int, DraftBatch] = {}
        for source in self._having_kv(False):
            wanted = [self._limit(source, limit, only) for limit, only in zip(limits, step.sources, strict=True)]
            batches[source] = self._ask(step, source, wanted)
            for request, score in enumerate(self._scores(batches[source], source, rows)):
                if score > scores[request]:
                    chosen[request], scores[request] = source, score
        elected = [self._elect(*one) for one in zip(rows, limits, step.sources, scores, strict=True)]
        for source in self._having_kv(True):
            wanted = [self._limit(source, limit) if who == source else 0 for limit, who in zip(limits, elected, strict=True)]
            batches[source] = self._ask(step, source, wanted)
            for request in _answered(batches[source]):
                chosen[request] = source
        for row, who in zip(rows, chosen, strict=True):
            self._drafted_by.pop(row, None)
            if who is not None:
                self._drafted_by[row] = who
        return _merge(batches, chosen)

    def _forget(self, rows: Sequence[int]) -> None:
        self.book.forget(rows)
        for row in rows:
            self._drafted_by.pop(row, None)

    def _learn(self, rows: list[int], num_sampled: list[int], num_rejected: list[int]) -> None:
        for row, sampled, rejected in zip(rows, num_sampled, num_rejected, strict=True):
            tested = sampled - 1 + rejected
            if sampled and tested and row in self._drafted_by:
                self.book.observe(row, self._drafted_by.pop(row), tested=tested, accepted=sampled - 1)

    def _having_kv(self, wanted: bool) -> list[int]:
        return [index for index, source in enumerate(self.sources) if (source.traits.kv is not DraftKV.NONE) == wanted]

    def _limit(self, source: int, limit: int, only: str | None = None) -> int:
        """Drafts that a source may make for a request that allows `limit` in all, from source `only` if it names one."""
        return min(limit, self.sources[source].traits.max_nodes) if only in (None, self.names[source]) else 0

    def _ask(self, step: StepView, source: int, wanted: list[int]) -> DraftBatch:
        may_draw = [may and count > 0 for may, count in zip(step.can_draw_target, wanted, strict=True)]
        return self.sources[source].propose(replace(step, max_nodes=wanted, can_draw_target=may_draw))

    def _scores(self, batch: DraftBatch, source: int, rows: list[int]) -> list[float]:
        """Expected accepted drafts per request. A source's own confidence counts half, experience with it the other half."""
        scores = []
        own = None if batch.confidence is None else batch.confidence.tolist()
        for request, (row, count) in enumerate(zip(rows, batch.num_nodes.tolist(), strict=True)):
            rate = self.book.rate(row, source)
            chances = [rate] * count if own is None else [(chance + rate) / 2 for chance in own[request][:count]]
            scores.append(expected_accepted(chances))
        return scores

    def _elect(self, row: int, limit: int, only: str | None, score: float) -> int | None:
        """The source with KV that promises most, if that is more than the lookups' `score`."""
        winner = None
        for source in self._having_kv(True):
            promise = expected_accepted([self.book.rate(row, source)] * self._limit(source, limit, only))
            if promise > score:
                winner, score = source, promise
        return winner


def _answered(batch: DraftBatch) -> list[int]:
    """Requests that got drafts, or a token drawn from the target's law, which has to be committed in any case."""
    drawn = [-1] * len(batch.num_nodes) if batch.target_token_ids is None else batch.target_token_ids.tolist()
    return [i for i, (count, token) in enumerate(zip(batch.num_nodes.tolist(), drawn, strict=True)) if count or token >= 0]


def _merge(batches: Mapping[int, DraftBatch], chosen: Sequence[int | None]) -> DraftBatch:
    """One batch of each request's chosen rows."""
    width = max((batch.token_ids.shape[1] for batch in batches.values()), default=0)
    some = next(iter(batches.values())).token_ids
    token_ids = some.new_full((len(chosen), width), -1)
    num_nodes = some.new_zeros(len(chosen))
    source = [""] * len(chosen)
    taken = [(batch, [i for i, who in enumerate(chosen) if who == index]) for index, batch in batches.items()]
    for batch, requests in taken:
        token_ids[requests, : batch.token_ids.shape[1]] = batch.token_ids[requests].to(token_ids)
        num_nodes[requests] = batch.num_nodes[requests].to(num_nodes)
        for request in requests:
            source[request] = batch.source[request]
    return DraftBatch(
        token_ids=token_ids,
        num_nodes=num_nodes,
        source=source,
        parents=_merge_parents(taken, token_ids),
        law=_merge_laws(taken, token_ids),
        confidence=_merge_confidence(taken, token_ids),
        target_token_ids=_merge_drawn(taken, token_ids),
    )


_Taken = Sequence[tuple[DraftBatch, list[int]]]  # a batch, and the requests that take its rows


def _merge_parents(taken: _Taken, like: torch.Tensor) -> torch.Tensor | None:
    """[R, K], chains as parents too; None where all are chains."""
    if all(batch.parents is None for batch, _ in taken):
        return None
    merged = torch.arange(-1, like.shape[1] - 1, device=like.device).repeat(like.shape[0], 1)
    for batch, requests in taken:
        if batch.parents is not None:
            merged[requests, : batch.parents.shape[1]] = batch.parents[requests].to(merged)
    return merged


def _merge_laws(taken: _Taken, like: torch.Tensor) -> DraftLaw | None:
    """The law of the one source that has rows, with every other request one-hot."""
    for batch, requests in taken:
        if batch.law is not None and batch.law.rows is not None:
            one_hot = torch.ones(like.shape[0], dtype=torch.bool, device=like.device)
            one_hot[requests] = batch.law.one_hot[requests].to(one_hot)
            return DraftLaw(one_hot=one_hot, rows=batch.law.rows)
    return None


def _merge_confidence(taken: _Taken, like: torch.Tensor) -> torch.Tensor | None:
    """[R, K] where every request with drafts has some, else None: an invented number would be mistaken for an estimate."""
    if any(requests and batch.confidence is None for batch, requests in taken):
        return None
    merged = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for batch, requests in taken:
        if requests and batch.confidence is not None:
            merged[requests, : batch.confidence.shape[1]] = batch.confidence[requests].to(merged)
    return merged


def _merge_drawn(taken: _Taken, like: torch.Tensor) -> torch.Tensor | None:
    if all(batch.target_token_ids is None for batch, _ in taken):
        return None
    merged = like.new_full((like.shape[0],), -1)
    for batch, requests in taken:
        if batch.target_token_ids is not None:
            merged[requests] = batch.target_token_ids[requests].to(merged)
    return merged
