"""Stops are exact inside a block: text, ids, log-probabilities, counts and reasons are the same however tokens are grouped."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.output_processor import OutputProcessor
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineOutput, EngineRequest, SpecDecodeRequestStats
from specdec.metrics.stats import EngineStats
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import RequestOutput, TokenLogprobs
from specdec.scheduler.request import Request

PROMPT = (1, 2, 3)


@dataclass(frozen=True)
class Answer:
    """Everything a client sees of a request, joined."""

    text: str
    token_ids: tuple[int, ...]
    logprob_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class Played:
    answer: Answer
    outputs: list[EngineOutput]
    cut_at: int | None
    stats: EngineStats

    @property
    def request_stats(self) -> SpecDecodeRequestStats:
        stats = self.outputs[-1].stats
        assert stats is not None
        return stats


def play(tokenizer: Tokenizer, sampling: SamplingParams, blocks: list[tuple[int, ...]]) -> Played:
    """Deliver blocks of tokens (drafts that were all kept, then one sampled token) through the real commit and processor."""
    stats = EngineStats()
    processor = OutputProcessor(tokenizer, stats)
    processor.add(EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=sampling, track_drafts=True))
    request = Request(request_id="r", prompt_token_ids=PROMPT, sampling=sampling)
    request.eos_token_ids, request.max_model_len = frozenset(tokenizer.eos_token_ids), 10_000
    outputs: list[EngineOutput] = []
    cut_at = None
    for step, block in enumerate(blocks):
        num_drafts = len(block) - 1
        num_rows = num_drafts + (1 if step else len(PROMPT))
        request.schedule(num_rows, num_drafts=num_drafts, samples=True)
        logprobs = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in block)
        result = RequestOutput(token_ids=block, num_drafts=num_drafts, source="script", draft_token_ids=block[:-1], logprobs=logprobs)
        commit = request.commit(result, num_rows=num_rows, num_drafts=num_drafts)
        emitted = processor.process("r", commit, result=result, now_s=float(step))
        assert emitted.output is not None
        outputs.append(emitted.output)
        if emitted.output.finish_reason is not None:
            cut_at = emitted.cut_at
            break
    answer = Answer(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprob_ids=tuple(entry.token_id for output in outputs for entry in output.logprobs or ()),
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
    )
    return Played(answer, outputs, cut_at, stats)


def blocks_of(token_ids: tuple[int, ...], sizes: list[int]) -> list[tuple[int, ...]]:
    """Cut tokens into a first single one (prefill's) and blocks of the given sizes, the last sizes repeating."""
    blocks, position = [token_ids[:1]], 1
    while position < len(token_ids):
        size = sizes[(len(blocks) - 1) % len(sizes)]
        blocks.append(token_ids[position : position + size])
        position += size
    return blocks


def one_by_one(token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(token_id,) for token_id in token_ids]


texts_of_ids = st.lists(st.sampled_from([33, 34, 35, 92, 93, 94, 95, 96]), min_size=1, max_size=14).map(tuple)  # A B C, emoji bytes, <eos>
samplings = st.builds(
    SamplingParams,
    stop=st.lists(st.text("ABC🎉", min_size=1, max_size=3), max_size=2).map(tuple),
    stop_token_ids=st.sampled_from([(), (35,), (93,)]),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 5),
    max_tokens=st.integers(5, 14),
)


