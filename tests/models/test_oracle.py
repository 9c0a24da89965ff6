"""The lean models against transformers with the same weights: equal logits in float32, however the rows are fed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdec.config.methods import FINAL_NORM
from specdec.errors import ConfigError
from specdec.models.hf import HfModel
from specdec.models.llama import LlamaModel, is_lean
from specdec.models.registry import TargetModel, load_model
from tests.models.paged import PagedRun
from tests.models.tiny import FALLBACK, LEAN, oracle_logits, random_prompt, read_config, save_random, saved, tiny_config

TOLERANCE = 1e-4  # absolute, on logits of size 5: summation order alone
Case = tuple[TargetModel, Any]


def load(path: Path) -> TargetModel:
    return load_model(str(path), read_config(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """name -> (our model, oracle), each saved and loaded once."""
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            oracle = saved(name, path)
            made[name] = (load(path), oracle)
        return made[name]

    return get


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.2, "logits this small cannot tell models apart"
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*LEAN, *FALLBACK])
def test_whole_prefill_then_decode(case: Callable[[str], Case], name: str) -> None:
    model, oracle = case(name)
    assert isinstance(model, LlamaModel if name in LEAN else HfModel)
    ids = random_prompt(40, seed=1)
    run = PagedRun(model)
    logits = [run.feed({0: ids[:33]})[0], *(run.feed({0: [token]})[0] for token in ids[33:])]
    assert_equal(torch.cat(logits), oracle_logits(oracle, ids))


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("name", [*LEAN, *FALLBACK])
def test_chunked_prefill(case: Callable[[str], Case], name: str, chunk: int) -> None:
    model, oracle = case(name)
    ids = random_prompt(20, seed=2)
    run = PagedRun(model)
    logits = [run.feed({0: ids[start : start + chunk]})[0] for start in range(0, len(ids), chunk)]
    assert_equal(torch.cat(logits), oracle_logits(oracle, ids))


@pytest.mark.parametrize("name", [*LEAN, *FALLBACK])
def test_requests_share_steps_and_not_keys(case: Callable[[str], Case], name: str) -> None:
    """Prefill, chunk, decode and multi-row decode together, in changing order."""
    model, oracle = case(name)
    prompts = [random_prompt(length, seed=length) for length in (23, 9, 30, 1)]
    run = PagedRun(model, num_requests=4)
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    for plan in ({0: 7, 1: 9}, {2: 13, 0: 1}, {3: 1, 2: 4, 0: 5}, {0: 10, 2: 13}):
        chunks = {request: prompts[request][run.lengths[request] :][:length] for request, length in plan.items()}
        for request, logits in run.feed(chunks).items():
            got[request].append(logits)
    for prompt, parts in zip(prompts, got, strict=True):
        assert_equal(torch.cat(parts), oracle_logits(oracle, prompt))


TREE = [(-1, 11), (-1, 12), (0, 13), (0, 14), (2, 15), (1, 16), (4, 17)]  # (parent node, token)


@pytest.mark.parametrize("name", [*LEAN, *FALLBACK])
def test_a_tree_row_sees_its_branch_alone(case: Callable[[str], Case], name: str) -> None:
    model, oracle = case(name)
    prompts = {0: random_prompt(10, seed=5), 1: random_prompt(6, seed=6)}
    trees = {0: TREE, 1: [(-1, 20), (-1, 21), (-1, 22)]}
    run = PagedRun(model, num_requests=2)
    run.feed({request: prompt[:-2] for request, prompt in prompts.items()})
    logits = run.peek_trees({request: prompt[-2:] for request, prompt in prompts.items()}, trees)
    for request, prompt in prompts.items():
        assert_equal(logits[request][:2], oracle_logits(oracle, prompt)[-2:])
        for node in range(len(trees[request])):
            branch = branch_of(trees[request], node)
            assert_equal(logits[request][2 + node], oracle_logits(oracle, [*prompt, *branch])[-1])


def branch_of(tree: list[tuple[int, int]], node: int) -> list[int]:
    parent, token = tree[node]
    return [*(branch_of(tree, parent) if parent >= 0 else []), token]


@pytest.mark.parametrize("name", ["llama_untied", "qwen3_norms", "gpt2_learned_positions", "gemma3_two_windows", "opt_offset_positions"])
def test_taps_are_the_stream_between_layers(case: Callable[[str], Case], name: str) -> None:
    model, oracle = case(name)
    ids = random_prompt(12, seed=3)
    run = PagedRun(model)
    run.feed({0: ids}, taps=(0, 1, 3, FINAL_NORM))
    with torch.inference_mode():
        states = oracle(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert set(run.taps) == {0, 1, 3, FINAL_NORM}
    assert_equal(run.taps[0], states[0][0])
    assert_equal(run.taps[1], states[1][0])
    assert_equal(run.taps[FINAL_NORM], states[-1][0])  # transformers lists the last state after its norm
    assert_equal(model.final_norm(run.taps[3]), states[-1][0])


@pytest.mark.parametrize("name", ["llama_tied", "gemma_scaled_embedding"])
def test_embedding_is_the_first_tap(case: Callable[[str], Case], name: str) -> None:
    model, _ = case(name)
    ids = random_prompt(5, seed=4)
    run = PagedRun(model)
    run.feed({0: ids}, taps=(0,))
    torch.testing.assert_close(run.taps[0], model.embed_tokens(torch.tensor(ids)))


@pytest.mark.parametrize("name", ["llama_tied", "llama_untied", "llama_biases", "gpt2_learned_positions", "mixtral_experts"])
def test_num_bytes_counts_every_weight_once(case: Callable[[str], Case], name: str) -> None:
    model, oracle = case(name)
    total = sum(parameter.numel() * 4 for parameter in oracle.parameters())
    small = sum(parameter.numel() * 4 for parameter in oracle.parameters() if parameter.ndim == 1)
    assert total - small <= model.num_bytes <= total  # norms and biases may go uncounted


def test_bfloat16_logits_stay_near_float32(tmp_path: Path) -> None:
    """bf16 keeps 8 bits: three layers of it move logits by at most 8 % of their size, in both classes."""
    oracle = saved("llama_untied", tmp_path)
    ids = random_prompt(24, seed=7)
    expected = oracle_logits(oracle, ids)
    config = read_config(tmp_path)
    arguments: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "max_model_len": 64}
    for model in (load_model(str(tmp_path), config, **arguments), HfModel(str(tmp_path), config, **arguments)):
        logits = PagedRun(model).feed({0: ids})[0]
        assert logits.dtype is torch.float32
        assert (logits - expected).norm() / expected.norm() < 0.08


def test_what_the_lean_model_does_not_know_is_left_to_transformers() -> None:
    def config(model_type: str, architecture: str, **changes: Any) -> Any:
        return tiny_config(model_type, architectures=[architecture], **changes)

    assert is_lean(config("llama", "LlamaForCausalLM"))
    assert not is_lean(config("llama", "LlamaForCausalLM", hidden_act="gelu"))
    dynamic = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    assert not is_lean(config("llama", "LlamaForCausalLM", rope_parameters=dynamic))
    assert not is_lean(config("gemma", "GemmaForCausalLM"))


def test_a_gelu_llama_is_served_by_transformers(tmp_path: Path) -> None:
    oracle = save_random(tiny_config("llama", hidden_act="gelu"), tmp_path)
    model = load(tmp_path)
    ids = random_prompt(18, seed=8)
    assert isinstance(model, HfModel)
    assert_equal(PagedRun(model).feed({0: ids})[0], oracle_logits(oracle, ids))


def test_a_config_without_vocabulary_is_no_language_model(tmp_path: Path) -> None:
    config = transformers.PretrainedConfig(architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="has no vocab_size"):
        load_model(str(tmp_path), config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
