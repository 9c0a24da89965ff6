"""Random products of request parameters, alone and side by side, with and without drafts: everything a client sees is the same.

Drafts are looked up (certain) or drawn by a draft model with the target's own noise (coupled); float32, so ids are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import parse_speculative
from specdec.engine.core import EngineCore
from specdec.engine.llm import LLM
from specdec.engine.results import GenerationOutput
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import TokenLogprobs
from specdec.worker import sampler
from tests.engine.tokenizers_for_tests import TOY_EOS, TOY_VOCAB_SIZE, toy_tokenizer
from tests.proposers.tiny import write_checkpoint

CHOICES: dict[str, list[Any]] = {
    "n": [1, 1, 1, 2],
    "temperature": [0.0, 0.0, 0.7, 1.0, 1.6],
    "top_p": [1.0, 0.9, 0.5],
    "top_k": [0, -1, 1, 5, 40],
    "min_p": [0.0, 0.0, 0.1],
    "repetition_penalty": [1.0, 1.0, 1.3, 0.8],
    "presence_penalty": [0.0, 0.0, 1.5],
    "frequency_penalty": [0.0, 0.0, 0.8, -0.4],
    "logit_bias": [{}, {}, {5: 4.0, 17: -100.0, TOY_EOS: 3.0}],
    "allowed_token_ids": [None, None, tuple(range(20, 40))],
    "bad_words_token_ids": [(), (), ((7,), (21, 22), (30, 31, 32))],
    "min_tokens": [0, 0, 9],
    "max_tokens": [1, 13, 30, 40],
    "stop": [(), ("A", "z!"), ("5",)],
    "stop_token_ids": [(), (33, 50)],
    "include_stop_str_in_output": [False, True],
    "ignore_eos": [False, True],
    "logprobs": [None, 0, 4],
    "prompt_logprobs": [None, None, 2],
}
PATTERN = [5, 6, 7, 8]


def random_batch(seed: int, *, count: int = 14) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which repeat themselves, and parameters drawn independently; half of the requests get few unusual ones."""
    rng = random.Random(seed)
    texts, params = [], []
    for index in range(count):
        length = rng.randint(1, 25)
        texts.append(PATTERN * (1 + length // 4) if index % 3 == 0 else [rng.randrange(TOY_VOCAB_SIZE - 1) for _ in range(length)])
        chosen = {name: rng.choice(values) for name, values in CHOICES.items() if index % 2 or rng.random() < 0.4}
        chosen = {"max_tokens": 30} | chosen
        chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"])
        params.append(SamplingParams(seed=rng.getrandbits(40), **chosen))
    return texts, params


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, draft): two tiny models; the draft is the target's first guess, not its twin."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    write_checkpoint(target, seed=1)
    write_checkpoint(draft, seed=1, num_layers=1)
    toy_tokenizer().hf.save_pretrained(target)
    toy_tokenizer().hf.save_pretrained(draft)
    return target, draft


@pytest.fixture(scope="module")
def generated(paths: tuple[Path, Path]) -> Callable[..., tuple[list[GenerationOutput], int]]:
    """generated(seed, speculation) -> outputs of random_batch(seed), and how many drafts were accepted. Runs are kept."""
    kept: dict[str, tuple[list[GenerationOutput], int]] = {}

    def get(seed: int, speculation: dict[str, Any] | None) -> tuple[list[GenerationOutput], int]:
        key = repr((seed, speculation))
        if key not in kept:
            kept[key] = generate(paths, random_batch(seed), speculation)
        return kept[key]

    return get


def generate(
    paths: tuple[Path, Path], batch: tuple[list[list[int]], list[SamplingParams]], speculation: dict[str, Any] | None
) -> tuple[list[GenerationOutput], int]:
    if speculation is not None and speculation["method"] == "draft_model":
        speculation = speculation | {"model": str(paths[1])}
    config = EngineConfig(
        model=ModelConfig(model=str(paths[0]), dtype="float32", max_model_len=80),
        cache=CacheConfig(block_size=4, num_blocks=300),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48, max_waiting=0),
        speculative=parse_speculative(speculation) if speculation else None,
        device="cpu",
    )
    with LLM.from_core(EngineCore.from_config(resolve(config))) as llm:
        results = llm.generate(batch[0], batch[1], use_tqdm=False)
        return results, llm.stats.spec.total.num_accepted_tokens


