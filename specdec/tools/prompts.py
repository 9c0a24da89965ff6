"""Prompts to measure with: questions to chat about, and texts to repeat or edit. The same for everybody, from fixed seeds.

Owns: the two workloads. Must not know: servers. A prompt is meant to be used once in a server's life, so that caches of
prefixes and of past answers find nothing; warm-up prompts are never measured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from specdec.errors import ConfigError

Workload = Literal["chat", "copy"]
WORKLOADS: tuple[Workload, ...] = ("chat", "copy")
COPY_PROMPTS = 1000
MIN_WORDS, MAX_WORDS = 60, 150  # of a text to copy: about 128 tokens of answer repeat it

TOPICS = (
    "growing tomatoes on a balcony", "the water cycle", "chess openings", "keeping a diary", "the Roman aqueducts",
    "baking sourdough bread", "black holes", "learning to swim as an adult", "the printing press", "sorting algorithms", "coral reefs",
    "planning a family budget", "jazz music", "how vaccines work", "mountain hiking in autumn", "public speaking", "the human heart",
    "recycling plastic", "the silk road", "training a puppy", "probability and dice", "writing a good cover letter", "volcanoes",
    "the history of bicycles", "healthy sleep habits", "photography at night", "prime numbers", "the French Revolution", "beekeeping",
    "electric cars", "learning Spanish", "wind energy", "making friends in a new city", "computer networks", "the life of penguins",
    "cooking rice", "origami", "time management for students", "ancient Egyptian writing", "running a small bookshop",
    "the seasons and the tilt of the Earth", "playing the guitar", "unit tests in Python", "saving water at home",
    "the migration of birds", "job interviews", "the theory of evolution", "knitting a scarf",
)  # fmt: skip
WARMUP_TOPICS = ("juggling", "the moons of Jupiter", "making paper", "lighthouses")
FIRST_QUESTIONS = (
    "Explain {} to someone who has never heard about it.",
    "What are three common mistakes people make with {}, and how can they be avoided?",
    "Write a short story in which {} plays the main part.",
    "Give me a plan, week by week, for getting to know {} in one month.",
    "Describe two different ways to look at {} and say which one you find more convincing.",
    "Write a friendly email that recommends {} to a colleague and gives two reasons.",
    "List five surprising facts about {}.",
    "Tell me about the history of {} in one paragraph.",
)
LATER_QUESTIONS = (  # of prompts behind those of the first questions, so that these keep their places
    "My grandmother asked me what {} is about. Help me answer her.",
    "Argue for or against spending a whole school year on {}.",
    "Plan a radio programme of thirty minutes about {}.",
    "Which five books, real or imagined, would you write about {}, and why?",
    "Prepare me for a debate in which I must defend {}.",
    "Picture a city that is built around {}. What is daily life like there?",
    "Put the most important events around {} in order and say why each mattered.",
    "Draft the opening paragraph of a travel diary that begins with {}.",
    "A friend says that {} is boring. Change their mind in four sentences.",
    "Which skills does one need for {}, and how does one practise each?",
    "Name the hardest thing about {} and suggest how to deal with it.",
    "Turn what you know about {} into rules for a board game.",
    "Outline a lesson of forty-five minutes on {} for children of ten.",
    "Invent a character whose whole life changed because of {}.",
    "Walk me through a first afternoon with {}, step by step.",
    "Ask me six questions to find out how much I know about {}.",
    "In what ways has {} changed over the last fifty years?",
    "Which everyday objects have something to do with {}? Explain how.",
    "Please settle an argument: is {} more an art or a science?",
    "Pretend that you are a museum guide in a room about {}. Welcome the visitors.",
)
QUESTIONS = (*FIRST_QUESTIONS, *LATER_QUESTIONS)

NAMES = ("Amira", "Bogdan", "Chiara", "Dmitri", "Elena", "Farid", "Greta", "Hiroshi", "Ines", "Jonas", "Katya", "Lorenzo", "Maren", "Nadia")
ROLES = ("the gardener", "the engineer", "a young teacher", "the captain", "our neighbour", "the old baker", "a visitor", "the librarian")
VERBS = ("carried", "repaired", "painted", "counted", "borrowed", "measured", "described", "collected", "hid", "sold", "cleaned", "weighed")
ADJECTIVES = ("blue", "heavy", "broken", "narrow", "silver", "quiet", "wooden", "strange", "empty", "ancient", "bright", "dusty")
NOUNS = (
    "lantern",
    "bridge",
    "map",
    "bicycle",
    "clock",
    "basket",
    "letter",
    "violin",
    "ladder",
    "window",
    "compass",
    "kettle",
    "statue",
    "boat",
)
PLACES = (
    "near the harbour",
    "behind the town hall",
    "at the edge of the forest",
    "in the market square",
    "on the second floor",
    "by the river",
)
TIMES = ("on Monday morning", "after the storm", "before sunrise", "late in the evening", "during the festival", "on a cold afternoon")
ENDINGS = (
    "and nobody noticed the difference", "because the road was closed", "while the others waited outside",
    "and wrote the number {} on the wall", "for exactly {} coins", "which took almost {} minutes", "although the key was still missing",
    "and promised to return in {} days",
)  # fmt: skip
VARIABLES = ("total", "values", "result", "counter", "items", "buffer", "price", "weight", "offset", "score", "length", "limit")


def num_prompts(workload: Workload) -> int:
    """Return how many distinct prompts a workload has."""
    return len(TOPICS) * len(QUESTIONS) if workload == "chat" else COPY_PROMPTS


def prompts_for(workload: Workload, count: int, *, skip: int = 0) -> list[str]:
    """Return `count` distinct prompts after the first `skip`, in an order that never changes.

    Raises:
        ConfigError: the workload has fewer prompts than that.
    """
    available = num_prompts(workload)
    if skip + count > available:
        raise ConfigError(
            f"{count} prompts after {skip} are asked for, but {workload} has {available}", hint="measure fewer requests or cells"
        )
    if workload == "chat":
        return [*_chat(TOPICS, FIRST_QUESTIONS), *_chat(TOPICS, LATER_QUESTIONS)][skip : skip + count]
    return [_copy_prompt(random.Random(f"copy {index}"), index) for index in range(skip, skip + count)]


def warmup_prompts(workload: Workload, count: int) -> list[str]:
    """Return prompts of the same kind that `prompts_for` never returns; at most 32 of them."""
    if workload == "chat":
        return _chat(WARMUP_TOPICS, FIRST_QUESTIONS)[:count]
    return [_copy_prompt(random.Random(f"warm-up {index}"), index) for index in range(min(count, 32))]


def _chat(topics: Sequence[str], questions: Sequence[str]) -> list[str]:
    """Every question about every topic, shuffled, so that neighbours differ in both."""
    prompts = [question.format(topic) for topic in topics for question in questions]
    random.Random(len(topics)).shuffle(prompts)
    return prompts


def _copy_prompt(rng: random.Random, index: int) -> str:
    match index % 4:
        case 0:
            return f"Repeat the following text exactly, word for word, and add nothing:\n\n{_story(rng)}"
        case 1:
            return f"Fix the spelling mistakes in this text and return the whole corrected text:\n\n{_with_typos(_story(rng), rng)}"
        case 2:
            old, new = rng.sample(NAMES, 2)
            return f"Replace the name {old} by {new} everywhere in this text and return the whole text:\n\n{_story(rng, hero=old)}"
        case _:
            code, old = _code(rng)
            return f"Rename the variable `{old}` to `{old}_value` in this Python code and return the whole code:\n\n```python\n{code}\n```"


def _story(rng: random.Random, hero: str | None = None) -> str:
    """Sentences of made-up facts until the drawn number of words is reached; nothing in them can be guessed, only copied."""
    wanted = rng.randint(MIN_WORDS, MAX_WORDS - 30)
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < wanted:
        who = rng.choice([hero or rng.choice(NAMES), f"{hero or rng.choice(NAMES)}, {rng.choice(ROLES)},"])
        ending = rng.choice(ENDINGS).format(rng.randint(3, 999))
        thing = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        sentences.append(f"{who} {rng.choice(VERBS)} {thing} {rng.choice(PLACES)} {rng.choice(TIMES)} {ending}.")
    return " ".join(sentences)


def _with_typos(text: str, rng: random.Random) -> str:
    """Swap two inner letters in about one long word of six."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 5 and word.isalpha() and rng.random() < 0.17:
            at = rng.randrange(1, len(word) - 2)
            words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _code(rng: random.Random) -> tuple[str, str]:
    """Return a made-up function of plain statements, 60 to 150 words long, and the variable in it that is to be renamed."""
    main, other, third = rng.sample(VARIABLES, 3)
    wanted = rng.randint(MIN_WORDS, MAX_WORDS - 30)
    lines = [f"def {rng.choice(VERBS)}_{rng.choice(NOUNS)}({other}, {third}):", f"    {main} = {rng.randint(1, 99)}"]
    while sum(len(line.split()) for line in lines) < wanted:
        number = rng.randint(2, 99)
        lines += rng.choice(
            (
                [f"    if {main} > {other} + {number}:", f"        {main} = {main} - {third} * {rng.randint(2, 9)}"],
                [f"    for step in range({number}):", f"        {main} = {main} + step * {other}"],
                [f"    {third} = {main} // {number} + {other}", f"    print('{rng.choice(NOUNS)}', {main}, {third})"],
                [f"    while {main} % {number} != 0:", f"        {main} = {main} + 1"],
            )
        )
    return "\n".join([*lines, f"    return {main} + {other}"]), main
