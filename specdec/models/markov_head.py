"""MarkovHead: DSpark's serial correction of a block's logits by the tokens chosen before each slot.

Owns: its weights, its three published forms, and the state that one of them carries along a block. Must not know: requests, drawing.
Source: DSpark (2607.05147). Letters: N rows, H width, V and Vd vocabularies, r rank; e = W1[previous token].

| form | added to the logits | carried along the block |
|---|---|---|
| vanilla | W2 e | nothing |
| gated | W2 (sigmoid(G [h; e]) * e) | nothing |
| rnn | W2 tanh(o) with (g, c, o) = J [s; e; h] | s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), 0 at first |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from specdec.errors import ConfigError
from specdec.models.linear import Linear

if TYPE_CHECKING:
    from specdec.models.draft_head import HeadReader

FORMS = ("vanilla", "gated", "rnn")


class MarkovHead:
    """first [V, r]; second: r -> Vd; inner: G or J, None for the vanilla form."""

    def __init__(self, form: str, first: torch.Tensor, second: Linear, inner: Linear | None) -> None:
        self.form, self.first, self.second, self.inner = form, first, second, inner

    @classmethod
    def read(cls, reader: HeadReader, hf_config: Any, *, draft_vocab: int) -> MarkovHead | None:
        """Read it where the config has one.

        Raises:
            ConfigError: it is of a kind that is not served.
        """
        rank = int(getattr(hf_config, "markov_rank", None) or 0)
        if not rank:
            return None
        form = getattr(hf_config, "markov_head_type", None) or "vanilla"
        if form not in FORMS:
            raise ConfigError(
                f"draft config.json: markov_head_type is {form!r}, but known are {', '.join(FORMS)}",
                hint="choose another DSpark checkpoint",
            )
        width, base = reader.shape.hidden_size, f"{reader.base}markov_head."
        first = reader.own("markov_head.markov_w1.weight", (int(hf_config.vocab_size), rank))
        inner = None
        if form == "gated":
            inner = reader.linear([f"{base}gate_proj"], [rank], width + rank)
        if form == "rnn":
            inner = reader.linear([f"{base}joint_proj"], [3 * rank], width + 2 * rank)
        return cls(form, first, reader.linear([f"{base}markov_w2"], [draft_vocab], rank), inner)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its weights."""
        inner = 0 if self.inner is None else self.inner.num_bytes
        return self.first.numel() * self.first.element_size() + self.second.num_bytes + inner

    def begin(self, num_rows: int) -> torch.Tensor:
        """The state [N, r] at the start of a block."""
        return self.first.new_zeros(num_rows, self.first.shape[1])

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """Target ids [N] -> e [N, r]."""
        return F.embedding(previous, self.first)

    def correct(self, embedded: torch.Tensor, normed: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """e [N, r], the slot's states [N, H] and the block's state [N, r] -> (what is added to the logits, [N, Vd] f32; the next state)."""
        if self.inner is None:
            return self.second.wide(embedded), state
        if self.form == "gated":
            return self.second.wide(torch.sigmoid(self.inner(torch.cat((normed, embedded), dim=-1))) * embedded), state
        gate, fresh, out = self.inner(torch.cat((state, embedded, normed), dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return self.second.wide(torch.tanh(out)), keep * state + (1 - keep) * torch.tanh(fresh)
