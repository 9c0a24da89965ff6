"""specdec chat: a terminal conversation with a running OpenAI-compatible server.

Owns: the dialogue and how it is shown. Must not know: the engine; it speaks HTTP like any client.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from specdec.errors import ConfigError

HELP = "/reset starts over, /quit leaves, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Which server to talk to and how answers are drawn. model None: the first one that the server lists."""

    url: str
    model: str | None = None
    system: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    api_key: str | None = None


@dataclass(slots=True)
class Answer:
    """One answer while it streams. num_tokens is the server's count, None when it did not say."""

    text: str = ""
    num_tokens: int | None = None
    started_s: float = field(default_factory=time.monotonic)

    def summary(self) -> str:
        """Return tokens and tokens a second, or how long it took when the server gave no count."""
        took_s = time.monotonic() - self.started_s
        if self.num_tokens is None:
            return f"{took_s:.1f} s"
        return f"{self.num_tokens} tokens, {took_s:.1f} s, {self.num_tokens / max(took_s, 1e-9):.0f} tok/s"


class Conversation:
    """Messages so far, and the streaming request for the next answer."""

    def __init__(self, client: httpx.Client, options: ChatOptions, model: str) -> None:
        self._client = client
        self._options = options
        self._model = model
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._options.system}] if self._options.system else []

    def ask(self, text: str) -> Generator[Answer, None, None]:
        """Send a user message and yield the growing answer. Closing the iterator closes the connection, which stops the server's work.

        Raises:
            ConfigError: the server refused the request or broke off.
        """
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=self._body()) as response:
                if response.status_code != httpx.codes.OK:
                    raise ConfigError(f"the server answered {response.status_code}: {_error_text(response)}", hint="see its log, or /reset")
                for event in _events(response):
                    if _add(answer, event):
                        yield answer
        except httpx.HTTPError as error:
            raise ConfigError(f"the connection broke: {error or type(error).__name__}", hint="is the server still running?") from error
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        yield answer

    def _body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": self.messages,
            "temperature": self._options.temperature,
            "max_tokens": self._options.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def run(options: ChatOptions) -> None:
    """Talk until /quit or the end of the input.

    Raises:
        ConfigError: no server answers there.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    console = Console()
    with httpx.Client(base_url=options.url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=httpx.Timeout(10, read=600)) as client:
        model = options.model or first_model(client, options.url)
        console.print(f"{model}: {HELP}", style="dim", markup=False, highlight=False)
        conversation = Conversation(client, options, model)
        while (text := _read_line()) is not None and text != "/quit":
            if text == "/reset":
                conversation.reset()
                console.print("started over", style="dim")
            elif text.startswith("/"):
                console.print(HELP, style="dim")
            elif text:
                _show_answer(conversation, text, console)


def first_model(client: httpx.Client, url: str) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: no server, no model, or a refused key.
    """
    try:
        response = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no server answers at {url}: {error}", hint="start one with `specdec serve`, or give --url") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"the server at {url} wants a key", hint="give --api-key")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"{url} answered {response.status_code} to /v1/models without a model list", hint="is it an OpenAI-compatible server?"
        ) from None


def _show_answer(conversation: Conversation, text: str, console: Console) -> None:
    """Stream one answer to the terminal, as Markdown where it is one; Ctrl-C keeps what came so far."""
    answer, note = Answer(), ""
    stream = conversation.ask(text)
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as live:
                for answer in stream:
                    live.update(Markdown(answer.text))
        else:
            shown = 0
            for answer in stream:
                sys.stdout.write(answer.text[shown:])
                sys.stdout.flush()
                shown = len(answer.text)
            sys.stdout.write("\n")
    except KeyboardInterrupt:
        note = "stopped, "
    except ConfigError as error:  # one refused message must not end the conversation
        console.print(error.render(), style="red", markup=False, highlight=False)
        return
    finally:
        stream.close()  # drops the connection, which stops the work on the server
    console.print(note + answer.summary(), style="dim", markup=False, highlight=False)


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and (payload := line[5:].strip()) != "[DONE]":
            yield json.loads(payload)


def _add(answer: Answer, event: dict[str, Any]) -> bool:
    """Add one stream event to the answer; return whether text was added."""
    if "error" in event:
        raise ConfigError(f"the server broke off: {event['error'].get('message', event['error'])}")
    if event.get("usage"):
        answer.num_tokens = event["usage"].get("completion_tokens")
    delta = "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
    answer.text += delta
    return bool(delta)


def _error_text(response: httpx.Response) -> str:
    body = response.read().decode(errors="replace")
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200]
