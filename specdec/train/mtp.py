"""MtpTraining: a multi-token-prediction module learns beside a finished target, by its own roll-out, one module for all its steps.

Owns: the module's weights while it is trained, and its loss. Must not know: batches' order, optimiser, files.
Sources: DeepSeek-V3 (2412.19437) for the module, FastMTP (2509.18362) for training one module on what it made itself.
The target's embedding and LM head are the module's; the loss looks at the LM head's rows of the draft vocabulary alone.
Letters: B sequences, T tokens, S steps, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch, predicted_rows
from specdec.train.eagle3 import roll_out_attention
from specdec.train.evaluation import NO_DRAFT
from specdec.train.layers import matrix, rms_norm, rope_table, rotate, silu_mlp
from specdec.train.losses import draft_laws, linear_draft_loss
from specdec.train.public_config import head_dim_of, shared_keys, theta_of
from specdec.train.warm_start import public_tensors

STEP_DECAY = 0.6  # weight of each step against the one before (FastMTP's)


class MtpTraining(nn.Module):
    """The module in float32; `dtype` is that of its arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, frozen; draft_ids [Vd]: see draft_vocabulary.py.
    It reads what the target's LM head reads, and no taps. shift: how far off it is trained, to see what alignment is worth.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        steps: int = 3,
        dtype: torch.dtype = torch.bfloat16,
        shift: int = 0,
    ) -> None:
        del taps
        super().__init__()
        width, inner = target.hidden_size, target.intermediate_size
        self.target, self.head_dim, self.eps, self.theta = target, head_dim_of(target), target.rms_norm_eps, theta_of(target)
        self.steps, self.dtype, self.shift, self.draft_ids = steps, dtype, shift, draft_ids
        self.embedding, self.target_head = embedding.to(dtype), head[draft_ids].to(dtype)
        q_size, kv_size = target.num_attention_heads * self.head_dim, target.num_key_value_heads * self.head_dim
        self.token_norm, self.hidden_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.projection = matrix(width, 2 * width)
        self.input_norm, self.post_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.o = matrix(q_size, width), matrix(kv_size, width), matrix(kv_size, width), matrix(width, q_size)
        self.gate, self.up, self.down = matrix(inner, width), matrix(inner, width), matrix(width, inner)
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean loss of each step [S])."""
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        owned = F.pad(batch.own[:, 1:], (0, 1))
        losses = []
        for step, output in enumerate(self.roll_out(batch)):
            rows, law_rows = predicted_rows(owned, step + 1 + self.shift, width=output.shape[1])
            losses.append(linear_draft_loss(output.flatten(0, 1).index_select(0, rows), self.target_head, laws, law_rows)[0])
        parts = torch.stack(losses)
        decay = STEP_DECAY ** torch.arange(len(losses))
        return (parts * decay).sum() / decay.sum(), parts.detach()

    def roll_out(self, batch: Batch) -> list[torch.Tensor]:
        """Normed output [B, T - 1 - s, H] of each step s: row j reads token j + 1 + s and predicts the token behind it."""
        weights = {name: getattr(self, name).to(self.dtype) for name in ("projection", "q", "k", "v", "o", "gate", "up", "down")}
        length = batch.ids.shape[1]
        cos, sin = rope_table(self.theta, self.head_dim, length + self.steps)
        feature = batch.hidden.to(self.dtype)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for step in range(self.steps):
            rows = length - 1 - step
            place = slice(step, step + rows)
            stream = F.linear(self._join(batch.ids[:, 1 + step :], feature[:, :rows], is_first=step == 0), weights["projection"])
            normed = rms_norm(stream, self.input_norm, self.eps)
            q, k, v = (F.linear(normed, weights[name]).view(*normed.shape[:-1], -1, self.head_dim) for name in ("q", "k", "v"))
            q, k = rotate(q, cos[place], sin[place]), rotate(k, cos[place], sin[place])
            keys, values = [x[:, :rows] for x in [*keys, k]], [x[:, :rows] for x in [*values, v]]
            stream = stream + F.linear(roll_out_attention(q, keys, values).flatten(-2), weights["o"])
            stream = stream + silu_mlp(rms_norm(stream, self.post_norm, self.eps), weights["gate"], weights["up"], weights["down"])
            feature = rms_norm(stream, self.norm, self.eps)
            outputs.append(feature)
        return outputs

    def _join(self, ids: torch.Tensor, feature: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """[normed token; normed feature] [B, rows, 2H]. The token behind position 0 is read as zeros, as in DeepSeek's modules."""
        token = F.embedding(ids, self.embedding)
        if is_first:
            token = torch.cat((torch.zeros_like(token[:, :1]), token[:, 1:]), dim=1)
        return torch.cat((rms_norm(token, self.token_norm, self.eps), rms_norm(feature, self.hidden_norm, self.eps)), dim=-1)

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, S]; see evaluation.Drafter. Row j of a roll-out has read token j + 1, the last one known."""
        found = torch.full((*batch.ids.shape, self.steps), NO_DRAFT)
        for step, output in enumerate(self.roll_out(batch)):
            found[:, 1 : 1 + output.shape[1], step] = self.draft_ids[(output @ self.target_head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under DeepSeek's names, behind the target's last layer."""
        parts = {
            "enorm": self.token_norm, "hnorm": self.hidden_norm, "eh_proj": self.projection, "shared_head.norm": self.norm,
            "input_layernorm": self.input_norm, "post_attention_layernorm": self.post_norm, "self_attn.q_proj": self.q,
            "self_attn.k_proj": self.k, "self_attn.v_proj": self.v, "self_attn.o_proj": self.o, "mlp.gate_proj": self.gate,
            "mlp.up_proj": self.up, "mlp.down_proj": self.down,
        }  # fmt: skip
        return {f"model.layers.{self.target.num_hidden_layers}.{name}.weight": weight for name, weight in parts.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported."""
        return public_tensors(self.weights())

    def maps(self) -> dict[str, torch.Tensor]:
        """None: the format has no vocabulary of its own; `token_map` names one to the server."""
        return {}

    def config(self) -> dict[str, Any]:
        """config.json of the exported module: the target's sizes, since a module is a layer of it."""
        own = {"architectures": ["DeepSeekMTPModel"], "model_type": "llama", "num_nextn_predict_layers": 1}
        keys = shared_keys(self.target, num_layers=self.target.num_hidden_layers, draft_vocab=self.target.vocab_size)
        return own | {name: value for name, value in keys.items() if name != "draft_vocab_size"}
