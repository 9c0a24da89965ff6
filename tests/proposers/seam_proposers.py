"""Small proposers that between them use everything the seam offers; the tests run each through scheduler, runner and engine.

Lookup, a chain with its own KV, a block with mask rows, one that only extends its KV and audits it, a ragged host one, a
two-branch tree, and one that draws a token from the target's law; then oracles that know what plain decoding emits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from specdec.config.methods import DraftKV, MethodTraits
from specdec.models.linear import Linear
from specdec.models.llama import Attention, DecoderLayer, LayerShape
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, DraftRail, MemoryNeed, Outcome, StepView
from specdec.proposers.ngram import host_batch
from specdec.proposers.paged import DraftExtent, PagedRows, Span, committed_ids, paged_rows, step_lengths
from tests.engine.tokenizers_for_tests import TOY_VOCAB_SIZE
from tests.proposers.tiny import MAX_MODEL_LEN

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 1, 16, 32


def traits(max_nodes: int, **needs: object) -> MethodTraits:
    """Traits of a test method."""
    return MethodTraits(**{"method": "seam", "max_nodes": max_nodes, "max_depth": max_nodes, **needs})


def history(step: StepView, index: int) -> list[int]:
    """Committed tokens of one request of the batch."""
    row = int(step.rows[index])
    return step.token_ids[row, : int(step.num_tokens[row])].tolist()


def may_draft(step: StepView, index: int) -> int:
    """Drafts that one request may get: none while its prompt is being read, and none that would pass the model's end."""
    nodes = step.max_nodes[index] if int(step.num_sampled[index]) else 0
    assert nodes == 0 or int(step.num_tokens[step.rows[index]]) + nodes < MAX_MODEL_LEN, "the target could not follow these drafts"
    return nodes


class LookupProposer(BaseProposer):
    """Continues the last earlier occurrence of the newest token; keeps no state."""

    def __init__(self, max_nodes: int = 4) -> None:
        self.traits = traits(max_nodes)

    def propose(self, step: StepView) -> DraftBatch:
        return host_batch([self._lookup(history(step, i), may_draft(step, i)) for i in range(len(step.rows))], source="seam")

    def _lookup(self, tokens: list[int], count: int) -> list[int]:
        place = next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]), None)
        return tokens[place + 1 : place + 1 + count] if place is not None else []


class RaggedProposer(BaseProposer):
    """Random drafts, 0 to max_nodes of them, another number for every request and step."""

    def __init__(self, max_nodes: int = 5) -> None:
        self.traits = traits(max_nodes)
        self.rng = random.Random(0)
        self.num_proposed = 0
        self.released: list[Outcome] = []

    def propose(self, step: StepView) -> DraftBatch:
        counts = [self.rng.randint(0, may_draft(step, i)) for i in range(len(step.rows))]
        self.num_proposed += sum(counts)
        return host_batch([[self.rng.randrange(TOY_VOCAB_SIZE) for _ in range(n)] for n in counts], source="seam")

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        self.released += outcomes


