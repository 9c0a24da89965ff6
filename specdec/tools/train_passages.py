"""Requests about a given text: short reports made of facts, lists, and passages that the target wrote, with something to do with them.

Owns: the texts and the tasks. Must not know: engines. Read next: train_prompts.py, which mixes them with the other kinds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

TEXT_TASKS = (
    "Summarize the text below in one sentence.", "Rewrite this passage in a more casual tone.", "Rewrite this passage in a formal tone.",
    "Translate this text into Spanish.", "Translate this text into German.", "What is the main idea of this passage?",
    "Write three questions that this text answers.", "Turn this text into bullet points.", "Make this text half as long.",
    "Continue this text with one more paragraph.", "Suggest a headline for this text.", "List the key words of this text.",
    "Is the tone of this text positive, negative or neutral? Say why.", "Rewrite this in the past tense.",
    "Explain this text to a ten-year-old.", "Write a reply to this text.", "What is missing from this text? Name two points.",
    "Write the opposite opinion to this text.", "Turn this text into a short dialogue.", "Correct the grammar of this passage.",
    "Rewrite this text in the first person.", "Give the first sentence of this text in other words.",
)  # fmt: skip
LIST_TASKS = (
    "Sort this list alphabetically", "Number these items", "Turn this list into a Markdown table with a column of prices",
    "Group these items in two categories", "Write one sentence about each of these items", "Return this list as a JSON array",
    "Which of these is the odd one out, and why? Items", "Write a short story that mentions all of these", "Remove the longest word",
)  # fmt: skip
ITEMS = (
    "pear", "hammer", "scarf", "candle", "notebook", "pillow", "onion", "rope", "cup", "lamp", "brush", "carrot", "blanket", "spoon",
    "ticket", "helmet", "jacket", "melon", "needle", "umbrella", "bucket", "chair", "lemon", "battery", "envelope", "towel", "bell",
)  # fmt: skip
PEOPLE = (
    "Oliver Grant", "Sofia Marino", "Kenji Tanaka", "Aisha Bello", "Laura Jensen", "Mateo Cruz", "Priya Nair", "Samuel Okoye",
    "Hannah Weiss", "Tomas Novak", "Yara Haddad", "Lucas Moreau", "Emily Carter", "Ravi Menon", "Nora Lindberg", "David Kim",
)  # fmt: skip
CITIES = (
    "Lisbon", "Denver", "Osaka", "Nairobi", "Toronto", "Prague", "Cape Town", "Lima", "Dublin", "Hanoi", "Oslo", "Austin", "Bergen",
)  # fmt: skip
EVENTS = (
    "book fair", "charity run", "science night", "film festival", "job fair", "flower show", "cooking contest", "summer concert",
    "robotics workshop", "street market", "photo exhibition", "spelling contest",
)  # fmt: skip
GOODS = ("desk lamp", "rain jacket", "coffee grinder", "travel bag", "headphones", "garden chair", "water bottle", "office chair")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "March", "April", "June", "July", "September", "October", "November")
REPORTS = (  # a report, and what can be asked about it; the answer is in the text
    (
        "The {event} in {city} takes place on {day}, {month} {date}. Doors open at {hour} o'clock. Tickets cost {price} dollars and can be "
        "bought online. {person} will give the opening speech, and about {count} visitors are expected.",
        ("When does the event take place?", "How much is a ticket?", "Who gives the opening speech?", "How many visitors are expected?"),
    ),
    (
        "Dear customer, thank you for your order number {order}. Your {good} was sent from {city} on {month} {date} and should arrive "
        "within {count} hours. The price was {price} dollars. If anything is wrong, please write to {person} in our service team.",
        ("What was ordered?", "Where was the parcel sent from?", "What should the customer do if something is wrong?", "What did it cost?"),
    ),
    (
        "{person} was born in {city} and worked as a teacher for {hour} years. In {month} she opened a small shop that sells a {good} of "
        "her own design for {price} dollars. In the first week she sold {count} of them, mostly on {day}.",
        ("Where was the person born?", "What does the shop sell?", "How many were sold in the first week?", "What was the job before?"),
    ),
    (
        "Minutes of the meeting on {day}, {month} {date}. Present: {person} and {other}. The team decided to move the office from {city} "
        "to {town}. The move costs {price} thousand dollars. {other} will look for a company that carries the {good}s. Next meeting: "
        "{hour} o'clock.",
        ("What was decided?", "Who was present?", "What does the move cost?", "Who looks for a company?", "Where will the office be?"),
    ),
    (
        "The weather in {city} was unusual this {month}: {hour} days of rain in a row, and {count} millimetres on {day} alone. {person}, "
        "who has kept records for {price} years, said that she had seen this only once. In {town} it stayed dry.",
        ("How many days did it rain?", "Who has kept records?", "Where did it stay dry?", "How much rain fell in one day?"),
    ),
)  # fmt: skip
REPORT_FORMS = (
    "{report}\n\n{question}", "Read the text and answer the question.\n\nText: {report}\n\nQuestion: {question}",
    "Context: {report}\n\nUsing only the context, answer: {question}", "{question}\n\n{report}",
    "Extract the names, places, dates and amounts in this text as JSON:\n\n{report}",
    "List every number in this text and say what it stands for.\n\n{report}",
)  # fmt: skip


def passage_prompt(rng: random.Random, passages: Sequence[str]) -> str:
    """A request about a text: one of `passages` (what the target wrote before) half of the time, where there are any."""
    draw = rng.random()
    if passages and draw < 0.5:
        return f"{rng.choice(TEXT_TASKS)}\n\n{rng.choice(passages)}"
    if draw < 0.62:
        return _list_prompt(rng)
    report, question = _report(rng)
    if draw < 0.8:
        return f"{rng.choice(TEXT_TASKS)}\n\n{report}"
    return rng.choice(REPORT_FORMS).format(report=report, question=question)


def _report(rng: random.Random) -> tuple[str, str]:
    text, questions = rng.choice(REPORTS)
    person, other = rng.sample(PEOPLE, 2)
    city, town = rng.sample(CITIES, 2)
    facts = {
        "event": rng.choice(EVENTS), "good": rng.choice(GOODS), "day": rng.choice(DAYS), "month": rng.choice(MONTHS),
        "person": person, "other": other, "city": city, "town": town, "date": rng.randint(1, 28), "hour": rng.randint(3, 12),
        "price": rng.randint(5, 95), "count": rng.randint(12, 480), "order": rng.randint(10_000, 99_999),
    }  # fmt: skip
    return text.format_map(facts), rng.choice(questions)


def _list_prompt(rng: random.Random) -> str:
    items = rng.sample(ITEMS, rng.randint(4, 9))
    shown = "\n".join(f"- {item}" for item in items) if rng.random() < 0.5 else ", ".join(items)
    return f"{rng.choice(LIST_TASKS)}:\n\n{shown}"
