"""The whole engine on tiny random models: greedy ids equal transformers' generate, with and without speculation.

Float32 on the CPU, block_size 4, steps of at most 16 rows, so that prompts are cut into chunks and drafts compete with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import parse_speculative
from specdec.engine.core import EngineCore
from specdec.engine.llm import LLM
from specdec.engine.results import CompletionOutput
from specdec.sampling_params import SamplingParams
from tests.engine.tokenizers_for_tests import TOY_EOS, TOY_VOCAB_SIZE, toy_tokenizer
from tests.models.tiny import EOS, FALLBACK, LEAN, VOCAB, oracle_greedy, random_prompt, save_random, saved, tiny_config

NUM_TOKENS = 30
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PATTERN = [5, 6, 7, 8, 9]
PROMPTS = [random_prompt(19, seed=1), [3], PATTERN * 4, random_prompt(6, seed=2), random_prompt(27, seed=3), [11, 12] * 4]
ENGINE_CASES = [
    "llama_untied",
    "mistral_window",
    "qwen3_norms",
    "gpt2_learned_positions",
    "opt_offset_positions",
    "phi_partial_rotary",
    "gemma_scaled_embedding",
    "gemma2_capped_logits",
    "gemma3_two_windows",
    "nemotron_drops_keywords",
]
Checkpoint = tuple[Path, Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """name -> (directory with model and tokenizer, oracle), each saved once."""
    assert (VOCAB, EOS) == (TOY_VOCAB_SIZE, TOY_EOS)
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            oracle = saved(name, path)
            toy_tokenizer().hf.save_pretrained(path)
            made[name] = (path, oracle)
        return made[name]

    return get


def build(path: Path, *, drafts: int = 0, num_blocks: int = 200, max_num_seqs: int = 8, async_scheduling: bool = False) -> LLM:
    """An engine over the checkpoint; drafts 0 is plain decoding."""
    raw = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=80),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, async_scheduling=async_scheduling, max_waiting=0),
        speculative=parse_speculative(raw) if drafts else None,
        device="cpu",
    )
    return LLM.from_core(EngineCore.from_config(resolve(config)))


def complete(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[CompletionOutput]:
    return [result.outputs[0] for result in llm.generate(list(prompts), sampling, use_tqdm=False)]


def ids_of(outputs: Sequence[CompletionOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def expected(oracle: Any) -> list[list[int]]:
    return [oracle_greedy(oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 4, 5])
def test_any_number_of_drafts_gives_the_ids_of_transformers(checkpoint: Callable[[str], Checkpoint], drafts: int) -> None:
    path, oracle = checkpoint("llama_untied")
    with build(path, drafts=drafts) as llm:
        assert ids_of(complete(llm, PROMPTS)) == expected(oracle)
        total = llm.stats.spec.total
    if drafts:
        assert 0 < total.num_accepted_tokens < total.num_draft_tokens, "both fates of a draft must occur"
    else:
        assert total.num_draft_tokens == 0


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ENGINE_CASES[1:])
def test_every_family_gives_the_ids_of_transformers(checkpoint: Callable[[str], Checkpoint], name: str, drafts: int) -> None:
    path, oracle = checkpoint(name)
    with build(path, drafts=drafts) as llm:
        assert ids_of(complete(llm, PROMPTS)) == expected(oracle)
        assert (llm.stats.spec.total.num_draft_tokens > 0) == (drafts > 0)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
def test_preempted_requests_resume_where_they_were(checkpoint: Callable[[str], Checkpoint], drafts: int, async_scheduling: bool) -> None:
    """24 blocks hold 96 of the about 260 tokens that six requests come to."""
    path, oracle = checkpoint("llama_untied")
    with build(path, drafts=drafts, num_blocks=24, async_scheduling=async_scheduling) as llm:
        assert ids_of(complete(llm, PROMPTS)) == expected(oracle)
        assert llm.stats.gauges.num_preemptions > 0


@pytest.mark.parametrize("drafts", [0, 5])
def test_one_request_at_a_time_is_the_same(checkpoint: Callable[[str], Checkpoint], drafts: int) -> None:
    path, oracle = checkpoint("llama_untied")
    with build(path, drafts=drafts, max_num_seqs=1) as llm:
        assert ids_of(complete(llm, PROMPTS)) == expected(oracle)


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("name", ["llama_untied", "gpt2_learned_positions"])
def test_shared_prefixes_are_computed_once_and_change_nothing(checkpoint: Callable[[str], Checkpoint], name: str, drafts: int) -> None:
    path, oracle = checkpoint(name)
    prompt = PROMPTS[4]
    prompts = [prompt, prompt, [*prompt[:20], 4, 5]]
    wanted = [oracle_greedy(oracle, ids, NUM_TOKENS) for ids in prompts]
    with build(path, drafts=drafts) as llm:
        assert ids_of(complete(llm, prompts[:1])) == wanted[:1]
        results = llm.generate(prompts[1:], GREEDY, use_tqdm=False)
        assert [list(result.outputs[0].token_ids) for result in results] == wanted[1:]
        assert all(result.num_cached_tokens >= 20 for result in results)


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_the_end_token_ends_inside_an_accepted_run(checkpoint: Callable[[str], Checkpoint], drafts: int) -> None:
    """The end token is one that the model repeats, so with drafts it arrives in the middle of a block."""
    path, oracle = checkpoint("llama_untied")
    free = expected(oracle)
    end = max(set(free[2]), key=free[2].count)
    wanted = [oracle_greedy(oracle, prompt, NUM_TOKENS, eos=end) for prompt in PROMPTS]
    assert any(len(short) < len(ids) for short, ids in zip(wanted, free, strict=True))
    sampling = replace(GREEDY, stop_token_ids=(end,))
    with build(path, drafts=drafts) as llm:
        outputs = complete(llm, PROMPTS, sampling)
    assert ids_of(outputs) == wanted
    assert [output.finish_reason for output in outputs] == ["stop" if end in ids else "length" for ids in wanted]


@pytest.mark.parametrize("drafts", [0, 5])
def test_the_checkpoint_names_its_end_token(checkpoint: Callable[[str], Checkpoint], tmp_path: Path, drafts: int) -> None:
    _, twin = checkpoint("llama_untied")
    free = expected(twin)
    end = max(set(free[2]), key=free[2].count)
    oracle = save_random(tiny_config("llama", tie_word_embeddings=False, eos_token_id=end), tmp_path)
    toy_tokenizer().hf.save_pretrained(tmp_path)
    wanted = [oracle_greedy(oracle, prompt, NUM_TOKENS, eos=[end, EOS]) for prompt in PROMPTS]
    assert wanted[2] == free[2][: free[2].index(end) + 1]
    with build(tmp_path, drafts=drafts) as llm:
        assert ids_of(complete(llm, PROMPTS, replace(GREEDY, ignore_eos=False))) == wanted


def test_the_listed_cases_exist() -> None:
    assert set(ENGINE_CASES) <= {*LEAN, *FALLBACK}