def assert_same_logprobs(ours: Sequence[TokenLogprobs | None] | None, expected: Sequence[TokenLogprobs | None] | None) -> None:
    assert (ours is None) == (expected is None)
    for mine, theirs in zip(ours or (), expected or (), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.token_id, mine.rank, len(mine.top)) == (theirs.token_id, theirs.rank, len(theirs.top))
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


def assert_same(ours: list[GenerationOutput], expected: list[GenerationOutput]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same_logprobs(mine.prompt_logprobs, theirs.prompt_logprobs)
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
            assert one.error is other.error is None
            assert_same_logprobs(one.logprobs, other.logprobs)


LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
COUPLED = {"method": "draft_model", "draft_sample_method": "coupled"}
CERTAIN = {"method": "draft_model"}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "speculation",
    [
        LOOKUP | {"num_speculative_tokens": 1},
        LOOKUP | {"num_speculative_tokens": 6},
        COUPLED | {"num_speculative_tokens": 3},
        CERTAIN | {"num_speculative_tokens": 2, "rejection_sample_method": "block"},
    ],
    ids=["lookup 1", "lookup 6", "coupled 3", "certain 2, block"],
)
def test_drafts_change_nothing_a_client_sees(generated: Callable[..., Any], speculation: dict[str, Any], seed: int) -> None:
    plain, _ = generated(seed, None)
    ours, num_accepted = generated(seed, speculation)
    assert num_accepted > 0
    assert_same(ours, plain)


def test_a_batch_is_the_sum_of_its_requests(paths: tuple[Path, Path], generated: Callable[..., Any]) -> None:
    texts, params = random_batch(1)
    speculation = COUPLED | {"num_speculative_tokens": 3}
    together, _ = generated(1, speculation)
    for index in (1, 4, 7):
        alone, _ = generate(paths, ([texts[index]], [params[index]]), speculation)
        assert_same(alone, together[index : index + 1])


def test_the_batches_use_every_parameter_and_every_way_to_end(generated: Callable[..., Any]) -> None:
    outputs = [output for seed in (1, 2, 3) for result in generated(seed, None)[0] for output in result.outputs]
    assert {"stop", "length"} == {output.finish_reason for output in outputs}
    assert any(isinstance(output.stop_reason, str) for output in outputs)
    assert any(isinstance(output.stop_reason, int) for output in outputs)
    params = [param for seed in (1, 2, 3) for param in random_batch(seed)[1]]
    for name, values in CHOICES.items():
        assert len({repr(getattr(param, name)) for param in params}) >= len({repr(value) for value in values}) - 1, name


# ---------------------------------------------------------------- mistakes: identity must see them


def _paths_stand_still(block: Callable[..., None]) -> Callable[..., None]:
    return lambda logits, sampling, *, paths, **rest: block(logits, sampling, paths=[()] * len(paths), **rest)


def test_parameters_that_ignore_earlier_drafts_are_seen(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [PATTERN * 5, [9, 9, 9, 9], [3, 4] * 5, [60]]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=0.3),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.05),
        SamplingParams(temperature=0.3, seed=3, max_tokens=40, ignore_eos=True, presence_penalty=0.4),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=0.2),
    ]
    speculation = LOOKUP | {"num_speculative_tokens": 6}
    plain, _ = generate(paths, (texts, params), None)
    right, num_accepted = generate(paths, (texts, params), speculation)
    assert num_accepted > 0
    assert_same(right, plain)
    monkeypatch.setattr(sampler, "process_block", _paths_stand_still(sampler.process_block))
    wrong, _ = generate(paths, (texts, params), speculation)
    assert [result.outputs[0].token_ids for result in wrong] != [result.outputs[0].token_ids for result in plain]
