"""VerifyRule: the configured rule of verification with its numbers, and how it runs on a part of a batch.

Owns: which kernel a rule is, and what it is given. Must not know: which drafts belong to which law (draft_laws.py), logits
processors, or the mathematics (kernels/rules.py). Letters: R requests of the part, L logits rows, K drafts, V vocabulary, S support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from specdec.kernels.dispatch import kernel
from specdec.kernels.verified import Verified

if TYPE_CHECKING:
    from specdec.config.fields import RejectionRule, SpeculativeBase


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRule:
    """A rule by name. is_lossy: what it emits does not follow the target's law.

    rates: of `synthetic`, probability that draft i is kept given that i - 1 was. Entropies in nats.
    """

    name: RejectionRule = "standard"
    is_lossy: bool = False
    rates: tuple[float, ...] = ()
    fly_window: int = 6
    fly_entropy_threshold: float = 0.3
    fly_entropy_top_k: int = 3
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3


def verify_rule(config: SpeculativeBase | None, *, max_nodes: int) -> VerifyRule:
    """Return the rule of a speculative config; plain decoding has `standard`, which never meets a draft."""
    if config is None:
        return VerifyRule()
    return VerifyRule(
        name=config.rejection_sample_method,
        is_lossy=config.is_lossy,
        rates=conditional_rates(config, max_nodes) if config.rejection_sample_method == "synthetic" else (),
        fly_window=config.fly_window_size or max(min(6, max_nodes - 1), 1),
        fly_entropy_threshold=config.fly_entropy_threshold,
        fly_entropy_top_k=config.fly_entropy_top_k,
        typical_epsilon=config.typical_acceptance_sampler_posterior_threshold,
        typical_delta=config.typical_acceptance_sampler_posterior_alpha,
    )


def conditional_rates(config: SpeculativeBase, max_nodes: int) -> tuple[float, ...]:
    """Return P(draft i kept | i - 1 kept) for i = 1..max_nodes.

    A mean length L (the target's own token included) means floor(L - 1) sure drafts, then one with the fraction, then none:
    of all rates with this mean, the ones whose length varies least.
    """
    kept = config.synthetic_acceptance_rates
    if kept is None:
        mean = (config.synthetic_acceptance_length or 1.0) - 1.0
        kept = tuple(min(max(mean - i, 0.0), 1.0) for i in range(max_nodes))
    kept = (*kept, *(0.0,) * (max_nodes - len(kept)))
    return tuple(after / before if before > 0 else 0.0 for before, after in pairwise((1.0, *kept)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Requests of a batch that are verified together.

    logits [L, V] f32, processed. rows, positions [L] int64: persistent row and position of each; they name the noise.
    drafts [R, K] int64. cu_num_logits [R+1] int32. parents [R, K] int64 or None for chains. seed, anchor [R] int64: noise of
    rules that flip coins. temperature, top_k, top_p, min_p [L].
    """

    logits: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    drafts: torch.Tensor
    cu_num_logits: torch.Tensor
    parents: torch.Tensor | None
    seed: torch.Tensor
    anchor: torch.Tensor
    cuts: dict[str, torch.Tensor]

    @property
    def device(self) -> torch.device:
        """Where the part lives."""
        return self.logits.device

    def target_law(self) -> torch.Tensor:
        """[L, V]: what plain sampling would draw from at every row, the bonus row's included."""
        law: torch.Tensor = kernel("target_law", self.device)(self.logits, **self.cuts)
        return law


SampleTarget = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, rows, positions) -> ids [L]


def match_exactly(part: Part, sample_target: SampleTarget) -> Verified:
    """Keep drafts that equal the target's own samples: lossless for every draft, certain or drawn, chain or tree."""
    targets = sample_target(part.logits, part.rows, part.positions)
    verified: Verified = kernel("verify_coupled", part.device)(targets, part.drafts, cu_num_logits=part.cu_num_logits, parents=part.parents)
    return verified


def run_rule(
    rule: VerifyRule, part: Part, sample_target: SampleTarget, *, draft_logits: torch.Tensor | None, draft_ids: torch.Tensor | None
) -> Verified:
    """Verify chains by the rule. draft_logits [R, K, S] and draft_ids (None, [S] or [R, K, S]) as in kernels/reference.py."""

    def call(name: str, target: torch.Tensor, **arguments: Any) -> Verified:
        verified: Verified = kernel(name, part.device)(target, part.drafts, cu_num_logits=part.cu_num_logits, **arguments)
        return verified

    noise = {"seed": part.seed, "position": part.anchor}
    if rule.name == "synthetic":
        rates = torch.tensor(rule.rates[: part.drafts.shape[1]], dtype=torch.float32, device=part.device)
        return call("synthetic", sample_target(part.logits, part.rows, part.positions), **noise, rates=rates)
    if rule.name == "typical":
        return call("typical", part.target_law(), epsilon=rule.typical_epsilon, delta=rule.typical_delta)
    law = {"draft_logits": draft_logits, "draft_ids": draft_ids}
    if rule.name == "fly":
        gate = {"window": rule.fly_window, "entropy_threshold": rule.fly_entropy_threshold, "entropy_top_k": rule.fly_entropy_top_k}
        return call("fly", part.target_law(), **noise, **law, **gate, gate_probs=_gate_law(part))
    return call("block_verify" if rule.name == "block" else "rejection_sample", part.target_law(), **noise, **law)


def _gate_law(part: Part) -> torch.Tensor | None:
    """The law whose entropy says that the target is undecided: a greedy row's is its softmax, since its own has none."""
    greedy = part.cuts["temperature"] <= 0
    if not bool(greedy.any()):
        return None
    softmax = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    cuts = {name: torch.where(greedy, torch.full_like(values, softmax[name]), values) for name, values in part.cuts.items()}
    law: torch.Tensor = kernel("target_law", part.device)(part.logits, **cuts)
    return law
