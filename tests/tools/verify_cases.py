"""A tiny random target, a drafter with a law of its own and deliberate faults, and how the tests of verify run both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaForCausalLM

from specdec.config.method_configs import EarlyExitConfig
from specdec.config.methods import MethodTraits
from specdec.engine.core import EngineCore
from specdec.kernels.philox import PURPOSE_DRAFT, uniform
from specdec.proposers.base import BaseProposer, Dense, DraftBatch, DraftLaw, DraftRail, StepView
from specdec.tools.arm import Arm
from specdec.tools.scoring import Scorer
from specdec.tools.verify import RuleFacts, VerifyOptions, VerifyReport, verify
from specdec.worker.worker import load_runner
from tests.engine.tokenizers_for_tests import TOY_VOCAB_SIZE, toy_tokenizer
from tests.proposers.tiny import prompts, resolved_for, write_checkpoint

NUM_DRAFTS = 3
PROMPTS = [tuple(ids) for ids in prompts(4, seed=5, shortest=4, longest=12)]
STANDARD = RuleFacts(name="standard", exact_match=False, by_slot=True, lossy=False)
BLOCK = RuleFacts(name="block", exact_match=False, by_slot=False, lossy=False)
EXACT = RuleFacts(name="exact match", exact_match=True, by_slot=True, lossy=False)
OPTIONS = VerifyOptions(temperature=1.5, tokens=1600, length=40, tv_samples=100, tv_prompts=2, tv_length=2)

Fault = Literal["none", "hidden_law", "law_of_other_temperature", "argmax_with_softmax_law", "kept_when_likely", "noise_by_position"]


class MarkovProposer(BaseProposer):
    """Draws each draft from the target's law given the newest token alone: often right, often wrong, and its law is known.

    hidden_law: drawn, but reported as certain, which is exact. The other faults are mutations.
    """

    def __init__(self, fault: Fault = "none", *, num_drafts: int = NUM_DRAFTS) -> None:
        laws: Any = "one_hot" if fault == "hidden_law" else "dense"
        self.traits = MethodTraits(method="early_exit", max_nodes=num_drafts, max_depth=num_drafts, laws=laws)
        self.fault = fault
        self.table = torch.zeros(0)  # [V, V] logits, by the token before

    def bind(self, rail: DraftRail) -> None:
        scorer = Scorer(rail.target, max_len=2)  # type: ignore[arg-type]
        self.table = torch.cat([rows for token in range(TOY_VOCAB_SIZE) for _, rows in scorer.logits([token], [0])])

    def propose(self, step: StepView) -> DraftBatch:
        rows = step.rows
        wanted = torch.tensor(step.max_nodes) * (step.num_sampled > 0)
        before = step.token_ids[rows, step.num_tokens[rows] - 1].long()
        temperature = step.sampling.temperature.clamp_min(1e-3)[:, None]
        drafts, laws, cut = [], [], wanted.clone()
        for index in range(self.traits.max_nodes):
            logits = self.table[before] / temperature
            before = self._draw(logits, step.sampling.seed, step.num_tokens[rows] - 1, index)
            if self.fault == "kept_when_likely":
                likely = logits.softmax(-1).gather(1, before[:, None]).squeeze(1) > 0.03
                cut = torch.where(likely | (cut < index), cut, cut.clamp_max(index))
            drafts.append(before)
            laws.append(logits * 0.6 if self.fault == "law_of_other_temperature" else logits)
        return DraftBatch(
            token_ids=torch.stack(drafts, 1),
            num_nodes=torch.minimum(cut, wanted),
            source=["early_exit" if n else "" for n in torch.minimum(cut, wanted).tolist()],
            law=None if self.fault == "hidden_law" else DraftLaw(torch.zeros(len(rows), dtype=torch.bool), Dense(torch.stack(laws, 1))),
        )

    def _draw(self, logits: torch.Tensor, seed: torch.Tensor, anchor: torch.Tensor, index: int) -> torch.Tensor:
        if self.fault == "argmax_with_softmax_law":
            return logits.argmax(-1)
        position, number = (anchor + index, 0) if self.fault == "noise_by_position" else (anchor, index)
        u = uniform(seed, position, purpose=PURPOSE_DRAFT, index=number)
        cumulative = logits.softmax(-1).cumsum(-1)
        return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True).squeeze(1).clamp_max(logits.shape[-1] - 1)


class TreeProposer(MarkovProposer):
    """The two most likely tokens after the newest one, and one more after the first of them; certain, so matched exactly."""

    def __init__(self) -> None:
        super().__init__("hidden_law")
        self.traits = replace(self.traits, max_depth=2)

    def propose(self, step: StepView) -> DraftBatch:
        before = step.token_ids[step.rows, step.num_tokens[step.rows] - 1].long()
        siblings = self.table[before].topk(2, dim=-1).indices
        child = self.table[siblings[:, 0]].argmax(-1, keepdim=True)
        wanted = torch.tensor(step.max_nodes) * (step.num_sampled > 0)
        return DraftBatch(
            token_ids=torch.cat([siblings, child], 1),
            num_nodes=wanted,
            source=["early_exit" if n else "" for n in wanted.tolist()],
            parents=torch.tensor([[-1, -1, 0]]).expand(len(before), 3).contiguous(),
        )


def write_repeating_checkpoint(path: Path) -> Path:
    """A target that likes to say the newest token again, so that penalties inside a block of drafts matter."""
    model = LlamaForCausalLM.from_pretrained(write_checkpoint(path, seed=3))
    model.lm_head.weight.data += model.model.embed_tokens.weight.data
    model.save_pretrained(path)
    return path


def config_of(rule: str) -> EarlyExitConfig:
    """A config that names the rule; the drafter itself is the test's own."""
    return EarlyExitConfig(
        num_speculative_tokens=NUM_DRAFTS, exit_layer=1, rejection_sample_method=rule, draft_sample_method="probabilistic"
    )


def run(
    path: Path, make: Callable[[], BaseProposer], *, rule: RuleFacts, options: VerifyOptions = OPTIONS, config_rule: str = "standard"
) -> VerifyReport:
    """Verify a drafter on the tiny model."""

    def load(drafted: bool) -> Arm:
        proposer = make() if drafted else None
        resolved = resolved_for(
            path, traits=proposer.traits if proposer else None, speculative=config_of(config_rule) if drafted else None,
            num_blocks=600, max_num_seqs=32, max_num_batched_tokens=256, max_waiting=0,
        )  # fmt: skip
        runner = load_runner(resolved, proposer=proposer)
        return Arm(EngineCore(resolved, runner, tokenizer=toy_tokenizer()), runner)

    return verify(lambda: load(False), lambda: load(True), prompts=PROMPTS, rule=rule, options=options)


def larger(tokens: int, **changes: Any) -> VerifyOptions:
    """The options with more tokens."""
    return replace(OPTIONS, tokens=tokens, **changes)
