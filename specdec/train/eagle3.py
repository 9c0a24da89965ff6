"""Eagle3Training: an EAGLE-3 head learns by its own roll-out (training-time test), several steps in one graph.

Owns: the head's weights while it is trained, and its loss. Must not know: batches' order, optimiser, files.
Source: Li et al. 2503.01840; EAGLE-3.1 (2605.09992): a norm on each tapped state, and the normed output is fed back.
Letters: B sequences, T tokens, S steps, H hidden, n tapped layers, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch, predicted_rows
from specdec.train.draft_vocabulary import offset_maps
from specdec.train.evaluation import NO_DRAFT
from specdec.train.features import taps_of
from specdec.train.layers import rms_norm, rope_table, rotate, silu_mlp
from specdec.train.losses import draft_laws, linear_draft_loss
from specdec.train.public_config import head_dim_of, shared_keys, theta_of
from specdec.train.warm_start import public_tensors

THIN = 2  # roll-out steps behind the first see every second sequence: they cost as much, and teach less
STEP_DECAY = 0.8  # weight of each roll-out step against the one before


class Eagle3Training(nn.Module):
    """The head in float32; `dtype` is that of its arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, frozen; draft_ids [Vd]: see draft_vocabulary.py.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        steps: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        shift: int = 0,
    ) -> None:
        super().__init__()
        width, inner = target.hidden_size, target.intermediate_size
        self.heads, self.kv_heads = target.num_attention_heads, target.num_key_value_heads
        self.target, self.head_dim, self.taps = target, head_dim_of(target), tuple(taps) or taps_of(target.num_hidden_layers)
        self.eps, self.steps, self.dtype, self.shift = target.rms_norm_eps, steps, dtype, shift
        self.theta = theta_of(target)
        self.embedding, self.target_head = embedding.to(dtype), head[draft_ids].to(dtype)
        self.draft_ids = draft_ids
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.fc_norm = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in self.taps])
        self.fc = _matrix(width, len(self.taps) * width)
        self.token_norm, self.feature_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v = _matrix(q_size, 2 * width), _matrix(kv_size, 2 * width), _matrix(kv_size, 2 * width)
        self.o, self.post_norm = _matrix(width, q_size), nn.Parameter(torch.ones(width))
        self.gate, self.up, self.down = _matrix(inner, width), _matrix(inner, width), _matrix(width, inner)
        self.norm = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Parameter(head[draft_ids].float().clone())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean loss of each step [S])."""
        laws, owned = self._targets(batch)
        head = self.lm_head.to(self.dtype)
        losses = []
        for step, output in enumerate(self.roll_out(batch, thin=THIN)):
            every = THIN if step else 1
            rows, law_rows = predicted_rows(owned[::every], step + 1 + self.shift, width=output.shape[1], every=every)
            losses.append(linear_draft_loss(output.flatten(0, 1).index_select(0, rows), head, laws, law_rows)[0])
        parts = torch.stack(losses)
        decay = STEP_DECAY ** torch.arange(len(losses))
        return (parts * decay).sum() / decay.sum(), parts.detach()

    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """laws [B * T, Vd]: row t of a sequence is the target's law of token t + 1; owned [B, T]: whether it wrote that token."""
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        return laws, F.pad(batch.own[:, 1:], (0, 1))

    def roll_out(self, batch: Batch, *, thin: int = 1) -> list[torch.Tensor]:
        """Normed output [B, T - 1 - s, H] of each step s: row j reads token j + 1 + s and predicts the token behind it.

        thin: behind the first step, go on with every so many-th sequence only.
        """
        weights = self._weights()
        length = batch.ids.shape[1]
        cos, sin = rope_table(self.theta, self.head_dim, length + self.steps)
        feature = self.combine(batch.aux)[:, : length - 1]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for step in range(self.steps):
            rows = length - 1 - step
            every = thin if step else 1
            if step == 1:
                feature, keys, values = feature[::thin], [x[::thin] for x in keys], [x[::thin] for x in values]
            feature = feature[:, :rows]
            token = F.embedding(batch.ids[::every, 1 + step :], self.embedding)
            place = slice(step, step + rows)
            mixed = torch.cat((rms_norm(token, self.token_norm, self.eps), rms_norm(feature, self.feature_norm, self.eps)), dim=-1)
            q, k, v = (F.linear(mixed, weights[name]).view(*mixed.shape[:-1], -1, self.head_dim) for name in ("q", "k", "v"))
            q, k = rotate(q, cos[place], sin[place]), rotate(k, cos[place], sin[place])
            keys, values = [x[:, :rows] for x in [*keys, k]], [x[:, :rows] for x in [*values, v]]
            attended = roll_out_attention(q, keys, values)
            stream = feature + F.linear(attended.flatten(-2), weights["o"])
            normed = rms_norm(stream, self.post_norm, self.eps)
            stream = stream + silu_mlp(normed, weights["gate"], weights["up"], weights["down"])
            feature = rms_norm(stream, self.norm, self.eps)
            outputs.append(feature)
        return outputs

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [B, T, n, H] -> features [B, T, H]."""
        parts = [rms_norm(part.to(self.dtype), norm, self.eps) for part, norm in zip(aux.unbind(dim=2), self.fc_norm, strict=True)]
        return F.linear(torch.cat(parts, dim=-1), self.fc.to(self.dtype))

    def _weights(self) -> dict[str, torch.Tensor]:
        """Copies in the dtype of the arithmetic."""
        return {name: getattr(self, name).to(self.dtype) for name in ("q", "k", "v", "o", "gate", "up", "down")}

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, S]; see evaluation.Drafter. Row j of a roll-out has read token j + 1, the last one known."""
        found = torch.full((*batch.ids.shape, self.steps), NO_DRAFT)
        head = self.lm_head.to(self.dtype)
        for step, output in enumerate(self.roll_out(batch)):
            found[:, 1 : 1 + output.shape[1], step] = self.draft_ids[(output @ head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names (SafeAILab's)."""
        named = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(self.fc_norm)}
        named |= {"fc.weight": self.fc, "norm.weight": self.norm, "lm_head.weight": self.lm_head}
        layer = {
            "input_layernorm": self.token_norm, "hidden_norm": self.feature_norm, "post_attention_layernorm": self.post_norm,
            "self_attn.q_proj": self.q, "self_attn.k_proj": self.k, "self_attn.v_proj": self.v, "self_attn.o_proj": self.o,
            "mlp.gate_proj": self.gate, "mlp.up_proj": self.up, "mlp.down_proj": self.down,
        }  # fmt: skip
        named |= {f"midlayer.{name}.weight": weight for name, weight in layer.items()}
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported, without the vocabulary's maps."""
        return public_tensors(self.weights())

    def maps(self) -> dict[str, torch.Tensor]:
        """d2t and t2d."""
        return offset_maps(self.draft_ids, self.target.vocab_size)

    def config(self) -> dict[str, Any]:
        """config.json of the exported head."""
        own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "fc_norm": True, "norm_output": True}
        own["eagle_aux_hidden_state_layer_ids"] = list(self.taps)
        return own | shared_keys(self.target, num_layers=1, draft_vocab=len(self.draft_ids))


def roll_out_attention(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Row j sees step 0's rows 0..j, and of each later step its own row only. All [B, T, heads, Dh]; query heads share KV heads."""
    group = q.shape[2] // keys[0].shape[2]
    q, first_k, first_v = (x.transpose(1, 2) for x in (q, keys[0], values[0]))
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q, first_k, first_v, is_causal=True, enable_gqa=True).transpose(1, 2)
    scale = q.shape[-1] ** -0.5
    batch, heads, rows, size = q.shape
    grouped = (q * scale).reshape(batch, -1, group * rows, size)
    scores = (grouped @ first_k.transpose(-1, -2)).view(batch, heads, rows, rows).float()
    scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
    own = [((q * scale).reshape(batch, -1, group, rows, size) * k.transpose(1, 2).unsqueeze(2)).sum(-1).flatten(1, 2) for k in keys[1:]]
    weights = torch.cat((scores, torch.stack(own, dim=-1).float()), dim=-1).softmax(dim=-1).to(q.dtype)
    out = (weights[..., :rows].reshape(batch, -1, group * rows, rows) @ first_v).view(batch, heads, rows, size)
    for index, v in enumerate(values[1:]):
        spread = v.transpose(1, 2).repeat_interleave(group, dim=1)
        out = out + weights[..., rows + index, None] * spread
    return out.transpose(1, 2)


def _matrix(out_size: int, in_size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(out_size, in_size) * in_size**-0.5)
