"""Heads that score some ids of the target alone: lossless, and every draft that of a reference with those rows of the LM head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build, parse_speculative
from specdec.config.token_map import read_token_map
from specdec.errors import ConfigError
from specdec.proposers.base import DraftBatch, Proposer, StepView, build_proposer
from specdec.tools.train_token_map import count_texts, rank, write
from tests.config.checkpoints import write_tokenizer
from tests.law.scoring import judge
from tests.models.eagle_reference import write_head
from tests.proposers.heads import EAGLE, headed, plain_head
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.test_mtp import PlainModule, drafting, with_module
from tests.proposers.test_mtp_modules import PlainModules, with_modules
from tests.proposers.tiny import prompts, request, run

SCORED = [1, 2, 4, *range(8, 80, 3), 81, 83, 90]  # 30 of 97 ids
HEADS = {"shared": EAGLE, "own": replace(EAGLE, has_tables=True)}
KINDS = ("shared", "own", "mtp", "modules")


class Recorder:
    """A proposer that keeps every text with its drafts."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.seen = inner, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, step: StepView) -> DraftBatch:
        batch: DraftBatch = self._inner.propose(step)
        for index, row in enumerate(step.rows.tolist()):
            if count := int(batch.num_nodes[index]):
                self.seen.append((step.token_ids[row, : int(step.num_tokens[row])].tolist(), batch.token_ids[index, :count].tolist()))
        return batch


@pytest.fixture(scope="module")
def map_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("map") / "hot.pt"
    torch.save(SCORED[::-1], path)  # as SGLang's: a list, the most frequent first
    return path


@pytest.fixture(scope="module")
def heads(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: write_head(tmp_path_factory.mktemp(name), spec, seed=7) for name, spec in HEADS.items()}
    made["mtp"] = with_module(target_path, tmp_path_factory.mktemp("mtp"), "deepseek")
    made["modules"] = with_modules(target_path, tmp_path_factory.mktemp("modules"), "deepseek")
    return made


def resolved_with(kind: str, target: Path, head: Path, drafts: int, config: dict[str, Any], **settings: Any) -> ResolvedConfig:
    if kind in HEADS:
        return headed(target, head, HEADS[kind], drafts, config=config, **settings)
    return drafting(head, drafts, config=config, **settings)


