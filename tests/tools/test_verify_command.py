"""specdec verify from its command line: verdict, JSON, exit codes, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec import cli
from specdec.config.engine import EngineConfig, ModelConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import parse_speculative
from specdec.errors import ConfigError
from specdec.tools.verify_command import default_prompts, read_prompts, rule_facts
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import write_checkpoint
from tests.tools import verify_mutations as mutations

SIZES = ["--samples", "30", "--tokens", "400", "--length", "24", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("model"), seed=3)
    toy_tokenizer().hf.save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("abcabcabcabc\n\n  say it again, say it \n", encoding="utf-8")
    return str(path)


def drafted(model: Path) -> list[str]:
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    return ["-sc", json.dumps(config)]


def test_a_correct_engine_gets_exit_code_0_and_says_what_was_tested(model: Path, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["verify", str(model), *drafted(model), "--prompts", prompts, *SIZES]) == 0
    out = capsys.readouterr().out
    assert "NO DIFFERENCE FOUND: 816 tokens follow the target's law" in " ".join(out.split())
    for words in ("the same tokens, off and on", "2 of 2", "the same law", "with cuts and penalties", "total variation of short texts"):
        assert words in out


def test_json_holds_every_number(model: Path, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["verify", str(model), "--spec-method", "ngram", "--spec-tokens", "3", "--speculative-config.prompt_lookup_min", "1"]
    status = cli._run([*argv, "--speculative-config.prompt_lookup_max", "3", "--prompts", prompts, *SIZES, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status == 0, answer["verdict"]
    assert answer["ok"] is True
    assert answer["configuration"]["speculative_config"]["method"] == "ngram"
    assert answer["rule"] == {"name": "exact match", "exact_match": True, "by_slot": True, "lossy": False}
    assert {(law["law"], law["engine"]) for law in answer["laws"]} == {
        (law, engine) for law in ("temperature 0.8", "with cuts and penalties") for engine in ("plain", "speculative")
    }
    assert 0 <= answer["variation"]["permutation_p"] <= 1
    assert answer["drafted"] > 0


def test_a_broken_engine_gets_exit_code_1(
    model: Path, prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutations.stale_kv_of_a_refused_draft(monkeypatch)
    other = write_checkpoint(Path(prompts).parent / "draft", seed=4)
    toy_tokenizer().hf.save_pretrained(other)
    assert cli._run(["verify", str(model), *drafted(other), "--prompts", prompts, *SIZES]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "BROKEN: speculation changes the output" in out
    assert "NOT EXPLAINED: greedy, prompt" in out


def test_nothing_is_claimed_where_nothing_was_drafted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in lookup needs five equal tokens in a row, which random text does not have."""
    path = tmp_path / "one.txt"
    path.write_text("abcdefgh", encoding="utf-8")
    argv = ["--spec-method", "ngram", "--spec-tokens", "2", "--prompts", str(path), "--temperature", "3"]
    config = ["--speculative-config.prompt_lookup_min", "60"]
    assert cli._run(["verify", str(model), *argv, *config, *SIZES]) == 1
    assert "NOTHING TESTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["--tokens", "10"], "tokens is 10, but it must be at least 400", ""),
        (["--temperature", "0"], "temperature is 0.0, but it must be in 0.01..10", ""),
        (["--false-alarm", "0.5"], "false-alarm is 0.5, but it must be in (0, 0.05]", ""),
        (["--samples", "3"], "samples is 3, but it must be at least 10", ""),
        (["--length", "4"], "length is 4, but it must be in 8..4096 tokens", ""),
        (["--prompts", "/no/such/file"], "--prompts '/no/such/file' cannot be read", "one prompt a line"),
        (["--spec-method", "nogram"], "nogram", ""),
        (["/no/such/model"], "/no/such/model", ""),
    ],
)
def test_mistakes_get_exit_code_2(argv: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["verify", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert hint in captured.err
    assert captured.out == ""


def test_a_prompt_that_does_not_fit_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.txt"
    path.write_text("short\n" + "x" * 110 + "\n", encoding="utf-8")
    argv = ["--spec-method", "ngram", "--spec-tokens", "2", "--prompts", str(path)]
    assert cli._run(["verify", str(model), *argv, *SIZES]) == 2
    assert "prompt 1 has 110 tokens, but with 24 more it must fit 128" in capsys.readouterr().err


def test_prompt_files(tmp_path: Path, prompts: str) -> None:
    assert read_prompts(prompts) == ["abcabcabcabc", "say it again, say it"]
    (tmp_path / "empty.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(str(tmp_path / "empty.txt"))
    assert len(set(default_prompts(16))) == 16


@pytest.mark.parametrize(
    ("keys", "name", "exact", "by_slot", "lossy"),
    [
        ({}, "exact match", True, True, False),
        ({"draft_sample_method": "coupled"}, "exact match", True, True, False),
        ({"draft_sample_method": "probabilistic"}, "standard", False, True, False),
        ({"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}, "block", False, False, False),
        ({"rejection_sample_method": "block"}, "exact match", True, True, False),
        ({"rejection_sample_method": "typical"}, "typical", False, False, True),
    ],
)
def test_what_a_rule_promises(model: Path, keys: dict[str, Any], name: str, exact: bool, by_slot: bool, lossy: bool) -> None:
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, **keys}
    engine = EngineConfig(model=ModelConfig(model=str(model)), speculative=parse_speculative(config), device="cpu")
    facts = rule_facts(resolve(engine))
    assert (facts.name, facts.exact_match, facts.by_slot, facts.lossy) == (name, exact, by_slot, lossy)
