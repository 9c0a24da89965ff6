"""Bad input to the program: damaged files and impossible options are one line with a way out, exit code 2, and never a traceback.

One process runs all command lines, so that torch is imported once; three more run alone, as a user would.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.config.checkpoints import TOKENS, write_checkpoint, write_model, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import contextlib, io, json, sys, traceback
from specdec import cli
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli._run(argv)
        except BaseException:
            status = traceback.format_exc()
    print(json.dumps([status, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
"""
Make = Callable[[Path], list[str]]  # an empty directory -> the arguments after "serve"


@dataclass(frozen=True)
class Case:
    """make: writes files and returns arguments. says: parts of the error line, or of its hint."""

    name: str
    make: Make
    says: tuple[str, ...]


def edited(name: str, edit: Callable[[bytes], bytes]) -> Make:
    """A sound model, one of whose files is changed."""

    def make(path: Path) -> list[str]:
        directory = Path(write_model(path / "m"))
        file = directory / name
        file.write_bytes(edit(file.read_bytes() if file.exists() else b""))
        return [str(directory)]

    return make


def keys(**changes: object) -> Make:
    """A sound model with other keys in config.json."""
    return lambda path: [write_model(path / "m", changes)]


def flags(*argv: str) -> Make:
    return lambda path: [write_model(path / "m"), *argv]


def spec(text: str) -> Make:
    return flags("--speculative-config", text)


def gguf(content: bytes) -> Make:
    def make(path: Path) -> list[str]:
        (path / "m.gguf").write_bytes(content)
        return [str(path / "m.gguf")]

    return make


def other_tokenizer(tokens: tuple[str, ...] | None) -> Make:
    """A tokenizer directory with these tokens, or with none at all."""

    def make(path: Path) -> list[str]:
        (path / "t").mkdir()
        if tokens is not None:
            write_tokenizer(path / "t", tokens)
        return [write_model(path / "m"), "--tokenizer", str(path / "t")]

    return make


def draft(change: Callable[[Path], object]) -> Make:
    """A sound target and a draft model that `change` damages."""

    def make(path: Path) -> list[str]:
        directory = write_model(path / "d")
        change(Path(directory))
        return [write_model(path / "m"), "--spec-method", "draft_model", "--spec-model", directory, "--spec-tokens", "3"]

    return make


def shape_of_another_model(content: bytes) -> bytes:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 8


