"""Verified: what every verification kernel returns, and the value that marks an absent token.

Owns: the layout of one verified batch. Must not know: which rule verified it. Read next: reference.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INVALID_TOKEN = -1  # a draft to refuse, padding of an output row, or the sample of a row without a finite logit


class Verified(NamedTuple):
    """What was emitted, for R requests with at most K drafts and depth D (K for chains). All int64.

    token_ids [R, D+1]: accepted drafts, then one recovered or bonus token, then INVALID_TOKEN.
    path [R, D+1]: row offset, from the request's first logits row, of each kept row: the anchor's 0, then those of the
        accepted drafts (1, 2, ... for a chain), then INVALID_TOKEN.
    num_sampled [R]: accepted + 1; 0 for a request that owns no logits row, or whose row has no finite logit (nothing is kept).
    num_rejected [R]: draft rows not kept. num_drafts [R]: drafts tested. num_invalid [R]: drafts refused before the test.
    """

    token_ids: torch.Tensor
    path: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    num_drafts: torch.Tensor
    num_invalid: torch.Tensor