class TinyNet:
    """One random decoder layer between an embedding and a head, over paged KV of its own."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * 0.3

        shape = LayerShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, hidden_size=HIDDEN, intermediate_size=48, eps=1e-5)
        qkv = Linear(weight(shape.q_size + 2 * shape.kv_size, HIDDEN))
        attention = Attention(shape, qkv=qkv, out=Linear(weight(HIDDEN, shape.q_size)), norms=None, window=None, has_rope=True)
        ones = torch.ones(HIDDEN)
        self.layer = DecoderLayer(
            shape, attention=attention, gate_up=Linear(weight(96, HIDDEN)), down=Linear(weight(HIDDEN, 48)), norms=(ones, ones)
        )
        self.embedding = weight(TOY_VOCAB_SIZE + 1, HIDDEN)  # the last row is the mask
        self.head = weight(TOY_VOCAB_SIZE, HIDDEN)

    def __call__(self, input_ids: torch.Tensor, rows: PagedRows, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[N] -> logits [N, V]."""
        angles = rows.positions[:, None] * torch.arange(1, HEAD_DIM // 2 + 1)[None] * 0.1
        delta, residual = self.layer(None, self.embedding[input_ids], angles.cos(), angles.sin(), kv, rows.meta)
        return (delta + residual) @ self.head.T


class OwnKVProposer(BaseProposer):
    """Common to the two that run TinyNet: its memory, and extending its KV over committed text."""

    def __init__(self, max_nodes: int, **needs: object) -> None:
        self.traits = traits(max_nodes, kv=DraftKV.OWN, runs_on="device", **needs)
        self.net = TinyNet(7)
        self.extent = DraftExtent()

    def memory(self) -> MemoryNeed:
        return MemoryNeed(
            weights_bytes=4 * self.net.embedding.numel(), kv_bytes_per_block=4 * 2 * 4 * HEAD_DIM, kv_layers=((KV_HEADS, HEAD_DIM),)
        )

    def bind(self, rail: DraftRail) -> None:
        self.rail = rail

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        self.extent.forget(rows)

    def run(self, step: StepView, spans: list[Span], input_ids: torch.Tensor | None = None, *, is_causal: bool = True) -> torch.Tensor:
        """Logits [N, V] of the rows of `spans`; without ids they are committed text."""
        rows = paged_rows(self.rail, step, spans, is_causal=is_causal)
        return self.net(committed_ids(step, rows) if input_ids is None else input_ids, rows, self.rail.kv[0])


class ChainProposer(OwnKVProposer):
    """A chain of greedy drafts, as a draft model makes them."""

    def __init__(self, max_nodes: int = 3) -> None:
        super().__init__(max_nodes, lookahead=max_nodes, draft_slots=1)

    def propose(self, step: StepView) -> DraftBatch:
        lengths = step_lengths(step)
        starts = self.extent.valid(step, lengths)
        drafting = [i for i in range(len(lengths)) if may_draft(step, i)]
        stops = [length.num_computed + (i in drafting) for i, length in enumerate(lengths)]
        spans = [Span(i, start, stop) for i, (start, stop) in enumerate(zip(starts, stops, strict=True)) if start < stop]
        drafts: list[list[int]] = [[] for _ in lengths]
        if spans:
            logits = self.run(step, spans)
            last = torch.tensor([span.stop - span.start for span in spans]).cumsum(0) - 1
            newest = dict(zip((span.request for span in spans), logits[last].argmax(-1).tolist(), strict=True))
            for i in drafting:
                drafts[i].append(newest[i])
        for depth in range(1, self.traits.max_nodes):
            left = [i for i in drafting if may_draft(step, i) > depth]
            if left:
                places = [Span(i, stops[i] + depth - 1, stops[i] + depth) for i in left]
                logits = self.run(step, places, torch.tensor([drafts[i][-1] for i in left]))
                for i, token in zip(left, logits.argmax(-1).tolist(), strict=True):
                    drafts[i].append(token)
        for i, row in enumerate(step.rows.tolist()):
            self.extent.record(row, stops[i], drafts[i][:-1])
        return host_batch(drafts, source="seam")


class BlockProposer(OwnKVProposer):
    """One pass over the anchor and mask rows that see each other, as block drafters do it."""

    def __init__(self, max_nodes: int = 4) -> None:
        super().__init__(max_nodes, lookahead=max_nodes + 1)

    def propose(self, step: StepView) -> DraftBatch:
        lengths = step_lengths(step)
        starts = self.extent.valid(step, lengths)
        extend = [Span(i, start, lengths[i].num_computed) for i, start in enumerate(starts) if start < lengths[i].num_computed]
        if extend:
            self.run(step, extend)
        for i, row in enumerate(step.rows.tolist()):
            self.extent.record(row, lengths[i].num_computed)  # block rows are rubbish to later steps: they are written again
        drafts: list[list[int]] = [[] for _ in lengths]
        blocks = [
            Span(i, lengths[i].num_computed, lengths[i].num_computed + may_draft(step, i) + 1)
            for i in range(len(lengths))
            if may_draft(step, i)
        ]
        if blocks:
            ids = [
                token for span in blocks for token in (history(step, span.request)[-1], *[TOY_VOCAB_SIZE] * (span.stop - span.start - 1))
            ]
            found = iter(self.run(step, blocks, torch.tensor(ids), is_causal=False).argmax(-1).tolist())
            for span in blocks:
                drafts[span.request] = [next(found) for _ in range(span.stop - span.start)][1:]
        return host_batch(drafts, source="seam")


class ExtendOnlyProposer(BaseProposer):
    """Drafts nothing. Its KV holds the token of each position, or with `ahead` the one that follows, and it reads all of it back."""

    def __init__(self, *, ahead: int = 0) -> None:
        self.traits = traits(2, kv=DraftKV.OWN, lookahead=2, prefill_lookahead=ahead)
        self.ahead = ahead
        self.num_audited = self.num_shared = 0

    def memory(self) -> MemoryNeed:
        return MemoryNeed(kv_bytes_per_block=4 * 2 * 4, kv_layers=((1, 1),))

    def bind(self, rail: DraftRail) -> None:
        self.rail = rail
        self.extent = DraftExtent()

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        self.extent.forget(rows)

    def propose(self, step: StepView) -> DraftBatch:
        lengths = step_lengths(step)
        k_cache, v_cache = (cache.view(-1) for cache in self.rail.kv[0])
        for i, start in enumerate(self.extent.valid(step, lengths)):
            row, stop = int(step.rows[i]), lengths[i].num_computed
            self.num_shared += start == lengths[i].context > 0
            rows = paged_rows(self.rail, step, [Span(i, 0, stop)])
            slots = rows.meta.slot_mapping
            k_cache[slots[start:]] = self._contents(step, row, rows.positions[start:])
            v_cache[slots[start:]] = rows.positions[start:].float()
            assert k_cache[slots].tolist() == self._contents(step, row, rows.positions).tolist(), (
                f"hole in the draft KV of {step.request_ids[i]}"
            )
            assert v_cache[slots].tolist() == list(range(stop))
            self.extent.record(row, stop)
            self.num_audited += stop
        return host_batch([[] for _ in lengths], source="seam")

    def _contents(self, step: StepView, row: int, positions: torch.Tensor) -> torch.Tensor:
        """The token `ahead` places further on: known, since a chunk leaves that many tokens and a sampled one follows."""
        return step.token_ids[row, positions + self.ahead].float() + 1


Truth = Callable[[Sequence[int], int], list[int]]


class KnowsTruth(BaseProposer):
    """Base of the oracles: `plain` maps request ids to what plain decoding emits."""

    def __init__(self, plain: Mapping[str, Sequence[int]], max_nodes: int, **needs: object) -> None:
        self.traits = traits(max_nodes, **needs)
        self.plain = plain
        self.num_prompt_tokens: dict[str, int] = {}

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        for info in infos:
            self.num_prompt_tokens.setdefault(info.request_id, len(info.prompt_token_ids))

    def coming(self, step: StepView, index: int, count: int) -> list[int]:
        """The next `count` tokens of a request."""
        request_id = step.request_ids[index]
        done = len(history(step, index)) - self.num_prompt_tokens[request_id]
        return list(self.plain[request_id][done : done + count])


class OracleProposer(KnowsTruth):
    """Right with probability `chance` at each draft, independently; else wrong on purpose."""

    def __init__(self, plain: Mapping[str, Sequence[int]], max_nodes: int, *, chance: float = 1.0) -> None:
        super().__init__(plain, max_nodes)
        self.chance = chance
        self.rng = random.Random(5)

    def propose(self, step: StepView) -> DraftBatch:
        drafts = []
        for index in range(len(step.rows)):
            truth = self.coming(step, index, may_draft(step, index))
            drafts.append([t if self.rng.random() < self.chance else (t + 1) % TOY_VOCAB_SIZE for t in truth])
        return host_batch(drafts, source="seam")


class TwoBranchProposer(KnowsTruth):
    """A tree of two chains of equal depth from the anchor; the second is right, so that its KV must move together."""

    PARENTS = (-1, -1, 0, 1, 2, 3)  # left and right by turns

    def __init__(self, plain: Mapping[str, Sequence[int]]) -> None:
        super().__init__(plain, 6)

    def propose(self, step: StepView) -> DraftBatch:
        drafts = []
        for index in range(len(step.rows)):
            depth = may_draft(step, index) // 2
            truth = self.coming(step, index, depth)
            drafts.append([token for right in truth for token in ((right + 1) % TOY_VOCAB_SIZE, right)])
        batch = host_batch(drafts, source="seam")
        width = batch.token_ids.shape[1]
        parents = torch.tensor(self.PARENTS[:width]).expand(len(drafts), width)
        return DraftBatch(token_ids=batch.token_ids, num_nodes=batch.num_nodes, source=batch.source, parents=parents)


class TargetTokenProposer(BaseProposer):
    """Runs the target over the anchor, draws its successor from the target's law, then looks up drafts behind that."""

    def __init__(self, max_nodes: int = 3) -> None:
        self.traits = traits(max_nodes, kv=DraftKV.TARGET, lookahead=2, runs_on="device")
        self.num_drawn = 0

    def bind(self, rail: DraftRail) -> None:
        self.rail = rail

    def propose(self, step: StepView) -> DraftBatch:
        chosen = [i for i in range(len(step.rows)) if may_draft(step, i) and step.can_draw_target[i]]
        drawn = torch.full((len(step.rows),), -1)
        drafts: list[list[int]] = [[] for _ in step.max_nodes]
        if chosen:
            places = [Span(i, len(history(step, i)) - 1, len(history(step, i))) for i in chosen]
            rows = paged_rows(self.rail, step, places)
            hidden, _ = self.rail.target.forward(committed_ids(step, rows), rows.positions, self.rail.target_kv, rows.meta)
            logits = self.rail.target.compute_logits(hidden)
            drawn[chosen] = self.rail.sample_target(logits, step.rows[rows.owner], rows.positions)
            self.num_drawn += len(chosen)
        for i in chosen:
            tokens = [*history(step, i), int(drawn[i])]
            drafts[i] = LookupProposer()._lookup(tokens, step.max_nodes[i] - 1)  # the drawn token takes the place of one draft
        batch = host_batch(drafts, source="seam")
        return DraftBatch(token_ids=batch.token_ids, num_nodes=batch.num_nodes, source=batch.source, target_token_ids=drawn)
