"""Large bodies: refused before they cost real work where they are too much to serve, and read beside the event loop where they are not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.engine.tokenizer import Tokenizer
from specdec.server import context, large_bodies
from specdec.server.large_bodies import UnhurriedDecoder
from specdec.server.protocol import CompletionBody
from tests.engine.tokenizers_for_tests import embedded_tokenizer, toy_tokenizer
from tests.server.serving import Served, serving
from tests.server.test_bad_input import BAD_BODIES, BAD_CHATS, BAD_COMPLETIONS, USER

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
        (COMPLETION, {"prompt": [5] * 300_000}, "prompt", "the prompt alone has 300000"),
        (COMPLETION, {"prompt": [[5], [5] * 300_000]}, "prompt", "the prompt alone has 300000"),
    ],
    ids=["prompts", "choices", "text", "second-text", "chat", "ids", "second-ids"],
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 1]))
def test_the_unhurried_decoder_reads_what_json_reads(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert repr(json.loads(text, cls=UnhurriedDecoder)) == repr(json.loads(text)), "repr: NaN is no equal of itself"


@given(st.text(alphabet='[]{}",:\\u0dtrue1-.e \n', max_size=12))
def test_the_unhurried_decoder_stumbles_where_json_does(text: str) -> None:
    def outcome(**how: Any) -> str:
        try:
            return repr(json.loads(text, **how))
        except json.JSONDecodeError as error:
            return str(error)

    assert outcome(cls=UnhurriedDecoder) == outcome()


def test_the_event_loop_turns_while_a_large_body_is_read() -> None:
    """Two million ids take the C scanner a tenth of a second in one go; here the loop gets many turns meanwhile."""
    raw = json.dumps({"prompt": [1] * 2_000_000}).encode()
    turns = 0

    async def read() -> Any:
        nonlocal turns
        reading = asyncio.get_running_loop().run_in_executor(None, lambda: json.loads(raw, cls=UnhurriedDecoder))
        while not reading.done():
            await asyncio.sleep(0.002)
            turns += 1
        return await reading

    assert len(asyncio.run(read())["prompt"]) == 2_000_000
    assert turns > 10


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that checked the fields of a completion body."""
    names: list[str] = []
    known = CompletionBody._wire_names

    def noted() -> set[str]:
        names.append(threading.current_thread().name)
        return known()

    monkeypatch.setattr(CompletionBody, "_wire_names", noted)
    return names


def test_large_bodies_are_parsed_and_checked_beside_the_loop(served: Served, readers: list[str]) -> None:
    padding = " " * (large_bodies.LARGE_BYTES + 1)
    small, large = json.dumps({"prompt": "abc", "max_tokens": 4}), json.dumps({"prompt": "abc", "max_tokens": 4, "user": padding})
    texts = []
    for text in (small, large):
        answer = served.http.post(served.url + COMPLETION, content=text, headers={"content-type": "application/json; charset=utf-8"})
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == texts[1]
    assert [name.startswith("body") for name in readers] == [False, True]


def test_replies_do_not_depend_on_who_reads_the_body(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bad body there is, read by FastAPI and read as a large one."""
    bodies = [(COMPLETION, json.dumps({"prompt": "abc"} | fields).encode()) for fields, _, _ in BAD_COMPLETIONS]
    bodies += [(CHAT, json.dumps({"messages": USER} | fields).encode()) for fields, _, _ in BAD_CHATS]
    bodies += [(COMPLETION, raw) for raw, _, _ in BAD_BODIES if raw]
    replies = []
    for limit in (large_bodies.LARGE_BYTES, 0):
        monkeypatch.setattr(large_bodies, "LARGE_BYTES", limit)
        answers = [served.http.post(served.url + path, content=raw, headers={"content-type": "application/json"}) for path, raw in bodies]
        replies.append([(answer.status_code, answer.json()) for answer in answers])
    assert replies[0] == replies[1]
    assert {status for status, _ in replies[1]} == {400}


def test_long_conversations_are_rendered_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    render = Tokenizer.render_chat

    def noted(self: Tokenizer, *given: Any, **options: Any) -> str:
        names.append(threading.current_thread().name)
        return render(self, *given, **options)

    monkeypatch.setattr(Tokenizer, "render_chat", noted)
    monkeypatch.setattr(context, "MANY_MESSAGES", 3)
    message = {"role": "user", "content": "a"}
    short = served.post(CHAT, {"messages": [message] * 3, "max_tokens": 1})
    long = served.post(CHAT, {"messages": [message] * 4, "max_tokens": 1})
    assert (short.status_code, long.status_code) == (200, 200)
    assert names[0] != names[1]
    assert names[1].startswith("asyncio_")
