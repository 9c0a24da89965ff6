"""DSparkTraining: a block head learns to fill blocks behind random anchors, its serial correction and its confidence with it.

Owns: the head's weights while it is trained, and its loss. Must not know: batches' order, optimiser, files.
Sources: DFlash (2602.06036), DSpark (2607.05147). Letters: B sequences, T tokens, A anchors of a sequence, G slots of a block,
H hidden, r rank, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch
from specdec.train.draft_vocabulary import offset_maps
from specdec.train.evaluation import NO_DRAFT
from specdec.train.features import taps_of
from specdec.train.layers import rms_norm, rope_table, rotate, silu_mlp
from specdec.train.losses import Mix, draft_laws, linear_draft_loss
from specdec.train.public_config import head_dim_of, shared_keys, theta_of
from specdec.train.warm_start import public_tensors

RANK = 48  # keeps the exported head under 32 MB
SLOT_DECAY = 2.0  # a slot's weight falls by e every so many slots: with little data, early slots first (the paper has 4)
ANCHORS = 32
MIX = Mix(cross_entropy=0.5, distance=0.5)  # the paper's 0.1 and 0.9 start slowly on little data
_LAYER = ("q", "k", "v", "o", "gate", "up", "down")


class DSparkTraining(nn.Module):
    """The head in float32; `dtype` is that of its arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, frozen; draft_ids [Vd]: see draft_vocabulary.py.
    mask_token_id: fed at the slots behind the anchor; an id that texts do not hold.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        num_layers: int = 2,
        slots: int = 7,
        mask_token_id: int = 5,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.target, self.head_dim, self.eps, self.theta = target, head_dim_of(target), target.rms_norm_eps, theta_of(target)
        self.slots, self.mask_token_id, self.dtype, self.draft_ids = slots, mask_token_id, dtype, draft_ids
        self.embedding, self.target_head = embedding.to(dtype), head[draft_ids].to(dtype)
        self.taps, width = tuple(taps) or taps_of(target.num_hidden_layers), target.hidden_size
        self.fc, self.context_norm = _matrix(width, len(self.taps) * width), nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList([nn.ParameterDict(_layer(target, self.head_dim)) for _ in range(num_layers)])
        self.norm = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Parameter(head[draft_ids].float().clone())
        self.markov_first = nn.Parameter(torch.randn(len(embedding), RANK) * 0.5)
        self.markov_second = nn.Parameter(torch.zeros(len(draft_ids), RANK))  # the correction begins as none
        self.joint, self.joint_bias = _matrix(3 * RANK, 2 * RANK + width), nn.Parameter(torch.zeros(3 * RANK))
        self.confidence = nn.Parameter(torch.zeros(width + RANK))
        self.confidence_bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean rejection 1 - overlap of each slot [G])."""
        anchors, slots = self.draw_anchors(batch), self.block_length(batch.number)
        states = self.blocks(batch, anchors, slots)  # [B, A, G, H]
        rows, law_rows, slot, previous = self._pick(batch, anchors, slots)
        embedded = F.embedding(previous, self.markov_first).to(self.dtype)  # [B, A, G, r]
        wide = torch.cat((states, self.corrections(states, embedded)), dim=-1).flatten(0, 2).index_select(0, rows)
        judged_by = torch.cat((states, embedded), dim=-1).flatten(0, 2).index_select(0, rows)
        head = torch.cat((self.lm_head, self.markov_second), dim=-1).to(self.dtype)  # base and correction are one product
        weight = torch.exp(-slot / SLOT_DECAY)
        weight = weight / weight.sum().clamp(min=1e-9)
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        loss, overlap = linear_draft_loss(wide, head, laws, law_rows, row_weight=weight, mix=MIX)
        trust = judged_by.detach().float() @ self.confidence + self.confidence_bias  # it reads the states, and does not bend them
        judged = F.binary_cross_entropy_with_logits(trust, overlap.clamp(0, 1), weight=weight, reduction="sum")
        count = torch.bincount(slot, minlength=self.slots).clamp(min=1)
        by_slot = torch.zeros(self.slots).index_add_(0, slot, 1 - overlap) / count
        return loss + judged, by_slot

    def corrections(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """What the correction reads at each slot, [..., G, r], from states [..., G, H] and the tokens before [..., G, r].

        The recurrent form: a small state is carried along the block, so a slot knows all tokens before it.
        """
        joint, carried, found = self.joint.to(self.dtype), torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(states.shape[-2]):
            read = torch.cat((carried, embedded[..., slot, :], states[..., slot, :]), dim=-1)
            gate, fresh, out = F.linear(read, joint, self.joint_bias.to(self.dtype)).chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            carried = keep * carried + (1 - keep) * torch.tanh(fresh)
            found.append(torch.tanh(out))
        return torch.stack(found, dim=-2)

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

    def _pick(self, batch: Batch, anchors: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots that are trained: their rows of [B * A * G], their laws' rows of [B * T], their numbers; the token before any [B, A, G]."""
        length = batch.ids.shape[1]
        places = anchors[:, :, None] + torch.arange(slots)  # the slot at place t predicts token t + 1
        inside = places + 1 < length
        owned = batch.own.gather(1, (places + 1).clamp(max=length - 1).flatten(1)).view(places.shape) & inside
        valid = owned.long().cumprod(dim=2).bool()  # a block ends with the answer
        sequence, _, slot = valid.nonzero(as_tuple=True)
        previous = batch.ids.gather(1, places.clamp(max=length - 1).flatten(1)).view(places.shape)
        return valid.flatten().nonzero()[:, 0], sequence * length + places[valid], slot, previous

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, G]; see evaluation.Drafter. Every place of an answer is an anchor once."""
        found = torch.full((*batch.ids.shape, self.slots), NO_DRAFT)
        length, begin = batch.ids.shape[1], int(batch.own.any(dim=0).long().argmax())
        head = torch.cat((self.lm_head, self.markov_second), dim=-1).to(self.dtype)
        for first in range(begin, length, ANCHORS):
            anchors = torch.arange(first, min(first + ANCHORS, length))
            states = self.blocks(batch, anchors.expand(len(batch.ids), -1), self.slots)
            places = (anchors[:, None] + torch.arange(self.slots)).clamp(max=length - 1)  # what is drafted behind the text is not read
            embedded = F.embedding(batch.ids[:, places], self.markov_first).to(self.dtype)
            wide = torch.cat((states, self.corrections(states, embedded)), dim=-1)
            found[:, anchors] = self.draft_ids[(wide @ head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names."""
        named: dict[str, torch.Tensor] = {"fc.weight": self.fc, "hidden_norm.weight": self.context_norm, "norm.weight": self.norm}
        named |= {"lm_head.weight": self.lm_head, "confidence_head.proj.bias": self.confidence_bias}
        named |= {"markov_head.markov_w1.weight": self.markov_first, "markov_head.markov_w2.weight": self.markov_second}
        named |= {"markov_head.joint_proj.weight": self.joint, "markov_head.joint_proj.bias": self.joint_bias}
        named |= {"confidence_head.proj.weight": self.confidence[None]}
        for index, layer in enumerate(self._layers()):
            for name, public in _PUBLIC.items():
                named[f"layers.{index}.{public}.weight"] = layer[name]
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported, without the vocabulary's maps."""
        return public_tensors(self.weights())

    def maps(self) -> dict[str, torch.Tensor]:
        """d2t and t2d."""
        return offset_maps(self.draft_ids, self.target.vocab_size)

    def config(self) -> dict[str, Any]:
        """config.json of the exported head."""
        own = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": self.slots, "mask_token_id": self.mask_token_id}
        own |= {"sample_from_anchor": True, "target_layer_ids": [tap - 1 for tap in self.taps]}
        own |= {"markov_rank": RANK, "markov_head_type": "rnn", "enable_confidence_head": True, "confidence_head_with_markov": True}
        return own | shared_keys(self.target, num_layers=len(self.layers), draft_vocab=len(self.draft_ids))


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
    return {name: _matrix(*size) for name, size in sizes.items()} | {name: nn.Parameter(torch.ones(size)) for name, size in norms.items()}


def _matrix(out_size: int, in_size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(out_size, in_size) * in_size**-0.5)
