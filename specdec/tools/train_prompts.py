"""Prompts to train on: many kinds of requests about many things, from a seed. None of them is among those that are measured with.

Owns: the texts. Must not know: engines. specdec/tools/prompts.py holds the prompts for measuring; a test keeps the two apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.tools.train_passages import passage_prompt

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
    "apartment leases", "barcodes", "blacksmiths", "board meetings", "brain teasers", "candles", "car engines", "castles in Scotland",
    "cathedrals", "chemical bonds", "city parks", "coal mining", "comic books", "constellations", "credit cards", "crossword puzzles",
    "customer complaints", "dental care", "detective novels", "diamonds", "drones", "eclipse myths", "electric motors", "emails at work",
    "escape rooms", "fairy tales", "farm animals", "fermentation", "fire drills", "flags", "fog", "food allergies", "fossils", "gears",
    "genetics", "glass blowing", "graph theory", "greenhouses", "hand washing", "hot air balloons", "human rights", "icebergs",
    "inflation", "job contracts", "jet engines", "kitchen knives", "landscape painting", "lawn mowers", "levers and pulleys",
    "light bulbs", "logic gates", "machine translation", "maps of the world", "maple syrup", "matrices", "metal detectors",
    "modern dance", "moss", "mystery stories", "night buses", "noise in cities", "nuclear power", "olive oil", "open source software",
    "oxygen", "parachutes", "passports", "pen pals", "perfume", "pigeons", "pinball", "plumbing", "podcasts", "pollen", "postcards",
    "power outages", "public holidays", "quilts", "rainbows", "raising chickens", "rhyme", "road signs", "rocket launches", "rowing",
    "rubber", "salmon", "school uniforms", "sea turtles", "second-hand clothes", "shadows", "silk", "sleepwalking", "snow",
    "soap", "sound waves", "space stations", "spices", "sports injuries", "stained glass", "steam engines", "stamps", "sugar",
    "sundials", "surfing", "table manners", "tailoring", "taste", "teamwork", "telescopes", "text adventures", "the alphabet",
    "the Black Sea", "the circulatory system", "the greenhouse effect", "the Inca Empire", "the ozone layer", "the stock of a library",
    "the suffragettes", "theatre masks", "tide pools", "toy trains", "triangles", "tunnels", "vegetarian cooking", "ventriloquism",
    "volunteering", "watches", "water polo", "wedding speeches", "weeds", "wheat", "wild horses", "windmills", "word games", "zippers",
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
    "Give me a JSON object that describes {} with four fields.", "Write a checklist for {}.", "True or false: {} can be dangerous.",
    "Answer in one sentence: what do people like about {}?", "Write a limerick about {}.", "Rank {} and {} by usefulness. Explain.",
    "I am nervous about {}. What would you say to me?", "Write the first paragraph of a novel set in the world of {}.",
    "What did people think about {} a hundred years ago?", "Write an interview with someone who loves {}.",
    "Give two arguments for and two against {}.", "Write an advertisement about {} and {}.", "What is the link between {} and money?",
    "Which words rhyme with the last word of this: {}?", "Write a diary entry by someone whose hobby is {}.",
    "Explain the difference between {} and {} with an example.", "Write a polite complaint to a company about {}.",
    "Write a recipe inspired by {}.", "Describe a picture that shows {}.", "Make up a proverb about {}.",
    "Tell me something about {} that I can use in a speech.", "Suggest five names for a club for people interested in {}.",
    "Write a text message to my sister about {}.", "What are the main parts or types of {}?", "Help me brainstorm ideas around {} and {}.",
)  # fmt: skip
SUMS = (
    "If a box holds {a} eggs and I have {b} boxes, how many eggs do I have?", "What is {a} plus {b}?",
    "A train travels {a} km in {b} hours. What is its average speed?", "Solve for x: {a}x + {b} = {c}.",
    "I have {c} dollars and spend {a}. Then I earn {b}. How much do I have now?",
    "Write a Python function that returns the sum of the first {a} even numbers.", "List the multiples of {a} up to {c}.",
    "What is {a} percent of {c}?", "What is {c} minus {a}?", "What is {a} times {b}?", "What is {c} divided by {b}?",
    "A book has {c} pages. Mia reads {a} pages a day. How many days does she need?", "Is {c} an even number? Explain.",
    "A rectangle is {a} metres long and {b} metres wide. What are its area and its perimeter?",
    "Tom is {a} years old. His aunt is {b} years older. How old will both be in five years?",
    "A shirt costs {c} dollars. It is {a} percent off. What is the new price?", "Count from {a} to {c} in steps of {b}.",
    "Three friends share {c} sweets. Each gets the same number. How many are left over?", "Round {c} to the nearest ten.",
)  # fmt: skip
CODE_TASKS = (
    "reverse a string", "check whether a word is a palindrome", "compute the factorial of a number", "find the largest number in a list",
    "count vowels in a text", "merge two sorted lists", "read a CSV file", "sort a dictionary by value", "generate random passwords",
    "convert Celsius to Fahrenheit", "compute Fibonacci numbers", "remove duplicates from a list", "find prime numbers below n",
    "parse a date", "validate an email address", "compute the average of a list", "implement a stack", "implement binary search",
    "download a web page", "draw a bar chart", "split a sentence into words", "shuffle a list", "transpose a matrix", "write a log file",
    "measure the time a function takes", "flatten a nested list", "convert a number to binary", "read a JSON file", "handle an exception",
    "define a class for a bank account", "count words in a file", "find the second largest element", "rotate an array", "build a queue",
    "compute the greatest common divisor", "print a multiplication table", "group records by key", "write a loop that stops at zero",
)  # fmt: skip
LANGUAGES = (
    "Python", "JavaScript", "Java", "C++", "SQL", "Rust", "Go",
)  # fmt: skip
CODE_TEMPLATES = (
    "Write {l} code to {c}.", "How do I {c} in {l}?", "Explain how to {c} in {l} with an example.",
    "Give me a function in {l} to {c}, with comments.", "What mistakes do people make when they {c} in {l}?",
    "Write a test for {l} code that has to {c}.",
)  # fmt: skip
FACTS = (
    "What is the capital of {country}?", "Which language is spoken in {country}?", "Name three cities in {country}.",
    "On which continent is {country}?", "What food is typical of {country}?", "What is the currency of {country}?",
    "What does the word \"{word}\" mean?", "Use the word \"{word}\" in a sentence.", "Give a synonym of \"{word}\".",
    "What is the opposite of \"{word}\"?", "Spell \"{word}\" backwards.", "How many letters does the word \"{word}\" have?",
    "What is the plural of \"{word}\"?", "Who wrote {book}?", "What is {book} about?", "What happens at the end of {book}?",
)  # fmt: skip
COUNTRIES = (
    "Portugal", "Kenya", "Japan", "Peru", "Canada", "Norway", "Vietnam", "Morocco", "Poland", "Chile", "Thailand", "Greece", "Ghana",
    "New Zealand", "Mexico", "Turkey", "Iceland", "Indonesia", "Argentina", "Hungary", "Nepal", "Cuba", "Finland", "South Korea",
)  # fmt: skip
WORDS = (
    "brave", "curious", "generous", "fragile", "ancestor", "horizon", "reluctant", "harvest", "ordinary", "whisper", "journey",
    "patience", "shelter", "vivid", "wander", "gather", "elegant", "humble", "rapid", "border", "stubborn", "mercy", "glance",
)  # fmt: skip
BOOKS = (
    "Romeo and Juliet", "Moby-Dick", "Don Quixote", "Pride and Prejudice", "The Odyssey", "Frankenstein", "Treasure Island",
    "Alice in Wonderland", "War and Peace", "The Jungle Book", "Dracula", "Little Women",
)  # fmt: skip
ROLES = (
    "You are a pirate captain. Stay in your role.", "You are a strict but fair maths teacher.", "You answer in at most two sentences.",
    "You are a travel guide who loves details.", "You are a helpful assistant that answers with bullet points.",
    "You are a science fiction author.", "You are a patient doctor who explains things simply.", "You reply as JSON only.",
    "You are a grumpy but kind wizard.", "You are a programmer who reviews code.", "You are a customer service agent.",
    "You are a helpful assistant.", "You are a philosopher. Ask a question back.", "You speak to small children.",
    "You are a sports commentator.", "You are an editor who writes clearly and briefly.",
)  # fmt: skip
FOLLOW_UPS = (
    "Can you make that shorter?", "Can you give me an example?", "Why?", "Explain that in other words.", "Tell me more.", "Thank you!",
    "Are you sure about that?", "What else should I know?", "Now write it as a poem.", "Turn that into a list.", "I don't understand.",
    "Which of these points matters most?", "Translate that into Italian.", "How would an expert put it?", "Give me two alternatives.",
    "What are the risks?", "Make it funnier.", "Make it more formal.", "Can you summarize that in one sentence?", "And what comes next?",
    "How long does that take?", "Can you add a title?", "What would be a good first step?", "Write it from another point of view.",
    "That is not what I meant. Please try again.", "Is there a cheaper way?", "Where can I read more about this?", "Add an ending to it.",
    "What is the opposite view?", "Put the main facts into a table.", "Ask me three questions about this.", "Who would disagree, and why?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. role: system, user or assistant."""

    role: str
    content: str


