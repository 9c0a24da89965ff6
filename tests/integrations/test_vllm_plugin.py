"""specdec's proposers in vLLM: its contract, requests told apart by their texts, and drafts like those of our own methods."""

from __future__ import annotations

import inspect
import logging
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.integrations import vllm_register
from specdec.integrations.vllm_plugin import HybridProposer, NgramProposer, SuffixProposer
from specdec.proposers.ngram_index import NgramIndex
from specdec.proposers.suffix_tree import SuffixTree
from tests.integrations.vllm_batch import MAX_MODEL_LEN, Batch, Request, config
from tests.proposers.test_custom_class import custom, custom_resolved
from tests.proposers.tiny import mixed_requests, plain, start

CLASSES = (NgramProposer, SuffixProposer, HybridProposer)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("made", CLASSES)
def test_the_call_shape_is_vllms(made: Any) -> None:
    parameters = list(inspect.signature(made.propose).parameters.values())
    assert [parameter.name for parameter in parameters] == [
        "self",
        "sampled_token_ids",
        "num_tokens_no_spec",
        "token_ids_cpu",
        "slot_mappings",
    ]
    assert parameters[-1].default is None
    assert made(config()).load_model(object()) is None, "vLLM's CPU runner calls it"
    assert [parameter.name for parameter in inspect.signature(made).parameters.values()] == ["vllm_config"]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: its own signatures are NOT checked (scripts/install-vllm)")
def test_the_installed_vllm_has_the_same_contract() -> None:
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer as VllmNgramProposer

    theirs = [name for name in inspect.signature(VllmNgramProposer.propose).parameters if name != "num_speculative_tokens"]
    assert list(inspect.signature(NgramProposer.propose).parameters) == theirs
    given = config(model="specdec.integrations.vllm_plugin.HybridProposer")
    assert isinstance(create_custom_proposer(given), HybridProposer)


def test_the_entry_point_is_declared_and_may_be_called_again(caplog: pytest.LogCaptureFixture) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."vllm.general_plugins"]\nspecdec = "specdec.integrations.vllm_register:register"' in text
    vllm_register.register.cache_clear()
    with caplog.at_level(logging.INFO):
        vllm_register.register()
        vllm_register.register()
    assert len(caplog.records) == 1
    assert all(f"specdec.integrations.vllm_plugin.{made.__name__}" in caplog.text for made in CLASSES)


@pytest.mark.parametrize(("module", "absent"), [("vllm_plugin", {"torch"}), ("vllm_register", {"torch", "numpy", "numba", "llvmlite"})])
def test_modules_import_no_more_than_they_must(module: str, absent: set[str]) -> None:
    code = f"import sys, specdec.integrations.{module}; sys.exit(bool({absent} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Few distinct tokens, so that much matches; some share a prompt, some a beginning."""
    prompts = [[rng.randrange(5) for _ in range(rng.randrange(1, 25))] for _ in range(count)]
    prompts[-1] = list(prompts[0])
    prompts[-2] = [*prompts[1], 3]
    return [Request(prompt, [rng.randrange(5) for _ in range(rng.randrange(1, 20))]) for prompt in prompts]


def serve(batch: Batch, requests: list[Request], rng: random.Random, check: Any) -> None:
    """Run all to their end, arriving one by one, and check every step's drafts."""
    waiting = list(requests)
    for _ in range(300):
        while waiting and len(batch.requests) < 5 and rng.random() < 0.5:
            batch.requests.append(waiting.pop())
        for one, drafts in batch.step(rng):
            if one.num_out:
                check(one, drafts)
        if not waiting and not batch.requests:
            return
    raise AssertionError("requests do not end")


@pytest.mark.parametrize("seed", range(6))
def test_ngram_drafts_are_those_of_the_text_wherever_its_row_goes(seed: int) -> None:
    rng = random.Random(seed)
    proposer = NgramProposer(config())
    num_drafts = 0

    def check(one: Request, drafts: list[int]) -> None:
        nonlocal num_drafts
        index = NgramIndex(2, 5)
        index.extend(one.text)
        assert drafts == index.lookup(min(4, MAX_MODEL_LEN - len(one.text) - 1))
        num_drafts += len(drafts)

    serve(Batch(proposer), random_requests(rng, 12), rng, check)
    assert num_drafts > 50
    assert proposer._num_seen <= 12 + 3, "texts are followed, not read anew"


