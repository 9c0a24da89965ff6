"""The embedded model, converted from its GGUF file, against transformers with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdec.config.engine import EMBEDDED_MODEL
from specdec.errors import ConfigError
from specdec.models.hf import HfModel
from specdec.models.llama import LlamaModel
from specdec.models.registry import TargetModel, load_model
from specdec.models.source import embedded_gguf, locate_target
from tests.models.paged import PagedRun
from tests.models.tiny import oracle_greedy, oracle_logits, read_config

PROMPT = "<|im_start|>user\nName three rivers and where they end.<|im_end|>\n<|im_start|>assistant\n"
# bf16 rounds each of 30 layers' sums to 8 bits; measured 2 % of the logits' norm, twice that is allowed
BF16_TOLERANCE = 0.04


@pytest.fixture(scope="module")
def path() -> Path:
    """Directory of the converted model; skips where its package is not installed."""
    try:
        embedded_gguf()
    except ConfigError as error:
        pytest.skip(f"THE EMBEDDED MODEL IS NOT TESTED: {error.message}")
    return Path(locate_target(EMBEDDED_MODEL).model_path)


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompt(path: Path) -> list[int]:
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(path)(PROMPT)["input_ids"]
    return ids


def load(path: Path, dtype: torch.dtype) -> TargetModel:
    return load_model(str(path), read_config(path), dtype=dtype, device=torch.device("cpu"), max_model_len=512)


def greedy(model: TargetModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Prefill in two chunks, then decode token by token."""
    run = PagedRun(model, max_len=len(prompt) + num_tokens, block_size=16)
    run.feed({0: prompt[:5]})
    logits = run.feed({0: prompt[5:]})[0]
    added: list[int] = []
    while len(added) < num_tokens:
        added.append(int(logits[-1].argmax()))
        logits = run.feed({0: added[-1:]})[0]
    return added


@pytest.mark.parametrize("num_tokens", [64, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_ids_equal_transformers_in_float32(path: Path, oracle: Any, prompt: list[int], num_tokens: int) -> None:
    model = load(path, torch.float32)
    assert isinstance(model, LlamaModel)
    assert greedy(model, prompt, num_tokens) == oracle_greedy(oracle, prompt, num_tokens)


@pytest.mark.slow
def test_the_fallback_gives_the_same_ids(path: Path, oracle: Any, prompt: list[int]) -> None:
    model = HfModel(str(path), read_config(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=512)
    assert greedy(model, prompt, 32) == oracle_greedy(oracle, prompt, 32)


def test_bfloat16_logits_stay_near_float32(path: Path, oracle: Any, prompt: list[int]) -> None:
    expected = oracle_logits(oracle, prompt)
    logits = PagedRun(load(path, torch.bfloat16)).feed({0: prompt})[0]
    distance = float((logits - expected).norm() / expected.norm())
    assert distance < BF16_TOLERANCE
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8
