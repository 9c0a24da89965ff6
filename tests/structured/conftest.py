"""Fixtures of the structured-output tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.engine.token_table import vocabulary_of
from specdec.engine.tokenizer import Tokenizer
from specdec.sampling_params import StructuredOutputParams
from specdec.structured.compiler import Grammar, GrammarCompiler
from tests.structured.vocabulary import EOS, VOCAB_SIZE, json_tokenizer, write_target


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The small tokenizer that can spell JSON."""
    return json_tokenizer()


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """A compiler over its vocabulary."""
    return GrammarCompiler(lambda: vocabulary_of(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)))


@pytest.fixture(scope="session")
def grammar(compiler: GrammarCompiler) -> Callable[..., Grammar]:
    """grammar(regex="...") compiles a constraint."""
    return lambda **constraint: compiler.compile(StructuredOutputParams(**constraint), field="f")


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target over the vocabulary."""
    return write_target(tmp_path_factory.mktemp("json_target"))
