"""TruncatedTraining: the target's first layers learn to be a draft model of their own, by distillation from the whole.

Owns: the copied layers while they are trained, and their loss. Must not know: batches' order, optimiser, files.
Sources: DistillSpec (2310.08461) for the loss on the target's law over its own text. The arithmetic is transformers', so every family
that it knows can be cut. Embedding and LM head stay the target's; the loss looks at the LM head's rows of the draft vocabulary alone.
Letters: B sequences, T tokens, K drafts, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch, predicted_rows
from specdec.train.evaluation import NO_DRAFT
from specdec.train.losses import draft_laws, linear_draft_loss
from specdec.train.warm_start import public_tensors

PER_LAYER_KEYS = ("layer_types", "no_rope_layers")  # lists with an entry for each layer


class TruncatedTraining(nn.Module):
    """The layers in float32; `dtype` is that of their arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, frozen; draft_ids [Vd]: see draft_vocabulary.py.
    read(name, shape): a tensor of the target. num_layers: how many are kept, None for a fifth. shift: as in mtp.py.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        read: Callable[[str, tuple[int, ...]], torch.Tensor],
        num_layers: int | None = None,
        num_drafts: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        shift: int = 0,
    ) -> None:
        from transformers import AutoModel

        del taps
        super().__init__()
        self.shape = cut(target, num_layers or max(1, round(target.num_hidden_layers / 5)))
        self.num_drafts, self.dtype, self.shift, self.draft_ids = num_drafts, dtype, shift, draft_ids
        self.embedding, self.head, self.target_head = embedding.to(dtype), head, head[draft_ids].to(dtype)
        decoder = AutoModel.from_config(self.shape, dtype=torch.float32, attn_implementation="sdpa")
        with torch.no_grad():
            for name, weight in decoder.named_parameters():
                if not name.startswith("embed_tokens."):
                    weight.copy_(read(f"model.{name}", tuple(weight.shape)))
        decoder.embed_tokens = nn.Identity()  # it is handed what is embedded
        self.decoder = decoder

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, the same [1]): every row predicts the token behind it."""
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        owned, output = F.pad(batch.own[:, 1:], (0, 1)), self.states(batch)
        rows, law_rows = predicted_rows(owned, self.shift, width=output.shape[1]) if self.shift >= 0 else _behind(owned, -self.shift)
        loss, _ = linear_draft_loss(output.flatten(0, 1).index_select(0, rows), self.target_head, laws, law_rows)
        return loss, loss.detach()[None]

    def states(self, batch: Batch) -> torch.Tensor:
        """Normed output [B, T, H]: row t has read the tokens up to t and predicts the next."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            output = self.decoder(inputs_embeds=F.embedding(batch.ids, self.embedding), use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state.to(self.dtype)
        return hidden

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, K]; see evaluation.Drafter. Draft s behind token t is what row t + s predicts."""
        found = torch.full((*batch.ids.shape, self.num_drafts), NO_DRAFT)
        choice = self.draft_ids[(self.states(batch) @ self.target_head.T).argmax(dim=-1)]
        for draft in range(self.num_drafts):
            found[:, : choice.shape[1] - draft, draft] = choice[:, draft:]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under the target's names."""
        return {f"model.{name}": weight for name, weight in self.decoder.named_parameters()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """A whole model: the weights with the target's tables."""
        tables = {"model.embed_tokens.weight": self.embedding}
        if not self.shape.tie_word_embeddings:
            tables["lm_head.weight"] = self.head
        return public_tensors(self.weights() | tables)

    def maps(self) -> dict[str, torch.Tensor]:
        """None: it drafts all ids."""
        return {}

    def config(self) -> dict[str, Any]:
        """config.json of the model: the target's with fewer layers."""
        keys: dict[str, Any] = self.shape.to_dict()
        return keys | {"torch_dtype": "bfloat16"}


def cut(target: Any, num_layers: int) -> Any:
    """The target's config with its first layers only."""
    shape = copy.deepcopy(target)
    shape.num_hidden_layers = num_layers
    for key in PER_LAYER_KEYS:
        if getattr(shape, key, None):
            setattr(shape, key, list(getattr(shape, key))[:num_layers])
    return shape


def _behind(owned: torch.Tensor, back: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are trained on the law of `back` places before their own."""
    sequence, place = owned[:, : owned.shape[1] - back].nonzero(as_tuple=True)
    return sequence * owned.shape[1] + place + back, sequence * owned.shape[1] + place
