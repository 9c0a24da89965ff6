"""check_regex: refuses what the compiler would read past, so that a pattern never means less than it says.

Owns: anchors and escapes, which the compiler drops with a warning. What it cannot parse at all (lookaround, back references,
word boundaries, flags) it refuses itself. A pattern is matched against the whole text.
"""

from __future__ import annotations

import re

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


def check_json_pattern(pattern: str) -> None:
    """Refuse what `check_regex` does, and characters that stand escaped in JSON strings: the compiler would write them as they are.

    Raises:
        GrammarFault: the reason names the character and its place.
    """
    check_regex(pattern)
    for found in _LITERAL.finditer(pattern):
        char = _literal(found)
        if char is not None and (char in '"\\' or char < " "):
            raise GrammarFault(
                f"the pattern names {char!r} at character {found.start()}, which JSON writes with a backslash",
                hint="leave it out, or use . or a negated class, which stand for all other characters",
            )


_LITERAL = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|.)|.", re.DOTALL)
_CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def _literal(found: re.Match[str]) -> str | None:
    """The character that a piece of a pattern names, None where it names a class of them."""
    text = found.group()
    if text[0] != "\\" or len(text) == 1:
        return text
    if text[1] == "c":
        return "\x01"
    if len(text) > 2:
        return chr(min(int(text[2:].strip("{}"), 16), 0x10FFFF))
    if text[1] in _CONTROL_ESCAPES:
        return _CONTROL_ESCAPES[text[1]]
    return None if text[1].isalnum() else text[1]


def _check_escape(pattern: str, index: int) -> None:
    letter = pattern[index + 1 : index + 2]
    if letter.isascii() and letter.isalpha() and letter not in _KNOWN_LETTER_ESCAPES:
        raise GrammarFault(f"the regex has the unknown escape \\{letter} at character {index}", hint="write the character itself")


def _begins(pattern: str, index: int, depth: int) -> bool:
    return index == 0 or (depth == 0 and pattern[index - 1] == "|")


def _ends(pattern: str, index: int, depth: int) -> bool:
    return index == len(pattern) - 1 or (depth == 0 and pattern[index + 1] == "|")