CASES = [
    Case("no model there", lambda path: [str(path / "nothing")], ("no such directory", "nothing")),
    Case("an empty directory", lambda path: [str(path)], ("config.json is missing",)),
    Case("a text file", lambda path: [str(ROOT / "README.md")], ("README.md",)),
    Case("config.json cut short", edited("config.json", lambda raw: raw[: len(raw) // 2]), ("config.json", "cannot be read")),
    Case("config.json empty", edited("config.json", lambda raw: b""), ("config.json",)),
    Case("config.json a list", edited("config.json", lambda raw: b"[1]"), ("config.json",)),
    Case("config.json not text", edited("config.json", lambda raw: b"\xff\xfe\x00"), ("config.json",)),
    Case("no model type", keys(model_type=None), ("model_type",)),
    Case("an unknown model type", keys(model_type="nosuchtype"), ("nosuchtype",)),
    Case("no architectures", keys(architectures=None), ()),
    Case("a width as text", keys(hidden_size="wide"), ("hidden_size",)),
    Case("no heads", keys(num_attention_heads=0), ("num_attention_heads",)),
    Case("no layers", keys(num_hidden_layers=0), ("num_hidden_layers",)),
    Case("a negative vocabulary", keys(vocab_size=-8), ("vocab_size",)),
    Case("heads that do not divide", keys(num_key_value_heads=3), ("num_key_value_heads",)),
    Case("no positions", keys(max_position_embeddings=0), ("max_position_embeddings",)),
    Case("weights cut short", edited("model.safetensors", lambda raw: raw[:-2]), ("model.safetensors",)),
    Case("weights empty", edited("model.safetensors", lambda raw: b""), ("model.safetensors",)),
    Case("weights of garbage", edited("model.safetensors", lambda raw: random.Random(4).randbytes(400)), ("model.safetensors",)),
    Case(
        "weights with a broken header", edited("model.safetensors", lambda raw: raw.replace(b'"dtype"', b'"dtyp')), ("model.safetensors",)
    ),
    Case("weights of an unknown type", edited("model.safetensors", lambda raw: raw.replace(b'"F32"', b'"Q99"')), ("model.safetensors",)),
    Case("tensors missing", keys(), ("missing", "model.embed_tokens.weight")),
    Case(
        "tensors of another model", edited("model.safetensors", shape_of_another_model), ("model.norm.weight", "model.embed_tokens.weight")
    ),
    Case("an index of nothing", edited("model.safetensors.index.json", lambda raw: b"{"), ("model.safetensors.index.json",)),
    Case("no weights", lambda path: [_without(write_model(path / "m"), "model.safetensors")], ("no .safetensors",)),
    Case("a GGUF of zeros", gguf(bytes(100)), ("not a GGUF file",)),
    Case("a GGUF empty", gguf(b""), ("GGUF",)),
    Case("a GGUF of garbage", gguf(b"GGUF\x03\0\0\0" + b"\xff" * 60), ("cannot be read",)),
    Case("a GGUF of another version", gguf(b"GGUF\x63\0\0\0" + bytes(60)), ("m.gguf",)),
    Case("a GGUF without a model", gguf(b"GGUF\x03\0\0\0" + bytes(16)), ("m.gguf",)),
    Case("no tokenizer", lambda path: [write_checkpoint(path / "m")], ("tokenizer",)),
    Case("tokenizer directory empty", other_tokenizer(None), ("tokenizer",)),
    Case("tokenizer not there", lambda path: [write_model(path / "m"), "--tokenizer", str(path / "t")], ("tokenizer",)),
    Case("tokenizer too large", other_tokenizer((*TOKENS, "g", "h")), ("10 tokens", "vocabulary is 8")),
    Case("tokenizer cut short", edited("tokenizer.json", lambda raw: raw[:-20]), ("tokenizer",)),
    Case("tokenizer of nothing", edited("tokenizer.json", lambda raw: b"{}"), ("tokenizer",)),
    Case("tokenizer config broken", edited("tokenizer_config.json", lambda raw: b"{"), ("tokenizer",)),
    Case("generation config broken", edited("generation_config.json", lambda raw: b"{"), ("generation_config.json",)),
    Case("draft not there", flags("--spec-method", "draft_model", "--spec-model", "/no/draft", "--spec-tokens", "2"), ("/no/draft",)),
    Case("draft without config", draft(lambda path: (path / "config.json").unlink()), ("config.json",)),
    Case("draft weights cut short", draft(lambda path: (path / "model.safetensors").write_bytes(b"\x08")), ("model.safetensors",)),
    Case("JSON broken", spec('{"method": "ngram",'), ("speculative", "line 1")),
    Case("JSON no object", spec("[1, 2]"), ("speculative",)),
    Case("a length as text", spec('{"method": "ngram", "num_speculative_tokens": "five"}'), ("num_speculative_tokens", "'five'")),
    Case("a length of 0", spec('{"method": "ngram", "num_speculative_tokens": 0}'), ("num_speculative_tokens", "0")),
    Case("a near miss", spec('{"method": "ngram", "num_speculative_token": 3}'), ("num_speculative_token", "num_speculative_tokens")),
    Case(
        "bounds the wrong way",
        spec('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 2}'),
        ("prompt_lookup_min", "5", "2"),
    ),
    Case("no such method", spec('{"method": "oracle"}'), ("oracle", "ngram")),
    Case("said twice", flags("--spec-tokens", "3", "-sc", '{"num_speculative_tokens": 3}'), ("--spec-tokens", "num_speculative_tokens")),
    Case("more drafts than a sequence", flags("--spec-method", "ngram", "--spec-tokens", "5000"), ("5000",)),
    Case("no block", flags("--block-size", "0"), ("block_size",)),
    Case("no sequence", flags("--max-num-seqs", "0"), ("max_num_seqs",)),
    Case("no step", flags("--max-num-batched-tokens", "-1"), ("max_num_batched_tokens",)),
    Case("more than all memory", flags("--memory-fraction", "1.5"), ("memory_fraction", "1.5")),
    Case("no length", flags("--max-model-len", "0"), ("max_model_len", "0")),
    Case("longer than the model", flags("--max-model-len", "5000"), ("5000", "512")),
    Case("no such policy", flags("--scheduling-policy", "lottery"), ("lottery", "fcfs")),
    Case("no GPU", flags("--device", "cuda"), ("cuda",)),
    Case("half precision on a CPU", flags("--dtype", "float16"), ("float16",)),
    Case("no such file of options", flags("--config", "/no/options.yaml"), ("/no/options.yaml",)),
]


def _without(directory: str, name: str) -> str:
    (Path(directory) / name).unlink()
    return directory


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, str, str]]:
    """Case name -> (exit status, stdout, stderr); an exception stands where its status would."""
    lines = []
    for index, case in enumerate(CASES):
        argv = case.make(tmp_path_factory.mktemp(f"case{index}"))
        lines.append(["serve", "--port", "0", *(() if "--device" in argv else ("--device", "cpu")), *argv])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            out, err = process.communicate(json.dumps(lines), timeout=200)
        except subprocess.TimeoutExpired:  # a case that is taken starts a server
            process.kill()
            out, err = process.communicate()
    results = [json.loads(line) for line in out.splitlines()]
    assert len(results) == len(CASES), f"did not end at {CASES[len(results)].name}: {err}"
    return {case.name: tuple(result) for case, result in zip(CASES, results, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_one_line_with_a_way_out(outcomes: dict[str, tuple[object, str, str]], case: Case) -> None:
    status, out, err = outcomes[case.name]
    assert_refused(status, out, err, says=case.says)


def assert_refused(status: object, out: str, err: str, *, says: tuple[str, ...]) -> None:
    """Exit code 2, nothing on stdout, and at the end of stderr one line that says what is wrong and one that says what to do.

    A message that gives the rule ("but it must ...") needs no second line.
    """
    assert status == 2, f"{status}\n{err}"
    assert out == ""
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, err
    if "but it must" in lines[-1]:
        lines.append("hint: keep to the rule")
    assert lines[-2].startswith("error: "), err
    assert lines[-1].startswith("hint: "), err
    for part in says:
        assert part in lines[-2] + lines[-1], err


@pytest.mark.parametrize("name", ["config.json cut short", "weights cut short", "a GGUF of garbage"])
def test_the_program_itself_exits_with_2(tmp_path: Path, name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0", *case.make(tmp_path)]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert_refused(done.returncode, done.stdout, done.stderr, says=case.says)
