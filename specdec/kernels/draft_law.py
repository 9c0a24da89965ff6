"""Triton: the probability that each draft was drawn with, and the argument checks that all p/q rules share.

Owns: one kernel (log-sum-exp of draft rows) and `ChainInputs`. Must not know: acceptance rules. Read next: recover.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import FLOATING, check

BLOCK = 2048
_INT = (torch.int64,)
IDS_ARE_VOCABULARY, IDS_ARE_SHARED, IDS_ARE_PER_ROW = 0, 1, 2  # layouts of a draft law's support


@triton.jit
def load_draft_ids(ids_ptr, row, offsets, inside, S, IDS: tl.constexpr):
    """Vocabulary ids of a block of a draft row; -1 where the row has no entry."""
    if IDS == 0:
        return tl.where(inside, offsets, -1).to(tl.int64)
    if IDS == 1:
        return tl.load(ids_ptr + offsets, mask=inside, other=-1)
    return tl.load(ids_ptr + row * S + offsets, mask=inside, other=-1)


@triton.jit
def load_draft_logits(logits_ptr, ids_ptr, row, offsets, S, IDS: tl.constexpr):
    """(logits, ids) of a block of a draft row; -inf where the row has no entry."""
    inside = offsets < S
    ids = load_draft_ids(ids_ptr, row, offsets, inside, S, IDS)
    logits = tl.load(logits_ptr + row * S + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(ids >= 0, logits, float("-inf")), ids


@triton.jit
def _draft_law_kernel(
    draft_ptr, logits_ptr, ids_ptr, one_hot_ptr, lse_ptr, q_ptr, K, S, HAS_LAW: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per (request, draft): a running log-sum-exp over the row, and the drawn token's entry in the same pass."""
    request = tl.program_id(0).to(tl.int64)
    row = request * K + tl.program_id(1)
    draft = tl.load(draft_ptr + row)
    lse = tl.full([], 0.0, tl.float32)
    q = tl.where(draft >= 0, 1.0, 0.0)
    if HAS_LAW:
        if (draft >= 0) & (tl.load(one_hot_ptr + request) == 0):
            peak = tl.full([], float("-inf"), tl.float32)
            total = tl.full([], 0.0, tl.float32)
            drawn = tl.full([], float("-inf"), tl.float32)
            for start in range(0, S, BLOCK):
                logits, ids = load_draft_logits(logits_ptr, ids_ptr, row, start + tl.arange(0, BLOCK), S, IDS)
                drawn = tl.maximum(drawn, tl.max(tl.where(ids == draft, logits, float("-inf")), axis=0))
                higher = tl.maximum(peak, tl.max(logits, axis=0))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp(peak - base) + tl.sum(tl.exp(logits - base), axis=0)
                peak = higher
            lse = peak + tl.log(total)
            q = tl.exp(drawn - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(q_ptr + row, q)


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """Checked arguments of a p/q rule. Without a draft law, logits, ids and one_hot are stand-ins that no kernel reads.

    lse [R, K] f32: log-sum-exp of each draft row. q [R, K] f32: probability each draft was drawn with; 0 for a refused one.
    """

    target_probs: torch.Tensor
    draft_token_ids: torch.Tensor
    cu_num_logits: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    one_hot: torch.Tensor
    lse: torch.Tensor
    q: torch.Tensor
    has_law: bool
    layout: int
    support: int

    @property
    def num_requests(self) -> int:
        """R."""
        return self.draft_token_ids.shape[0]

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.draft_token_ids.shape[1]

    @property
    def vocab(self) -> int:
        """V."""
        return self.target_probs.shape[1]


def chain_inputs(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_ids: torch.Tensor | None,
    one_hot: torch.Tensor | None,
) -> ChainInputs:
    """Check the arguments of a p/q rule (reference.rejection_sample says what they are) and weigh each draft.

    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, or ids without logits.
    """
    num_requests, num_drafts = draft_token_ids.shape
    rules = {
        "target_probs": (target_probs, tuple(target_probs.shape), (torch.float32,)),
        "draft_token_ids": (draft_token_ids, (num_requests, num_drafts), _INT),
        "cu_num_logits": (cu_num_logits, (num_requests + 1,), (torch.int32,)),
        "seed": (seed, (num_requests,), _INT),
        "position": (position, (num_requests,), _INT),
    }
    if draft_logits is not None:
        rules["draft_logits"] = (draft_logits, (num_requests, num_drafts, draft_logits.shape[-1]), FLOATING)
    if draft_ids is not None:
        if draft_logits is None:
            raise ValueError("draft_ids was given without draft_logits: ids alone are no law, so pass both or neither")
        rules["draft_ids"] = (draft_ids, tuple(draft_logits.shape[-draft_ids.dim() :]), _INT)
    if one_hot is not None:
        rules["one_hot"] = (one_hot, (num_requests,), (torch.bool,))
    if draft_logits is not None and draft_ids is None and draft_logits.shape[-1] != target_probs.shape[-1]:
        raise ValueError(
            f"draft_logits has {draft_logits.shape[-1]} entries a row, but target_probs has {target_probs.shape[-1]}: "
            "pass draft_ids to say which ids they stand for"
        )
    device = check(rules)
    lse = torch.zeros((num_requests, num_drafts), dtype=torch.float32, device=device)
    inputs = ChainInputs(
        target_probs=target_probs,
        draft_token_ids=draft_token_ids,
        cu_num_logits=cu_num_logits,
        seed=seed,
        position=position,
        logits=lse if draft_logits is None else draft_logits,
        ids=draft_token_ids if draft_ids is None else draft_ids,
        one_hot=torch.zeros(num_requests, dtype=torch.bool, device=device) if one_hot is None else one_hot,
        lse=lse,
        q=torch.zeros_like(lse),
        has_law=draft_logits is not None,
        layout=IDS_ARE_VOCABULARY if draft_ids is None else IDS_ARE_SHARED if draft_ids.dim() == 1 else IDS_ARE_PER_ROW,
        support=1 if draft_logits is None else draft_logits.shape[-1],
    )
    if lse.numel():
        _draft_law_kernel[(num_requests, num_drafts)](
            draft_token_ids, inputs.logits, inputs.ids, inputs.one_hot, lse, inputs.q, num_drafts, inputs.support,
            HAS_LAW=inputs.has_law, IDS=inputs.layout, BLOCK=BLOCK,
        )  # fmt: skip
    return inputs
