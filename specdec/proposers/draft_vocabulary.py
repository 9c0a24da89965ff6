"""DraftVocabulary: between the ids of a head with a reduced vocabulary and the target's ids.

Owns: translating drafts and grammar masks. Must not know: the head. Letters: R requests, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from specdec.proposers.base import DraftSampling


class DraftVocabulary:
    """id_map [Vd] int64: target id of each draft id, or None where they are equal."""

    def __init__(self, id_map: torch.Tensor | None) -> None:
        self.id_map = id_map
        self._on_host: list[int] | None = None if id_map is None else id_map.tolist()

    def to_target(self, draft_ids: Sequence[int]) -> list[int]:
        """Return the target id of each draft id, which is never negative."""
        return list(draft_ids) if self._on_host is None else [self._on_host[draft] for draft in draft_ids]

    def sampling(self, sampling: DraftSampling) -> DraftSampling:
        """Return the same settings with a grammar mask over draft ids: it takes draft paths and its columns are draft ids."""
        mask_of, id_map = sampling.token_mask, self.id_map
        if mask_of is None or id_map is None:
            return sampling

        def token_mask(depth: int, paths: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor | None:
            mapped = None if paths is None else {request: self.to_target(path) for request, path in paths.items()}
            mask = mask_of(depth, mapped)
            if mask is None:
                return None
            ids = id_map.to(mask.device)
            inside = ids < mask.shape[1]  # ids past the grammar's vocabulary are padding: never allowed
            return mask[:, ids.clamp(max=mask.shape[1] - 1)] & inside

        return replace(sampling, token_mask=token_mask)
