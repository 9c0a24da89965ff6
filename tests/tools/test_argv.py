"""Arguments before typer sees them: dotted keys, underscores, vLLM's flags, and options from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.errors import ConfigError
from specdec.tools.argv import REFUSED, normalise
from specdec.tools.config_file import read_options


def speculative(argv: list[str]) -> object:
    assert argv.count("--speculative-config") == 1
    return json.loads(argv[argv.index("--speculative-config") + 1])


def test_ordinary_arguments_pass_unchanged() -> None:
    argv = ["serve", "model", "--port", "1", "-sc", '{"method": "ngram"}', "--api-key=a_b=c", "--", "--tensor-parallel-size"]
    assert normalise(argv) == argv
    assert normalise([]) == []


def test_underscores_in_names_become_dashes_and_values_stay() -> None:
    assert normalise(["--max_model_len", "7", "--served_model_name=my_model"]) == ["--max-model-len", "7", "--served-model-name=my_model"]


@pytest.mark.parametrize("option", ["--speculative-config", "--speculative_config", "-sc"])
def test_dotted_keys_become_one_json(option: str) -> None:
    argv = normalise(
        ["serve", f"{option}.method", "ngram", f"{option}.num-speculative-tokens=4", "--port", "9", f"{option}.a.b", "[1, true]"]
    )
    assert argv[:3] == ["serve", "--port", "9"]
    assert speculative(argv) == {"method": "ngram", "num_speculative_tokens": 4, "a": {"b": [1, True]}}


@pytest.mark.parametrize(
    "given", [["--speculative-config", '{"method": "ngram"}'], ["-sc", '{"method": "ngram"}'], ['-sc={"method": "ngram"}']]
)
def test_dotted_keys_join_a_json(given: list[str]) -> None:
    argv = normalise(["--speculative-config.num_speculative_tokens", "3", *given, "--port", "9"])
    assert speculative(argv) == {"method": "ngram", "num_speculative_tokens": 3}
    assert argv[-2:] == ["--port", "9"]


def test_values_that_are_not_json_are_strings() -> None:
    assert speculative(normalise(["-sc.model", "org/name", "-sc.revision", "007x"])) == {"model": "org/name", "revision": "007x"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculative-config.method"], "--speculative-config.method has no value"),
        (["-sc.method=a", "-sc.method=b"], "-sc.method is given twice"),
        (["-sc.a=1", "-sc.a.b=2"], "goes below `a`"),
        (["-sc.", "x"], "empty key"),
        (["-sc.a..b=1"], "empty key"),
        (["-sc.num-speculative-tokens=1", "-sc", '{"num-speculative-tokens": 2}'], "are both given"),
    ],
)
def test_dotted_mistakes_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as caught:
        normalise(argv)
    assert caught.value.hint


def test_broken_json_is_left_for_the_parser_that_shows_where() -> None:
    argv = ["-sc", "{broken", "-sc.method", "ngram"]
    assert normalise(argv) == ["-sc", "{broken"]
    assert normalise(["-sc.method", "ngram", "-sc"]) == ["-sc"]


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_flags_of_vllm_without_counterpart_are_refused_with_a_way_out(flag: str) -> None:
    for argv in ([flag, "2"], [f"{flag}=2"], [flag.replace("-model", "_model")]):
        if argv[0].startswith(flag):
            with pytest.raises(ConfigError, match=f"{flag} is a flag of vLLM") as caught:
                normalise(["serve", *argv])
            assert caught.value.hint


KNOWN = {"port": "port", "max-model-len": "max_model_len", "speculative-config": "speculative_config", "api-key": "api_key"}


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return read_options(str(path), KNOWN, repeated=["api_key"])


def test_a_file_of_options_is_read(tmp_path: Path) -> None:
    text = "port: 80\nmax_model_len: 5\nspeculative-config: {method: ngram}\napi-key: one\n"
    assert read(tmp_path, text) == {"port": 80, "max_model_len": 5, "speculative_config": '{"method": "ngram"}', "api_key": ["one"]}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("prt: 80", "`prt` is no option of specdec serve", "did you mean `port`?"),
        ("- port", "holds a list, not options", "one `option: value` a line"),
        ("", "holds a NoneType", "one `option: value` a line"),
        ("a: [", "is not YAML", "one `option: value` a line"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert hint in str(caught.value.hint)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_options(str(tmp_path / "none.yaml"), KNOWN)
