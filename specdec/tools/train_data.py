"""specdec train data: the target answers prompts, many at once on its own engine, and the texts are kept as shards.

Owns: how answers are drawn, what is thrown away, and going on where a stopped run was. Must not know: what is trained on the texts.
Answers that end in a loop are dropped, since a head that learns loops looks better than it is. A shard is written whole, with the
keys of its prompts, so a run that is killed loses at most the answers of one shard and never asks twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.engine.llm import LLM
from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams
from specdec.tools.train_prompts import FOLLOW_UPS, Conversation, Turn
from specdec.tools.train_sources import Frame, PromptSource, key_of
from specdec.train.manifest import write_manifest
from specdec.train.shards import Document, Origin, read_origin, read_shard, shard_paths, write_shard

PER_SHARD = 384  # prompts asked together
GREEDY = 0.4
TEMPERATURES = (0.8, 0.9, 1.0)
MAX_PROMPT = 300  # tokens
LOOP_TAIL, LOOP_PERIOD = 64, 16
FOLLOWED_UP = 0.12  # of the answers, if they are short and came to an end
MAX_FOLLOWED = 200  # tokens of prompt and answer
PASSAGE = (40, 160)  # tokens of an answer that later prompts ask about
BARREN_ROUNDS = 3  # shards without one usable answer, behind which a run gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """num_tokens: answer tokens in all. answer_tokens: of one answer, at most. seed: of prompts and answers.

    Raises:
        ConfigError: a value is outside its range.
    """

    num_tokens: int
    answer_tokens: int = 280
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("tokens", self.num_tokens, 1), ("answer-tokens", self.answer_tokens, 8)):
            if value < least:
                raise ConfigError(f"{name} is {value}, but it must be at least {least}")

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest document."""
        return MAX_PROMPT + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """After each shard: answers kept of those asked, answer tokens in all shards, and per second in this one."""

    kept: int
    asked: int
    num_tokens: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A document, the conversation with the target's answer at its end, and whether that came to an end before its limit."""

    document: Document
    conversation: Conversation
    is_whole: bool


def write_data(
    llm: LLM,
    out: Path,
    source: PromptSource,
    *,
    fingerprint: str,
    options: DataOptions,
    show: Callable[[Report], None] = lambda _: None,
) -> int:
    """Write shards until they hold the wanted answer tokens, or the source has no more prompts; returns the answer tokens.

    What the directory holds already counts, and no prompt that was asked before is asked again. fingerprint: of the target.

    Raises:
        ConfigError: the directory holds texts of another target, or the target gives no usable answers.
    """
    out.mkdir(parents=True, exist_ok=True)
    asked, num_tokens = _progress_of(out, fingerprint)
    frame, barren = Frame(llm.tokenizer), 0
    while num_tokens < options.num_tokens:
        number, start_s = len(shard_paths(out)), time.monotonic()
        rng = random.Random(f"{options.seed}/{number}/{barren}")
        conversations = source.take(PER_SHARD, asked=asked, passages=_passages(llm, out, number), rng=rng)
        if not conversations:
            break
        documents = _documents(llm, frame, conversations, rng, options, goes_on=source.goes_on)
        keys = tuple(map(key_of, conversations))
        asked.update(keys)
        if documents:
            origin = Origin(model=fingerprint, source=source.name, seed=options.seed, asked=keys)
            write_shard(out / f"shard-{number:05d}.safetensors", documents, vocab_size=llm.tokenizer.vocab_size, origin=origin)
            write_manifest(out)
        barren = 0 if documents else barren + 1
        if barren == BARREN_ROUNDS:
            raise ConfigError(
                f"the target gave no usable answer to {barren * PER_SHARD} prompts: all were empty or ended in a loop",
                hint="use a chat model, and look at some of its answers with specdec chat",
            )
        written = _answer_tokens(documents)
        num_tokens += written
        show(
            Report(
                kept=len(documents),
                asked=len(conversations),
                num_tokens=num_tokens,
                tokens_per_s=written / (time.monotonic() - start_s),
            )
        )
    return num_tokens


def _progress_of(out: Path, fingerprint: str) -> tuple[set[str], int]:
    """Keys of the prompts that were asked, and the answer tokens that are there."""
    asked: set[str] = set()
    num_tokens = 0
    for shard in shard_paths(out):
        origin = read_origin(shard)
        if origin and origin.model != fingerprint:
            raise ConfigError(
                f"out is {str(out)!r}, but {shard.name} there was written by another model (fingerprint {origin.model})",
                hint="write the texts of each target to a directory of its own",
            )
        asked.update(origin.asked if origin else ())
        num_tokens += _answer_tokens(list(read_shard(shard, features=False)))
    return asked, num_tokens


def _answer_tokens(documents: Sequence[Document]) -> int:
    return sum(len(document.ids) - document.prompt_len for document in documents)


def _passages(llm: LLM, out: Path, number: int) -> list[str]:
    """Answers of the last shard that are a good length to ask about."""
    if number == 0:
        return []
    answers = (document.ids[document.prompt_len :].tolist() for document in read_shard(shard_paths(out)[-1], features=False))
    return [llm.tokenizer.decode(answer).strip() for answer in answers if PASSAGE[0] <= len(answer) <= PASSAGE[1]]


def _documents(
    llm: LLM, frame: Frame, conversations: Sequence[Conversation], rng: random.Random, options: DataOptions, *, goes_on: bool
) -> list[Document]:
    answers = _answers(llm, frame, conversations, rng, options)
    if goes_on:
        short = [answer for answer in answers if answer.is_whole and len(answer.document.ids) <= MAX_FOLLOWED]
        chosen = rng.sample(short, min(len(short), round(len(answers) * FOLLOWED_UP)))
        second = [(*answer.conversation, Turn("user", rng.choice(FOLLOW_UPS))) for answer in chosen]
        answers += _answers(llm, frame, second, rng, options)
    return [answer.document for answer in answers]


def _answers(llm: LLM, frame: Frame, conversations: Sequence[Conversation], rng: random.Random, options: DataOptions) -> list[_Answer]:
    """Ask, and keep what is fit to learn from. Prompts that are too long are left out."""
    asked = [(conversation, list(frame.ask(conversation))) for conversation in conversations]
    asked = [(conversation, ids) for conversation, ids in asked if len(ids) <= MAX_PROMPT]
    sampling = [
        SamplingParams(
            temperature=0.0 if rng.random() < GREEDY else rng.choice(TEMPERATURES),
            max_tokens=options.answer_tokens,
            seed=rng.getrandbits(40),
        )
        for _ in asked
    ]
    answers = []
    for (conversation, ids), params, result in zip(
        asked, sampling, llm.generate([ids for _, ids in asked], sampling, use_tqdm=False), strict=True
    ):
        output = result.outputs[0]
        written, text = list(output.token_ids), output.text.strip()  # the ids end with the end of the turn
        if not text or ends_in_loop(written):
            continue
        document = Document(ids=torch.tensor([*ids, *written]), prompt_len=len(ids), temperature=params.temperature, seed=params.seed or 0)
        told = (*conversation, Turn("assistant", text))
        answers.append(_Answer(document=document, conversation=told, is_whole=output.finish_reason == "stop"))
    return answers


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether the last tokens repeat with a short period."""
    tail = ids[-LOOP_TAIL:]
    if len(tail) < LOOP_TAIL:
        return False
    return any(all(tail[i] == tail[i - period] for i in range(period, LOOP_TAIL)) for period in range(1, LOOP_PERIOD + 1))
