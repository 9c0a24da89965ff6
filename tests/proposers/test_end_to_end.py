"""Each draft method from the text of --speculative-config to tokens: parsed, resolved from checkpoints on disk, built by the registry."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import parse_speculative
from specdec.engine.core import EngineCore
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import BLOCK_SIZE, Run, mixed_requests, write_checkpoint

MAX_MODEL_LEN = 96


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and a draft with a tokenizer beside them, and a corpus."""
    places = {}
    for name, vocab_size in (("target", 97), ("draft", 104)):
        path = tmp_path_factory.mktemp(name)
        write_checkpoint(path, seed=1, num_layers=2, vocab_size=vocab_size)
        toy_tokenizer().hf.save_pretrained(path)
        places[name] = str(path)
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    corpus.write_text("the quick brown fox " * 20)
    return {**places, "corpus": str(corpus)}


def generate(served: dict[str, str], speculative: dict[str, Any] | None) -> Run:
    engine = EngineConfig(
        model=ModelConfig(model=served["target"], dtype="float32", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=120),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        speculative=parse_speculative(speculative),
        device="cpu",
    )
    core = EngineCore.from_config(resolve(engine))
    running = Run(core, core._runner)
    running.add(mixed_requests())
    return running.finish()


@pytest.mark.parametrize("method", ["suffix", "draft_model", "early_exit", "hybrid"])
def test_a_method_runs_from_its_config(served: dict[str, str], method: str) -> None:
    configs: dict[str, dict[str, Any]] = {
        "suffix": {"method": "suffix", "suffix_corpus": served["corpus"], "suffix_decoding_min_token_prob": 0.0},
        "draft_model": {"model": served["draft"], "num_speculative_tokens": 3},
        "early_exit": {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2},
        "hybrid": {"method": "hybrid", "num_speculative_tokens": 4, "sources": [{"method": "suffix"}, {"model": served["draft"]}]},
    }
    result = generate(served, configs[method])
    assert result.token_ids == generate(served, None).token_ids
    assert result.num_drafted() > 0
    sources = {source for stats in result.stats.values() for source in stats.by_source}
    assert sources <= ({"suffix", "draft_model"} if method == "hybrid" else {method})
