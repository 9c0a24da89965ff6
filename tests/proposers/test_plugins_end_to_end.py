"""ngram_gpu, custom_class and extract_hidden_states from the text of --speculative-config to tokens, alone and in a hybrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.proposers.test_custom_class import PATIENT
from tests.proposers.test_end_to_end import generate, served  # noqa: F401 (a fixture)

CLASS = "tests.proposers.user_classes.Repeats"
LOOKUP: dict[str, Any] = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
CUSTOM: dict[str, Any] = {"method": "custom_class", "model": CLASS, "num_speculative_tokens": 3}
CONFIGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ngram_gpu": (LOOKUP, {"ngram_gpu"}),
    "custom_class": (CUSTOM, {"custom_class"}),
    "inferred": ({"model": CLASS, "num_speculative_tokens": 2}, {"custom_class"}),
    "hybrid": ({"method": "hybrid", "num_speculative_tokens": 3, "sources": [LOOKUP, CUSTOM]}, {"ngram_gpu", "custom_class"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_method_runs_from_its_config(served: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("specdec.proposers.custom_class.Deadlines", lambda: PATIENT)
    config, sources = CONFIGS[name]
    result = generate(served, config)
    assert result.token_ids == generate(served, None).token_ids
    assert result.num_drafted() > 0
    assert {source for stats in result.stats.values() for source in stats.by_source} <= sources


def test_hidden_states_are_written_from_a_config(served: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    model = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    result = generate(served, {"method": "extract_hidden_states", "draft_model_config": model, "shared_storage_path": str(tmp_path)})
    assert result.num_drafted() == 0
    result.runner.proposer.files.wait()  # type: ignore[union-attr]
    assert {path.stem for path in tmp_path.iterdir()} == set(result.token_ids)
