"""PEagleTraining: an EAGLE-3 head learns to draft all its tokens in one pass, from masks behind the last token that is known.

Owns: the head's weights while it is trained, and its loss. Must not know: batches' order, optimiser, files.
Source: P-EAGLE (2602.01469). Known rows join feature and next token and see each other, causally. Behind a start, K - 1 mask rows join
one learned state with the mask's embedding; each sees the known rows up to the start, and the masks before it. Starts are drawn at
random, so that a pass stays short. Letters: B sequences, T tokens, A starts, K drafts, R rows (T - 1 known, then A * (K - 1) masks),
H hidden, n tapped layers, Vd draft vocabulary.
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
from specdec.train.layers import matrix, rms_norm, rope_table, rotate, silu_mlp
from specdec.train.losses import draft_laws, linear_draft_loss
from specdec.train.public_config import head_dim_of, shared_keys, theta_of
from specdec.train.warm_start import public_tensors

STARTS = 32
DEPTH_DECAY = 0.8  # weight of each place against the one before
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class PEagleTraining(nn.Module):
    """The head in float32; `dtype` is that of its arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, frozen; draft_ids [Vd]: see draft_vocabulary.py.
    drafts_per_pass: K. mask_token_id: an id that texts do not hold. shift: how far off it is trained, to see what alignment is worth.
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
        drafts_per_pass: int = 5,
        mask_token_id: int = 5,
        dtype: torch.dtype = torch.bfloat16,
        shift: int = 0,
    ) -> None:
        super().__init__()
        width = target.hidden_size
        self.target, self.head_dim, self.eps, self.theta = target, head_dim_of(target), target.rms_norm_eps, theta_of(target)
        self.num_drafts, self.mask_token_id, self.dtype, self.shift = drafts_per_pass, mask_token_id, dtype, shift
        self.taps, self.draft_ids = tuple(taps) or taps_of(target.num_hidden_layers), draft_ids
        self.embedding, self.target_head = embedding.to(dtype), head[draft_ids].to(dtype)
        self.fc_norm = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in self.taps])
        self.fc, self.mask_state = matrix(width, len(self.taps) * width), nn.Parameter(torch.randn(len(self.taps), width))
        self.token_norm, self.feature_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        layers = [_layer(target, self.head_dim, in_size=width if index else 2 * width) for index in range(num_layers)]
        self.layers, self.norm = nn.ModuleList([nn.ParameterDict(layer) for layer in layers]), nn.Parameter(torch.ones(width))
        self.lm_head = nn.Parameter(head[draft_ids].float().clone())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean rejection 1 - overlap of each place [K])."""
        starts = self.draw_starts(batch)
        rows, law_rows, depth = self._pick(batch, starts)
        weight = DEPTH_DECAY ** depth.float() / torch.bincount(depth, minlength=self.num_drafts)[depth]
        weight = weight / weight.sum().clamp(min=1e-9)
        hidden = self.states(batch, starts).flatten(0, 1).index_select(0, rows)
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        loss, overlap = linear_draft_loss(hidden, self.lm_head.to(self.dtype), laws, law_rows, row_weight=weight)
        count = torch.bincount(depth, minlength=self.num_drafts).clamp(min=1)
        return loss, torch.zeros(self.num_drafts).index_add_(0, depth, 1 - overlap) / count

    def draw_starts(self, batch: Batch) -> torch.Tensor:
        """[B, A] known rows behind which masks are trained, at random among those that predict the answer; the same for the same batch."""
        owned = F.pad(batch.own[:, 2:], (0, 1)).float()  # row j predicts token j + 2
        chance = torch.rand(owned.shape, generator=torch.Generator().manual_seed(batch.number)) + owned
        return chance.topk(min(STARTS, owned.shape[1]), dim=1).indices.sort(dim=1).values

    def _pick(self, batch: Batch, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that are trained, of [B * R]; rows of the laws, of [B * T]; and how many masks each stands behind its start."""
        (num, length), (_, count) = batch.ids.shape, starts.shape
        masks = starts[:, :, None] + torch.arange(1, self.num_drafts)
        row = torch.cat((torch.arange(length - 1).expand(num, -1), masks.flatten(1)), dim=1)  # a row's position
        depth = torch.cat((torch.zeros(length - 1, dtype=torch.int64), torch.arange(1, self.num_drafts).repeat(count)))
        token = row + 2 + self.shift  # what it predicts
        owned = batch.own.gather(1, token.clamp(max=length - 1)) & (token < length)
        first = owned.gather(1, torch.cat((torch.arange(length - 1).expand(num, -1), starts.repeat_interleave(self.num_drafts - 1, 1)), 1))
        sequence, place = (owned & first).nonzero(as_tuple=True)
        return sequence * row.shape[1] + place, sequence * length + token[sequence, place] - 1, depth[place]

    def states(self, batch: Batch, starts: torch.Tensor) -> torch.Tensor:
        """Normed output [B, R, H] of known rows and, start by start, of the masks behind them."""
        (num, length), (_, count) = batch.ids.shape, starts.shape
        per_start = self.num_drafts - 1
        known = self.combine(batch.aux[:, : length - 1])
        blank = self.combine(self.mask_state[None, None]).expand(num, count * per_start, -1)
        ids = F.pad(batch.ids[:, 1:], (0, count * per_start), value=self.mask_token_id)
        masks = starts[:, :, None] + torch.arange(1, self.num_drafts)
        places = torch.cat((torch.arange(length - 1).expand(num, -1), masks.flatten(1)), dim=1)
        cos, sin = (table[places] for table in rope_table(self.theta, self.head_dim, length + self.num_drafts))
        stream = feature = torch.cat((known, blank), dim=1)
        token = rms_norm(F.embedding(ids, self.embedding), self.token_norm, self.eps)
        mask = _mask(starts, length=length, per_start=per_start)
        for index, layer in enumerate(self._layers()):
            weights = {name: layer[name].to(self.dtype) for name in _MATRICES}
            normed = rms_norm(stream, layer["input_norm"], self.eps) if index else rms_norm(feature, self.feature_norm, self.eps)
            read = normed if index else torch.cat((token, normed), dim=-1)
            q, k, v = (
                F.linear(read, weights[name]).view(num, read.shape[1], -1, self.head_dim).transpose(1, 2) for name in ("q", "k", "v")
            )
            q, k = (rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            stream = stream + F.linear(attended.transpose(1, 2).flatten(2), weights["o"])
            stream = stream + silu_mlp(rms_norm(stream, layer["post_norm"], self.eps), weights["gate"], weights["up"], weights["down"])
        return rms_norm(stream, self.norm, self.eps)

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [..., n, H] -> features [..., H]."""
        parts = [rms_norm(part.to(self.dtype), norm, self.eps) for part, norm in zip(aux.unbind(dim=-2), self.fc_norm, strict=True)]
        return F.linear(torch.cat(parts, dim=-1), self.fc.to(self.dtype))

    def _layers(self) -> list[Any]:
        return list(self.layers)

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, K]; see evaluation.Drafter. Row j drafts behind token j + 1."""
        num, length = batch.ids.shape
        found = torch.full((num, length, self.num_drafts), NO_DRAFT)
        head, begin = self.lm_head.to(self.dtype), max(int(batch.own.any(dim=0).long().argmax()) - 1, 0)
        for first in range(begin, length - 1, STARTS):
            starts = torch.arange(first, min(first + STARTS, length - 1))
            states = self.states(batch, starts.expand(num, -1))
            own = states[:, length - 1 :].view(num, len(starts), self.num_drafts - 1, -1)
            rows = torch.cat((states[:, starts][:, :, None], own), dim=2)
            found[:, starts + 1] = self.draft_ids[(rows @ head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names: EAGLE-3's, further layers, and `mask_hidden`."""
        named = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(self.fc_norm)}
        named |= {
            "fc.weight": self.fc,
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
            "mask_hidden": self.mask_state.view(1, 1, -1),
        }
        named |= {"midlayer.input_layernorm.weight": self.token_norm, "midlayer.hidden_norm.weight": self.feature_norm}
        for index, layer in enumerate(self._layers()):
            base = f"layers.{index}." if index else "midlayer."
            named |= {f"{base}{_PUBLIC[name]}.weight": weight for name, weight in layer.items()}
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported, without the vocabulary's maps."""
        return public_tensors(self.weights())

    def maps(self) -> dict[str, torch.Tensor]:
        """d2t and t2d."""
        return offset_maps(self.draft_ids, self.target.vocab_size)

    def config(self) -> dict[str, Any]:
        """config.json of the exported head."""
        own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "fc_norm": True}
        own |= {"eagle_aux_hidden_state_layer_ids": list(self.taps), "ptd_token_id": self.mask_token_id}
        return own | shared_keys(self.target, num_layers=len(self.layers), draft_vocab=len(self.draft_ids))


_PUBLIC = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def _mask(starts: torch.Tensor, *, length: int, per_start: int) -> torch.Tensor:
    """[B, 1, R, R] bool: known rows before or at a row's start, and the masks of the same start up to it."""
    num, count = starts.shape
    known = length - 1
    start = torch.cat((torch.arange(known).expand(num, -1), starts.repeat_interleave(per_start, dim=1)), dim=1)
    sees_known = torch.arange(known) <= start[:, :, None]
    block = torch.cat((torch.full((known,), -1), torch.arange(count).repeat_interleave(per_start)))
    depth = torch.cat((torch.zeros(known, dtype=torch.int64), torch.arange(per_start).repeat(count)))
    sees_masks = (block[:, None] == block[known:]) & (depth[:, None] >= depth[known:])
    return torch.cat((sees_known, sees_masks.expand(num, -1, -1)), dim=-1)[:, None]


def _layer(target: Any, head_dim: int, *, in_size: int) -> dict[str, nn.Parameter]:
    width, inner = target.hidden_size, target.intermediate_size
    q_size, kv_size = target.num_attention_heads * head_dim, target.num_key_value_heads * head_dim
    sizes = {"q": (q_size, in_size), "k": (kv_size, in_size), "v": (kv_size, in_size), "o": (width, q_size)}
    sizes |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    norms = {"post_norm": width} | ({"input_norm": width} if in_size == width else {})
    return {name: matrix(*size) for name, size in sizes.items()} | {name: nn.Parameter(torch.ones(size)) for name, size in norms.items()}
