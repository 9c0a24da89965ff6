"""Prompts to train on: many kinds of requests about many things, from a seed. None of them is among those that are measured with.

Owns: the texts. Must not know: engines. specdec/tools/prompts.py holds the prompts for measuring; a test keeps the two apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

TOPICS = (
    "apple orchards", "the immune system", "tides", "medieval castles", "street food", "bird watching", "submarines", "the stock market",
    "tea ceremonies", "glaciers", "robot vacuum cleaners", "poetry", "the periodic table", "camping in the rain", "marathon training",
    "the Great Wall of China", "dinosaurs", "video editing", "lasers", "houseplants", "the internet of things", "opera", "fishing",
    "the nervous system", "rainforests", "remote work", "cryptography", "gravity", "board games", "electric guitars", "the Olympic games",
    "compost", "sign language", "databases", "pottery", "nutrition labels", "the Amazon river", "magnets", "stage fright", "ballet",
    "woodworking", "deserts", "the Vikings", "mental arithmetic", "cheese making", "satellites", "coffee roasting", "climate zones",
    "sewing machines", "the moon landing", "ants", "negotiation", "calligraphy", "earthquakes", "sailing", "neural networks",
    "the digestive system", "carnivals", "museums", "speed reading", "bamboo", "railways", "insurance", "comets", "gardening tools",
    "the Renaissance", "soccer tactics", "allergies", "spreadsheets", "rain gauges", "wolves", "bridges", "solar eclipses", "yoga",
    "the Roman Senate", "ice cream", "version control", "astronauts", "zoos", "recursion", "mirrors", "honey", "skateboarding",
    "democracy", "fractions", "salt", "whales", "thermometers", "hotel management", "the violin", "plate tectonics", "hiccups",
    "online shopping", "the circus", "chocolate", "wildfires", "libraries", "ceramic tiles", "batteries", "storytelling",
    "memory techniques", "horses", "deep sea vents", "traffic lights", "lightning", "bread ovens", "tax returns", "folk dances",
    "microscopes", "tropical fruit", "small talk", "elevators", "mushrooms", "clock towers", "paper airplanes", "data privacy",
    "sculpture", "sharks", "time zones", "lullabies", "antibiotics", "snowboarding", "hurricanes", "haiku", "calendar systems",
    "bicycles repair", "the Eiffel Tower", "first aid", "grammar", "butterflies", "kites", "ecosystems", "leadership", "fireworks",
    "the Mongol Empire", "vitamins", "sandcastles", "interest rates", "owls", "wetlands", "typing", "puppetry", "pyramids", "radio",
    "swimming pools", "vegetable soup", "optical illusions", "chess clocks", "rivers", "parrots", "magnetic compasses", "team sports",
    "blood pressure", "the water wheel", "elections", "sunflowers", "meteorology", "coins", "marriage customs", "street lamps", "planets",
    "pasta", "user interfaces", "friendship", "meditation", "rocks and minerals", "tigers", "budget travel", "dreams", "winter clothes",
)  # fmt: skip
TEMPLATES = (
    "What is {}?", "Explain {} in simple terms.", "Give me three tips about {}.", "How would you describe {} to a child?",
    "Write a poem about {}.", "Write a short dialogue between two friends about {}.", "What are the advantages and disadvantages of {}?",
    "Why is {} important?", "Create a quiz with five questions about {} and give the answers.",
    "Summarize what you know about {} in three sentences.", "Write a news article about {}.",
    "Imagine you are an expert in {}. Introduce yourself.", "What should a beginner know about {}?", "Compare {} with {}.",
    "How are {} and {} related?", "Write a blog post about {}.", "Write an essay of two paragraphs on {}.",
    "Give me a step-by-step guide related to {}.", "Write a product description that has to do with {}.",
    "Make a table with two columns about {}.", "Write a letter to a friend about {}.", "What questions would you ask an expert about {}?",
    "Tell me a joke about {}.", "Write a story that begins with a problem about {} and ends with {}.",
    "List ten words connected with {}.", "What is the future of {}?", "What is the biggest misunderstanding about {}?",
    "Write a speech about {}.", "Describe a day in the life of someone who works with {}.", "How can I learn more about {}?",
    "Is {} good or bad? Give your opinion.", "Write an outline for a book about {}.", 'Translate into French: "I like {}."',
    "Write a social media post about {}.", "What equipment do I need for {}?", "Define {} and give an example.",
    "Who invented or discovered {}?", "Write a review of a documentary about {}.",
    'Rewrite this sentence in a formal style: "{} is kind of cool, you know."', "Suggest a title for an article about {} and {}.",
    "Write a python function that prints facts about {}.", "Explain how {} works.",
    "What are some common questions people ask about {}? Answer them briefly.",
    "Write a conversation between a teacher and a student about {}.", "Create a schedule for a workshop on {}.",
    "Give an example of a metaphor that uses {}.", "What would happen if there were no {}?", "Describe {} using the five senses.",
    "Write a scene for a play about {}.", "How much does {} cost, and why?",
)  # fmt: skip
SUMS = (
    "If a box holds {a} eggs and I have {b} boxes, how many eggs do I have?", "What is {a} plus {b}?",
    "A train travels {a} km in {b} hours. What is its average speed?", "Solve for x: {a}x + {b} = {c}.",
    "I have {c} dollars and spend {a}. Then I earn {b}. How much do I have now?",
    "Write a Python function that returns the sum of the first {a} even numbers.", "List the multiples of {a} up to {c}.",
    "What is {a} percent of {c}?",
)  # fmt: skip
CODE_TASKS = (
    "reverse a string", "check whether a word is a palindrome", "compute the factorial of a number", "find the largest number in a list",
    "count vowels in a text", "merge two sorted lists", "read a CSV file", "sort a dictionary by value", "generate random passwords",
    "convert Celsius to Fahrenheit", "compute Fibonacci numbers", "remove duplicates from a list", "find prime numbers below n",
    "parse a date", "validate an email address", "compute the average of a list", "implement a stack", "implement binary search",
    "download a web page", "draw a bar chart",
)  # fmt: skip
LANGUAGES = (
    "Python", "JavaScript", "Java", "C++", "SQL", "Rust", "Go",
)  # fmt: skip
CODE_TEMPLATES = (
    "Write {l} code to {c}.", "How do I {c} in {l}?", "Explain how to {c} in {l} with an example.",
)  # fmt: skip
SUM_SHARE = CODE_SHARE = 0.08


def built_in_prompts(seed: int) -> Iterator[str]:
    """Yield prompts without end, the same for the same seed. Some come twice."""
    rng = random.Random(seed)
    while True:
        draw = rng.random()
        if draw < SUM_SHARE:
            yield _sum(rng)
        elif draw < SUM_SHARE + CODE_SHARE:
            yield rng.choice(CODE_TEMPLATES).format(l=rng.choice(LANGUAGES), c=rng.choice(CODE_TASKS))
        else:
            template = rng.choice(TEMPLATES)
            text = template.format(*rng.sample(TOPICS, template.count("{}")))
            yield text[0].upper() + text[1:]


def _sum(rng: random.Random) -> str:
    a, b = rng.randint(2, 20), rng.randint(2, 15)
    return rng.choice(SUMS).format(a=a, b=b, c=a * b + rng.randint(1, 90))
