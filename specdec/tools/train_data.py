"""specdec train data: the target answers prompts, many at once on its own engine, and the texts are kept as shards.

Owns: which prompts are asked, how answers are drawn, and what is thrown away. Must not know: what is trained on the texts.
Half of the prompts the target writes itself, after the head of a user's turn: no list of topics is as varied. Answers that end in a
loop are dropped, since a head that learns loops looks better than it is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from specdec.engine.llm import LLM
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams
from specdec.tools.train_prompts import built_in_prompts
from specdec.train.shards import Document, shard_paths, write_shard

PER_SHARD = 384  # prompts asked together
SELF_WRITTEN = 0.6  # of them, as many as turn out well
GREEDY = 0.45
TEMPERATURES = (0.7, 0.8, 1.0)
MAX_PROMPT, MAX_ANSWER = 300, 280  # tokens
LOOP_TAIL, LOOP_PERIOD = 64, 16
MARK = "\u241f"  # stands for a user's text while the chat template is taken apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """After each shard: answers kept of those asked, and answer tokens in all shards."""

    kept: int
    asked: int
    num_tokens: int


class Frame:
    """What the chat template puts before and behind a user's text, and the token that ends a turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.hf.chat_template:
            raise ConfigError("the target has no chat template, so nothing can be asked", hint="train a head for a chat model")
        head, mark, tail = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
        assert mark, "a chat template shows the user's text"
        self.tokenizer, self.head, self.tail = tokenizer, head, tail
        ends = tokenizer.encode(tail, add_special_tokens=False)
        self.end_of_turn = ends[0]

    def ask(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return self.tokenizer.encode(self.head + text + self.tail, add_special_tokens=False)

    def opening(self) -> tuple[int, ...]:
        """Token ids behind which the target writes a user's turn itself."""
        return self.tokenizer.encode(self.head, add_special_tokens=False)


def write_data(
    llm: LLM,
    out: Path,
    *,
    num_tokens: int,
    seed: int = 0,
    prompts: Sequence[str] = (),
    show: Callable[[Report], None] = lambda _: None,
) -> int:
    """Write shards until they hold num_tokens answer tokens, or `prompts` are used up; returns the answer tokens.

    prompts: asked once, in order; none: built-in and self-written ones. What a directory holds already counts, and no prompt
    that was asked before is asked again.
    """
    out.mkdir(parents=True, exist_ok=True)
    state = _State.read(out)
    frame = Frame(llm.tokenizer)
    while state.num_tokens < num_tokens:
        number = len(shard_paths(out))
        rng = random.Random(f"{seed}/{number}")
        texts = _next_texts(llm, frame, state, prompts, rng)
        if not texts:
            break
        documents = _answers(llm, frame, texts, rng)
        if documents:
            write_shard(out / f"shard-{number:05d}.safetensors", documents, vocab_size=len(llm.tokenizer.hf))
        state.asked.update(texts)
        state.num_tokens += sum(len(document.ids) - document.prompt_len for document in documents)
        state.write(out)
        show(Report(kept=len(documents), asked=len(texts), num_tokens=state.num_tokens))
    return state.num_tokens


@dataclass(slots=True)
class _State:
    """What a directory holds. It is written behind each shard, so a shard without it is asked for again under another number."""

    num_tokens: int
    asked: set[str]

    @classmethod
    def read(cls, out: Path) -> _State:
        path = out / "state.json"
        if not path.exists():
            return cls(0, set())
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(stored["tokens"], set(stored["seen"]))

    def write(self, out: Path) -> None:
        partial = out / "state.partial"
        partial.write_text(json.dumps({"tokens": self.num_tokens, "seen": sorted(self.asked)}), encoding="utf-8")
        partial.rename(out / "state.json")


def _next_texts(llm: LLM, frame: Frame, state: _State, prompts: Sequence[str], rng: random.Random) -> list[str]:
    if prompts:
        return list(islice((text for text in dict.fromkeys(prompts) if text not in state.asked), PER_SHARD))
    own = list(dict.fromkeys(text for text in _self_written(llm, frame, rng) if text not in state.asked))
    taken = state.asked.union(own)
    built_in = (text for text in built_in_prompts(rng.getrandbits(40)) if text not in taken)
    return own + list(dict.fromkeys(islice(built_in, PER_SHARD - len(own))))


def _self_written(llm: LLM, frame: Frame, rng: random.Random) -> Iterator[str]:
    """Users' turns that the target writes, where they come to an end."""
    count = round(PER_SHARD * SELF_WRITTEN)
    sampling = [
        SamplingParams(
            temperature=rng.choice(TEMPERATURES[1:]), max_tokens=96, seed=rng.getrandbits(40), stop_token_ids=(frame.end_of_turn,)
        )
        for _ in range(count)
    ]
    for result in llm.generate([list(frame.opening())] * count, sampling, use_tqdm=False):
        answer = result.outputs[0]
        text = answer.text.strip()
        if answer.finish_reason == "stop" and len(text) > 15:
            yield text


def _answers(llm: LLM, frame: Frame, texts: Sequence[str], rng: random.Random) -> list[Document]:
    prompts = [ids for ids in map(frame.ask, texts) if len(ids) <= MAX_PROMPT]
    temperatures = [0.0 if rng.random() < GREEDY else rng.choice(TEMPERATURES) for _ in prompts]
    sampling = [SamplingParams(temperature=t, max_tokens=MAX_ANSWER, seed=rng.getrandbits(40)) for t in temperatures]
    documents = []
    for ids, temperature, result in zip(
        prompts, temperatures, llm.generate([list(p) for p in prompts], sampling, use_tqdm=False), strict=True
    ):
        answer = list(result.outputs[0].token_ids)
        if result.outputs[0].finish_reason == "stop" and answer[-1:] != [frame.end_of_turn]:
            answer.append(frame.end_of_turn)  # a head should learn where answers end
        if len(answer) > 3 and not ends_in_loop(answer):
            documents.append(Document(ids=torch.tensor([*ids, *answer]), prompt_len=len(ids), temperature=temperature))
    return documents


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether the last tokens repeat with a short period."""
    tail = ids[-LOOP_TAIL:]
    if len(tail) < LOOP_TAIL:
        return False
    return any(all(tail[i] == tail[i - period] for i in range(period, LOOP_TAIL)) for period in range(1, LOOP_PERIOD + 1))
