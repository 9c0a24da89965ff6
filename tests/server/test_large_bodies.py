"""Bodies that are small enough to come in and too much to serve: refused before they cost the event loop, or a thread, any real work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.engine.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import embedded_tokenizer, toy_tokenizer
from tests.server.serving import Served, serving

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[Served, list[int]]]:
    """A server, and the length of every text that it tokenizes."""
    with serving() as served, pytest.MonkeyPatch.context() as patch:
        lengths: list[int] = []
        encode = Tokenizer.encode

        def counting(self: Tokenizer, text: str, **options: Any) -> tuple[int, ...]:
            lengths.append(len(text))
            return encode(self, text, **options)

        patch.setattr(Tokenizer, "encode", counting)
        yield served, lengths


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETION, {"prompt": ["ab"] * 100_000}, "prompt", "asks for 100000 sequences, but the engine holds 2048"),
        (COMPLETION, {"prompt": ["ab"] * 30, "n": 128}, "prompt", "asks for 3840 sequences"),
        (COMPLETION, {"prompt": "a b " * 300_000}, "prompt", "the prompt has 1200000 characters"),
        (COMPLETION, {"prompt": ["ab", "a b " * 300_000]}, "prompt", "the prompt has 1200000 characters"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 300_000}]}, "messages", "context length is 256 tokens"),
    ],
    ids=["prompts", "choices", "text", "second-text", "chat"],
)
def test_too_much_is_refused_without_tokenizing_it(
    counted: tuple[Served, list[int]], path: str, body: dict[str, Any], param: str, message: str
) -> None:
    served, lengths = counted
    lengths.clear()
    refused = served.post(path, body | {"max_tokens": 2})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert message in refused.json()["error"]["message"]
    assert sum(lengths) <= 60, "only the short texts before it were read"
    assert served.post(COMPLETION, {"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_a_text_that_may_fit_is_counted_in_tokens(counted: tuple[Served, list[int]]) -> None:
    served, _ = counted
    answer = served.post(COMPLETION, {"prompt": "a" * 300, "max_tokens": 2})
    assert answer.status_code == 400
    assert "the prompt alone has 300" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["toy", "embedded"])
def test_no_token_stands_for_more_characters_than_the_bound(name: str) -> None:
    tokenizer = toy_tokenizer() if name == "toy" else embedded_tokenizer()
    if tokenizer is None:
        pytest.skip("THE EMBEDDED TOKENIZER IS NOT TESTED: its package is not installed")
    bound = tokenizer.max_chars_per_token
    assert bound is not None
    piece = st.sampled_from(["the ", " ", "\n", "\t", "é", "🎉", "中文", "def f(x):\n    ", "=" * 9, "<eos>", "<|im_end|>", "-"])

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(piece, st.integers(1, 200)), min_size=1, max_size=6))
    def holds(parts: list[tuple[str, int]]) -> None:
        text = "".join(part * count for part, count in parts)
        known = text if name == "embedded" else "".join(char for char in text if " " <= char < "{" or char == "🎉")
        assert len(known) <= bound * len(tokenizer.encode(known, add_special_tokens=False))

    holds()


def test_where_tokens_may_melt_there_is_no_bound() -> None:
    backend = BackendTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")).max_chars_per_token is None
