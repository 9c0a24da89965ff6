"""The terminal chat against a scripted server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from specdec.errors import ConfigError
from specdec.tools.chat import ChatOptions, Conversation, run
from tests.bench.fake_server import PIECES, TOKENS_PER_ANSWER, FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Type these lines, then close the input."""
    queue = list(lines)

    def read(_: str) -> str:
        if not queue:
            raise EOFError
        return queue.pop(0)

    monkeypatch.setattr("builtins.input", read)


def test_answers_stream_and_the_history_grows(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello", "", "again")
    run(ChatOptions(url=server.url + "/v1", system="be brief"))
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.bodies[1]["messages"][2]["content"] == "".join(PIECES)
    assert server.bodies[1]["model"] == "fake"
    out = capsys.readouterr().out
    assert out.count("Once upon a time.") == 2
    assert out.count(f"{TOKENS_PER_ANSWER} tokens, ") == 2


def test_reset_forgets_and_quit_leaves(server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say(monkeypatch, "one", "/reset", "two", "/what", "/quit", "never sent")
    run(ChatOptions(url=server.url))
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]
    assert capsys.readouterr().out.count("/reset starts over") == 2  # at the start, and for the unknown command


def test_a_refused_message_is_shown_and_forgotten(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "please FAIL", "hello")
    run(ChatOptions(url=server.url))
    assert "error: the server answered 400: told to fail" in capsys.readouterr().out
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hello"]


def test_stopping_an_answer_keeps_what_came(server: FakeServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(client, ChatOptions(url=server.url), "fake")
        stream = conversation.ask("hello")
        assert next(stream).text == PIECES[0]
        stream.close()
    assert [message["content"] for message in conversation.messages] == ["hello", PIECES[0]]


def test_no_server_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="no server answers at http://127") as caught:
        run(ChatOptions(url="http://127.0.0.1:9"))
    assert "specdec serve" in str(caught.value.hint)
