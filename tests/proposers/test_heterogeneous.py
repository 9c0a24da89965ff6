"""A draft model with another tokenizer drafts what both know, whatever ids it knows them by, and the output stays the target's.

The strongest check is the target under shuffled ids: every greedy draft must be accepted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig
from specdec.config.methods import traits_for
from specdec.config.vocabulary_overlap import overlap_of, readable_tokens
from specdec.errors import ConfigError
from tests.law.scoring import judge
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import plain, prompts, request, resolved_for, run, with_draft

VOCAB = 97


def write_tokenizer(
    path: Path, tokens: dict[str, int], *, byte_level: bool = False, unknown: str | None = None, special: tuple[str, ...] = ()
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "model": {"type": "BPE", "vocab": tokens, "merges": [], "unk_token": unknown},
        "decoder": {"type": "ByteLevel"} if byte_level else {"type": "Replace"},
        "added_tokens": [{"content": token, "id": tokens[token], "special": True} for token in special],
    }
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shuffled(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target's weights under shuffled ids, with a tokenizer that spells spaces another way; and one that lacks every third token."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    paths = {"target": write_tokenizer(tmp_path_factory.mktemp("ours"), {f"Ġw{i}": i for i in range(VOCAB)}, byte_level=True)}
    for name in ("whole", "partial"):
        path = tmp_path_factory.mktemp(name)
        model = LlamaForCausalLM.from_pretrained(target_path)
        with torch.no_grad():
            for table in (model.model.embed_tokens.weight, model.lm_head.weight):
                table[order] = table.clone()
        model.save_pretrained(path)
        known = {f"▁w{i}" if name == "whole" or i % 3 else f"▁other{i}": int(order[i]) for i in range(VOCAB)}
        paths[name] = write_tokenizer(path, known, unknown=next(iter(known)))
    return paths


def mixed(
    target: Path, draft: Path, tokenizer: Path, drafts: int, *, config: dict[str, Any] | None = None, **settings: Any
) -> ResolvedConfig:
    speculative = DraftModelConfig(model=str(draft), num_speculative_tokens=drafts, use_heterogeneous_vocab=True, **(config or {}))
    resolved = resolved_for(target, traits=traits_for(speculative), speculative=speculative, **settings)
    return replace(with_draft(resolved, draft), tokenizer_path=str(tokenizer))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_target_under_other_ids_is_always_right(target_path: Path, shuffled: dict[str, Path], scenario: Scenario) -> None:
    resolved = mixed(target_path, shuffled["whole"], shuffled["target"], 4, **scenario.settings)
    result = check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _: resolved)
    greedy = [stats for name, stats in result.stats.items() if int(name[-1]) % 2 == 0]
    assert sum(stats.num_draft_tokens for stats in greedy) > 20
    assert all(stats.num_verified_tokens == stats.num_draft_tokens for stats in greedy)


@pytest.mark.parametrize("method", ["greedy", "coupled"])
def test_missing_tokens_cost_acceptance_only(target_path: Path, shuffled: dict[str, Path], method: str) -> None:
    for scenario in (SCENARIOS[1], SCENARIOS[4]):
        resolved = mixed(
            target_path, shuffled["partial"], shuffled["target"], 3, config={"draft_sample_method": method}, **scenario.settings
        )
        result = check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _, resolved=resolved: resolved)
        assert 0 < result.num_accepted() < result.num_drafted()


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_keep_the_law(target_path: Path, shuffled: dict[str, Path], rule: str) -> None:
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(mixed(target_path, shuffled["partial"], shuffled["target"], 3, config=config, max_num_seqs=16), requests)
    assert judge(target_path, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


def test_mean_acceptance_length_under_other_ids_is_k_plus_1(target_path: Path, shuffled: dict[str, Path]) -> None:
    requests = [request(f"a{i}", [i, 2, 3], max_tokens=1 + 4 * 6) for i in range(3)]
    result = run(mixed(target_path, shuffled["whole"], shuffled["target"], 5), requests)
    assert result.token_ids == plain(target_path, requests)
    assert result.acceptance_length() == 6


# -- pairing -------------------------------------------------------------------------------------------------------------


def test_tokens_are_the_same_by_their_bytes(tmp_path: Path) -> None:
    ours = write_tokenizer(
        tmp_path / "a", {"Ġthe": 0, "the": 1, "Ã©": 2, "<|end|>": 3, "Ċ": 4, "x": 5}, byte_level=True, special=("<|end|>",)
    )
    theirs = write_tokenizer(
        tmp_path / "b", {"<0x0A>": 0, "é": 1, "▁the": 2, "</s>": 3, "<|end|>": 4, "the": 9}, unknown="</s>", special=("</s>",)
    )
    assert readable_tokens(ours)[b" the"] == 0
    assert readable_tokens(theirs)[b"\n"] == 0
    overlap = overlap_of(theirs, ours, draft_eos=[3], target_eos=[3], sizes=(8, 6))
    # "the" is past the draft's table; the special <|end|> is no ordinary text, and pairs with the draft's end of text
    assert dict(zip(overlap.target_ids, overlap.draft_ids, strict=True)) == {0: 2, 2: 1, 3: 3, 4: 0}
    assert overlap.fallback == 3


def test_pairs_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    ours, theirs = write_tokenizer(tmp_path / "a", {"a": 0}), write_tokenizer(tmp_path / "b", {"b": 0})
    with pytest.raises(ConfigError, match="no token in common"):
        overlap_of(theirs, ours, draft_eos=[], target_eos=[], sizes=(1, 1))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        overlap_of(tmp_path, ours, draft_eos=[], target_eos=[], sizes=(1, 1))
    with pytest.raises(ConfigError, match="neither an unknown token nor an end of text"):
        overlap_of(ours, ours, draft_eos=[], target_eos=[], sizes=(1, 1))
