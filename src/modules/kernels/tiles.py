"""The GRU of `recurrent.py` in one Numba kernel a pass, whose products are instructions of the processor (AMX).

A tile is 16 rows of 64 bytes. An instruction multiplies a tile of bf16 [16, 32] by one of [32, 16] and adds the result
to one of float32 [16, 16]: 16,384 operations in 16 cycles. Called one by one, the small products of a step take several
times as long to prepare as to compute. Arrays hold float32, or bf16 as its bits (int16). Only processors with AMX run
this (`has_tiles`).
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any, cast

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from torch import Tensor

from omagd.modules.kernels.compiled import ONE, TWO, function, intrinsic, kernel
from omagd.modules.kernels.vectors import LANES, load, same, sigmoid, store

BLOCK = 32  # rows, and columns, of the products that four tiles hold at once
_SYSTEM_CALL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), Linux on x86-64
_BYTE, _LONG, _ROWS = ir.IntType(8), ir.IntType(64), 16


@cache
def has_tiles() -> bool:
    """Return whether this process may multiply by tiles: AMX with bf16, and Linux keeps tiles for it from now on."""
    features, settings = binding.get_host_cpu_features(), cast(Any, config)
    there = all(features.get(name) for name in ("amx-tile", "amx-bf16", "avx512f", "avx512bf16"))
    if platform.system() != "Linux" or not there or settings.CPU_NAME or settings.CPU_FEATURES:
        return False
    return bool(ctypes.CDLL(None).syscall(_SYSTEM_CALL, _REQUEST, _TILE_DATA) == 0)


def shapes() -> np.ndarray[Any, Any]:
    """Return what `begin` reads: all eight tiles have 16 rows of 64 bytes (Intel's manual, LDTILECFG)."""
    table = np.zeros(64, np.uint8)
    table[0] = 1
    table[16:32].view(np.uint16)[:] = 64
    table[48:56] = _ROWS
    return table


def _emit(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    found = builder.module.globals.get(f"llvm.x86.{name}")
    builder.call(found or ir.Function(builder.module, kind, f"llvm.x86.{name}"), args)


def _place(context: Any, builder: Any, array: Any, memory: Any, *numbers: Any) -> Any:
    """Return the address of the element whose number is the sum of `numbers`."""
    total = ir.Constant(_LONG, 0)
    for number in numbers:
        total = builder.add(total, number)
    data = context.make_array(array)(context, builder, memory).data
    return builder.bitcast(builder.gep(data, [total]), _BYTE.as_pointer())


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


@intrinsic
def begin(_: Any, table: Any) -> Any:
    """Set the shapes of the tiles of this thread; see `shapes`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, "ldtilecfg", _place(context, builder, signature.args[0], args[0]))
        return context.get_dummy_value()

    return types.void(table), generate


@intrinsic
def end(_: Any) -> Any:
    """Leave the tiles, which makes switching to other threads cheap again."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def clear(_: Any) -> Any:
    """Set the four tiles of results to 0."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        for tile in range(4):
            _emit(builder, "tilezero", _tile(tile))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply(_: Any, a: Any, place: Any, width: Any, b: Any, place_b: Any, width_b: Any) -> Any:
    """Add a [32, 32] times b [32, 32] to the results.

    place: number of the first element in the memory of a, whose rows have `width` elements; the same for b, which is
    laid out by `paired`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, place, width, b, place_b, width_b = args
        two, rows, columns = (ir.Constant(_LONG, n) for n in (2, _ROWS, 2 * _ROWS))
        below, of_a, of_b = builder.mul(width, rows), builder.mul(width, two), builder.mul(width_b, two)
        for tile, numbers in ((4, (place,)), (5, (place, below))):
            _emit(builder, "tileloadd64", _tile(tile), _place(context, builder, signature.args[0], a, *numbers), of_a)
        for tile, numbers in ((6, (place_b,)), (7, (place_b, columns))):
            _emit(builder, "tileloadd64", _tile(tile), _place(context, builder, signature.args[3], b, *numbers), of_b)
        for tile in range(4):
            _emit(builder, "tdpbf16ps", _tile(tile), _tile(4 + tile // 2), _tile(6 + tile % 2))
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64, b, types.int64, types.int64), generate


@intrinsic
def keep(_: Any, out: Any, place: Any, width: Any) -> Any:
    """Write the results to `out` [., width] float32 from element number `place` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, place, width = args
        below, right = builder.mul(width, ir.Constant(_LONG, _ROWS)), ir.Constant(_LONG, _ROWS)
        bytes_of_row = builder.mul(width, ir.Constant(_LONG, 4))
        for tile, numbers in enumerate(((place,), (place, right), (place, below), (place, below, right))):
            _emit(
                builder, "tilestored64", _tile(tile), _place(context, builder, signature.args[0], out, *numbers),
                bytes_of_row,
            )  # fmt: skip
        return context.get_dummy_value()

    return types.void(out, types.int64, types.int64), generate


def paired(weight: Tensor) -> Tensor:
    """Return a matrix [k, n] as the second factor of `multiply`, [k / 2, 2 n] bf16: two of a column in turn."""
    k, n = weight.shape
    return weight.bfloat16().view(k // 2, 2, n).transpose(1, 2).reshape(k // 2, 2 * n)


@function
def add_product(a: Any, first: int, depth: int, b: Any, column: int) -> None:
    """Add to the results: a's 32 rows and `depth` columns from element `first` on, times b's 32 columns."""
    width, width_b = a.shape[1], b.shape[1]
    for i in range(0, depth, BLOCK):
        multiply(a, first + i, width, b, i // 2 * width_b + 2 * column, width_b)


@function
def multiply_block(a: Any, first: int, depth: int, b: Any, column: int, out: Any, place: int) -> None:
    """Write a product of `add_product` alone to `out` from element `place` on."""
    clear()
    add_product(a, first, depth, b, column)
    keep(out, place, out.shape[1])


@function
def gru_gates(row: Any, bias: Any, j: int, h: Any) -> Any:
    """Return n, r, z, m and h' of sixteen units from number j on. row: sums [n | r | z | m] [4H]. h: before."""
    size, one, two = len(bias) // 4, same(ONE), same(TWO)
    r = sigmoid(load(row, size + j) + load(bias, size + j))
    z = sigmoid(load(row, 2 * size + j) + load(bias, 2 * size + j))
    m = load(row, 3 * size + j) + load(bias, 3 * size + j)
    n = two * sigmoid(two * (load(row, j) + load(bias, j) + r * m)) - one  # tanh(a)
    return n, r, z, m, n + z * (h - n)


@function
def copy_row(source: Any, out: Any, count: int) -> None:
    """Copy numbers, a multiple of 16, rounding them if need be."""
    for j in range(0, count, LANES):
        store(out, j, load(source, j))


@kernel
def gru_forward(
    table: Any, steps: Any, x: Any, start: Any, from_x: Any, from_h: Any, bias: Any, room: Any, low: Any, gates: Any,
    read: Any, out: Any,
) -> None:  # fmt: skip
    """Write the hidden state after each row, `out` [R, H], 32 rows at a time.

    steps: [T, 2], first row and number of rows of each step. x: [R, K]. start: hidden state before the first step.
    from_x, from_h: `paired` weights of [n | r | z] and of [r | z | m]. bias: [4H]. room: [32, 4H] float32 and low
    [32, K + H] bf16 for what is between two steps. gates and read: take [n | r | z | m] and [x | h before] of each row
    unless they have no rows.
    """
    size, width, keeps = out.shape[1], x.shape[1], len(gates) > 0
    begin(table)
    for t in range(len(steps)):
        first, last = steps[t, 0], steps[t - 1, 0] if t else 0
        for offset in range(0, steps[t, 1], BLOCK):
            k = min(steps[t, 1] - offset, BLOCK)
            for i in range(k):
                h = out[last + offset + i] if t else start[offset + i]
                copy_row(x[first + offset + i], low[i], width)
                copy_row(h, low[i, width:], size)
            for j in range(0, size, BLOCK):
                multiply_block(low, 0, width, from_x, j, room, j)
                multiply_block(low, width, size, from_h, 2 * size + j, room, 3 * size + j)
            for j in range(0, 2 * size, BLOCK):
                clear()
                add_product(low, 0, width, from_x, size + j)
                add_product(low, width, size, from_h, j)
                keep(room, size + j, 4 * size)
            for i in range(k):
                place = first + offset + i
                row, after, h = room[i], out[place], out[last + offset + i] if t else start[offset + i]
                if keeps:
                    copy_row(low[i], read[place], width + size)
                    kept = gates[place]
                for j in range(0, size, LANES):
                    n, r, z, m, made = gru_gates(row, bias, j, load(h, j))
                    store(after, j, made)
                    if keeps:
                        store(kept, j, n)
                        store(kept, size + j, r)
                        store(kept, 2 * size + j, z)
                        store(kept, 3 * size + j, m)
    end()


@function
def gru_gradients(row: Any, g: Any, given: Any, h: Any, of_bias: Any) -> None:
    """Turn a row's gates into gradients, and g into g z; g is the gradient that later steps gave."""
    size, one = len(g), same(ONE)
    for j in range(0, size, LANES):
        n, r, z, m = load(row, j), load(row, size + j), load(row, 2 * size + j), load(row, 3 * size + j)
        whole = load(g, j) + load(given, j)
        d_n = whole * (one - z) * (one - n * n)
        d_r = d_n * m * r * (one - r)
        d_z = whole * (load(h, j) - n) * z * (one - z)
        d_m = d_n * r
        store(g, j, whole * z)
        store(row, j, d_n)
        store(row, size + j, d_r)
        store(row, 2 * size + j, d_z)
        store(row, 3 * size + j, d_m)
        store(of_bias, j, load(of_bias, j) + d_n)
        store(of_bias, size + j, load(of_bias, size + j) + d_r)
        store(of_bias, 2 * size + j, load(of_bias, 2 * size + j) + d_z)
        store(of_bias, 3 * size + j, load(of_bias, 3 * size + j) + d_m)


@kernel
def gru_backward(
    table: Any, steps: Any, given: Any, gates: Any, start: Any, out: Any, back_x: Any, back_h: Any, room: Any,
    carried: Any, for_x: Any, sums: Any,
) -> None:  # fmt: skip
    """Set `gates` to the gradients [d_n | d_r | d_z | d_m], and `for_x` [R, K] to those of x, last step first.

    steps, start, out: as in `gru_forward`. given: dL/dh' of each row. gates: its own, with 32 rows more. back_x,
    back_h: `paired` W_i [n | r | z] and W_h [r | z | m]. room: [32, H + K], for products. carried: zeros
    [rows of the first step, H], becomes dL/dh before it. sums: [T, 4H]; the gradients of a step's rows add up there.
    """
    size, width = out.shape[1], for_x.shape[1]
    begin(table)
    for t in range(len(steps) - 1, -1, -1):
        first, last = steps[t, 0], steps[t - 1, 0] if t else 0
        for offset in range(0, steps[t, 1], BLOCK):
            k, place = min(steps[t, 1] - offset, BLOCK), first + offset
            for i in range(k):
                h = out[last + offset + i] if t else start[offset + i]
                gru_gradients(gates[place + i], carried[offset + i], given[place + i], h, sums[t])
            for j in range(0, size, BLOCK):
                multiply_block(gates, (4 * place + 1) * size, 3 * size, back_h, j, room, j)
            for j in range(0, width, BLOCK):
                multiply_block(gates, 4 * place * size, 3 * size, back_x, j, room, size + j)
            for i in range(k):
                row, g = room[i], carried[offset + i]
                for j in range(0, size, LANES):
                    store(g, j, load(g, j) + load(row, j))
                copy_row(row[size:], for_x[place + i], width)
    end()


def call_all() -> None:
    """Call each kernel with the types that it has, so that it is compiled or loaded."""
    exact, low = np.zeros((0, 4), np.float32), np.zeros((0, 4), np.int16)
    table, steps, bias = shapes(), np.zeros((1, 2), np.int64), np.zeros(16, np.float32)
    gru_forward(table, steps, low, exact, low, low, bias, exact, low, low, low, exact)
    gru_backward(table, steps, exact, low, exact, exact, low, low, exact, exact, low, exact)
