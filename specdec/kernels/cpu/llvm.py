"""Instructions numba has no word for: AMX tiles, bit casts, 16-lane vectors, and the OpenMP team's own calls.

Owns: numba intrinsics, each a few lines of LLVM IR. Must not know: what is computed with them.
Source: Intel SDM vol. 2 (TILELOADD, TDPBF16PS); Random LLVM targets lower the vector parts, only tiles need AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_PTR = _I8.as_pointer()
_LANES = 16
_EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)  # Taylor terms ln(2)^n / n!
LOG2_E = 1.4426950408889634
UNSEEN = -1e30  # score of a key that may not be seen: finite, so that an empty chunk stays harmless
_VEC = ir.VectorType(_F32, _LANES)


def _external(builder: Any, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    """Call a symbol or an LLVM intrinsic by name."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _tile(index: int) -> ir.Constant:
    return ir.Constant(_I8, index)


@intrinsic
def tile_config(typingctx, config):  # type: ignore[no-untyped-def]  # noqa: D103
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _external(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [builder.inttoptr(args[0], _PTR)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def tile_zero(index: int) -> Callable[[], None]:
    """Return the intrinsic that zeroes tile `index`."""

    @intrinsic
    def zero(typingctx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            _external(builder, "llvm.x86.tilezero", ir.VoidType(), [_tile(index)])
            return context.get_dummy_value()

        return types.void(), codegen

    return zero  # type: ignore[no-any-return]


def tile_load(index: int) -> Callable[[int, int], None]:
    """Return the intrinsic load(address, stride in bytes) into tile `index`."""
    return _tile_memory("llvm.x86.tileloadd64", index)


def tile_store(index: int) -> Callable[[int, int], None]:
    """Return the intrinsic store(address, stride in bytes) of tile `index`."""
    return _tile_memory("llvm.x86.tilestored64", index)


def _tile_memory(name: str, index: int) -> Callable[[int, int], None]:
    @intrinsic
    def move(typingctx, address, stride):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            _external(builder, name, ir.VoidType(), [_tile(index), builder.inttoptr(args[0], _PTR), args[1]])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return move  # type: ignore[no-any-return]


def tile_dot(c: int, a: int, b: int) -> Callable[[], None]:
    """Return the intrinsic tile c += a @ b: a is [16, 32] bf16, b holds 16 row pairs of 16 columns, c is [16, 16] f32."""
    return _tile_product("llvm.x86.tdpbf16ps", c, a, b)


def tile_dot_int8(c: int, a: int, b: int) -> Callable[[], None]:
    """Return the intrinsic tile c += a @ b: a is [16, 64] int8, b holds 16 row quads of 16 columns, c is [16, 16] int32."""
    return _tile_product("llvm.x86.tdpbssd", c, a, b)


def _tile_product(name: str, c: int, a: int, b: int) -> Callable[[], None]:
    @intrinsic
    def dot(typingctx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            _external(builder, name, ir.VoidType(), [_tile(c), _tile(a), _tile(b)])
            return context.get_dummy_value()

        return types.void(), codegen

    return dot  # type: ignore[no-any-return]


@intrinsic
def pointer(typingctx, address):  # type: ignore[no-untyped-def]  # noqa: D103
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], _PTR)

    return types.voidptr(types.int64), codegen


@intrinsic
def bits_of(typingctx, value):  # type: ignore[no-untyped-def]  # noqa: D103
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):  # type: ignore[no-untyped-def]  # noqa: D103
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def thread_num(typingctx):  # type: ignore[no-untyped-def]  # noqa: D103
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _external(builder, "specdec_thread_num", _I32, [])

    return types.int32(), codegen


@intrinsic
def team_size(typingctx):  # type: ignore[no-untyped-def]  # noqa: D103
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _external(builder, "specdec_team_size", _I32, [])

    return types.int32(), codegen


@intrinsic
def atomic_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at an address and return what it held before."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):  # type: ignore[no-untyped-def]
    """Read the int64 at an address, with all that was written before it."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _external(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_cpu(typingctx):  # type: ignore[no-untyped-def]
    """Let another thread have the core."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _external(builder, "sched_yield", _I32, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def accumulate_values(typingctx, acc, scale, weights, values, count):  # type: ignore[no-untyped-def]
    """acc[64] = acc[64] * scale + sum_t weights[16 t] * values[64 t .. 64 t + 63] for t < count, all float32 by address.

    Four 16-lane accumulators stay in registers over the whole sum; numba's own arrays would go through memory each turn.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        acc, scale, weights, values, count = args
        accumulators = []
        for lane in range(4):
            slot = cgutils.alloca_once(builder, _VEC)
            scaled = builder.fmul(_load_vector(builder, acc, lane * 64), _broadcast(builder, scale))
            builder.store(scaled, slot)
            accumulators.append(slot)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            weight_at = builder.inttoptr(builder.add(weights, builder.shl(loop.index, ir.Constant(_I64, 6))), _F32.as_pointer())
            weight = _broadcast(builder, builder.load(weight_at))
            row = builder.add(values, builder.shl(loop.index, ir.Constant(_I64, 8)))
            for lane, slot in enumerate(accumulators):
                product = builder.fmul(weight, _load_vector(builder, row, lane * 64), flags=("contract",))
                builder.store(builder.fadd(product, builder.load(slot), flags=("contract",)), slot)
        for lane, slot in enumerate(accumulators):
            store = builder.store(builder.load(slot), _vector_at(builder, acc, lane * 64))
            store.align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), codegen


@intrinsic
def softmax_keys(typingctx, scores, count, scale, state):  # type: ignore[no-untyped-def]
    """Online softmax of 16 queries over the keys of a chunk: scores [count, 16] float32 become weights in place.

    state holds three rows of 16 float32: running maximum, running sum of weights, and (written) the factor by which
    earlier sums shrink. Scores at or below UNSEEN weigh nothing; scale (positive) turns scores into powers of two.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        scores, count, scale, state = args
        scale = _broadcast(builder, scale)
        before = _load_vector(builder, state, 0)
        top = cgutils.alloca_once_value(builder, before)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            score = _load_vector(builder, _row(builder, scores, loop.index), 0)
            builder.store(_larger(builder, score, builder.load(top)), top)
        largest = builder.load(top)
        factor = _exp2(builder, builder.fmul(builder.fsub(before, largest), scale))
        total = cgutils.alloca_once_value(builder, builder.fmul(_load_vector(builder, state, 64), factor))
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            at = _row(builder, scores, loop.index)
            score = _load_vector(builder, at, 0)
            weight = _exp2(builder, builder.fmul(builder.fsub(score, largest), scale))
            weight = builder.select(builder.fcmp_ordered(">", score, _splat(UNSEEN)), weight, _splat(0.0))
            _store_vector(builder, weight, at, 0)
            builder.store(builder.fadd(builder.load(total), weight), total)
        _store_vector(builder, largest, state, 0)
        _store_vector(builder, builder.load(total), state, 64)
        _store_vector(builder, factor, state, 128)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic
def silu_times(typingctx, gate, up, out):  # type: ignore[no-untyped-def]
    """out[16] (bf16 bits) = silu(gate[16]) * up[16], float32 by address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        gate, up = _load_vector(builder, args[0], 0), _load_vector(builder, args[1], 0)
        power = _exp2(builder, builder.fmul(gate, _splat(-1.4426950408889634)))
        value = builder.fmul(builder.fdiv(gate, builder.fadd(_splat(1.0), power)), up)
        store = builder.store(_round_bf16(builder, value), builder.inttoptr(args[2], ir.VectorType(_I16, _LANES).as_pointer()))
        store.align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def widen_rows(typingctx, source, stride, out, count):  # type: ignore[no-untyped-def]
    """out[64 t .. 64 t + 63] (float32) = 64 bf16 values at source + stride * t (bytes), for t < count."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source, stride, out, count = args
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            row = builder.add(source, builder.mul(stride, loop.index))
            target = builder.add(out, builder.shl(loop.index, ir.Constant(_I64, 8)))
            for lane in range(4):
                _store_vector(builder, _load_half(builder, builder.add(row, ir.Constant(_I64, lane * 32))), target, lane * 64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def largest(typingctx, values, count):  # type: ignore[no-untyped-def]
    """The largest of `count` (a multiple of 16) float32 at an address; NaN counts as nothing."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        top = cgutils.alloca_once_value(builder, _splat(-3.4e38))
        with cgutils.for_range(builder, builder.lshr(args[1], ir.Constant(_I64, 4)), intp=_I64) as loop:
            builder.store(_larger(builder, _load_vector(builder, _row(builder, args[0], loop.index), 0), builder.load(top)), top)
        return _external(builder, "llvm.vector.reduce.fmax.v16f32", _F32, [builder.load(top)])

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def exp_sum(typingctx, values, count, top):  # type: ignore[no-untyped-def]
    """The sum of e^(x - top) over `count` (a multiple of 16) float32 at an address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        values, count, top = args
        shift, total = _broadcast(builder, top), cgutils.alloca_once_value(builder, _splat(0.0))
        with cgutils.for_range(builder, builder.lshr(count, ir.Constant(_I64, 4)), intp=_I64) as loop:
            distance = builder.fsub(_load_vector(builder, _row(builder, values, loop.index), 0), shift)
            power = _exp2(builder, builder.fmul(distance, _splat(LOG2_E)))
            builder.store(builder.fadd(power, builder.load(total)), total)
        return _external(builder, "llvm.vector.reduce.fadd.v16f32", _F32, [ir.Constant(_F32, 0.0), builder.load(total)])

    return types.float32(types.int64, types.int64, types.float32), codegen


@intrinsic
def largest_half(typingctx, values, count):  # type: ignore[no-untyped-def]
    """The largest magnitude of `count` (a multiple of 16) bf16 values at an address; NaN counts as nothing."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        top = cgutils.alloca_once_value(builder, _splat(0.0))
        with cgutils.for_range(builder, builder.lshr(args[1], ir.Constant(_I64, 4)), intp=_I64) as loop:
            at = builder.add(args[0], builder.shl(loop.index, ir.Constant(_I64, 5)))
            size = _external(builder, "llvm.fabs.v16f32", _VEC, [_load_half(builder, at)])
            builder.store(_larger(builder, size, builder.load(top)), top)
        return _external(builder, "llvm.vector.reduce.fmax.v16f32", _F32, [builder.load(top)])

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def round_half(typingctx, values, count, factor, out):  # type: ignore[no-untyped-def]
    """out (int8) = round(x * factor) of `count` (a multiple of 16) bf16 values at an address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        values, count, factor, out = args
        factor = _broadcast(builder, factor)
        with cgutils.for_range(builder, builder.lshr(count, ir.Constant(_I64, 4)), intp=_I64) as loop:
            at = builder.add(values, builder.shl(loop.index, ir.Constant(_I64, 5)))
            scaled = _external(builder, "llvm.rint.v16f32", _VEC, [builder.fmul(_load_half(builder, at), factor)])
            whole = builder.trunc(builder.fptosi(scaled, ir.VectorType(_I32, _LANES)), ir.VectorType(_I8, _LANES))
            target = builder.add(out, builder.shl(loop.index, ir.Constant(_I64, 4)))
            builder.store(whole, builder.inttoptr(target, ir.VectorType(_I8, _LANES).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic
def scale_sums(typingctx, sums, scales, scale, out, is_sum):  # type: ignore[no-untyped-def]
    """out[16] (+)= sums[16] (int32) * scales[16] * scale[0], all by address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        sums, scales, scale, out, is_sum = args
        load = builder.load(builder.inttoptr(sums, ir.VectorType(_I32, _LANES).as_pointer()))
        load.align = 4
        factor = _broadcast(builder, builder.load(builder.inttoptr(scale, _F32.as_pointer())))
        value = builder.fmul(builder.fmul(builder.sitofp(load, _VEC), _load_vector(builder, scales, 0)), factor)
        before = builder.select(is_sum, _load_vector(builder, out, 0), _splat(0.0))
        _store_vector(builder, builder.fadd(before, value), out, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.boolean), codegen


@intrinsic
def f32_at(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Write a float32 at an address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store(args[1], builder.inttoptr(args[0], _F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


def _load_half(builder: Any, address: Any) -> Any:
    """16 bf16 values as float32."""
    load = builder.load(builder.inttoptr(address, ir.VectorType(_I16, _LANES).as_pointer()))
    load.align = 2
    return builder.bitcast(builder.shl(builder.zext(load, ir.VectorType(_I32, _LANES)), _integers(16)), _VEC)


def _splat(value: float) -> ir.Constant:
    return ir.Constant(_VEC, [value] * _LANES)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, _LANES), [value] * _LANES)


def _row(builder: Any, base: Any, index: Any) -> Any:
    return builder.add(base, builder.shl(index, ir.Constant(_I64, 6)))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp2(builder: Any, x: Any) -> Any:
    """2^x of 16 lanes: a degree-6 polynomial on the fraction (relative error 2e-7), the whole part through the exponent."""
    x = _larger(builder, x, _splat(-126.0))
    x = builder.select(builder.fcmp_ordered("<", x, _splat(126.0)), x, _splat(126.0))
    whole = _external(builder, "llvm.floor.v16f32", _VEC, [builder.fadd(x, _splat(0.5))])
    fraction = builder.fsub(x, whole)
    value = _splat(_EXP2[0])
    for coefficient in _EXP2[1:]:
        value = builder.fadd(builder.fmul(value, fraction, flags=("contract",)), _splat(coefficient), flags=("contract",))
    exponent = builder.shl(builder.add(builder.fptosi(whole, ir.VectorType(_I32, _LANES)), _integers(127)), _integers(23))
    return builder.fmul(value, builder.bitcast(exponent, _VEC))


def _round_bf16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, ir.VectorType(_I32, _LANES))
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _integers(0x7FFF)), odd), _integers(16))
    return builder.trunc(rounded, ir.VectorType(_I16, _LANES))


def _store_vector(builder: Any, value: Any, address: Any, offset: int) -> None:
    builder.store(value, _vector_at(builder, address, offset)).align = 4


def _vector_at(builder: Any, address: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), _VEC.as_pointer())


def _load_vector(builder: Any, address: Any, offset: int) -> Any:
    load = builder.load(_vector_at(builder, address, offset))
    load.align = 4
    return load


def _broadcast(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VEC, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_VEC, ir.Undefined), ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES))
