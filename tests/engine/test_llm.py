"""LLM: prompts in, results in the same order out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.engine.core import EngineCore
from specdec.engine.llm import LLM
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import ConfigError, EngineDeadError, RequestRejected
from specdec.sampling_params import SamplingParams
from tests.toy import ToyRunner, coin, hash_target, toy_resolved

EOS = 96
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture
def made(toy: Tokenizer) -> Iterator[tuple[LLM, ToyRunner]]:
    """An LLM over the toy worker with drafts that are right six times of ten."""
    resolved = toy_resolved(num_drafts=4, eos_token_ids=(EOS,), max_num_seqs=3)
    runner = ToyRunner.for_config(resolved, drafter=coin(0.6), target=hash_target(eos_token_id=EOS))
    with LLM.from_core(EngineCore(resolved, runner, tokenizer=toy)) as llm:
        yield llm, runner
    assert runner.is_closed or runner.target.__name__ == "interrupted"


def test_results_keep_the_order_of_prompts_and_say_what_was_drafted(made: tuple[LLM, ToyRunner], toy: Tokenizer) -> None:
    llm, runner = made
    prompts = ["hello", "a", "some longer text", "b!"]
    sampling = [SamplingParams(max_tokens=4 + 5 * index, logprobs=1) for index in range(4)]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    for prompt, params, result in zip(prompts, sampling, results, strict=True):
        token_ids, reason, _ = runner.solo(toy.encode(prompt), params)
        output = result.outputs[0]
        assert (result.prompt, result.prompt_token_ids, result.finished) == (prompt, toy.encode(prompt), True)
        assert (list(output.token_ids), output.finish_reason, output.text) == (token_ids, reason, toy.decode(token_ids))
        assert output.logprobs is not None
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
        assert result.metrics.speculative.num_steps > 0
        assert result.metrics.arrival_s <= result.metrics.first_token_s <= result.metrics.finished_s  # type: ignore[operator]
    totals = [result.metrics.speculative.num_accepted_tokens for result in results]
    assert sum(totals) == llm.stats.spec.total.num_accepted_tokens > 0


def test_samples_get_their_own_seeds_and_pooled_statistics(made: tuple[LLM, ToyRunner]) -> None:
    llm, runner = made
    (result,) = llm.generate("hello", SamplingParams(n=3, seed=40, max_tokens=12), use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    news = [new for plan in runner.plans for new in plan.new]
    assert [(new.request_id, new.sampling.seed, new.sampling.n) for new in news] == [
        (f"{result.request_id}-{index}", 40 + index, 1) for index in range(3)
    ]
    pooled = result.metrics.speculative
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_verified_tokens", "num_steps"):
        assert getattr(pooled, name) == sum(getattr(output.speculative, name) for output in result.outputs)
    assert pooled.by_source["ngram"][1] == pooled.num_accepted_tokens == sum(pooled.accepted_per_pos)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [(65, 66)]),
        ([65, 66], [(65, 66)]),
        ([[65, 66], [67]], [(65, 66), (67,)]),
        ({"prompt": "ab"}, [(65, 66)]),
        ([{"prompt_token_ids": [1, 2]}, "a", (3,)], [(1, 2), (65,), (3,)]),
        ([], []),
    ],
)
def test_prompts_come_as_text_ids_or_mappings(made: tuple[LLM, ToyRunner], prompts: Any, expected: list[tuple[int, ...]]) -> None:
    results = made[0].generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == expected


def test_chat_takes_one_conversation_or_several(made: tuple[LLM, ToyRunner], toy: Tokenizer) -> None:
    llm, _ = made
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "system", "content": "s"}, {"role": "user", "content": "yo"}]
    params = SamplingParams(max_tokens=2)
    (single,) = llm.chat(one, params, use_tqdm=False, chat_template=TEMPLATE)
    assert single.prompt == "u:hi;a:"
    both = llm.chat([one, two], params, use_tqdm=False, chat_template=TEMPLATE, add_generation_prompt=False)
    assert [result.prompt for result in both] == ["u:hi;", "s:s;u:yo;"]
    assert both[1].prompt_token_ids == toy.encode("s:s;u:yo;")
    assert llm.chat(one, params, use_tqdm=False, chat_template=TEMPLATE)[0].num_cached_tokens == 4


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["a", ""], None, "prompt is empty"),
        (["a", "b"], [SamplingParams()], "1 entries, but there are 2 prompts"),
        ({"text": "a"}, None, "takes prompt or prompt_token_ids"),
        ({}, None, "takes prompt or prompt_token_ids"),
        (["a", [200]], None, "token id 200"),
    ],
)
def test_a_bad_call_generates_nothing(made: tuple[LLM, ToyRunner], prompts: Any, params: Any, text: str) -> None:
    llm, runner = made
    with pytest.raises(RequestRejected, match=text):
        llm.generate(prompts, params, use_tqdm=False)
    assert runner.plans == []


def test_an_interrupted_call_leaves_nothing_behind(made: tuple[LLM, ToyRunner]) -> None:
    llm, runner = made
    target, calls = runner.target, 0

    def interrupted(history: Any, num_prompt: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return target(history, num_prompt)

    runner.target = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=9), use_tqdm=False)
    assert llm.stats.num_requests_by_reason["abort"] == 2
    assert llm.stats.gauges.num_running == 0
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt") as caught:  # half a step may have run: say so, do not guess
        llm.generate("three", use_tqdm=False)
    assert caught.value.hint == "load the model again"


def test_the_progress_bar_goes_to_stderr(made: tuple[LLM, ToyRunner], capsys: pytest.CaptureFixture[str]) -> None:
    made[0].generate(["a", "b"], SamplingParams(max_tokens=3))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert "tok/s" in captured.err


def test_bad_options_name_themselves() -> None:
    with pytest.raises(ConfigError, match="num_spec_tokens"):
        LLM("/nowhere", speculative_config={"method": "ngram", "num_spec_tokens": 3})
    with pytest.raises(TypeError, match="max_num_sequences"):
        LLM("/nowhere", max_num_sequences=3)  # type: ignore[call-arg]


@pytest.mark.slow
def test_the_embedded_model_gives_the_same_tokens_with_and_without_drafts(smollm: Tokenizer) -> None:
    text = "one two three four five six seven eight nine ten"
    conversations = [[{"role": "user", "content": f"Repeat exactly, three times: {text}"}], [{"role": "user", "content": "Name a colour."}]]
    sampling = [SamplingParams(temperature=heat, seed=5, max_tokens=40, logprobs=0, stop=("nine ten",)) for heat in (0.0, 0.8)]
    answers = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}):
        with LLM(speculative_config=speculative, max_model_len=512, num_blocks=80, max_num_seqs=2) as llm:
            results = llm.chat(conversations, sampling, use_tqdm=False)
            answers.append([(output.text, output.token_ids, output.finish_reason) for result in results for output in result.outputs])
            for result in results:
                assert result.outputs[0].logprobs is not None
                assert [entry.token_id for entry in result.outputs[0].logprobs] == list(result.outputs[0].token_ids)
            spec = llm.stats.spec
        gc.collect()
    assert answers[0] == answers[1]
    assert spec.total.num_accepted_tokens > 0
