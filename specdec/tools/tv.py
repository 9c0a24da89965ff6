"""Total variation between two samples of short texts, against the floor that two equal samples have.

Owns: the statistic, its floor and its permutation test. Must not know: models. It needs no laws, so it also sees errors that
scoring shares with serving. Letters: n texts of one prompt in each arm, B symbols.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.tools.significance import Check, normal_upper

TOP_SYMBOLS = 63  # texts that are counted alone; the others share one symbol
PERMUTATIONS = 999

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Mean total variation over prompts. floor: of two plain samples. permutation_p: at least 1 / (PERMUTATIONS + 1)."""

    observed: float
    floor: float
    permutation_p: float
    check: Check


def compare(plain: Sequence[Sequence[Text]], again: Sequence[Sequence[Text]], drafted: Sequence[Sequence[Text]], *, seed: int) -> Variation:
    """Compare three samples, each a list of texts for every prompt: plain, plain with other seeds, and with speculation.

    Labels are shuffled within each prompt. A permutation p-value has a floor, so the check's is the normal tail of the observed
    value among the shuffled ones.
    """
    rng = np.random.default_rng(seed)
    floor = float(np.mean([_variations(*_one_hot(a, b), rng, 0)[0] for a, b in zip(plain, again, strict=True)]))
    rows = np.mean([_variations(*_one_hot(a, b), rng, PERMUTATIONS) for a, b in zip(plain, drafted, strict=True)], axis=0)
    observed, shuffled = float(rows[0]), rows[1:]
    spread = float(shuffled.std())
    z = (observed - float(shuffled.mean())) / spread if spread > 0 else 0.0
    permutation_p = (1 + int((shuffled >= observed - 1e-12).sum())) / (PERMUTATIONS + 1)
    check = Check("total variation", z, normal_upper(z), sum(map(len, plain)) + sum(map(len, drafted)))
    return Variation(observed=observed, floor=floor, permutation_p=permutation_p, check=check)


def _one_hot(first: Sequence[Text], second: Sequence[Text]) -> tuple[np.ndarray, int]:
    """([n1 + n2, B] symbols of both samples, n1). Equally frequent texts are ordered by their ids: which sample a text came
    from must not decide whether it is counted alone."""
    texts = [*first, *second]
    ordered = sorted(Counter(texts).items(), key=lambda item: (-item[1], item[0]))
    top = {text: index for index, (text, _) in enumerate(ordered[:TOP_SYMBOLS])}
    symbols = np.array([top.get(text, TOP_SYMBOLS) for text in texts])
    return np.eye(TOP_SYMBOLS + 1)[symbols], len(first)


def _variations(one_hot: np.ndarray, num_first: int, rng: np.random.Generator, permutations: int) -> np.ndarray:
    """[1 + permutations]: total variation as labelled, then with shuffled labels."""
    labels = np.zeros(len(one_hot))
    labels[:num_first] = 1
    chosen = np.vstack([labels, rng.permuted(np.tile(labels, (permutations, 1)), axis=1)])
    first = chosen @ one_hot
    second = one_hot.sum(0) - first
    variations: np.ndarray = 0.5 * np.abs(first / num_first - second / (len(one_hot) - num_first)).sum(1)
    return variations