@settings(max_examples=400, deadline=None)
@given(texts_of_ids, samplings, st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_grouping_tokens_into_blocks_changes_nothing(
    toy: Tokenizer, token_ids: tuple[int, ...], sampling: SamplingParams, sizes: list[int]
) -> None:
    single = play(toy, sampling, one_by_one(token_ids))
    grouped = play(toy, sampling, blocks_of(token_ids, sizes))
    assert grouped.answer == single.answer
    assert grouped.answer.logprob_ids == grouped.answer.token_ids
    assert grouped.stats.num_generation_tokens == len(grouped.answer.token_ids)
    if grouped.answer.finish_reason is not None:
        stats = grouped.request_stats
        assert stats.num_accepted_tokens <= stats.num_verified_tokens <= stats.num_draft_tokens
        num_sampled = sum(len(output.token_ids) > (output.trace.num_accepted if output.trace else 0) for output in grouped.outputs)
        assert len(grouped.answer.token_ids) == stats.num_accepted_tokens + num_sampled
        assert (grouped.cut_at is None) == (not isinstance(grouped.answer.stop_reason, str))
        if grouped.cut_at is not None:
            assert grouped.cut_at == len(PROMPT) + len(grouped.answer.token_ids)


@settings(max_examples=200, deadline=None)
@given(texts_of_ids, st.booleans(), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_without_stop_strings_the_text_is_the_decoded_ids(toy: Tokenizer, token_ids: tuple[int, ...], skip: bool, sizes: list[int]) -> None:
    sampling = SamplingParams(ignore_eos=True, skip_special_tokens=skip, max_tokens=len(token_ids))
    answer = play(toy, sampling, blocks_of(token_ids, sizes)).answer
    assert answer.text == toy.decode(token_ids, skip_special_tokens=skip)
    assert (answer.finish_reason, answer.token_ids) == ("length", token_ids)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_at_each_position_of_a_block(toy: Tokenizer, position: int, include: bool) -> None:
    """The block holds 5 kept drafts and a sampled token; the stop `!?` completes at `position`, or began in the block before."""
    filler = "abcdef"
    text = filler[:position] + "?" + filler[position + 1 :] if position == 0 else filler[: position - 1] + "!?" + filler[position + 1 :]
    start = "x!" if position == 0 else "xy"
    blocks = [toy.encode(start[0]), toy.encode(start[1]), toy.encode(text), toy.encode("zzz")]
    played = play(toy, SamplingParams(stop=("!?",), include_stop_str_in_output=include), blocks)
    full = start + text
    end = full.index("!?") + 2
    assert played.answer == Answer(
        text=full[: end if include else end - 2],
        token_ids=toy.encode(full[:end]),
        logprob_ids=toy.encode(full[:end]),
        finish_reason="stop",
        stop_reason="!?",
    )
    assert played.cut_at == len(PROMPT) + end
    stats = played.request_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_verified_tokens) == (1, 5, 5)
    assert stats.num_accepted_tokens == min(position + 1, 5)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("kind", ["eos", "stop_token_id", "ignored"])
def test_a_stop_token_at_each_position_of_a_block(toy: Tokenizer, position: int, kind: str) -> None:
    eos = toy.eos_token_ids[0]
    special = toy.encode("#")[0] if kind == "stop_token_id" else eos
    block = list(toy.encode("abcdef"))
    block[position] = special
    sampling = SamplingParams(stop_token_ids=(special,) if kind == "stop_token_id" else (), ignore_eos=kind == "ignored", max_tokens=8)
    played = play(toy, sampling, [toy.encode("x"), tuple(block), toy.encode("y")])
    if kind == "ignored":
        assert played.answer.finish_reason == "length"
        assert played.answer.token_ids == (*toy.encode("x"), *block, *toy.encode("y"))
        return
    assert played.answer.finish_reason == "stop"
    assert played.answer.stop_reason == (special if kind == "stop_token_id" else None)
    assert played.answer.token_ids == (*toy.encode("x"), *block[: position + 1])
    assert played.answer.text == "x" + "abcdef"[:position]  # the stop token is kept as an id, not as text
    assert played.answer.logprob_ids == played.answer.token_ids
    assert played.request_stats.num_accepted_tokens == min(position + 1, 5)


def test_an_included_stop_token_shows_its_text(toy: Tokenizer) -> None:
    sampling = SamplingParams(stop_token_ids=toy.encode("#"), include_stop_str_in_output=True)
    assert play(toy, sampling, [toy.encode("x"), toy.encode("a#b")]).answer.text == "xa#"


def test_an_eos_inside_the_accepted_prefix_counts_what_was_emitted(toy: Tokenizer) -> None:
    """Five right drafts with the end token third: five proposed and verified, three emitted, one target pass."""
    eos = toy.eos_token_ids[0]
    a, b, d, e, f = toy.encode("abdef")
    played = play(toy, SamplingParams(), [toy.encode("x"), (a, b, eos, d, e, f)])
    assert played.answer.token_ids == (*toy.encode("x"), a, b, eos)
    stats = played.request_stats
    assert (stats.num_draft_tokens, stats.num_verified_tokens, stats.num_accepted_tokens) == (5, 5, 3)
    assert stats.accepted_per_pos == [1, 1, 1]
    assert stats.by_source == {"script": [5, 3]}
    spec = played.stats.spec
    assert (spec.total.num_accepted_tokens, spec.total.num_verified_tokens) == (3, 5)
    assert spec.tokens_per_target_pass == 3.0
    assert played.stats.num_generation_tokens == len(played.answer.token_ids) == 4


@pytest.mark.parametrize("min_tokens", range(9))
def test_min_tokens_suppresses_every_kind_of_stop_before_it(toy: Tokenizer, min_tokens: int) -> None:
    """`!` is the third token (inside the first block) and the sixth (inside the second); the end token is the eighth."""
    eos = toy.eos_token_ids[0]
    blocks = [toy.encode("a"), toy.encode("b!cd"), (*toy.encode("!e"), eos, *toy.encode("f"))]
    for sampling in (
        SamplingParams(stop=("!",), min_tokens=min_tokens),
        SamplingParams(stop_token_ids=toy.encode("!"), min_tokens=min_tokens),
    ):
        answer = play(toy, sampling, blocks).answer
        expected = 3 if min_tokens <= 3 else 6 if min_tokens <= 6 else 8 if min_tokens <= 8 else None
        assert len(answer.token_ids) == (expected or 9)
        assert answer.finish_reason == ("stop" if expected else None)
        if expected == 8:
            assert answer.text == "ab!cd!e"
            assert answer.stop_reason is None


def test_a_stop_string_before_an_end_token_of_the_same_block_wins(toy: Tokenizer) -> None:
    eos = toy.eos_token_ids[0]
    played = play(toy, SamplingParams(stop=("!",)), [toy.encode("x"), (*toy.encode("a!b"), eos)])
    assert (played.answer.stop_reason, played.answer.text, len(played.answer.token_ids)) == ("!", "xa", 3)
    assert played.cut_at == len(PROMPT) + 3


def test_a_stop_string_on_the_last_allowed_token_is_a_stop_not_a_length(toy: Tokenizer) -> None:
    answer = play(toy, SamplingParams(stop=("!",), max_tokens=3), [toy.encode("x"), toy.encode("a!bc")]).answer
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", "!", "xa")


def test_held_text_is_shown_when_the_request_ends_without_the_stop(toy: Tokenizer) -> None:
    played = play(toy, SamplingParams(stop=("END",), max_tokens=3), [toy.encode("x"), toy.encode("EN")])
    assert [output.text for output in played.outputs] == ["x", "EN"]
    assert played.answer.finish_reason == "length"


def test_a_stop_string_that_spans_steps_is_never_shown_in_part(toy: Tokenizer) -> None:
    blocks = [toy.encode("x"), toy.encode("yE"), toy.encode("N"), toy.encode("Dz")]
    played = play(toy, SamplingParams(stop=("END",)), blocks)
    assert [output.text for output in played.outputs] == ["x", "y", "", ""]
    assert [output.token_ids for output in played.outputs] == [*blocks[:3], toy.encode("D")]


def test_a_trace_names_the_drafts_of_its_step(toy: Tokenizer) -> None:
    played = play(toy, SamplingParams(stop=("!",)), [toy.encode("x"), toy.encode("ab"), toy.encode("a!cd")])
    assert played.outputs[0].trace is None
    first, second = (output.trace for output in played.outputs[1:])
    assert first is not None
    assert second is not None
    assert (first.source, first.draft_token_ids, first.num_accepted) == ("script", toy.encode("a"), 1)
    assert (second.draft_token_ids, second.num_accepted) == (toy.encode("a!c"), 2)


def chunk(start: int, stop: int) -> tuple[TokenLogprobs | None, ...]:
    """What the worker scores from the prompt rows start to stop - 1 of a prompt of 6: tokens start + 1 to stop."""
    entries = tuple(TokenLogprobs(token, -1.0, 1) for token in range(start + 1, min(stop + 1, 6)))
    return (None, *entries) if start == 0 else entries


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 4, 6), (0, 5, 6), (0, 3, 0, 2, 6)])  # the last one is preempted after 3 rows
def test_prompt_logprobs_of_chunks_join_to_one_list_with_the_first_output(toy: Tokenizer, cuts: tuple[int, ...]) -> None:
    sampling = SamplingParams(prompt_logprobs=0)
    processor = OutputProcessor(toy, EngineStats())
    processor.add(EngineRequest(request_id="r", prompt_token_ids=tuple(range(6)), sampling=sampling))
    request = Request(request_id="r", prompt_token_ids=tuple(range(6)), sampling=sampling)
    request.max_model_len = 100
    for start, stop in pairwise(cuts):
        if stop < start:
            request.reset_progress()
            continue
        samples = stop == 6
        request.schedule(stop - start, num_drafts=0, samples=samples)
        result = RequestOutput(token_ids=(9,) if samples else (), prompt_logprobs=chunk(start, stop))
        commit = request.commit(result, num_rows=stop - start, num_drafts=0)
        output = processor.process("r", commit, result=result, now_s=0.0).output
        assert (output is not None) == samples
    assert output is not None
    assert output.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, 1, 2, 3, 4, 5]
