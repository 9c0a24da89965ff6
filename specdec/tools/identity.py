"""Are the tokens the same with speculation as without? And where not: was it rounding?

Owns: finding the first difference of two answers and explaining it from the target's own logits. Must not know: how drafts are made.

A forward pass over several rows may add in another order than one over a single row. In 16 bits that can swap two tokens that are
nearly equally likely, or move a random draw over the border between two tokens. Such a difference is explained; any other is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.kernels.philox import PURPOSE_TARGET, uniform
from specdec.tools.arm import Answer
from specdec.tools.scoring import Scorer

LOGIT_GAP = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}  # how far rounding may move a logit
MASS_GAP = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}  # how far it may move a border of the cumulative law


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token where two answers differ. gap: logits between the two choices, or mass between the draw and the other token."""

    prompt_index: int
    position: int
    plain_token: int
    drafted_token: int
    gap: float
    explained: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How many answers are the same, and the first difference of each other one."""

    kind: str
    num: int
    num_same: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """True when every difference is explained by rounding."""
        return all(difference.explained for difference in self.differences)


def compare(kind: str, plain: Sequence[Answer], drafted: Sequence[Answer], *, scorer: Scorer, dtype: str) -> Identity:
    """Compare answers to the same prompts, parameters and seeds. kind names the comparison in the report."""
    differences = [
        _explain(index, a, b, scorer=scorer, dtype=dtype)
        for index, (a, b) in enumerate(zip(plain, drafted, strict=True))
        if a.token_ids != b.token_ids
    ]
    return Identity(kind=kind, num=len(plain), num_same=len(plain) - len(differences), differences=tuple(differences))


def _explain(index: int, plain: Answer, drafted: Answer, *, scorer: Scorer, dtype: str) -> Difference:
    pairs = zip(plain.token_ids, drafted.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.token_ids), len(drafted.token_ids)))
    if position >= min(len(plain.token_ids), len(drafted.token_ids)):
        return Difference(
            prompt_index=index, position=position, plain_token=-1, drafted_token=-1, gap=float("inf"), explained=False,
            reason="one answer ends where the other goes on",
        )  # fmt: skip
    known = plain.token_ids[: position + 1]
    tokens = (plain.token_ids[position], drafted.token_ids[position])
    if plain.sampling.is_greedy:
        *_, (_, rows) = scorer.logits(plain.prompt, known)
        gap, bar, what = _logit_gap(rows[-1], tokens), LOGIT_GAP[dtype], "the larger of both choices lies {:.3g} logits below the top"
    else:
        *_, (_, laws) = scorer.laws(plain.prompt, known, plain.sampling)
        gap, bar = _mass_gap(laws[-1], tokens, _draw(plain, position)), MASS_GAP[dtype]
        what = "the random draw lies {:.3g} of probability away from the other token"
    verdict = f"rounding in {dtype}" if gap <= bar else f"more than rounding in {dtype} explains ({bar:g})"
    return Difference(
        prompt_index=index,
        position=position,
        plain_token=tokens[0],
        drafted_token=tokens[1],
        gap=gap,
        explained=gap <= bar,
        reason=f"{what.format(gap)}: {verdict}",
    )


def _logit_gap(row: torch.Tensor, tokens: tuple[int, int]) -> float:
    """How far the less likely of two tokens lies below the top logit."""
    return float(row.max() - row[list(tokens)].min())


def _mass_gap(law: torch.Tensor, tokens: tuple[int, int], u: float) -> float:
    """How far u lies outside the interval of the cumulative law, in id order, that belongs to the farther of two tokens."""
    ends = law.cumsum(0)
    gaps = [max(float(ends[token] - law[token]) - u, u - float(ends[token]), 0.0) for token in tokens]
    return max(gaps)


def _draw(answer: Answer, position: int) -> float:
    """The uniform that the target's own draw used there; it is named by the seed and the position of the token before."""
    seed = torch.tensor([((answer.sampling.seed or 0) + 2**63) % 2**64 - 2**63])
    return float(uniform(seed, torch.tensor([len(answer.prompt) + position - 1]), purpose=PURPOSE_TARGET))
