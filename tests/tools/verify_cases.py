"""A tiny random target, a drafter with a law of its own and deliberate faults, and how the tests of verify run both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config.method_configs import EarlyExitConfig
from specdec.config.methods import MethodTraits
from specdec.engine.core import EngineCore
from specdec.kernels.philox import PURPOSE_DRAFT, uniform
from specdec.proposers.base import BaseProposer, Dense, DraftBatch, DraftLaw, DraftRail, StepView
from specdec.tools.arm import Arm
from specdec.tools.scoring import Scorer
from specdec.tools.verify import RuleFacts, VerifyOptions, VerifyReport, verify
from specdec.worker.worker import load_runner
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import resolved_for


class Dial(NamedTuple):
    """A target whose law is known, by the token before (rows), and what is drafted for it."""

    p: torch.Tensor
    q: torch.Tensor


NEAR_AND_FAR = Dial(
    torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.05, 0.15, 0.1, 0.7]]),
    torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.1, 0.5, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]]),
)
# Laws that differ much from row to row.
CHANGING_ROWS = Dial(
    torch.tensor([[0.02, 0.02, 0.2, 0.76], [0.43, 0.02, 0.33, 0.22], [0.21, 0.42, 0.31, 0.06], [0.66, 0.17, 0.04, 0.13]]),
    torch.tensor([[0.02, 0.59, 0.31, 0.08], [0.02, 0.51, 0.1, 0.37], [0.02, 0.46, 0.37, 0.15], [0.69, 0.06, 0.12, 0.13]]),
)
FLAT_AND_SHARP = Dial(torch.tensor([[0.5, 0.2, 0.2, 0.1]] * 4), torch.tensor([[0.1, 0.6, 0.2, 0.1]] * 4))
ONE_LAW = Dial(torch.tensor([[0.7, 0.2, 0.1]] * 3), torch.tensor([[0.3, 0.3, 0.4]] * 3))
NUM_DRAFTS = 3
PROMPTS = [(0, 1, 2, 0), (1, 1, 1, 2, 1), (2, 1, 0), (1, 0, 2, 2, 2, 0, 1)]
STANDARD = RuleFacts(name="standard", exact_match=False, by_slot=True, lossy=False)
BLOCK = RuleFacts(name="block", exact_match=False, by_slot=False, lossy=False)
EXACT = RuleFacts(name="exact match", exact_match=True, by_slot=True, lossy=False)
OPTIONS = VerifyOptions(temperature=1.0, tokens=1600, length=40, tv_samples=50, tv_prompts=1, tv_length=2)

Fault = Literal["none", "hidden_law", "law_of_other_temperature", "argmax_with_softmax_law", "kept_when_likely", "noise_by_position"]


class MarkovProposer(BaseProposer):
    """Draws each draft from a law that knows the newest token alone: the dial's, or else the target's own.

    hidden_law: drawn, but reported as certain, which is exact. The other faults are mutations.
    """

    def __init__(self, fault: Fault = "none", *, dial: Dial | None = None) -> None:
        laws: Any = "one_hot" if fault == "hidden_law" else "dense"
        self.traits = MethodTraits(method="early_exit", max_nodes=NUM_DRAFTS, max_depth=NUM_DRAFTS, laws=laws)
        self.fault = fault
        self.dial = dial
        self.table = torch.zeros(0)  # [V, V] logits, by the token before

    def bind(self, rail: DraftRail) -> None:
        if self.dial is not None:
            self.table = self.dial.q.log()
            return
        scorer = Scorer(rail.target, max_len=2)  # type: ignore[arg-type]
        self.table = torch.cat([rows for token in range(rail.vocab_size) for _, rows in scorer.logits([token], [0])])

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
                likely = logits.softmax(-1).gather(1, before[:, None]).squeeze(1) > 0.25
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

    def __init__(self, *, dial: Dial | None = None) -> None:
        super().__init__("hidden_law", dial=dial)
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


def write_dial_target(path: Path, dial: Dial) -> Path:
    """Write a target that follows the dial: layers that add nothing, one-hot embeddings, log p in the head."""
    hidden = 32
    config = LlamaConfig(
        vocab_size=len(dial.p), hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, rms_norm_eps=1e-9,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(dial.p), hidden))  # the final norm scales the 1 to the root of hidden
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : len(dial.p)] = dial.p.log().T / hidden**0.5
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
        resolved = replace(resolved, vocab_size=resolved.hf_config.vocab_size, eos_token_ids=())
        runner = load_runner(resolved, proposer=proposer)
        return Arm(EngineCore(resolved, runner, tokenizer=toy_tokenizer()), runner)

    return verify(lambda: load(False), lambda: load(True), prompts=PROMPTS, rule=rule, options=options)


def larger(tokens: int, **changes: Any) -> VerifyOptions:
    """The options with more tokens."""
    return replace(OPTIONS, tokens=tokens, **changes)
