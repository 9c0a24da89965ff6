"""Functions that several Triton kernels share: named uniforms, sortable keys, cuts of a logits row, the inverse CDF.

Owns: device code only; nothing here is launched. Must not know: which kernel calls. Semantics: reference.py.

Whether these run compiled or interpreted is fixed when this module is imported, by Triton itself (TRITON_INTERPRET=1), for its own
library as much as for ours. So tests interpret in a child process (tests/kernels/conftest.py) and never switch a running one.

A row is read in blocks of BLOCK. Sums are float32 inside a block and float64 across blocks, so 150,000 entries lose nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_uniform(seed, position, purpose, index):
    """The bits of philox.uniform: an odd multiple of 2^-24 in (0, 1). seed and position int64, purpose and index int32."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low & 0
    word, _, _, _ = tl.philox(seed, low, (zero + index).to(tl.uint32), (zero + purpose).to(tl.uint32), high)
    odd = (word >> 9).to(tl.int32) * 2 + 1
    return odd.to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def load_logits(row_ptr, offsets, V):
    """Logits as float32; NaN, +inf and everything past the row count as -inf, and -0 as 0."""
    x = tl.load(row_ptr + offsets, mask=offsets < V, other=float("-inf")).to(tl.float32)
    x = tl.where((x != x) | (x == float("inf")), float("-inf"), x)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def sort_key(x):
    """Map float32 to uint32 so that order is kept: flip the sign bit of positives and every bit of negatives."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def row_max(row_ptr, V, BLOCK: tl.constexpr):
    """Largest usable logit of a row; -inf when there is none."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        best = tl.maximum(best, load_logits(row_ptr, start + tl.arange(0, BLOCK), V))
    return tl.max(best, axis=0)


