"""Draft heads beside the tiny target: configurations, and what a plain reference drafts for the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specdec.config.checkpoints import draft_hf_config
from specdec.config.compatibility import flatten
from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import Eagle3Config, EagleConfig
from specdec.config.methods import traits_for
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.eagle import EagleProposer
from tests.models.eagle_reference import Reference, Spec
from tests.proposers.tiny import resolved_for

EAGLE = Spec(method="eagle", draft_vocab=97, taps=())
EAGLE3 = Spec()


def headed(target: Path, head: Path, spec: Spec, drafts: int, *, config: dict[str, Any] | None = None, **settings: Any) -> ResolvedConfig:
    """The configuration of the tiny target with a head, as resolve() would settle it."""
    kind = EagleConfig if spec.method == "eagle" else Eagle3Config
    speculative = kind(model=str(head), num_speculative_tokens=drafts, **(config or {}))
    keys = flatten(json.loads((head / "config.json").read_text(encoding="utf-8")))
    traits = traits_for(speculative, keys, num_target_layers=2)
    resolved = resolved_for(target, traits=traits, speculative=speculative, **settings)
    return replace(resolved, draft_model_path=str(head), draft_hf_config=draft_hf_config(str(head), keys))


@dataclass(slots=True)
class PlainHead:
    """What the reference drafts behind a text. to_target: target id of a draft id."""

    model: LlamaForCausalLM
    reference: Reference
    spec: Spec
    to_target: Callable[[int], int]

    @torch.inference_mode()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Greedy drafts behind the text, of which the last token is the anchor."""
        _, features = self.features(text[:-1])
        return self.reference.chain(list(text[1:]), features, count, to_target=self.to_target)[0]

    def features(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(target logits [T, V], head features [T, H]) of a text."""
        streams: list[torch.Tensor] = []  # before each layer and before the final norm: the library's own last entry is behind it
        parts = [*self.model.model.layers, self.model.model.norm]
        hooks = [part.register_forward_pre_hook(lambda _, args: streams.append(args[0][0])) for part in parts]
        output = self.model.model(input_ids=torch.tensor([list(text)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        states = [streams[tap] for tap in self.spec.taps] or [output.last_hidden_state[0]]
        return self.model.lm_head(output.last_hidden_state[0]), self.reference.features(states)


def plain_head(target: Path, head: Path, spec: Spec) -> PlainHead:
    """Read both checkpoints with nothing of the served code."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    weights = {name.removeprefix(spec.prefix): tensor for name, tensor in load_file(head / "model.safetensors").items()}
    offsets = weights.get("d2t")
    reference = Reference(spec, weights, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    return PlainHead(model, reference, spec, lambda index: index if offsets is None else index + int(offsets[index]))


class Recording(EagleProposer):
    """Keeps, for every request that got drafts, its text at that moment and the drafts."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, step: StepView) -> DraftBatch:
        batch = super().propose(step)
        for index, row in enumerate(step.rows.tolist()):
            count = int(batch.num_nodes[index])
            if count:
                text = step.token_ids[row, : int(step.num_tokens[row])].tolist()
                self.seen.append((text, batch.token_ids[index, :count].tolist()))
        return batch


class Shifted(EagleProposer):
    """Joins each feature with a token `shift` places from the right one."""

    shift = 0

    def _successors(self, step: StepView, rows: Any) -> torch.Tensor:
        last = step.num_tokens[step.rows[rows.owner]] - 1
        places = torch.minimum((rows.positions + 1 + self.shift).clamp(min=0), last)
        return step.token_ids[step.rows[rows.owner], places].long()
