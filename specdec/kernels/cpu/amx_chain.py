"""Draft chains of an EAGLE-3 head as one compiled call: join the target's states, run the head, take the best id, feed it back.

Owns: a whole drafting phase on CPUs with AMX, between two target passes. The proposer's own loop over models/eagle3.py is its oracle.
Must not know: requests, or how rows were chosen (chain_rows.py).

A pass of a small head takes less time than the Python around it, so all passes of a step are one call on the OpenMP team. Two call tables
of amx_decoder.py share one set of row buffers: the committed rows, then one row per chain at each depth.
Letters: N committed rows, P chains, K drafts, H width, Ht target width, Vd draft vocabulary.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

from specdec.kernels.cpu.amx_decoder import (
    BLOCK_SIZE,
    BLOCK_TABLE,
    EPS,
    FAST,
    FINAL_NORM,
    HIDDEN,
    LAYERS,
    MIXED,
    MIXED_WIDTH,
    NUM_COLUMNS,
    NUM_LAYERS,
    NUM_ROWS,
    NUM_SLOTS,
    NUM_THREADS,
    POSITIONS,
    RESIDUAL,
    SCRATCH,
    SCRATCH_STRIDE,
    SEQ_LENS,
    SLOTS,
    TABLE_STRIDE,
    TILE_CONFIG,
    WORKSPACE,
    f32,
    from_bf16,
    i64,
    product,
    rms_norm_row,
    run_layer,
    to_bf16,
    u16,
    wait_for_all,
)
from specdec.kernels.cpu.amx_gemm import ROWS, gemm_blocks, share
from specdec.kernels.cpu.amx_int8 import gemm_blocks_int8
from specdec.kernels.cpu.llvm import exp_sum, largest, pointer, team_size, thread_num, tile_config

# Slots of the call table (int64); buffers are addresses, zero means absent.
# EXTEND, CHAIN: call tables of the decoder. TAPS: addresses of the target's states [., Ht] bf16, TAP_NORMS of their norms [Ht] f32.
(
    EXTEND, CHAIN, NUM_TAPS, TAP_WIDTH, TAPS, TAP_NORMS, WIDE_NORM, WIDE, W_JOIN, S_JOIN, JOINED, KEPT, SUCCESSORS,
    EMBEDDING, TOKEN_NORM, FEATURE_NORM, NORMS_RESIDUAL, NORMS_OUTPUT, FEATURES,
    NUM_CHAINS, NEWEST, ANCHORS, WANTED, SCORED, FED_BACK, W_HEAD, S_HEAD, HEAD_SIZE, LOGITS, ID_MAP,
    MOST, LEAST_TRUST, TRUST, NEXT, DRAFTS, CONFIDENCE, NUM_CHAIN_SLOTS,
) = range(37)  # fmt: skip


@njit(fastmath=FAST)
def norm_half_row(source: int, weight: int, out: int, width: int, eps: float) -> None:
    """out (bf16) = source (bf16) / rms(source) * weight (f32); out may be source."""
    x, w, y = u16(source, width), f32(weight, width), u16(out, width)
    total = np.float32(0.0)
    for i in range(width):
        value = from_bf16(x[i])
        total += value * value
    scale = np.float32(1.0) / np.float32(np.sqrt(total / np.float32(width) + eps))
    for i in range(width):
        y[i] = to_bf16(from_bf16(x[i]) * scale * w[i])


@njit
def copy_half_row(source: int, out: int, width: int) -> None:
    """Copy bf16 values."""
    x, y = u16(source, width), u16(out, width)
    for i in range(width):
        y[i] = x[i]


@njit(fastmath=FAST)
def round_row(source: int, out: int, width: int) -> None:
    """out (bf16) = source (f32)."""
    x, y = f32(source, width), u16(out, width)
    for i in range(width):
        y[i] = to_bf16(x[i])


@njit(fastmath=FAST)
def widen_row(source: int, out: int, width: int) -> None:
    """out (f32) = source (bf16)."""
    x, y = u16(source, width), f32(out, width)
    for i in range(width):
        y[i] = from_bf16(x[i])


@njit
def gather_states(c: np.ndarray, row: int, eps: float) -> None:
    """WIDE row: the target's states of a committed row side by side, normed each or together where the head does so."""
    count, width = c[NUM_TAPS], c[TAP_WIDTH]
    at, out = i64(c[KEPT], row + 1)[row] * width * 2, c[WIDE] + row * count * width * 2
    taps, norms = i64(c[TAPS], count), i64(c[TAP_NORMS], count)
    for t in range(count):
        if norms[t]:
            norm_half_row(taps[t] + at, norms[t], out + t * width * 2, width, eps)
        else:
            copy_half_row(taps[t] + at, out + t * width * 2, width)
    if c[WIDE_NORM]:
        norm_half_row(out, c[WIDE_NORM], out, count * width, eps)


