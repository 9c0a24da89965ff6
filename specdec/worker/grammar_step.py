"""What grammars do in a step outside of verification: matchers follow the emitted tokens, and chains end before a forbidden draft.

Owns: the order advance -> propose -> keep. Must not know: masks of logits (sampler.py). Letters: R requests, K draft nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.proposers.base import DraftBatch
from specdec.structured.mask import num_valid
from specdec.worker.request_state import RowInfo


def advance_matchers(infos: list[RowInfo], emitted: Sequence[Sequence[int]]) -> dict[int, str]:
    """Move the matchers over a step's emitted tokens; return, by batch index, why a grammar refuses one."""
    faults = {}
    for index, (info, tokens) in enumerate(zip(infos, emitted, strict=True)):
        if info.matcher is not None:
            info.matcher.advance(tokens)
            if info.matcher.fault is not None:
                faults[index] = info.matcher.fault
    return faults


def keep_valid(drafts: DraftBatch, infos: list[RowInfo]) -> DraftBatch:
    """Cut the chains of structured requests before the first draft that the grammar forbids, so that no row is spent on it.

    Trees are left whole: verification refuses single nodes. So are drafts with a law of their own, which must be refused by the
    rule to keep the target's law.
    """
    wanted = [index for index, info in enumerate(infos) if info.matcher is not None]
    if drafts.parents is not None or not wanted or not drafts.token_ids.shape[1]:
        return drafts
    tokens, counts = drafts.token_ids.tolist(), drafts.num_nodes.tolist()
    has_law = drafts.law is not None and drafts.law.rows is not None
    one_hot = drafts.law.one_hot.tolist() if drafts.law is not None and has_law else [True] * len(infos)
    for index in wanted:
        matcher = infos[index].matcher
        if matcher is not None and one_hot[index]:
            counts[index] = num_valid(matcher, tokens[index][: counts[index]])
    return replace(drafts, num_nodes=drafts.num_nodes.new_tensor(counts))
