"""A stack of decoder layers as one compiled call: norms, AMX products, RoPE, KV store, attention, MLP.

Owns: the fused forward on CPUs with AMX. The eager path (models/llama.py over kernels/cpu/layer_ops.py) is its oracle.
Must not know: requests. One call runs every layer on the OpenMP team; Python and the GIL are out of the way meanwhile.

Each function works on addresses. Letters: M query rows, H hidden, Hq/Hkv heads, Dh head dim, I MLP width, T threads.
The residual stream is float32 [M, H]; row buffers are padded to 16 rows, since a tile always moves 16.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

from specdec.kernels.cpu.amx_gemm import ROWS, TILE_BYTES, gemm_blocks, share
from specdec.kernels.cpu.amx_int8 import dot_rows, gemm_blocks_int8, round_rows
from specdec.kernels.cpu.llvm import (
    UNSEEN,
    accumulate_values,
    atomic_add,
    atomic_load,
    bits_of,
    float_of,
    pause,
    pointer,
    silu_times,
    softmax_keys,
    team_size,
    thread_num,
    tile_config,
    tile_dot,
    tile_load,
    tile_store,
    tile_zero,
    widen_rows,
    yield_cpu,
)

CHUNK = 64  # keys attended at once: four tiles of scores
LOG2E = np.float32(1.4426950408889634)
SPINS = 2000  # about 0.1 ms: longer than any stage lasts on an idle machine
FAST = {"contract", "nsz", "reassoc", "arcp"}  # no `nnan`, `ninf`: a broken row must stay visible

# Slots of the call table (int64). Buffers are addresses. WORKSPACE: where that of int8 products begins in a thread's scratch.
(
    NUM_THREADS, NUM_ROWS, NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MLP,
    RESIDUAL, NORMED, QKV, QUERY, ATTENDED, ACTIVATION, COS, SIN, POSITIONS, SLOTS,
    NUM_REQUESTS, QUERY_STARTS, SEQ_LENS, BLOCK_TABLE, TABLE_STRIDE, BLOCK_SIZE, TREE, TREE_STRIDE, IS_CAUSAL,
    SCRATCH, SCRATCH_STRIDE, TILE_CONFIG, LAYERS, EPS, FINAL_NORM, OUTPUT, ARRIVALS, WORKSPACE, NUM_SLOTS,
) = range(37)  # fmt: skip

# Columns of the layer table (int64). Zero means absent.
# S_: scales [N] f32 of a weight in int8 (amx_int8.py); without them it is in bf16.
# MIXED: rows [M, MIXED_WIDTH] in bf16 that the QKV product reads in place of the normed stream (the first layer of a draft head).
(
    W_QKV, W_OUT, W_GATE_UP, W_DOWN, INPUT_NORM, POST_NORM, K_CACHE, V_CACHE, QKV_BIAS, Q_NORM, K_NORM, WINDOW, HAS_ROPE, TAP,
    MIXED, MIXED_WIDTH, S_QKV, S_OUT, S_GATE_UP, S_DOWN, NUM_COLUMNS,
) = range(21)  # fmt: skip

_zero0, _zero1, _zero2, _zero3 = (tile_zero(i) for i in range(4))
_load4, _load5, _load6 = tile_load(4), tile_load(5), tile_load(6)
_store0 = tile_store(0)
_dot045 = tile_dot(0, 4, 5)
_dot046 = tile_dot(0, 4, 6)


@njit(inline="always")
def f32(address: int, count: int) -> np.ndarray:
    """float32 array at an address."""
    return carray(pointer(address), (count,), np.float32)


@njit(inline="always")
def u16(address: int, count: int) -> np.ndarray:
    """uint16 (bf16 bits) array at an address."""
    return carray(pointer(address), (count,), np.uint16)


@njit(inline="always")
def i64(address: int, count: int) -> np.ndarray:
    """int64 array at an address."""
    return carray(pointer(address), (count,), np.int64)


@njit(inline="always")
def to_bf16(value: float) -> int:
    """Round to the nearest bf16, ties to even; returns its bits."""
    bits = bits_of(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(inline="always")
def from_bf16(value: int) -> float:
    """Widen bf16 bits."""
    return float_of(np.uint32(value) << np.uint32(16))


@njit(fastmath=FAST)
def rms_norm_row(source: int, weight: int, out: int, width: int, eps: float) -> None:
    """out (bf16) = source (f32) / rms(source) * weight (f32)."""
    x, w, y = f32(source, width), f32(weight, width), u16(out, width)
    total = np.float32(0.0)
    for i in range(width):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.float32(np.sqrt(total / np.float32(width) + eps))
    for i in range(width):
        y[i] = to_bf16(x[i] * scale * w[i])


@njit(fastmath=FAST)
def prepare_head(source: int, bias: int, norm: int, cos: int, sin: int, out: int, width: int, eps: float, has_rope: bool) -> None:
    """One query or key head of one row: bias, head norm, rotation, rounding to bf16. The source (f32) is overwritten."""
    x, y, half = f32(source, width), u16(out, width), width // 2
    if bias:
        b = f32(bias, width)
        for i in range(width):
            x[i] += b[i]
    if norm:
        w = f32(norm, width)
        total = np.float32(0.0)
        for i in range(width):
            total += x[i] * x[i]
        scale = np.float32(1.0) / np.float32(np.sqrt(total / np.float32(width) + eps))
        for i in range(width):
            x[i] = x[i] * scale * w[i]
    if has_rope:
        c, s = f32(cos, half), f32(sin, half)
        for i in range(half):
            first, second = x[i], x[half + i]
            y[i] = to_bf16(first * c[i] - second * s[i])
            y[half + i] = to_bf16(second * c[i] + first * s[i])
    else:
        for i in range(width):
            y[i] = to_bf16(x[i])


@njit(fastmath=FAST)
def prepare_row(a: np.ndarray, layer: np.ndarray, row: int, eps: float) -> None:
    """Rotate a row's query heads into QUERY, and its key and value heads into the cache at the row's slot, unless that is negative."""
    num_heads, num_kv, width = a[NUM_HEADS], a[NUM_KV_HEADS], a[HEAD_DIM]
    source = a[QKV] + row * (num_heads + 2 * num_kv) * width * 4
    position = i64(a[POSITIONS], row + 1)[row]
    cos, sin = a[COS] + position * width * 2, a[SIN] + position * width * 2
    has_rope, bias = layer[HAS_ROPE] != 0, layer[QKV_BIAS]
    slot = i64(a[SLOTS], row + 1)[row] * num_kv * width * 2
    stored = num_kv if slot >= 0 else 0
    for head in range(num_heads):
        at = head * width * 4
        out = a[QUERY] + (row * num_heads + head) * width * 2
        prepare_head(source + at, bias + at if bias else 0, layer[Q_NORM], cos, sin, out, width, eps, has_rope)
    for head in range(stored):
        at = (num_heads + head) * width * 4
        out = layer[K_CACHE] + slot + head * width * 2
        prepare_head(source + at, bias + at if bias else 0, layer[K_NORM], cos, sin, out, width, eps, has_rope)
        at = (num_heads + num_kv + head) * width * 4
        prepare_head(source + at, bias + at if bias else 0, 0, cos, sin, layer[V_CACHE] + slot + head * width * 2, width, eps, False)


@njit(fastmath=FAST)
def silu_product(gate_up: int, stride: int, out: int, out_stride: int, num_rows: int) -> None:
    """out (bf16) = silu(gate) * up for two neighbouring 16-column blocks of float32 rows."""
    for row in range(num_rows):
        at = gate_up + row * stride
        silu_times(at, at + 64, out + row * out_stride)


@njit
def product(
    a: np.ndarray, x: int, width: int, w: int, scales: int, total: int, unit: int, thread: int, out: int, is_sum: bool, scratch: int
) -> None:
    """A thread's share, cut at multiples of `unit`, of out [M, 16 * total] (f32) (+)= x W^T; x [M, width] bf16, W of either type."""
    num_rows, stride = a[NUM_ROWS], total * 64
    first, last = share(total, thread, a[NUM_THREADS], unit)
    if scales != 0:
        gemm_blocks_int8(x, width, w, scales, first, last, out, stride, num_rows, is_sum, scratch + a[WORKSPACE])
    else:
        gemm_blocks(x, width * 2, w, width // 32, first, last, out, stride, (num_rows + ROWS - 1) // ROWS, is_sum)


@njit(fastmath=FAST)
def gate_up_int8(a: np.ndarray, w: int, scales: int, first: int, last: int, scratch: int) -> None:
    """ACTIVATION columns of MLP blocks [first, last), the weight in int8."""
    hidden, mlp, num_rows, workspace = a[HIDDEN], a[MLP], a[NUM_ROWS], scratch + a[WORKSPACE]
    for m in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - m)
        round_rows(a[NORMED] + m * hidden * 2, hidden, rows, workspace)
        for block in range(first, last, 2):
            at, count = 2 * block, min(2, last - block)
            weight = w + at * (hidden // 64) * TILE_BYTES
            dot_rows(hidden, weight, scales + at * 64, 0, 2 * count, scratch, 256, rows, False, workspace)
            for n in range(count):
                silu_product(scratch + n * 128, 256, a[ACTIVATION] + (m * mlp + (block + n) * 16) * 2, mlp * 2, rows)


@njit(fastmath=FAST)
def gate_up_blocks(a: np.ndarray, w: int, first: int, last: int, scratch: int) -> None:
    """ACTIVATION columns of MLP blocks [first, last): each is a gate block and an up block of the interleaved weight.

    Two MLP blocks by up to two row tiles at a time, so that four tile products are always under way.
    """
    hidden, mlp, num_rows = a[HIDDEN], a[MLP], a[NUM_ROWS]
    num_k = hidden // 32
    for block in range(first, last, 2):
        num_blocks = min(2, last - block)
        weight = w + 2 * block * num_k * TILE_BYTES
        for m in range(0, num_rows, 2 * ROWS):
            rows = min(2 * ROWS, num_rows - m)
            tiles = (rows + ROWS - 1) // ROWS
            gemm_blocks(a[NORMED] + m * hidden * 2, hidden * 2, weight, num_k, 0, 2 * num_blocks, scratch, 256, tiles, False)
            for n in range(num_blocks):
                silu_product(scratch + n * 128, 256, a[ACTIVATION] + (m * mlp + (block + n) * 16) * 2, mlp * 2, rows)


@njit(fastmath=FAST)
def pack_queries(a: np.ndarray, first_row: int, kv_head: int, first: int, count: int, out: int) -> None:
    """Lay queries [first, first + count) of a request and KV head out as the right-hand tiles of a product: pairs x queries."""
    num_heads, width = a[NUM_HEADS], a[HEAD_DIM]
    group = num_heads // a[NUM_KV_HEADS]
    pairs = width // 2
    tile = carray(pointer(out), (pairs * 16,), np.uint32)
    for j in range(16):
        if j < count:
            row, head = first_row + (first + j) // group, kv_head * group + (first + j) % group
            query = carray(pointer(a[QUERY] + (row * num_heads + head) * width * 2), (pairs,), np.uint32)
            for i in range(pairs):
                tile[i * 16 + j] = query[i]
        else:
            for i in range(pairs):
                tile[i * 16 + j] = np.uint32(0)


@njit(fastmath=FAST)
def score_chunk(a: np.ndarray, k_cache: int, table: int, kv_head: int, start: int, end: int, queries: int, scores: int) -> None:
    """scores [64, 16] = keys [start, start + 64) x queries. Keys are read in place, 16 slots of one block per tile."""
    width, block_size = a[HEAD_DIM], a[BLOCK_SIZE]
    stride = a[NUM_KV_HEADS] * width * 2
    blocks = carray(pointer(table), (end // block_size + 1,), np.int32)
    for part in range(4):
        token = start + part * 16
        if token >= end:
            return
        slot = np.int64(blocks[token // block_size]) * block_size + token % block_size
        key = k_cache + slot * stride + kv_head * width * 2
        _zero0()
        for k in range(width // 32):
            _load4(key + k * 64, stride)
            _load5(queries + k * TILE_BYTES, 64)
            _dot045()
        _store0(scores + part * 1024, 64)


@njit(fastmath=FAST)
def widen_values(a: np.ndarray, v_cache: int, table: int, kv_head: int, start: int, count: int, out: int) -> None:
    """Copy `count` value rows from token `start` on as float32, in slices of 64 dims: [Dh / 64, 64 tokens, 64]."""
    width, block_size = a[HEAD_DIM], a[BLOCK_SIZE]
    stride = a[NUM_KV_HEADS] * width * 2
    blocks = carray(pointer(table), ((start + count - 1) // block_size + 1,), np.int32)
    for t in range(0, count, ROWS):  # 16 tokens never cross a block
        slot = np.int64(blocks[(start + t) // block_size]) * block_size + (start + t) % block_size
        value = v_cache + slot * stride + kv_head * width * 2
        for part in range(width // 64):
            widen_rows(value + part * 128, stride, out + (part * CHUNK + t) * 256, min(ROWS, count - t))


@njit(fastmath=FAST)
def mask_scores(
    a: np.ndarray, layer: np.ndarray, request: int, first_row: int, first: int, count: int, start: int, num_keys: int, scores: int
) -> None:
    """Hide what a query may not see: the future, other branches of a tree, keys behind the window."""
    group = a[NUM_HEADS] // a[NUM_KV_HEADS]
    starts = i64(a[QUERY_STARTS], request + 2)
    query_len = starts[request + 1] - starts[request]
    context = i64(a[SEQ_LENS], request + 1)[request] - query_len
    s = f32(scores, CHUNK * 16)
    places = i64(a[POSITIONS] + first_row * 8, query_len)
    if start + num_keys <= context and layer[WINDOW] == 0:
        return
    for j in range(count):
        offset = (first + j) // group
        place = offset if a[TREE] == 0 else places[offset] - places[0]  # a tree row stands at its depth, not at its slot
        for t in range(num_keys):
            token = start + t
            hidden = a[IS_CAUSAL] != 0 and token > context + offset
            if a[TREE] != 0 and token >= context:
                hidden = carray(pointer(a[TREE] + (first_row + offset) * a[TREE_STRIDE]), (query_len,), np.uint8)[token - context] == 0
            if layer[WINDOW] != 0:
                key_place = token - context
                if a[TREE] != 0 and token >= context:
                    key_place = places[token - context] - places[0]
                hidden = hidden or key_place <= place - layer[WINDOW]
            if hidden:
                s[t * 16 + j] = np.float32(UNSEEN)


# Keys that are no numbers weigh nothing: the row becomes NaN. Python's error for 1 / 0 would leave the other threads at a barrier.
@njit(fastmath=FAST, error_model="numpy")
def attend_item(a: np.ndarray, layer: np.ndarray, request: int, kv_head: int, first: int, count: int, scratch: int) -> None:
    """Attention of up to 16 queries (rows x heads of one group) of one request over all their keys."""
    num_heads, width = a[NUM_HEADS], a[HEAD_DIM]
    group = num_heads // a[NUM_KV_HEADS]
    starts = i64(a[QUERY_STARTS], request + 2)
    first_row = starts[request]
    seq_len = i64(a[SEQ_LENS], request + 1)[request]
    context = seq_len - (starts[request + 1] - first_row)
    end = seq_len if a[IS_CAUSAL] == 0 or a[TREE] != 0 else context + (first + count - 1) // group + 1
    begin = 0
    if layer[WINDOW] != 0:
        offset = first // group if a[TREE] == 0 else 0
        begin = max(context + offset - layer[WINDOW] + 1, 0) // CHUNK * CHUNK
    table = a[BLOCK_TABLE] + request * a[TABLE_STRIDE] * 4
    queries, scores = scratch, scratch + 32 * 1024
    state = scores + CHUNK * 64  # running maximum, sum and rescaling of 16 queries
    outputs = scores + CHUNK * 64 + 192
    values = outputs + 16 * width * 4
    pack_queries(a, first_row, kv_head, first, count, queries)
    top, mass, factor, out = f32(state, 16), f32(state + 64, 16), f32(state + 128, 16), f32(outputs, 16 * width)
    scale = LOG2E / np.float32(np.sqrt(np.float32(width)))
    for j in range(16):
        top[j], mass[j] = np.float32(UNSEEN), np.float32(0.0)
    for i in range(16 * width):
        out[i] = np.float32(0.0)
    for start in range(begin, end, CHUNK):
        num_keys = min(CHUNK, end - start)
        score_chunk(a, layer[K_CACHE], table, kv_head, start, end, queries, scores)
        widen_values(a, layer[V_CACHE], table, kv_head, start, num_keys, values)
        mask_scores(a, layer, request, first_row, first, count, start, num_keys, scores)
        softmax_keys(scores, num_keys, scale, state)
        for j in range(count):
            for part in range(width // 64):
                accumulate_values(outputs + (j * width + part * 64) * 4, factor[j], scores + j * 4, values + part * CHUNK * 256, num_keys)
    for j in range(count):
        row, head = first_row + (first + j) // group, kv_head * group + (first + j) % group
        y = u16(a[ATTENDED] + (row * num_heads + head) * width * 2, width)
        inverse = np.float32(1.0) / mass[j]
        for i in range(width):
            y[i] = to_bf16(out[j * width + i] * inverse)


@njit(fastmath=FAST)
def attend(a: np.ndarray, layer: np.ndarray, thread: int, scratch: int) -> None:
    """Deal the (request, KV head, 16 queries) items out to the threads in turn."""
    group = a[NUM_HEADS] // a[NUM_KV_HEADS]
    starts = i64(a[QUERY_STARTS], a[NUM_REQUESTS] + 1)
    item = 0
    for request in range(a[NUM_REQUESTS]):
        num_queries = (starts[request + 1] - starts[request]) * group
        for first in range(0, num_queries, 16):
            for kv_head in range(a[NUM_KV_HEADS]):
                if item % a[NUM_THREADS] == thread:
                    attend_item(a, layer, request, kv_head, first, min(16, num_queries - first), scratch)
                item += 1


@njit
def norm_rows(a: np.ndarray, weight: int, out: int, thread: int, eps: float) -> None:
    """RMS norm of the thread\'s rows of the residual stream, as bf16."""
    for row in range(thread, a[NUM_ROWS], a[NUM_THREADS]):
        rms_norm_row(a[RESIDUAL] + row * a[HIDDEN] * 4, weight, out + row * a[HIDDEN] * 2, a[HIDDEN], eps)


@njit
def copy_rows(a: np.ndarray, out: int, thread: int) -> None:
    """Tap: the residual stream as bf16 [M, H]."""
    width = a[HIDDEN]
    for row in range(thread, a[NUM_ROWS], a[NUM_THREADS]):
        x, y = f32(a[RESIDUAL] + row * width * 4, width), u16(out + row * width * 2, width)
        for i in range(width):
            y[i] = to_bf16(x[i])


@njit
def wait_for_all(a: np.ndarray) -> None:
    """Barrier of the team, by a counter of arrivals that only grows.

    OpenMP's own barrier puts a waiting thread to sleep at once when a process holds more OpenMP threads than cores (a second
    pool is enough), and 240 wake-ups of 50 us a step would double its time. After a while the core is offered to others.
    """
    num_threads = a[NUM_THREADS]
    goal = (atomic_add(a[ARRIVALS], 1) // num_threads + 1) * num_threads
    spins = 0
    while atomic_load(a[ARRIVALS]) < goal:
        pause()
        spins += 1
        if spins > SPINS:
            yield_cpu()


@njit
def run_layer(a: np.ndarray, layer: np.ndarray, thread: int, scratch: int, eps: float) -> None:
    """One decoder layer. Barriers stand where a thread reads what another wrote."""
    num_threads, hidden = a[NUM_THREADS], a[HIDDEN]
    q_width = a[NUM_HEADS] * a[HEAD_DIM]
    qkv_width = q_width + 2 * a[NUM_KV_HEADS] * a[HEAD_DIM]
    source, width = layer[MIXED], layer[MIXED_WIDTH]
    if source == 0:
        source, width = a[NORMED], hidden
        norm_rows(a, layer[INPUT_NORM], source, thread, eps)
    if layer[TAP] != 0:
        copy_rows(a, layer[TAP], thread)
    wait_for_all(a)
    product(a, source, width, layer[W_QKV], layer[S_QKV], qkv_width // 16, 4, thread, a[QKV], False, scratch)
    wait_for_all(a)
    for row in range(thread, a[NUM_ROWS], num_threads):
        prepare_row(a, layer, row, eps)
    wait_for_all(a)
    attend(a, layer, thread, scratch)
    wait_for_all(a)
    product(a, a[ATTENDED], q_width, layer[W_OUT], layer[S_OUT], hidden // 16, 2, thread, a[RESIDUAL], True, scratch)
    wait_for_all(a)
    norm_rows(a, layer[POST_NORM], a[NORMED], thread, eps)
    wait_for_all(a)
    first, last = share(a[MLP] // 16, thread, num_threads, 2)
    if layer[S_GATE_UP] != 0:
        gate_up_int8(a, layer[W_GATE_UP], layer[S_GATE_UP], first, last, scratch)
    else:
        gate_up_blocks(a, layer[W_GATE_UP], first, last, scratch)
    wait_for_all(a)
    product(a, a[ACTIVATION], a[MLP], layer[W_DOWN], layer[S_DOWN], hidden // 16, 2, thread, a[RESIDUAL], True, scratch)
    wait_for_all(a)


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def decoder_entry(arguments: int) -> None:
    """Run the layers of a call table on one thread of the team."""
    a = carray(arguments, (NUM_SLOTS,), np.int64)
    a[NUM_THREADS] = np.int64(team_size())  # the runtime may grant fewer than asked; every thread writes the same number
    tile_config(a[TILE_CONFIG])
    thread = np.int64(thread_num())
    scratch = a[SCRATCH] + thread * a[SCRATCH_STRIDE]
    eps = f32(a[EPS], 1)[0]
    for index in range(a[NUM_LAYERS]):
        run_layer(a, i64(a[LAYERS] + index * NUM_COLUMNS * 8, NUM_COLUMNS), thread, scratch, eps)
    if a[FINAL_NORM] != 0:
        norm_rows(a, a[FINAL_NORM], a[OUTPUT], thread, eps)
