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
from specdec.proposers.ngram_index import NgramIndex

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


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
        counts, lengths = step.num_sampled.tolist(), step.num_tokens[step.rows].tolist()
        for request, (row, sampled) in enumerate(zip(step.rows.tolist(), step.sampled_token_ids.tolist(), strict=True)):
            index, count, wanted = self._index[row], counts[request], step.max_nodes[request]
            new = sampled[:count]
            if len(index.tokens) + count != lengths[request]:  # another source drew a token of the target's since
                new = step.token_ids[row, len(index.tokens) : lengths[request]].tolist()
            index.extend(new)
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
