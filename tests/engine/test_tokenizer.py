"""The tokenizer wrapper: templates, single tokens, and errors that name the field."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.tokenizer import LONG_TEXT, Tokenizer
from specdec.errors import ConfigError, RequestRejected

TEXT = "Héllo 🎉\n\u00a0world<|im_end|>"


def test_token_bytes_join_to_the_text_also_where_characters_are_split(smollm: Tokenizer) -> None:
    token_ids = smollm.encode(TEXT, add_special_tokens=False)
    assert b"".join(smollm.token_bytes(token_id) for token_id in token_ids).decode() == TEXT
    assert any("\ufffd" in smollm.token_text(token_id) for token_id in token_ids)  # the emoji takes several tokens


def test_decode_keeps_or_skips_special_tokens(smollm: Tokenizer) -> None:
    token_ids = smollm.encode(TEXT, add_special_tokens=False)
    assert smollm.decode(token_ids, skip_special_tokens=False) == TEXT
    assert smollm.decode(token_ids) == TEXT.removesuffix("<|im_end|>")


def test_an_unknown_id_has_no_bytes(smollm: Tokenizer) -> None:
    assert smollm.token_bytes(smollm.vocab_size + 5) == b""


def test_the_chat_template_is_the_models_own(smollm: Tokenizer) -> None:
    token_ids = smollm.apply_chat_template([{"role": "user", "content": "hi"}])
    text = smollm.decode(token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    shorter = smollm.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert token_ids[: len(shorter)] == shorter
    assert len(shorter) < len(token_ids)


def test_template_kwargs_reach_the_template(smollm: Tokenizer) -> None:
    template = "{{ mood }}: {{ messages[0]['content'] }}"
    text = smollm.render_chat([{"role": "user", "content": "hi"}], chat_template=template, template_kwargs={"mood": "calm"})
    assert text == "calm: hi"


@pytest.mark.parametrize(
    ("messages", "kwargs", "param", "text"),
    [
        ([], {}, "messages", "at least one message"),
        ([{"role": "user", "content": "hi"}], {"tools": []}, "chat_template_kwargs", "'tools', which has its own field"),
    ],
)
def test_bad_chats_are_refused(smollm: Tokenizer, messages: list[dict[str, str]], kwargs: dict[str, object], param: str, text: str) -> None:
    with pytest.raises(RequestRejected, match=text) as caught:
        smollm.apply_chat_template(messages, template_kwargs=kwargs)
    assert caught.value.param == param


def test_a_template_that_refuses_the_messages_is_the_clients_error(smollm: Tokenizer) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestRejected, match="roles must alternate"):
        smollm.render_chat([{"role": "user", "content": "hi"}], chat_template=template)


def test_a_model_without_template_says_so(toy: Tokenizer) -> None:
    with pytest.raises(RequestRejected, match="has none") as caught:
        toy.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.hint is not None
    assert "/v1/completions" in caught.value.hint


def test_a_directory_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer can be read there") as caught:
        Tokenizer.from_path(str(tmp_path))
    assert str(tmp_path) in caught.value.message
    assert "tokenizer.json" in (caught.value.hint or "")


def test_a_saved_tokenizer_loads_again(toy: Tokenizer, tmp_path: Path) -> None:
    toy.hf.save_pretrained(str(tmp_path))
    again = Tokenizer.from_path(str(tmp_path), eos_token_ids=(5,))
    assert again.eos_token_ids == (5, *toy.eos_token_ids)
    assert again.encode("hello") == toy.encode("hello")
    assert again.vocab_size == toy.vocab_size


def test_a_long_text_is_encoded_as_a_batch_which_lets_other_threads_run(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """encode holds the interpreter's lock from start to end, so a megabyte would hold up every stream; encode_batch does not."""
    calls: list[str] = []

    class Watched:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def encode(self, text: str, **options: Any) -> Any:
            calls.append("encode")
            return self._backend.encode(text, **options)

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            calls.append("encode_batch")
            return self._backend.encode_batch(texts, **options)

    text = "The cat sat on the mat, été 🎉. " * 300
    expected = tuple(smollm.backend.encode(text, add_special_tokens=False).ids)
    monkeypatch.setattr(smollm, "backend", Watched(smollm.backend))
    assert len(text) > LONG_TEXT
    assert smollm.encode(text, add_special_tokens=False) == expected
    assert smollm.encode("The cat", add_special_tokens=False) == expected[:2]
    assert calls == ["encode_batch", "encode"]


def test_a_thread_runs_on_while_a_long_text_is_encoded(smollm: Tokenizer) -> None:
    """While one thread encodes two megabytes, this one goes on: many turns, not one at the end."""
    text = "The cat sat on the mat. " * 80_000
    worker = threading.Thread(target=smollm.encode, args=(text,))
    worker.start()
    num_turns = 0
    while worker.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 20
