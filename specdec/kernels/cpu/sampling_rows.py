"""Compiled sampling for CPUs: one row of logits at a time, all rows on torch's OpenMP team.

Owns: peak, weights, cuts and draw of a row, and the call table. Semantics: kernels/reference.py, target_law and sample_logits.
Must not know: torch tensors (sampling.py fills the table). Letters: L logits rows, V vocabulary.

With weights w = exp((logit - peak) / T) every cut is a threshold on w, and "the largest threshold that keeps enough" is found by
bisection over the bits of w: each look is one vectorised pass, so no row is ever sorted.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

from specdec.kernels.cpu.llvm import bits_of, float_of, pointer, thread_num

(LOGITS, ROW_STRIDE, NUM_ROWS, VOCAB, NUM_THREADS, NOISE, TEMPERATURE, TOP_K, TOP_P, MIN_P, SCRATCH, IDS, LAWS, NUM_SLOTS) = range(14)

GREEDY_TEMPERATURE = np.float32(1e-5)
BLOCK = 512  # entries summed in float32 before the sum moves to float64
LOG2E = np.float32(1.4426950408889634)
INF = np.float32(np.inf)
LOWEST_POWER = np.float32(-125.0)  # weights below 2^-125 count as zero
LEAST_WEIGHT = np.float32(2.0**-126)
ONE_BITS = 0x3F800000
SUM = {"reassoc", "contract"}


@njit
def cleaned(x: float) -> float:
    """NaN and +inf count as -inf; -0 as 0, so that ties are ties."""
    return x + np.float32(0.0) if x < INF else -INF


@njit
def order_key(x: float) -> int:
    """An unsigned integer that sorts as the float does, because only integer maxima vectorise without assumptions about NaN."""
    bits = bits_of(x)
    return np.uint32(bits ^ np.uint32(0x80000000)) if bits < np.uint32(0x80000000) else np.uint32(~bits)


@njit
def find_peak(x: np.ndarray) -> int:
    """Return the lowest id of the largest finite logit, -1 where none is finite."""
    best, at = order_key(-INF), -1
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        top = np.uint32(0)
        for i in range(len(block)):
            top = max(top, order_key(cleaned(block[i])))
        if top > best:
            best, at = top, start
    if at < 0:
        return -1
    while order_key(cleaned(x[at])) != best:
        at += 1
    return at


@njit
def exp2(x: float) -> float:
    """2^x for -125 < x <= 0 by a degree-6 polynomial on the fraction (relative error 2e-7), so that LLVM can use all lanes."""
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return p * float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@njit(fastmath={"contract"})
def weigh(x: np.ndarray, peak: float, temperature: float, w: np.ndarray) -> None:
    """w = exp((x - peak) / temperature): 1 at the peak, 0 below 2^-125."""
    scale = LOG2E / temperature
    for i in range(len(x)):
        power = (cleaned(x[i]) - peak) * scale
        weight = exp2(max(power, LOWEST_POWER))
        w[i] = weight if power > LOWEST_POWER else np.float32(0.0)


@njit(fastmath=SUM)
def block_mass(w: np.ndarray, threshold: float) -> tuple[float, float]:
    """(sum, count) of the entries of one block that are at least `threshold`, float32."""
    mass, count = np.float32(0.0), np.float32(0.0)
    for i in range(len(w)):
        is_kept = w[i] >= threshold
        mass += w[i] if is_kept else np.float32(0.0)
        count += np.float32(1.0) if is_kept else np.float32(0.0)
    return mass, count


@njit
def kept_mass(w: np.ndarray, threshold: float) -> tuple[float, float]:
    """(sum, count) of the entries that are at least `threshold`, float64."""
    mass, count = 0.0, 0.0
    for start in range(0, len(w), BLOCK):
        block = block_mass(w[start : start + BLOCK], threshold)
        mass += block[0]
        count += block[1]
    return mass, count


@njit
def lower_until(w: np.ndarray, low: float, goal: float, by_count: bool) -> float:
    """Return the largest threshold, or one that keeps the same entries, at which sum (or count) reaches `goal`; at least `low`."""
    below, above = np.int64(bits_of(np.float32(low))), np.int64(ONE_BITS + 1)
    count_below, count_above = kept_mass(w, low)[1], 0.0
    while above - below > 1 and count_below - count_above > 1.5:
        middle = (below + above) // 2
        mass, count = kept_mass(w, float_of(np.uint32(middle)))
        if (count if by_count else mass) >= goal:
            below, count_below = middle, count
        else:
            above, count_above = middle, count
    return float_of(np.uint32(below))


@njit
def cut(w: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """Return the weight below which nothing is kept: top-k, then min-p, then top-p over what these leave."""
    threshold = LEAST_WEIGHT
    if 0 < top_k < len(w) and kept_mass(w, threshold)[1] > top_k:
        threshold = lower_until(w, threshold, np.float64(top_k), True)
    threshold = max(threshold, np.float32(min_p))
    if top_p < np.float32(1.0):
        total = kept_mass(w, threshold)[0]
        goal = np.float64(top_p) * total
        # entries below the share that the tail may lose, spread over the whole vocabulary, cannot be the border
        low = max(threshold, np.float32((1.0 - np.float64(top_p)) * total / len(w)))
        low = low if kept_mass(w, low)[0] >= goal else threshold
        threshold = lower_until(w, low, goal, False)
    return threshold


@njit
def draw(w: np.ndarray, threshold: float, u: float) -> int:
    """Return the smallest id whose cumulative kept weight exceeds u times the total."""
    goal = np.float64(u) * kept_mass(w, threshold)[0]
    run = 0.0
    for start in range(0, len(w), BLOCK):
        block = w[start : start + BLOCK]
        mass = np.float64(block_mass(block, threshold)[0])
        if run + mass <= goal:
            run += mass
            continue
        for i in range(len(block)):
            if block[i] >= threshold:
                run += np.float64(block[i])
                if run > goal:
                    return start + i
    last = len(w) - 1  # rounding took u past the end
    while w[last] < threshold:
        last -= 1
    return last


@njit
def write_law(w: np.ndarray, threshold: float, law: np.ndarray) -> None:
    """law = the kept weights over their sum."""
    scale = np.float32(1.0 / kept_mass(w, threshold)[0])
    for i in range(len(w)):
        law[i] = w[i] * scale if w[i] >= threshold else np.float32(0.0)


@njit
def floats(address: int, count: int) -> np.ndarray:
    """View `count` float32 values at an address."""
    return carray(pointer(address), (count,), np.float32)


@njit
def integers(address: int, count: int) -> np.ndarray:
    """View `count` int64 values at an address."""
    return carray(pointer(address), (count,), np.int64)


@njit
def run_row(a: np.ndarray, row: int, w: np.ndarray) -> None:
    """Sample one row into IDS, or write its law into LAWS, whichever address is given; rows without a finite logit give -1, or zeros."""
    vocab = a[VOCAB]
    x = floats(a[LOGITS] + 4 * row * a[ROW_STRIDE], vocab)
    temperature = floats(a[TEMPERATURE], a[NUM_ROWS])[row]
    peak = find_peak(x)
    is_sampled = peak >= 0 and temperature >= GREEDY_TEMPERATURE
    threshold = LEAST_WEIGHT
    if is_sampled:
        weigh(x, cleaned(x[peak]), temperature, w)
        threshold = cut(w, integers(a[TOP_K], a[NUM_ROWS])[row], floats(a[TOP_P], a[NUM_ROWS])[row], floats(a[MIN_P], a[NUM_ROWS])[row])
    if a[IDS] != 0:
        integers(a[IDS], a[NUM_ROWS])[row] = draw(w, threshold, floats(a[NOISE], a[NUM_ROWS])[row]) if is_sampled else peak
    if a[LAWS] != 0:
        law = floats(a[LAWS] + 4 * row * vocab, vocab)
        if is_sampled:
            write_law(w, threshold, law)
        else:
            law[:] = np.float32(0.0)
            if peak >= 0:
                law[peak] = np.float32(1.0)


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def rows_entry(arguments: int) -> None:
    """Run every n-th row on this thread of the team, n being the number of threads."""
    a = carray(arguments, (NUM_SLOTS,), np.int64)
    thread = np.int64(thread_num())
    w = floats(a[SCRATCH] + 4 * thread * a[VOCAB], a[VOCAB])
    for row in range(thread, a[NUM_ROWS], a[NUM_THREADS]):
        run_row(a, row, w)