@pytest.mark.parametrize("seed", range(4))
def test_suffix_drafts_are_those_of_the_text_wherever_its_row_goes(seed: int) -> None:
    rng = random.Random(seed)
    options = {"suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.2}
    proposer = SuffixProposer(config(suffix_decoding_max_cached_requests=0, **options))

    def check(one: Request, drafts: list[int]) -> None:
        tree = SuffixTree(8)
        tree.extend(one.text)
        limit = min(4, MAX_MODEL_LEN - len(one.text) - 1)
        assert drafts == list(tree.continue_text(one.text[-8:], limit=limit, factor=2.0, min_chance=0.2).token_ids)

    serve(Batch(proposer), random_requests(rng, 10), rng, check)
    assert proposer.cache.num_responses == 0


@pytest.mark.parametrize("made", [SuffixProposer, HybridProposer])
def test_responses_of_ended_requests_are_learned(made: Any) -> None:
    answer = [7, 3, 9, 1, 4, 8, 2, 6, 5, 11, 13, 12]
    batch = Batch(made(config()))
    steps = []
    for prompt in ([20, 21], [30, 31]):
        batch.requests.append(Request(prompt, answer))
        steps.append(0)
        while batch.requests:
            batch.step()
            steps[-1] += 1
    assert batch.proposer.cache.num_responses == 2
    assert steps[1] < steps[0] - 4, "the second request is drafted from the first one's answer"


def test_the_prompt_is_not_learned_as_a_response() -> None:
    proposer = SuffixProposer(config())
    batch = Batch(proposer, chunk=2)
    batch.requests.append(Request([1, 2, 3, 4, 5], [6, 7]))
    while batch.requests:
        batch.step()
    tree = proposer.cache._trees["shared"]
    assert tree.num_tokens == 2


@pytest.mark.parametrize(("failing", "expected"), [(0, [3]), (1, [9])])
def test_the_hybrid_leaves_a_source_that_fails(failing: int, expected: list[int]) -> None:
    """After 1 2 came 3 twice, which counts tell, and 9 the last time, which the most recent match tells."""
    text = [1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 9, 6, 1, 2]
    rows = np.array([[*text, *[0] * (MAX_MODEL_LEN - len(text))]], dtype=np.int32)
    proposer = HybridProposer(config(suffix_decoding_max_cached_requests=0))
    for key in range(2, 12):  # other requests
        proposer.book.observe(key, failing, tested=4, accepted=0)
        proposer.book.observe(key, 1 - failing, tested=4, accepted=4)
    drafts = proposer.propose([[2]], np.array([len(text)]), rows)[0]
    assert drafts[:1] == expected
    before = proposer.book.rate(1, 1 - failing)
    longer = [*text, 60]  # none of the drafts came true
    rows[0, : len(longer)] = longer
    proposer.propose([[60]], np.array([len(longer)]), rows)
    assert proposer.book.rate(1, 1 - failing) < before, "the request remembers what failed"


def test_drafts_stop_where_the_model_does() -> None:
    proposer = NgramProposer(config())
    text = [1, 2, 3, 4] * 16
    for length, expected in ((MAX_MODEL_LEN - 3, 2), (MAX_MODEL_LEN - 2, 1), (MAX_MODEL_LEN - 1, 0), (MAX_MODEL_LEN, 0)):
        drafts = proposer.propose([[text[length - 1]]], np.array([length]), np.array([text], dtype=np.int32))
        assert len(drafts[0]) == expected


def test_a_config_without_a_number_of_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is missing"):
        HybridProposer(config(None))


@pytest.mark.parametrize("made", CLASSES)
def test_the_same_classes_serve_our_own_custom_class(target_path: Path, made: Any) -> None:
    requests = mixed_requests()
    resolved = custom_resolved(target_path, f"specdec.integrations.vllm_plugin.{made.__name__}", drafts=4)
    with custom(resolved) as proposer:
        running = start(resolved, lambda _: proposer)
        running.add(requests)
        result = running.finish()
        assert proposer.faults == {}
    assert result.token_ids == plain(target_path, requests)
    assert result.num_drafted() > 0