@triton.jit
def kth_key(row_ptr, V, k, BLOCK: tl.constexpr):
    """Key of the k-th largest logit: the greatest t with count(key >= t) >= k, found two bits a pass, from the top."""
    t = tl.full([], 0, tl.uint32)
    for step in range(16):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        above1 = tl.zeros([BLOCK], tl.int32)
        above2 = tl.zeros([BLOCK], tl.int32)
        above3 = tl.zeros([BLOCK], tl.int32)
        for start in range(0, V, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            key = sort_key(load_logits(row_ptr, offsets, V))
            inside = offsets < V
            above1 += (inside & (key >= t + unit)).to(tl.int32)
            above2 += (inside & (key >= t + 2 * unit)).to(tl.int32)
            above3 += (inside & (key >= t + 3 * unit)).to(tl.int32)
        digit = (tl.sum(above1, axis=0) >= k).to(tl.uint32)
        digit += (tl.sum(above2, axis=0) >= k).to(tl.uint32)
        digit += (tl.sum(above3, axis=0) >= k).to(tl.uint32)
        t += digit * unit
    return t


@triton.jit
def weight(row_ptr, offsets, V, maximum, inv_temperature, floor):
    """Unnormalised probability of each entry: exp((x - max) / T) where the key reaches the floor, else 0."""
    x = load_logits(row_ptr, offsets, V)
    kept = (sort_key(x) >= floor) & (x > float("-inf"))
    return tl.where(kept, tl.exp(tl.where(kept, x - maximum, 0.0) * inv_temperature), 0.0)


@triton.jit
def row_mass(row_ptr, V, maximum, inv_temperature, floor, BLOCK: tl.constexpr):
    """Sum of the weights at or above a floor key, float64."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        part = weight(row_ptr, start + tl.arange(0, BLOCK), V, maximum, inv_temperature, floor)
        total += tl.sum(part, axis=0).to(tl.float64)
    return total


@triton.jit
def mass_key(row_ptr, V, maximum, inv_temperature, floor, wanted, BLOCK: tl.constexpr):
    """The greatest key t whose mass at or above it reaches `wanted`, counting weights above `floor` only."""
    t = tl.full([], 0, tl.uint32)
    for step in range(16):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        mass1 = tl.full([], 0.0, tl.float64)
        mass2 = tl.full([], 0.0, tl.float64)
        mass3 = tl.full([], 0.0, tl.float64)
        for start in range(0, V, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            key = sort_key(load_logits(row_ptr, offsets, V))
            part = weight(row_ptr, offsets, V, maximum, inv_temperature, floor)
            mass1 += tl.sum(tl.where(key >= t + unit, part, 0.0), axis=0).to(tl.float64)
            mass2 += tl.sum(tl.where(key >= t + 2 * unit, part, 0.0), axis=0).to(tl.float64)
            mass3 += tl.sum(tl.where(key >= t + 3 * unit, part, 0.0), axis=0).to(tl.float64)
        digit = (mass1 >= wanted).to(tl.uint32) + (mass2 >= wanted).to(tl.uint32) + (mass3 >= wanted).to(tl.uint32)
        t += digit * unit
    return t


@triton.jit
def row_cut(row_ptr, V, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """(max, 1/T, floor key) of a row: an entry survives all cuts iff its key reaches the floor.

    A greedy row gets the key of its maximum as floor, so its survivors are the tied argmaxes. No sort: every cut is a
    threshold on one ordered key, so top-k counts and top-p weighs what lies above a candidate.
    """
    maximum = row_max(row_ptr, V, BLOCK)
    is_greedy = temperature < 1e-5
    inv_temperature = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))
    floor = sort_key(maximum)
    if (not is_greedy) & (maximum > float("-inf")):
        # a min-p of 0 keeps everything
        floor = tl.where(min_p > 0.0, sort_key(maximum + temperature * tl.log(tl.maximum(min_p, 1e-38))), 0)
        if (top_k > 0) & (top_k < V):
            floor = tl.maximum(floor, kth_key(row_ptr, V, top_k, BLOCK))
        if top_p < 1.0:
            mass = row_mass(row_ptr, V, maximum, inv_temperature, floor, BLOCK)
            by_mass = mass_key(row_ptr, V, maximum, inv_temperature, floor, mass * top_p.to(tl.float64), BLOCK)
            floor = tl.maximum(floor, by_mass)
    return maximum, inv_temperature, floor


@triton.jit
def locate_weight(row_ptr, V, u, maximum, inv_temperature, floor, BLOCK: tl.constexpr):
    """Inverse CDF of a logits row at u: the smallest id whose cumulative weight exceeds u times the total; -1 if there is none."""
    total = row_mass(row_ptr, V, maximum, inv_temperature, floor, BLOCK)
    wanted = u.to(tl.float64) * total
    before = tl.full([], 0.0, tl.float64)
    cumulative = tl.full([], 0.0, tl.float64)
    block = tl.full([], -1, tl.int32)
    for start in range(0, V, BLOCK):
        part = weight(row_ptr, start + tl.arange(0, BLOCK), V, maximum, inv_temperature, floor)
        after = cumulative + tl.sum(part, axis=0).to(tl.float64)
        is_hit = (block < 0) & (after > wanted)
        block = tl.where(is_hit, start, block)
        before = tl.where(is_hit, cumulative, before)
        cumulative = after
    offsets = tl.maximum(block, 0) + tl.arange(0, BLOCK)
    part = weight(row_ptr, offsets, V, maximum, inv_temperature, floor)
    return tl.where(block < 0, -1, _inside_block(part, offsets, before, wanted, BLOCK))


@triton.jit
def locate_mass(row_ptr, V, u, BLOCK: tl.constexpr):
    """Inverse CDF of a row of masses at u, negative ones counting as 0; -1 for a row without mass."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        total += tl.sum(load_mass(row_ptr, start + tl.arange(0, BLOCK), V), axis=0).to(tl.float64)
    wanted = u.to(tl.float64) * total
    before = tl.full([], 0.0, tl.float64)
    cumulative = tl.full([], 0.0, tl.float64)
    block = tl.full([], -1, tl.int32)
    for start in range(0, V, BLOCK):
        after = cumulative + tl.sum(load_mass(row_ptr, start + tl.arange(0, BLOCK), V), axis=0).to(tl.float64)
        is_hit = (block < 0) & (after > wanted)
        block = tl.where(is_hit, start, block)
        before = tl.where(is_hit, cumulative, before)
        cumulative = after
    offsets = tl.maximum(block, 0) + tl.arange(0, BLOCK)
    return tl.where(block < 0, -1, _inside_block(load_mass(row_ptr, offsets, V), offsets, before, wanted, BLOCK))


@triton.jit
def load_mass(row_ptr, offsets, V):
    """A block of masses as float32, never negative, 0 past the row."""
    return tl.maximum(tl.load(row_ptr + offsets, mask=offsets < V, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _inside_block(part, offsets, before, wanted, BLOCK: tl.constexpr):
    """First id whose cumulative mass exceeds `wanted`; the last id with mass if rounding leaves none."""
    cumulative = before + tl.cumsum(part.to(tl.float64), axis=0)
    has_mass = part > 0.0
    first = tl.min(tl.where(has_mass & (cumulative > wanted), offsets, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(has_mass, offsets, -1), axis=0)
    return tl.where(first == 0x7FFFFFFF, last, first)
