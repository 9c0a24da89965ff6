"""NgramProposer: prompt lookup. The longest suffix of the text that occurred before is continued as it was then.

Owns: one incremental index per row. Must not know: the target. Where nothing matches, nothing is drafted and no row is
wasted. Source: prompt lookup decoding; longest match first, then the most recent occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import MethodTraits
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, Outcome, StepView

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class NgramIndex:
    """Where each n-gram of one text was last followed by a token: O(max - min + 1) per new token and per lookup."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.tokens: list[int] = []
        self._next_of: list[dict[tuple[int, ...], int]] = [{} for _ in range(shortest, longest + 1)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once a token follows it, so that a suffix never matches itself."""
        for token in tokens:
            end = len(self.tokens)  # the n-grams that end just before `end` are now followed by `token`
            for size, table in enumerate(self._next_of, self.shortest):
                if end >= size:
                    table[tuple(self.tokens[end - size : end])] = end
            self.tokens.append(token)

    def lookup(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest matching suffix, the most recent time it occurred."""
        for size in range(self.longest, self.shortest - 1, -1):
            if len(self.tokens) < size:
                continue
            start = self._next_of[size - self.shortest].get(tuple(self.tokens[-size:]))
            if start is not None:
                return self.tokens[start : start + count]
        return []


class NgramProposer(BaseProposer):
    """Drafts from the request's own prompt and output."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        self.traits: MethodTraits = resolved.traits
        self._bounds = (config.prompt_lookup_min, config.prompt_lookup_max)
        self._index: dict[int, NgramIndex] = {}

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Index the prompts (and, after preemption, the output so far)."""
        for row, info in zip(rows, infos, strict=True):
            self._index[row] = NgramIndex(*self._bounds)
            self._index[row].extend(info.prompt_token_ids)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Forget the rows."""
        for row in rows:
            self._index.pop(row, None)

    def propose(self, step: StepView) -> DraftBatch:
        """Index the step's tokens, then look up."""
        drafts = []
        counts = step.num_sampled.tolist()
        for row, sampled, count, wanted in zip(step.rows.tolist(), step.sampled_token_ids.tolist(), counts, step.max_nodes, strict=True):
            index = self._index[row]
            index.extend(sampled[:count])
            drafts.append(index.lookup(wanted) if count and wanted else [])
        return host_batch(drafts, source="ngram")


def host_batch(drafts: Sequence[Sequence[int]], *, source: str) -> DraftBatch:
    """Pack ragged host drafts into a DraftBatch of one-hot chains."""
    width = max(map(len, drafts), default=0)
    padded = [[*draft, *[-1] * (width - len(draft))] for draft in drafts]
    return DraftBatch(
        token_ids=torch.tensor(padded, dtype=torch.int64).view(len(drafts), width),
        num_nodes=torch.tensor([len(draft) for draft in drafts], dtype=torch.int64),
        source=[source if draft else "" for draft in drafts],
    )
