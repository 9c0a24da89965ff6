"""DraftTokens: between the target's ids, the draft model's own, and the indices that drafts are drawn by.

Owns: the three numberings. Must not know: models. Letters: N rows, V target and Vd draft vocabulary, S tokens that both know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.config.vocabulary_overlap import VocabularyOverlap


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """num_known S. id_map [S] int64: target id of each index, None where they are equal.

    own_ids [S] int64: the draft model's id of each index; own_of_target [V] int64: its id for every target id. Both None where
    draft and target number their tokens alike.
    """

    num_known: int
    id_map: torch.Tensor | None = None
    own_ids: torch.Tensor | None = None
    own_of_target: torch.Tensor | None = None

    @classmethod
    def shared(cls, draft_size: int, target_size: int, *, device: torch.device) -> DraftTokens:
        """The same tokenizer: rows past the smaller table are padding."""
        known = min(draft_size, target_size)
        return cls(known, torch.arange(known, device=device) if known < target_size else None)

    @classmethod
    def overlapping(cls, overlap: VocabularyOverlap, target_size: int, *, device: torch.device) -> DraftTokens:
        """Two tokenizers: a target token that the draft lacks is fed as its fallback, which costs acceptance only."""
        target_ids, own_ids = torch.tensor(overlap.target_ids, device=device), torch.tensor(overlap.draft_ids, device=device)
        own_of_target = torch.full((target_size,), overlap.fallback, device=device)
        own_of_target[target_ids] = own_ids
        return cls(len(target_ids), target_ids, own_ids, own_of_target)

    def committed(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Target ids [N] -> what the draft model is fed for them."""
        return target_ids if self.own_of_target is None else self.own_of_target[target_ids]

    def fed_back(self, indices: torch.Tensor) -> torch.Tensor:
        """Drawn indices [N] -> what the draft model is fed for them."""
        return indices if self.own_ids is None else self.own_ids[indices]

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft model's logits [N, Vd] -> [N, S]."""
        return logits[:, : self.num_known] if self.own_ids is None else logits[:, self.own_ids]
