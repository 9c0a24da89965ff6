"""Masks: from matchers to logits. Rows of a verify block, the valid beginning of drafts, and masks for drafters.

Owns: which draft is allowed where, for chains and trees. Must not know: sampling. Letters: R requests, L logits rows, K draft
nodes, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specdec.structured.matcher import WORD_BITS, Matcher


def block_mask(matcher: Matcher, drafts: Sequence[int], parents: Sequence[int] | None) -> tuple[torch.Tensor, list[bool]]:
    """Return mask [K+1, W] int32 of a block's rows (the anchor's, then each draft's) and which drafts are allowed.

    parents: the tree, None for a chain; parents come before their children. A draft is allowed when the grammar lets it follow
    its ancestors, all allowed themselves; rows of other drafts allow everything, since verification never gets there.
    """
    mask = torch.full((len(drafts) + 1, matcher.num_words), -1, dtype=torch.int32)
    matcher.fill(mask, 0)
    paths: list[list[int] | None] = [[]]  # by row; None: that draft is not allowed
    for node, draft in enumerate(drafts):
        before = paths[node if parents is None else parents[node] + 1]
        path = None if before is None else [*before, draft]
        if path is not None and matcher.apply(path) == len(path):
            matcher.fill(mask, node + 1)
        else:
            path = None
        paths.append(path)
    matcher.apply(())
    return mask, [path is not None for path in paths[1:]]


def forbid(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Set what mask [L, W] forbids to -inf in logits [L, V], in place."""
    logits.masked_fill_(~allowed_ids(mask, logits.shape[1], device=logits.device), -torch.inf)


def allowed_ids(mask: torch.Tensor, size: int, *, device: torch.device) -> torch.Tensor:
    """Return mask [L, W] int32 as [L, size] bool on `device`; ids past the mask are forbidden."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=device)
    wide = ((mask.to(device)[:, :, None] >> bits) & 1).bool().flatten(1)
    if wide.shape[1] < size:
        wide = torch.nn.functional.pad(wide, (0, size - wide.shape[1]))
    return wide[:, :size]


def num_valid(matcher: Matcher, drafts: Sequence[int]) -> int:
    """Return how many drafts of a chain the grammar allows, from the first on. One behind an ending token is not."""
    count = matcher.apply(drafts)
    matcher.apply(())
    return count


class DraftMasks:
    """What a drafter that has logits may draw: DraftSampling.token_mask of one step. matchers: by batch index, of R requests."""

    def __init__(self, matchers: Mapping[int, Matcher], num_requests: int, *, device: torch.device) -> None:
        self._matchers = matchers
        self._num_requests = num_requests
        self._device = device

    def __call__(self, depth: int, paths: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor | None:
        """Return [R, V] bool: what may be drawn at `depth` (0: right behind the anchor), or None where nothing is known.

        paths: by batch index, the drafts before it; without them only depth 0 is known. Behind a draft that is not allowed
        everything is; verification refuses it.
        """
        if depth and paths is None:
            return None
        mask: torch.Tensor | None = None
        for request, matcher in self._matchers.items():
            path = paths.get(request, ())[:depth] if paths is not None else ()
            if mask is None:
                mask = torch.full((self._num_requests, matcher.num_words), -1, dtype=torch.int32)
            if len(path) == depth == matcher.apply(path):
                matcher.fill(mask, request)
            matcher.apply(())
        return None if mask is None else allowed_ids(mask, matcher.size, device=self._device)
