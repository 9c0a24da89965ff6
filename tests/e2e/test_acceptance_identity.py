"""The embedded model answers the benchmark's prompts with the same tokens, whatever is drafted and whoever is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.sampling_params import SamplingParams
from specdec.tools.arm import Answer, Question
from specdec.tools.identity import compare
from tests.e2e.embedded import BlockDtype, Embedded, answers, benchmark_prompts, drafting, embedded, lookup

LENGTHS = (1, 3, 5, 8)
SEEDED = {
    "whole law": SamplingParams(temperature=0.8, seed=11, max_tokens=12),
    "top_p": SamplingParams(temperature=0.8, seed=12, top_p=0.9, max_tokens=12),
    "top_k": SamplingParams(temperature=0.8, seed=13, top_k=40, max_tokens=12),
    "min_p": SamplingParams(temperature=0.8, seed=-5, min_p=0.05, top_p=0.95, top_k=200, max_tokens=12),
}
OTHERS = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=16, logprobs=2),
    SamplingParams(temperature=1.4, seed=4, top_k=5, max_tokens=12, min_tokens=8),
    SamplingParams(temperature=0.8, seed=5, presence_penalty=1.0, stop=(".",), max_tokens=28),
)


def require_same(model: Embedded, kind: str, plain: Sequence[Answer], drafted: Sequence[Answer]) -> None:
    """Equal ids in float32 and through the compiled stack; elsewhere each difference must be rounding, and is printed with its gap."""
    found = compare(kind, plain, drafted, scorer=model.scorer(), dtype=model.dtype)
    for each in found.differences:
        print(f"{kind}: prompt {each.prompt_index}, token {each.position}: {each.plain_token} or {each.drafted_token}; {each.reason}")
    if model.dtype == "float32" or model.is_fused:
        assert found.num_same == found.num, found.differences
    assert found.holds, found.differences
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids != other.token_ids or one.finish_reason == other.finish_reason


def run(model: Embedded, questions: Sequence[Question], speculation: dict[str, Any] | None = None, **options: Any) -> list[Answer]:
    """Answer with a new engine; with speculation both fates of a draft must have occurred."""
    arm = model.arm(speculation, **options)
    try:
        found = answers(arm, questions)
        num_accepted, num_drafted = arm.acceptance
        assert 0 < num_accepted < num_drafted if speculation else num_drafted == 0
        return found
    finally:
        arm.close()


def greedy(model: Embedded, *, chat: int, copy: int, max_tokens: int) -> list[Question]:
    return model.questions(benchmark_prompts(chat=chat, copy=copy), SamplingParams(temperature=0, max_tokens=max_tokens))


def test_float32_greedy_is_the_same_for_every_number_of_drafts() -> None:
    """One engine, in whose batches requests with 1, 3, 5 and 8 drafts sit side by side and share their prompts' KV."""
    model = embedded("float32")
    questions = greedy(model, chat=2, copy=1, max_tokens=20)
    plain = run(model, questions)
    mixed = [drafting(question, count) for count in LENGTHS for question in questions]
    drafted = run(model, mixed, lookup(max(LENGTHS)), prefix_caching=True, max_num_seqs=6)
    require_same(model, "greedy", plain * len(LENGTHS), drafted)


def test_bfloat16_greedy_is_the_same_for_every_number_of_drafts() -> None:
    model = embedded("bfloat16")
    questions = greedy(model, chat=4, copy=3, max_tokens=32)
    plain = run(model, questions)
    for count in LENGTHS:
        require_same(model, f"greedy, {count} drafts", plain, run(model, questions, lookup(count)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_answers_of_many_prompts_are_the_same(dtype: BlockDtype) -> None:
    """As many prompts as a cell of the benchmark has, more where the model is fast; an engine for each number of drafts."""
    model = embedded(dtype)
    model.arm().close()  # loads it
    size = 20 if model.is_fused else 6
    questions = greedy(model, chat=size, copy=size, max_tokens=96 if model.is_fused else 40)
    plain = run(model, questions)
    for count in LENGTHS:
        require_same(model, f"greedy, {count} drafts", plain, run(model, questions, lookup(count)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_answers_are_the_same_alone_and_in_a_mixed_batch(dtype: BlockDtype) -> None:
    """Four seeded requests at temperature 0.8: each alone and plain, then beside the seven others, with drafts."""
    model = embedded(dtype)
    batch = mixed_batch(model)
    alone = run(model, batch[::2], max_num_seqs=1)
    require_same(model, "seeded, drafted among others", alone, run(model, batch, lookup(5))[::2])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_longer_seeded_answers_are_the_same_in_all_four_ways(dtype: BlockDtype) -> None:
    model = embedded(dtype)
    batch = [replace(each, sampling=replace(each.sampling, max_tokens=48)) for each in mixed_batch(model)]
    alone = run(model, batch[::2], max_num_seqs=1)
    together = run(model, batch)
    require_same(model, "seeded among others", alone, together[::2])
    require_same(model, "seeded, drafted alone", alone, run(model, batch[::2], lookup(5), max_num_seqs=1))
    drafted = run(model, batch, lookup(5))
    require_same(model, "seeded, drafted among others", alone, drafted[::2])
    assert [answer.token_ids for answer in drafted[1::2]] == [answer.token_ids for answer in together[1::2]]


def mixed_batch(model: Embedded) -> list[Question]:
    """Eight requests: at the even places the seeded ones, at the odd ones others with every kind of parameter."""
    *chats, copy = benchmark_prompts(chat=4, copy=1)
    asked = zip([copy, *chats[:3]], SEEDED.values(), chats, OTHERS, strict=True)
    return [Question(model.encode(text), params) for a, b, c, d in asked for text, params in ((a, b), (c, d))]


def test_other_seeds_give_other_answers() -> None:
    """The seeds above matter: were they ignored, the identity would hold too."""
    model = embedded("bfloat16")
    (text,) = benchmark_prompts(chat=1, copy=0)
    params = SEEDED["whole law"]
    asked = [Question(model.encode(text), replace(params, seed=seed, max_tokens=8)) for seed in range(6)]
    found = {tuple(answer.token_ids) for answer in run(model, [*asked, asked[0]])}
    assert len(found) > 3
    assert len(found) <= 6
