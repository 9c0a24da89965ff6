"""Faults of speculative engines, as changes to this one: each is a known way to lose the target's law without any visible error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.kernels import dispatch, reference
from specdec.kernels.philox import PURPOSE_ACCEPT, PURPOSE_DRAFT, uniform
from specdec.kernels.rules import BLOCK, STANDARD, Problem, Rule, block_weights
from specdec.kernels.verified import Verified
from specdec.scheduler.output import SchedulerOutput
from specdec.worker import model_runner, sampler
from specdec.worker.input_batch import InputBatch
from specdec.worker.request_state import RequestState, RowInfo
from specdec.worker.rules import Part, SampleTarget, match_exactly

Mutation = Callable[[pytest.MonkeyPatch], None]


def of_rule(name: str, mutated: Rule) -> Mutation:
    """Serve the reference column's rule, changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(reference, name, mutated)
        serve_reference(patch)

    return apply


def serve_reference(patch: pytest.MonkeyPatch) -> None:
    for kernel in ("rejection_sample", "block_verify"):
        patch.setitem(dispatch.CPU, kernel, "reference")
    dispatch.load.cache_clear()


def residual(weight: float, problem: Problem, kept: int) -> torch.Tensor:
    if kept == len(problem.drafts):
        return problem.p[kept]
    rest = (weight * problem.p[kept] - problem.q[kept]).clamp_min(0.0)
    return rest if float(rest.sum()) > 0 else problem.p[kept]


residual_from_target = of_rule("STANDARD", STANDARD._replace(recovered=lambda problem, kept: problem.p[kept]))
drawn_draft_judged_as_certain = of_rule(
    "STANDARD", STANDARD._replace(coins=lambda problem: [float(problem.p[i, d]) for i, d in enumerate(problem.drafts)])
)
bonus_row_off_by_one = of_rule(
    "STANDARD",
    STANDARD._replace(recovered=lambda problem, kept: problem.p[kept - 1] if kept == len(problem.drafts) else residual(1.0, problem, kept)),
)


def _block_coins(problem: Problem, *, rows_late: int) -> list[float]:
    weights, coins = block_weights(problem), []
    for i in range(1, len(problem.drafts)):
        row = i - rows_late
        mass = float((weights[i] * problem.p[row] - problem.q[row]).clamp_min(0.0).sum())
        rest = mass + 1.0 - weights[i]
        coins.append(mass / rest if rest > 0.0 else 1.0)
    return [*coins, weights[-1]] if problem.drafts else []


def _last_coin_by_formula(problem: Problem) -> list[float]:
    coins, weight = _block_coins(problem, rows_late=0), block_weights(problem)[-1]
    if coins:
        mass = float((weight * problem.p[len(coins)] - problem.q[len(coins) - 1]).clamp_min(0.0).sum())
        coins[-1] = mass / max(mass + 1.0 - weight, 1e-12)
    return coins


block_sum_over_the_row_before = of_rule("BLOCK", BLOCK._replace(coins=lambda problem: _block_coins(problem, rows_late=1)))
block_last_coin_by_formula = of_rule("BLOCK", BLOCK._replace(coins=_last_coin_by_formula))


def coin_is_the_uniform_that_drew_the_draft(patch: pytest.MonkeyPatch) -> None:
    def mutated(seed: torch.Tensor, position: torch.Tensor, *, purpose: int, index: Any = 0) -> torch.Tensor:
        return uniform(seed, position, purpose=PURPOSE_DRAFT if purpose == PURPOSE_ACCEPT else purpose, index=index)

    patch.setattr(reference, "uniform", mutated)
    serve_reference(patch)


def penalties_not_advanced_along_drafts(patch: pytest.MonkeyPatch) -> None:
    process = sampler.process_block

    def mutated(logits: torch.Tensor, sampling: Any, *, paths: Any, **more: Any) -> None:
        process(logits, sampling, paths=[() for _ in paths], **more)

    patch.setattr(sampler, "process_block", mutated)


def cuts_after_the_test(patch: pytest.MonkeyPatch) -> None:
    """Drafts are tested against the law before top-k, top-p and min-p."""
    law = Part.target_law

    def mutated(part: Part) -> torch.Tensor:
        return law(replace(part, cuts={"temperature": part.cuts["temperature"], "top_k": part.cuts["top_k"] * 0,
                                       "top_p": part.cuts["top_p"] * 0 + 1, "min_p": part.cuts["min_p"] * 0}))  # fmt: skip

    patch.setattr(Part, "target_law", mutated)


def fresh_draw_after_refused_drafts(patch: pytest.MonkeyPatch) -> None:
    """The token at the first mismatch is drawn anew without leaving out what was refused: chains and siblings of a tree alike."""

    def mutated(part: Part, sample_target: SampleTarget) -> Verified:
        verified = match_exactly(part, sample_target)
        again = sample_target(part.logits, part.rows, part.positions + 10_000)
        last = (verified.num_sampled - 1).clamp_min(0)
        refused = (verified.num_rejected > 0) & (verified.num_sampled > 0)
        row = part.cu_num_logits[:-1] + verified.path.gather(1, last[:, None]).squeeze(1)
        tokens = verified.token_ids.clone()
        tokens[refused, last[refused]] = again[row[refused]]
        return verified._replace(token_ids=tokens)

    patch.setattr(sampler, "match_exactly", mutated)


def _of_batch(patch: pytest.MonkeyPatch, change: Callable[[list[RowInfo], InputBatch], InputBatch]) -> None:
    build = model_runner.build_batch

    def mutated(plan: SchedulerOutput, state: RequestState, *, block_size: int) -> tuple[list[RowInfo], InputBatch]:
        infos, batch = build(plan, state, block_size=block_size)
        return infos, change(infos, batch)

    patch.setattr(model_runner, "build_batch", mutated)


def stale_kv_of_a_refused_draft(patch: pytest.MonkeyPatch) -> None:
    """The anchor's keys go to the slot of the draft after it, so that its own slot keeps what the last step left there."""

    def change(infos: list[RowInfo], batch: InputBatch) -> InputBatch:
        slots = batch.slot_mapping.clone()
        first = (batch.cu_query_lens[1:].long() - batch.num_drafts - 1)[batch.num_drafts > 0]
        slots[first] = slots[first + 1]
        return replace(batch, slot_mapping=slots)

    _of_batch(patch, change)


def wrong_position_after_rollback(patch: pytest.MonkeyPatch) -> None:
    def change(infos: list[RowInfo], batch: InputBatch) -> InputBatch:
        decoding = [
            info.num_tokens > info.num_prompt_tokens + 2 and count > 0 for info, count in zip(infos, batch.num_drafts_cpu, strict=True)
        ]
        shift = torch.repeat_interleave(torch.tensor(decoding).long(), torch.tensor(batch.query_lens_cpu))
        return replace(batch, positions=batch.positions + shift)

    _of_batch(patch, change)