def reference_of(kind: str, target: Path, head: Path) -> Any:
    """A reference whose LM head has the scored rows alone."""
    if kind in HEADS:
        plain = plain_head(target, head, HEADS[kind])
        plain.reference.weights.update({"lm_head.weight": plain.reference.weights.get("lm_head.weight", plain.reference.lm_head)[SCORED]})
        plain.to_target = SCORED.__getitem__
        return plain
    return (PlainModule if kind == "mtp" else PlainModules)(head, "deepseek", scored=SCORED)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_head_is_lossless_and_drafts_what_the_reference_drafts(
    target_path: Path, heads: dict[str, Path], map_path: Path, kind: str, scenario: Scenario
) -> None:
    made: list[Recorder] = []

    def make(resolved: ResolvedConfig) -> Proposer:
        made.append(Recorder(build_proposer(resolved)))
        return made[-1]

    config = {"token_map": str(map_path)}
    resolved = resolved_with(kind, target_path, heads[kind], 5, config, **scenario.settings)
    assert resolved.traits is not None
    served = target_path if kind in HEADS else heads[kind]
    check_lossless(served, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference, seen = reference_of(kind, target_path, heads[kind]), made[0].seen
    assert len(seen) > 40
    for text, given in seen[:: max(len(seen) // 20, 1)]:
        assert given == reference.drafts(text, len(given)), f"behind {len(text)} tokens"
    assert {token for _, given in seen for token in given} <= set(SCORED)


@pytest.mark.parametrize("kind", ["shared", "modules"])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_of_a_reduced_head_keep_the_law(
    target_path: Path, heads: dict[str, Path], map_path: Path, kind: str, rule: str
) -> None:
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule, "token_map": str(map_path)}
    texts = prompts(30, seed=3, longest=12)
    requests = [request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(texts)]
    result = run(resolved_with(kind, target_path, heads[kind], 3, config, max_num_seqs=16), requests)
    served = target_path if kind in HEADS else heads[kind]
    assert judge(served, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0
    assert {token for ids in result.token_ids.values() for token in ids} - set(SCORED)  # the others come from the residual


def test_the_copied_rows_count_as_memory(target_path: Path, heads: dict[str, Path], map_path: Path) -> None:
    whole, reduced = (
        build_proposer(headed(target_path, heads["shared"], EAGLE, 3, config=config)).memory().weights_bytes  # type: ignore[union-attr]
        for config in ({}, {"token_map": str(map_path)})
    )
    assert reduced - whole == len(SCORED) * 32 * 4


# -- the file ------------------------------------------------------------------------------------------------------------


def test_all_formats_hold_the_same_ids(tmp_path: Path) -> None:
    torch.save(torch.tensor(SCORED[::-1]), tmp_path / "tensor.pt")
    torch.save(SCORED, tmp_path / "list.bin")
    (tmp_path / "list.json").write_text(json.dumps(SCORED))
    save_file({"token_map": torch.tensor(SCORED), "other": torch.zeros(3)}, tmp_path / "named.safetensors")
    save_file({"draft_ids": torch.tensor(SCORED, dtype=torch.int32)}, tmp_path / "only.safetensors")
    for file in tmp_path.iterdir():
        ids = read_token_map(str(file), 97)
        assert (ids.dtype, ids.tolist()) == (torch.int64, sorted(SCORED)), file.name


BAD = {
    "id past the vocabulary": ([1, 97], r"holds the id 97, but the target has ids 0 to 96"),
    "negative id": ([-1, 3], "holds the id -1"),
    "twice": ([4, 9, 4], "holds the id 4 twice"),
    "no id": ([], "no one list of token ids"),
    "fractions": ([0.5, 1.0], "no one list of token ids"),
    "no list": ({"a": 1}, "cannot be read"),
    "nested": ([[1, 2], [3, 4]], "no one list of token ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_token_map(str(tmp_path / "bad.json"), 97)


@pytest.mark.parametrize("suffix", [".pt", ".json", ".safetensors"])
def test_a_damaged_or_missing_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"map{suffix}"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_map(str(path), 97)
    path.write_bytes(b"\x00\x01 not a map")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_map(str(path), 97)
    with pytest.raises(ConfigError, match=r"ends in '\.txt'"):
        read_token_map(str(tmp_path / "map.txt"), 97)


# -- as a user asks for it -----------------------------------------------------------------------------------------------


def test_key_and_flag_are_one_and_other_methods_refuse_it(
    target_path: Path, heads: dict[str, Path], map_path: Path, tmp_path: Path
) -> None:
    asked = parse_speculative(spec_method="eagle", spec_model=str(heads["shared"]), spec_tokens=3, token_map=str(map_path))
    assert asked == build({"method": "eagle", "model": str(heads["shared"]), "num_speculative_tokens": 3, "token_map": str(map_path)})
    with pytest.raises(ConfigError, match="--speculative-token-map and --speculative-config"):
        parse_speculative({"method": "mtp", "token_map": "a.pt"}, token_map="b.pt")
    with pytest.raises(ConfigError, match=r"token_map does not apply to method `eagle3`: it belongs to `eagle`, `mtp`"):
        build({"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3, "token_map": "a.pt"})
    build({"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3, "token_map": None})  # null asks for nothing


def test_a_bad_map_stops_the_start_before_weights_are_read(heads: dict[str, Path], tmp_path: Path) -> None:
    path = heads["mtp"]
    write_tokenizer(path)
    (tmp_path / "bad.json").write_text("[1, 400]")
    speculative = build({"method": "mtp", "num_speculative_tokens": 2, "token_map": str(tmp_path / "bad.json")})
    engine = EngineConfig(
        device="cpu",
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=96),
        cache=CacheConfig(block_size=4, num_blocks=200),
        speculative=speculative,
    )
    with pytest.raises(ConfigError, match="holds the id 400"):
        resolve(engine)


# -- making one ----------------------------------------------------------------------------------------------------------


def test_ids_are_ranked_by_count_and_special_ones_always_kept(tmp_path: Path) -> None:
    counts = count_texts(lambda text: [ord(x) - 97 for x in text], ["aabbbz", "cbz"], 30)
    assert counts[:3].tolist() == [2, 4, 1]
    chosen = rank(counts, 4, always=[29])
    assert chosen.ids.tolist() == [1, 0, 25, 29]
    assert chosen.coverage == pytest.approx(8 / 9)
    for name in ("map.pt", "map.json", "map.safetensors"):
        write(chosen.ids, tmp_path / name)
        assert read_token_map(str(tmp_path / name), 30).tolist() == [0, 1, 25, 29]
    assert torch.load(tmp_path / "map.pt", weights_only=True) == [1, 0, 25, 29]
    for size, always in ((0, []), (31, []), (1, [3, 4])):
        with pytest.raises(ConfigError, match=f"size is {size}"):
            rank(counts, size, always=always)
    with pytest.raises(ConfigError, match="no token was counted"):
        rank(torch.zeros(5, dtype=torch.int64), 2)
