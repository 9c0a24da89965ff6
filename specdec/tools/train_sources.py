"""Where the prompts of training data come from: a file, or built-in ones and ones that the target writes itself.

Owns: which conversations are asked next, never one twice. Must not know: answers, shards. Read next: train_data.py.
Half of the prompts the target writes itself, behind the head of a user's turn: no list of topics is as varied.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from specdec.engine.llm import LLM
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import ConfigError, RequestRejected
from specdec.sampling_params import SamplingParams
from specdec.tools.prompts import num_prompts, prompts_for
from specdec.tools.train_prompts import Conversation, Turn, built_in_prompts

SELF_WRITTEN = 0.6  # of the prompts, before those that turn out badly are dropped
SELF_TEMPERATURES = (0.8, 1.0)
MAX_SELF_WRITTEN = 96  # tokens
MIN_CHARACTERS = 15
MARK = "\u241f"  # stands for a user's text while the chat template is taken apart


def key_of(conversation: Conversation) -> str:
    """A short name of a conversation, by which it is remembered as asked."""
    text = json.dumps([(turn.role, turn.content) for turn in conversation])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Frame:
    """The chat template of a target: prompts as token ids, and where a user's turn begins and ends.

    Raises:
        ConfigError: the target has no chat template that shows a user's text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the target has no chat template, so nothing can be asked", hint="train a head for a chat model")
        head, mark, tail = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
        if not mark:
            raise ConfigError("the target's chat template does not show what the user says", hint="repair chat_template of its tokenizer")
        self.tokenizer = tokenizer
        self.opening = tokenizer.encode(head, add_special_tokens=False)  # behind these ids the target writes a user's turn itself
        self.end_of_turn = next(iter(tokenizer.encode(tail, add_special_tokens=False)), None)
        self.takes_system = self._takes(Turn("system", MARK))

    def ask(self, conversation: Conversation) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return self.tokenizer.apply_chat_template([{"role": turn.role, "content": turn.content} for turn in conversation])

    def _takes(self, turn: Turn) -> bool:
        try:
            return bool(self.ask((turn, Turn("user", "Hello"))))
        except RequestRejected:
            return False


class PromptSource(Protocol):
    """name: for the manifest. goes_on: whether answers are followed by second questions."""

    name: str
    goes_on: bool

    def take(self, count: int, *, asked: Set[str], passages: Sequence[str], rng: random.Random) -> list[Conversation]:
        """Up to `count` different conversations whose keys are not in `asked`; [] at the end. passages: texts of the target's own."""


class OwnSource:
    """Conversations without end: built-in ones, and ones that the target writes."""

    name = "built-in and self-written"
    goes_on = True

    def __init__(self, llm: LLM, frame: Frame) -> None:
        self._llm, self._frame = llm, frame
        self._measured = frozenset(prompts_for("chat", num_prompts("chat")))  # never trained on, whoever writes them

    def take(self, count: int, *, asked: Set[str], passages: Sequence[str], rng: random.Random) -> list[Conversation]:
        """As PromptSource says; never []."""
        own = self._self_written(round(count * SELF_WRITTEN), rng)
        built_in = built_in_prompts(rng.getrandbits(40), passages=passages, system=self._frame.takes_system)
        return list(islice(_fresh(_chain(own, built_in), asked), count))

    def _self_written(self, count: int, rng: random.Random) -> Iterator[Conversation]:
        """Users' turns that the target writes, where they come to an end."""
        ends = () if self._frame.end_of_turn is None else (self._frame.end_of_turn,)
        sampling = [
            SamplingParams(
                temperature=rng.choice(SELF_TEMPERATURES), max_tokens=MAX_SELF_WRITTEN, seed=rng.getrandbits(40), stop_token_ids=ends
            )
            for _ in range(count)
        ]
        for result in self._llm.generate([list(self._frame.opening)] * count, sampling, use_tqdm=False):
            text = result.outputs[0].text.strip()
            if result.outputs[0].finish_reason == "stop" and len(text) >= MIN_CHARACTERS and text not in self._measured:
                yield (Turn("user", text),)


class FileSource:
    """The conversations of a file, once each and in order.

    A line is a prompt. In a .jsonl file it is {"messages": [{"role": ..., "content": ...}, ...]}, which ends with the user, or
    {"prompt": ...}.

    Raises:
        ConfigError: the file cannot be read, has no prompt, or a line is not one.
    """

    goes_on = False

    def __init__(self, path: str) -> None:
        try:
            raw = Path(path).expanduser().read_bytes()
            lines = raw.decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--prompts {path!r} cannot be read: {error}", hint="give a UTF-8 text file with one prompt a line"
            ) from error
        is_json = path.endswith(".jsonl")
        self._conversations = [
            _from_json(line, f"line {number} of --prompts {path!r}") if is_json else (Turn("user", line.strip()),)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        if not self._conversations:
            raise ConfigError(f"--prompts {path!r} holds no prompt", hint="write one prompt a line")
        self.name = f"{Path(path).name} sha256:{hashlib.sha256(raw).hexdigest()[:16]}"

    def take(self, count: int, *, asked: Set[str], passages: Sequence[str], rng: random.Random) -> list[Conversation]:
        """As PromptSource says; the order of the file needs neither texts nor chance."""
        del passages, rng
        return list(islice(_fresh(self._conversations, asked), count))


def _chain(first: Iterable[Conversation], second: Iterable[Conversation]) -> Iterator[Conversation]:
    yield from first
    yield from second


def _fresh(conversations: Iterable[Conversation], asked: Set[str]) -> Iterator[Conversation]:
    seen = set(asked)
    for conversation in conversations:
        key = key_of(conversation)
        if key not in seen:
            seen.add(key)
            yield conversation


def _from_json(line: str, where: str) -> Conversation:
    hint = 'write {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}'
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}", hint=hint) from error
    messages = [{"role": "user", "content": entry["prompt"]}] if isinstance(entry, dict) and "prompt" in entry else None
    messages = entry.get("messages") if messages is None and isinstance(entry, dict) else messages
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ConfigError(f"{where} holds no messages with a role and a text", hint=hint)
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{where} does not end with a message of the user, so there is nothing to answer", hint=hint)
    return tuple(Turn(message["role"], message["content"]) for message in messages)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) and message[name] for name in ("role", "content"))
