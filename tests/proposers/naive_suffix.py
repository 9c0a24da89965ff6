"""What a search in suffix trees means, by counting over all suffixes. Slow, and simple enough to be read as the definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specdec.proposers.suffix_tree import Continuation


def occurrences(texts: Sequence[Sequence[int]], string: Sequence[int]) -> list[tuple[int, int]]:
    """(text, end) of every place where the string occurs."""
    size = len(string)
    return [
        (index, start + size)
        for index, text in enumerate(texts)
        for start in range(len(text) - size + 1)
        if list(text[start : start + size]) == list(string)
    ]


def likeliest(texts: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(token, count) that most often follows the places; of equals the one that was seen last; count 0 where nothing follows."""
    followed: dict[int, tuple[int, tuple[int, int]]] = {}
    for place in places:
        index, end = place
        if end < len(texts[index]):
            count, _ = followed.get(texts[index][end], (0, place))
            followed[texts[index][end]] = (count + 1, place)
    if not followed:
        return 0, 0
    token = max(followed, key=lambda token: followed[token])
    return token, followed[token][0]


def continue_text(
    texts: Sequence[Sequence[int]], pattern: Sequence[int], *, depth: int, limit: int, factor: float, min_chance: float
) -> Continuation:
    """The continuation with the highest sum of path probabilities over all match lengths; a longer match wins ties."""
    best = Continuation()
    pattern = list(pattern)[-depth:]
    for match in range(1, len(pattern)):
        string = pattern[-match:]
        if not occurrences(texts, string):
            break
        chance, score = 1.0, 0.0
        ids: list[int] = []
        paths = [1.0]
        while len(ids) < min(limit, int(match * factor + 1e-6)) and match + len(ids) < depth:
            places = occurrences(texts, string + ids)
            token, count = likeliest(texts, places)
            if count == 0 or chance * (count / len(places)) < min_chance:
                break
            chance *= count / len(places)
            score += chance
            ids.append(token)
            paths.append(chance)
        if ids and score >= best.score:
            chances = tuple(later / earlier for earlier, later in pairwise(paths))
            best = Continuation(tuple(ids), chances, score, match)
    return best
