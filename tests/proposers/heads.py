"""Draft heads beside the tiny target: configurations, and what a plain reference drafts for the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config.checkpoints import draft_hf_config
from specdec.config.compatibility import flatten
from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import Eagle3Config, EagleConfig
from specdec.config.methods import traits_for
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.paged import PagedRows
from tests.models.eagle_reference import Reference, Spec
from tests.proposers.tiny import resolved_for, write_checkpoint

EAGLE = Spec(method="eagle", draft_vocab=97, taps=())
EAGLE3 = Spec()


def headed(target: Path, head: Path, spec: Spec, drafts: int, *, config: dict[str, Any] | None = None, **settings: Any) -> ResolvedConfig:
    """The configuration of a tiny target with a head, as resolve() would settle it."""
    kind = EagleConfig if spec.method == "eagle" else Eagle3Config
    speculative = kind(model=str(head), num_speculative_tokens=drafts, **(config or {}))
    keys = flatten(json.loads((head / "config.json").read_text(encoding="utf-8")))
    traits = traits_for(speculative, keys, num_target_layers=LlamaConfig.from_pretrained(target).num_hidden_layers)
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
        features = self.reference.features(self.read(text[:-1])[1])
        return self.reference.chain(list(text[1:]), features, count, to_target=self.to_target)[0]

    @torch.inference_mode()
    def chances(self, text: Sequence[int], count: int) -> list[float]:
        """The head's own probability of each of those drafts."""
        features = self.reference.features(self.read(text[:-1])[1])
        laws = self.reference.chain(list(text[1:]), features, count, to_target=self.to_target)[1]
        return [float(law.softmax(dim=-1).max()) for law in laws]

    @torch.no_grad()
    def read(self, text: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(logits [T, V], the states that the head reads, each [T, H]) of the target over a text."""
        streams: list[torch.Tensor] = []  # before each layer and before the final norm: the library's own last entry is behind it
        parts = [*self.model.model.layers, self.model.model.norm]
        hooks = [part.register_forward_pre_hook(lambda _, args: streams.append(args[0][0])) for part in parts]
        output = self.model.model(input_ids=torch.tensor([list(text)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        states = [streams[tap] for tap in self.spec.taps] or [output.last_hidden_state[0]]
        return self.model.lm_head(output.last_hidden_state[0]), states


@torch.no_grad()
def agreement(taught: PlainHead, texts: Sequence[Sequence[int]], *, shift: int = 0) -> float:
    """How often the head's choice is the target's own, if row j (token j + 1) is read as the law of token j + 2 + shift."""
    hits, total = 0, 0
    for text in texts:
        logits, states = taught.read(text)
        scored, _ = taught.reference.rows(torch.tensor(text[1:]), taught.reference.features(states)[:-1])
        choice, own = taught.reference.logits(scored).argmax(-1)[1:-2], logits.argmax(-1)[2 + shift :]
        hits += int((choice == own[: len(choice)]).sum())
        total += len(choice)
    return hits / total


@torch.no_grad()
def cross_entropy(taught: PlainHead, texts: Sequence[Sequence[int]]) -> float:
    """Mean cross entropy of the head's law against the target's, in nats."""
    losses = []
    for text in texts:
        logits, states = taught.read(text)
        scored, _ = taught.reference.rows(torch.tensor(text[1:]), taught.reference.features(states)[:-1])
        losses.append(-(logits[1:].softmax(-1) * taught.reference.logits(scored).log_softmax(-1)).sum(-1))
    return float(torch.cat(losses).mean())


def write_teachable(path: Path) -> Path:
    """Write a target of 4 layers whose next token hangs mostly on the last one, so that a toy head learns it in seconds."""
    write_checkpoint(path, seed=2, num_layers=4)
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight *= 0.5 if "layers" in name else 3.0 if "embed" in name else 1.0
    model.save_pretrained(path)
    return path


def train(plain: PlainHead, *, num_steps: int, length: int = 48) -> None:
    """Fit the head's weights to the target's law two tokens past each row's feature, over random texts."""
    weights, generator = plain.reference.weights, torch.Generator().manual_seed(11)
    texts = [torch.randint(0, plain.spec.vocab - 1, (length,), generator=generator) for _ in range(48)]
    read = [plain.read(text.tolist()) for text in texts]
    ids = torch.tensor([plain.to_target(index) for index in range(plain.spec.draft_vocab)])
    fitted = [weight.requires_grad_() for weight in weights.values() if weight.is_floating_point()]
    optimizer = torch.optim.Adam(fitted, lr=4e-3)
    for step in range(num_steps):
        text, (logits, states) = texts[step % len(texts)], read[step % len(texts)]
        scored, _ = plain.reference.rows(text[1:], plain.reference.features(states)[:-1])
        wanted = logits[1:, ids].softmax(-1)  # row j holds token j + 1, and the target's law there is of token j + 2
        loss = -(wanted * plain.reference.logits(scored).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weight in fitted:
        weight.requires_grad_(False)


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


class Behind(EagleProposer):
    """Joins each feature with the token of its own position, one place before the right one."""

    def _successors(self, step: StepView, rows: PagedRows) -> torch.Tensor:
        return step.token_ids[step.rows[rows.owner], rows.positions].long()