Conversation = tuple[Turn, ...]  # ends with what the user says


def built_in_prompts(seed: int, *, passages: Sequence[str] = (), system: bool = True) -> Iterator[Conversation]:
    """Yield conversations without end, the same for the same seed. Some come twice.

    passages: texts of the target's own to ask about. system: whether the model knows system messages; they give it a role.
    """
    rng = random.Random(seed)
    kinds, weights = zip(*_KINDS.items(), strict=True)
    while True:
        (kind,) = rng.choices(kinds, weights)
        text = _text(rng, kind, passages)
        user = Turn("user", text[0].upper() + text[1:])
        yield (Turn("system", rng.choice(ROLES)), user) if system and rng.random() < 0.1 else (user,)


_KINDS = {"topic": 0.52, "passage": 0.2, "fact": 0.1, "sum": 0.08, "code": 0.1}  # of all built-in prompts


def _text(rng: random.Random, kind: str, passages: Sequence[str]) -> str:
    match kind:
        case "passage":
            return passage_prompt(rng, passages)
        case "fact":
            return rng.choice(FACTS).format(country=rng.choice(COUNTRIES), word=rng.choice(WORDS), book=rng.choice(BOOKS))
        case "sum":
            return _sum(rng)
        case "code":
            return rng.choice(CODE_TEMPLATES).format(l=rng.choice(LANGUAGES), c=rng.choice(CODE_TASKS))
        case _:
            template = rng.choice(TEMPLATES)
            return template.format(*rng.sample(TOPICS, template.count("{}")))


def _sum(rng: random.Random) -> str:
    a, b = rng.randint(2, 20), rng.randint(2, 15)
    return rng.choice(SUMS).format(a=a, b=b, c=a * b + rng.randint(1, 90))
