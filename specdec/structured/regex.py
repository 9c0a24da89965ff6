"""check_regex: refuses what the compiler would read past, so that a pattern never means less than it says.

Owns: anchors and escapes, which the compiler drops with a warning. What it cannot parse at all (lookaround, back references,
word boundaries, flags) it refuses itself. A pattern is matched against the whole text.
"""

from __future__ import annotations

from specdec.structured.faults import GrammarFault

_KNOWN_LETTER_ESCAPES = frozenset("dDwWsSnrtfvxucbBpPk0")  # the last ones are refused by the compiler, by name


def check_regex(pattern: str) -> None:
    """Refuse a pattern with an anchor inside it or an escape that has no meaning.

    Raises:
        GrammarFault: the reason names the character and its place.
    """
    depth, index, in_class = 0, 0, False
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            _check_escape(pattern, index)
            index += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            index += pattern[index + 1 : index + 2] in ("]", "^")  # neither closes the class there
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "^" and not _begins(pattern, index, depth):
            raise GrammarFault(f"the regex has ^ at character {index}, but it is known at the start only", hint="remove it")
        elif char == "$" and not _ends(pattern, index, depth):
            raise GrammarFault(f"the regex has $ at character {index}, but it is known at the end only", hint="remove it")
        index += 1


def _check_escape(pattern: str, index: int) -> None:
    letter = pattern[index + 1 : index + 2]
    if letter.isascii() and letter.isalpha() and letter not in _KNOWN_LETTER_ESCAPES:
        raise GrammarFault(f"the regex has the unknown escape \\{letter} at character {index}", hint="write the character itself")


def _begins(pattern: str, index: int, depth: int) -> bool:
    return index == 0 or (depth == 0 and pattern[index - 1] == "|")


def _ends(pattern: str, index: int, depth: int) -> bool:
    return index == len(pattern) - 1 or (depth == 0 and pattern[index + 1] == "|")
