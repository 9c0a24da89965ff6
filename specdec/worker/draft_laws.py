"""Which requests of a batch are verified together: those matched exactly, and those whose drafts came with one layout of law.

Owns: the split, and joining the laws that rows keep. Must not know: how a rule decides. Read next: rules.py.
Letters: R requests of a group, K drafts of the step, S support, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.proposers.base import Dense, Sparse
from specdec.worker.request_state import RowInfo
from specdec.worker.rules import VerifyRule


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Batch indices, in order, of requests verified together. laws: one per request, or None where the drafts were certain.

    by_match: verified by exact match whatever the rule.
    """

    requests: tuple[int, ...]
    by_match: bool
    laws: tuple[Dense | Sparse, ...] | None = None


def group_requests(infos: Sequence[RowInfo], num_drafts: Sequence[int], *, rule: VerifyRule) -> list[RequestGroup]:
    """Split a batch. Exact match serves certain drafts and greedy requests of a lossless rule, and all trees.

    It accepts a certain draft exactly as often as the p/q test, and makes seeded output independent of drafting besides. A
    request without drafts is matched too: nothing is tested, so nothing may be lossy.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, (info, count) in enumerate(zip(infos, num_drafts, strict=True)):
        kinds.setdefault(_kind(info, count, rule), []).append(index)
    groups = []
    for kind, requests in kinds.items():
        laws = tuple(law for law in (infos[index].law for index in requests) if law is not None) if kind[0] == "law" else None
        groups.append(RequestGroup(tuple(requests), kind[0] == "match", laws))
    return groups


def _kind(info: RowInfo, num_drafts: int, rule: VerifyRule) -> tuple[object, ...]:
    if not num_drafts or info.parents is not None:
        return ("match",)
    if rule.name in ("synthetic", "typical"):
        return ("certain",)  # these never look at the draft's law
    if not rule.is_lossy and (info.law is None or info.sampling.is_greedy):
        return ("match",)
    if info.law is None or info.sampling.is_greedy:
        return ("certain",)
    if isinstance(info.law, Sparse):
        return ("law", "sparse")
    return ("law", "dense", info.law.logits.shape[-1], None if info.law.id_map is None else id(info.law.id_map))


def join_laws(laws: Sequence[Dense | Sparse] | None, num_drafts: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (draft_logits [R, K, S], draft_ids None, [S] or [R, K, S]) of one group; K = num_drafts of the step's widest chain.

    Entries past a request's own drafts are never read; ids of a sparse law are padded with -1.
    """
    if laws is None:
        return None, None
    first = laws[0]
    if isinstance(first, Dense):
        return _stack([law.logits for law in laws if isinstance(law, Dense)], num_drafts, fill=0.0).float(), first.id_map
    sparse = [law for law in laws if isinstance(law, Sparse)]
    logits = _stack([law.logprobs for law in sparse], num_drafts, fill=-torch.inf).float()
    return logits, _stack([law.ids for law in sparse], num_drafts, fill=-1)


def _are_adjacent(rows: Sequence[torch.Tensor]) -> bool:
    first = rows[0]
    return all(
        row.shape == first.shape
        and row[0].is_contiguous()
        and row.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and row.storage_offset() == first.storage_offset() + index * first[0].numel()
        for index, row in enumerate(rows)
    )


def _stack(rows: Sequence[torch.Tensor], num_drafts: int, *, fill: float) -> torch.Tensor:
    """[1, K_r, S_r] each -> [R, num_drafts, max S], filled where a row is shorter."""
    width = max(row.shape[-1] for row in rows)
    if _are_adjacent(rows):  # all of one drafting pass, in its order: 40 rows of 49,152 floats need no copy
        whole = rows[0].as_strided((len(rows), *rows[0].shape[1:]), (rows[0][0].numel(), width, 1))
        if whole.shape[1] >= num_drafts:
            return whole[:, :num_drafts].contiguous()
    stacked = rows[0].new_full((len(rows), num_drafts, width), fill)
    for index, row in enumerate(rows):
        kept = min(row.shape[1], num_drafts)
        stacked[index, :kept, : row.shape[2]] = row[0, :kept]
    return stacked
