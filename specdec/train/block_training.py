"""BlockTraining: the layers that fill blocks behind random anchors, as DFlash and DSpark heads have them, while they are trained.

Owns: their weights and arithmetic. Must not know: losses, what corrects a block, files.
Sources: DFlash (2602.06036), DSpark (2607.05147). Letters: B sequences, T tokens, A anchors of a sequence, G slots of a block,
H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch
from specdec.train.draft_vocabulary import offset_maps
from specdec.train.features import taps_of
from specdec.train.layers import matrix, rms_norm, rope_table, rotate, silu_mlp
from specdec.train.losses import draft_laws
from specdec.train.public_config import head_dim_of, theta_of

ANCHORS = 32
SLOT_DECAY = 2.0  # a slot's weight falls by e every so many slots: with little data, early slots first (the paper has 4)
_LAYER = ("q", "k", "v", "o", "gate", "up", "down")


class BlockTraining(nn.Module):
    """The layers in float32; `dtype` is that of their arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, frozen; draft_ids [Vd]: see draft_vocabulary.py.
    mask_token_id: fed at the slots behind the anchor; an id that texts do not hold. shift: how far off the slots are trained, to see
    what alignment is worth.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int],
        num_layers: int,
        slots: int,
        mask_token_id: int,
        dtype: torch.dtype,
        shift: int = 0,
    ) -> None:
        super().__init__()
        self.shift = shift
        self.target, self.head_dim, self.eps, self.theta = target, head_dim_of(target), target.rms_norm_eps, theta_of(target)
        self.slots, self.mask_token_id, self.dtype, self.draft_ids = slots, mask_token_id, dtype, draft_ids
        self.embedding, self.target_head = embedding.to(dtype), head[draft_ids].to(dtype)
        self.taps, width = tuple(taps) or taps_of(target.num_hidden_layers), target.hidden_size
        self.fc, self.context_norm = matrix(width, len(self.taps) * width), nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList([nn.ParameterDict(_layer(target, self.head_dim)) for _ in range(num_layers)])
        self.norm = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Parameter(head[draft_ids].float().clone())

    def block_length(self, number: int) -> int:
        """Slots of a batch's blocks: every third batch has shorter ones, since a server drafts fewer when it is busy."""
        return self.slots if number % 3 else 1 + number // 3 % self.slots

    def draw_anchors(self, batch: Batch) -> torch.Tensor:
        """[B, A] places whose next token is the target's own, at random; the same for the same batch."""
        next_owned = F.pad(batch.own[:, 1:], (0, 1)).float()
        next_owned[:, 0] = 0  # an anchor has context
        generator = torch.Generator().manual_seed(batch.number)
        chance = torch.rand(next_owned.shape, generator=generator) + next_owned
        return chance.topk(min(ANCHORS, chance.shape[1]), dim=1).indices.sort(dim=1).values

    def blocks(self, batch: Batch, anchors: torch.Tensor, slots: int) -> torch.Tensor:
        """Normed states [B, A, G, H] of the blocks at the anchors [B, A]; each sees the tokens before its anchor and itself."""
        context = rms_norm(F.linear(batch.aux.flatten(2).to(self.dtype), self.fc.to(self.dtype)), self.context_norm, self.eps)
        (num, length), (_, count) = batch.ids.shape, anchors.shape
        ids = torch.full((num, count, slots), self.mask_token_id)
        ids[:, :, 0] = batch.ids.gather(1, anchors)
        stream = F.embedding(ids.flatten(1), self.embedding)  # [B, A * G, H]
        places = (anchors[:, :, None] + torch.arange(slots)).flatten(1)
        cos, sin = rope_table(self.theta, self.head_dim, length + slots)
        turns = (cos[:length], sin[:length]), (cos[places], sin[places])
        mask = _block_mask(anchors, length=length, slots=slots)
        for layer in self._layers():
            weights = {name: layer[name].to(self.dtype) for name in _LAYER}
            stream = stream + self._attention(layer, weights, context, stream, turns, mask)
            normed = rms_norm(stream, layer["post_norm"], self.eps)
            stream = stream + silu_mlp(normed, weights["gate"], weights["up"], weights["down"])
        return rms_norm(stream, self.norm, self.eps).view(num, count, slots, -1)

    def _layers(self) -> list[Any]:
        return list(self.layers)

    def _attention(
        self,
        layer: Any,
        weights: dict[str, torch.Tensor],
        context: torch.Tensor,
        stream: torch.Tensor,
        turns: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        normed = rms_norm(stream, layer["input_norm"], self.eps)
        query = self._heads(normed, weights["q"])
        query = rotate(rms_norm(query, layer["q_norm"], self.eps), *turns[1])
        keys, values = [], []
        for rows, turn in zip((context, normed), turns, strict=True):
            keys.append(rotate(rms_norm(self._heads(rows, weights["k"]), layer["k_norm"], self.eps), *turn))
            values.append(self._heads(rows, weights["v"]))
        group = query.shape[2] // keys[0].shape[2]
        key, value = (torch.cat(parts, dim=1).transpose(1, 2).repeat_interleave(group, dim=1) for parts in (keys, values))
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask)
        return F.linear(attended.transpose(1, 2).flatten(2), weights["o"])

    def _heads(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, weight).view(*rows.shape[:-1], -1, self.head_dim)

    def pick(self, batch: Batch, anchors: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots that are trained, where slot s behind anchor a predicts token a + s + 1: rows of [B * A * G], rows of the laws, numbers."""
        length = batch.ids.shape[1]
        places = anchors[:, :, None] + torch.arange(slots) + self.shift
        inside = places + 1 < length
        owned = batch.own.gather(1, (places + 1).clamp(max=length - 1).flatten(1)).view(places.shape) & inside
        valid = owned.long().cumprod(dim=2).bool()  # a block ends with the answer
        sequence, _, slot = valid.nonzero(as_tuple=True)
        return valid.flatten().nonzero()[:, 0], sequence * length + places[valid], slot

    def laws(self, batch: Batch) -> torch.Tensor:
        """The target's laws on the draft vocabulary [B * T, Vd]: row t of a sequence is that of token t + 1."""
        return draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)

    def block_weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names."""
        named: dict[str, torch.Tensor] = {"fc.weight": self.fc, "hidden_norm.weight": self.context_norm, "norm.weight": self.norm}
        named["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self._layers()):
            for name, public in _PUBLIC.items():
                named[f"layers.{index}.{public}.weight"] = layer[name]
        return named

    def maps(self) -> dict[str, torch.Tensor]:
        """d2t and t2d."""
        return offset_maps(self.draft_ids, self.target.vocab_size)


_PUBLIC = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def _block_mask(anchors: torch.Tensor, *, length: int, slots: int) -> torch.Tensor:
    """[B, 1, A * G, T + A * G] bool: context before the anchor, and the own block."""
    count = anchors.shape[1]
    before = torch.arange(length) < anchors.repeat_interleave(slots, dim=1)[:, :, None]
    block = torch.arange(count).repeat_interleave(slots)
    own = (block[:, None] == block[None]).expand(len(anchors), -1, -1)
    return torch.cat((before, own), dim=-1)[:, None]


def _layer(target: Any, head_dim: int) -> dict[str, nn.Parameter]:
    width, inner = target.hidden_size, target.intermediate_size
    q_size, kv_size = target.num_attention_heads * head_dim, target.num_key_value_heads * head_dim
    sizes = {"q": (q_size, width), "k": (kv_size, width), "v": (kv_size, width), "o": (width, q_size)}
    sizes |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    norms = {"input_norm": width, "post_norm": width, "q_norm": head_dim, "k_norm": head_dim}
    return {name: matrix(*size) for name, size in sizes.items()} | {name: nn.Parameter(torch.ones(size)) for name, size in norms.items()}