@njit
def enter_row(c: np.ndarray, a: np.ndarray, row: int, token: int, feature: int, eps: float) -> None:
    """The first layer's input [normed token, normed feature] and the residual stream of a row. feature: address, bf16 [H]."""
    width = a[HIDDEN]
    mixed = i64(a[LAYERS], NUM_COLUMNS)[MIXED] + row * 2 * width * 2
    norm_half_row(c[EMBEDDING] + token * width * 2, c[TOKEN_NORM], mixed, width, eps)
    norm_half_row(feature, c[FEATURE_NORM], mixed + width * 2, width, eps)
    widen_row(mixed + width * 2 if c[NORMS_RESIDUAL] else feature, a[RESIDUAL] + row * width * 4, width)


@njit
def run_layers(a: np.ndarray, thread: int, eps: float) -> None:
    """All layers of the head over the rows of a call table; ends behind a barrier."""
    scratch = a[SCRATCH] + thread * a[SCRATCH_STRIDE]
    for index in range(a[NUM_LAYERS]):
        run_layer(a, i64(a[LAYERS] + index * NUM_COLUMNS * 8, NUM_COLUMNS), thread, scratch, eps)


@njit
def extend(c: np.ndarray, a: np.ndarray, thread: int, eps: float) -> None:
    """Run the head over all committed rows; their KV is what later passes read."""
    width, wide, num_threads = a[HIDDEN], c[NUM_TAPS] * c[TAP_WIDTH], a[NUM_THREADS]
    for row in range(thread, a[NUM_ROWS], num_threads):
        gather_states(c, row, eps)
    wait_for_all(a)
    if c[W_JOIN]:
        scratch = a[SCRATCH] + thread * a[SCRATCH_STRIDE]
        product(a, c[WIDE], wide, c[W_JOIN], c[S_JOIN], width // 16, 4, thread, c[JOINED], False, scratch)
        wait_for_all(a)
    for row in range(thread, a[NUM_ROWS], num_threads):
        feature = c[WIDE] + row * wide * 2
        if c[W_JOIN]:
            feature = c[FEATURES] + row * width * 2
            round_row(c[JOINED] + row * width * 4, feature, width)
        enter_row(c, a, row, i64(c[SUCCESSORS], row + 1)[row], feature, eps)
    wait_for_all(a)
    run_layers(a, thread, eps)


@njit
def leave_row(c: np.ndarray, a: np.ndarray, chain: int, row: int, eps: float) -> None:
    """SCORED and FED_BACK of a chain from the residual stream of `row`."""
    width = a[HIDDEN]
    stream, scored, fed = a[RESIDUAL] + row * width * 4, c[SCORED] + chain * width * 2, c[FED_BACK] + chain * width * 2
    rms_norm_row(stream, a[FINAL_NORM], scored, width, eps)
    if c[NORMS_OUTPUT]:
        copy_half_row(scored, fed, width)
    else:
        round_row(stream, fed, width)


@njit(error_model="numpy")
def draw_best(c: np.ndarray, chain: int, depth: int) -> None:
    """Take a chain's most likely id, if the whole chain still is likely enough; NEXT says which target id is fed next, -1 for none."""
    size, most = c[HEAD_SIZE], c[MOST]
    following = i64(c[NEXT], chain + 1)
    if depth > 0 and following[chain] < 0:
        return
    following[chain] = -1
    row = c[LOGITS] + chain * size * 4
    logits, top = f32(row, size), largest(row, size)
    best = 0
    while best < size and logits[best] != top:
        best += 1
    if best == size:  # no number: nothing is drafted
        return
    chance = np.float32(1.0) / exp_sum(row, size, top)
    trust = f32(c[TRUST], chain + 1)
    trust[chain] *= chance
    if trust[chain] < f32(c[LEAST_TRUST], 1)[0]:
        return
    token = i64(c[ID_MAP], size)[best] if c[ID_MAP] else best
    i64(c[DRAFTS], (chain + 1) * most)[chain * most + depth] = token
    f32(c[CONFIDENCE], (chain + 1) * most)[chain * most + depth] = chance
    if depth + 1 < i64(c[WANTED], chain + 1)[chain]:
        following[chain] = token


@njit
def score_chains(c: np.ndarray, a: np.ndarray, depth: int, thread: int) -> None:
    """LM head over SCORED, and each chain's next draft; ends behind a barrier."""
    width, num_threads = a[HIDDEN], a[NUM_THREADS]
    first, last = share(c[HEAD_SIZE] // 16, thread, num_threads, 4)
    stride, count = c[HEAD_SIZE] * 4, c[NUM_CHAINS]
    if c[S_HEAD]:
        workspace = a[SCRATCH] + thread * a[SCRATCH_STRIDE] + a[WORKSPACE]
        gemm_blocks_int8(c[SCORED], width, c[W_HEAD], c[S_HEAD], first, last, c[LOGITS], stride, count, False, workspace)
    else:
        gemm_blocks(c[SCORED], width * 2, c[W_HEAD], width // 32, first, last, c[LOGITS], stride, (count + ROWS - 1) // ROWS, False)
    wait_for_all(a)
    for chain in range(thread, c[NUM_CHAINS], num_threads):
        draw_best(c, chain, depth)
    wait_for_all(a)


@njit
def place_row(c: np.ndarray, a: np.ndarray, chain: int, depth: int) -> int:
    """Put a chain's row at its position and return the token it feeds. One that has ended reads committed keys and writes nothing."""
    token, anchor, block_size = i64(c[NEXT], chain + 1)[chain], i64(c[ANCHORS], chain + 1)[chain], a[BLOCK_SIZE]
    position, slot = anchor - 1, np.int64(-1)
    if token >= 0:
        position = anchor - 1 + depth
        table = carray(pointer(a[BLOCK_TABLE] + chain * a[TABLE_STRIDE] * 4), (position // block_size + 1,), np.int32)
        slot = np.int64(table[position // block_size]) * block_size + position % block_size
    i64(a[POSITIONS], chain + 1)[chain] = position
    i64(a[SLOTS], chain + 1)[chain] = slot
    i64(a[SEQ_LENS], chain + 1)[chain] = position + 1
    return max(token, 0)


@njit
def has_next(c: np.ndarray) -> bool:
    """True while some chain goes on. Every thread asks between the same two barriers, so all agree."""
    following = i64(c[NEXT], c[NUM_CHAINS])
    for chain in range(c[NUM_CHAINS]):
        if following[chain] >= 0:
            return True
    return False


@njit
def grow(c: np.ndarray, a: np.ndarray, depth: int, thread: int, eps: float) -> None:
    """One pass of the head over the newest drafts, and the drafts behind them."""
    width = a[HIDDEN]
    for chain in range(thread, c[NUM_CHAINS], a[NUM_THREADS]):
        token = place_row(c, a, chain, depth)
        enter_row(c, a, chain, token, c[FED_BACK] + chain * width * 2, eps)
    wait_for_all(a)
    run_layers(a, thread, eps)
    for chain in range(thread, c[NUM_CHAINS], a[NUM_THREADS]):
        leave_row(c, a, chain, chain, eps)
    wait_for_all(a)
    score_chains(c, a, depth, thread)


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def chain_entry(arguments: int) -> None:
    """Run a drafting phase on one thread of the team. MOST 0: the chains' first states only, for drafts drawn elsewhere."""
    c = carray(arguments, (NUM_CHAIN_SLOTS,), np.int64)
    a, rows = i64(c[CHAIN], NUM_SLOTS), i64(c[EXTEND], NUM_SLOTS)
    a[NUM_THREADS] = rows[NUM_THREADS] = np.int64(team_size())  # every thread writes the same number
    tile_config(a[TILE_CONFIG])
    thread, eps = np.int64(thread_num()), f32(a[EPS], 1)[0]
    i64(a[LAYERS], NUM_COLUMNS)[MIXED_WIDTH] = 2 * a[HIDDEN]
    extend(c, rows, thread, eps)
    newest = i64(c[NEWEST], c[NUM_CHAINS])
    for chain in range(thread, c[NUM_CHAINS], a[NUM_THREADS]):
        leave_row(c, a, chain, newest[chain], eps)
    wait_for_all(a)
    if c[MOST] == 0 or c[NUM_CHAINS] == 0:
        return
    score_chains(c, a, 0, thread)
    for depth in range(1, c[MOST]):
        if not has_next(c):
            return
        grow(c, a, depth, thread, eps)
