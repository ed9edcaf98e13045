"""Sixteen float32 numbers in a register of the processor, as Numba kernels compute with them.

LLVM vectorises a loop by eight numbers, with a remainder, and asks first whether its arrays overlap: for rows of 64
numbers that takes longer than the work. Here every operation is one of sixteen numbers. `scaled`,
`about_inverse` and bf16 (given as int16) are for processors with AVX-512; LLVM has the rest for every processor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types

from omagd.modules.kernels import compiled
from omagd.modules.kernels.compiled import function, intrinsic

LANES = 16


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not name."""

    null = "0.0"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_BFLOATS = ir.VectorType(_BFloat(), LANES)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16)))


class Sixteen(types.Type):
    """Numba's type of sixteen float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="sixteen float32")


sixteen = Sixteen()


@extending.register_model(Sixteen)
class _Register(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


def _operator(op: Callable[..., Any], instruction: str) -> None:
    """Let `op` of two vectors be one instruction; a product and a sum may become one, as in other kernels."""

    @extending.type_callable(op)
    def typed(_: Any) -> Any:
        return lambda a, b: sixteen if isinstance(a, Sixteen) and isinstance(b, Sixteen) else None

    @extending.lower_builtin(op, Sixteen, Sixteen)  # type: ignore[untyped-decorator]
    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args, flags=("contract",))


for _op, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operator(_op, _instruction)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    found = builder.module.globals.get(name)
    return builder.call(found or ir.Function(builder.module, kind, name), args)


def _all(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _address(context: Any, builder: Any, array: Any, memory: Any, place: Any, kind: Any) -> Any:
    data = context.make_array(array)(context, builder, memory).data
    return builder.bitcast(builder.gep(data, [place]), kind.as_pointer())


@intrinsic
def same(_: Any, number: Any) -> Any:
    """Return a float32 number sixteen times."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), _all(_INTS, 0))

    return sixteen(types.float32), generate


@intrinsic
def load(_: Any, row: Any, place: Any) -> Any:
    """Return the numbers from `place` on in the memory of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = signature.args[0]
        if array.dtype == types.float32:
            return builder.load(_address(context, builder, array, args[0], args[1], _FLOATS), align=4)
        low = builder.load(_address(context, builder, array, args[0], args[1], _SHORTS), align=2)
        return builder.bitcast(builder.shl(builder.zext(low, _INTS), _all(_INTS, 16)), _FLOATS)

    return sixteen(row, types.int64), generate


@intrinsic
def store(_: Any, row: Any, place: Any, numbers: Any) -> Any:
    """Write the numbers as `load` reads them, as the nearest bf16 numbers (ties to even) if the array has these."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, (memory, place, numbers) = signature.args[0], args
        if array.dtype == types.float32:
            builder.store(numbers, _address(context, builder, array, memory, place, _FLOATS), align=4)
        else:
            low = builder.fptrunc(numbers, _BFLOATS)
            builder.store(low, _address(context, builder, array, memory, place, _BFLOATS), align=2)
        return context.get_dummy_value()

    return types.void(row, types.int64, sixteen), generate


@intrinsic
def positive(_: Any, x: Any) -> Any:
    """Return relu(x): 0 where a number is not above 0."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        zero = _all(_FLOATS, 0.0)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[0], zero)

    return sixteen(sixteen), generate


@intrinsic
def above_zero(_: Any, x: Any) -> Any:
    """Return which numbers are above 0, as the bits of a uint16."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(builder.fcmp_ordered(">", args[0], _all(_FLOATS, 0.0)), ir.IntType(LANES))

    return types.uint16(sixteen), generate


@intrinsic
def where(_: Any, bits: Any, x: Any) -> Any:
    """Return the numbers whose bit is set, and 0 for the others."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.select(
            builder.bitcast(args[0], ir.VectorType(ir.IntType(1), LANES)), args[1], _all(_FLOATS, 0.0)
        )

    return sixteen(types.uint16, sixteen), generate


@intrinsic
def scaled(_: Any, x: Any, exponent: Any) -> Any:
    """Return x 2^exponent for whole exponents: 0 or infinity beyond what a float32 can hold."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        mask, rounding = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
        return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, *args, args[0], mask, rounding)

    return sixteen(sixteen, sixteen), generate


@intrinsic
def nearest(_: Any, x: Any) -> Any:
    """Return the nearest whole number of each."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _call(builder, "llvm.rint.v16f32", _FLOATS, args[0])

    return sixteen(sixteen), generate


def _bounded(builder: Any, x: Any, beyond: str, limit: Any) -> Any:
    return builder.select(builder.fcmp_ordered(beyond, x, limit), limit, x)


@intrinsic
def within(_: Any, x: Any, lowest: Any, highest: Any) -> Any:
    """Return each number or, beyond these bounds, the bound; NaN where x is."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _bounded(builder, _bounded(builder, args[0], "<", args[1]), ">", args[2])

    return sixteen(sixteen, sixteen, sixteen), generate


@intrinsic
def about_inverse(_: Any, x: Any) -> Any:
    """Return 1 / x within 2^-14 relative."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        mask = ir.Constant(ir.IntType(16), -1)
        return _call(builder, "llvm.x86.avx512.rcp14.ps.512", _FLOATS, args[0], args[0], mask)

    return sixteen(sixteen), generate


@function
def exp(x: Any) -> Any:
    """Return e^x for x between -87 and 87, within 2e-7 relative; NaN for NaN. As `compiled.exp`."""
    x = within(x, same(-compiled.LIMIT), same(compiled.LIMIT))
    k = nearest(x * same(compiled.LOG2_E))
    r = x - k * same(compiled.LN_2) - k * same(compiled.LN_2_REST)
    p = (same(compiled.C0) * r + same(compiled.C1)) * r + same(compiled.C2)
    p = ((p * r + same(compiled.C3)) * r + same(compiled.C4)) * r + same(compiled.C5)
    return scaled(p * r * r + r + same(compiled.ONE), k)


@function
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x) within 3e-7 relative, without a division."""
    one = same(compiled.ONE)
    whole = one + exp(same(compiled.ZERO) - x)
    near = about_inverse(whole)
    return near + near * (one - whole * near)  # a step of Newton's method
