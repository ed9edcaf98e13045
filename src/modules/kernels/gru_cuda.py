"""The recurrence of the GRU on an NVIDIA GPU: all steps in one kernel, forward and backward, in float32.

A step is too little work for a GPU, so launching each one, twice or more, takes most of an update. Rows do not depend
on each other: a block of threads takes `ROWS` of them through all steps, one thread for each hidden unit, and what the
units tell each other stays in the block's memory. Equations: `ops.gru` and `kernels/gru.py`.

Shapes: T steps of B rows, H units.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numba import float32, njit
from torch import Tensor

from omagd.modules.kernels.gru import LARGEST
from omagd.utils.cuda import CUDACompiler, cuda

compiler = CUDACompiler(Path(__file__).parent, "kernels of GRUs", "2 to 4 s")
Array = Any
ROWS = 4  # of a block, which reads each weight once for all of them
ONE, ALIGNED = np.float32(1), 16  # bytes: four numbers are read at once


@njit(inline="always")
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of a float32."""
    return ONE / (ONE + math.exp(-x))


def forward(given: Array, start: Array, w: Array, b: Array, out: Array) -> None:
    """Write the states `out` [T, B, H] after all steps.

    Args:
        given: [T, B, 3, H] W_i x + b_i, blocks [r | z | n]. start: [B, H]. w: [H, 3, H], W_h transposed. b: [3, H] b_h.
    """
    before = cuda.shared.array((2, LARGEST, ROWS), float32, ALIGNED)  # states before this step, and before the next one
    state, r, z = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
    n, m = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
    unit, first, last = cuda.threadIdx.x, cuda.blockIdx.x * ROWS, len(start) - 1
    units = np.uint64(len(w))  # unsigned: an index that may be negative costs a test
    for i in range(ROWS):  # a block's rows after the last one are that one again
        state[i] = start[min(first + i, last), unit]
    for t in range(len(given)):
        half = t & 1
        for i in range(ROWS):
            before[half, unit, i] = state[i]
            row = min(first + i, last)
            r[i], z[i] = given[t, row, 0, unit] + b[0, unit], given[t, row, 1, unit] + b[1, unit]
            n[i], m[i] = given[t, row, 2, unit], b[2, unit]
        # Once a step: the next states are written to the other half, while others may still read this one.
        cuda.syncthreads()
        k = np.uint64(0)
        while k < units:
            w_r, w_z, w_n = w[k, 0, unit], w[k, 1, unit], w[k, 2, unit]
            for i in range(ROWS):
                h = before[half, k, i]
                r[i] += w_r * h
                z[i] += w_z * h
                m[i] += w_n * h
            k += np.uint64(1)
        for i in range(ROWS):
            candidate = math.tanh(n[i] + sigmoid(r[i]) * m[i])
            state[i] = candidate + sigmoid(z[i]) * (state[i] - candidate)
            out[t, min(first + i, last), unit] = state[i]


def backward(gates: Array, grad: Array, w: Array, by_x: Array, by_h: Array, by_start: Array) -> None:
    """Write the gradients of W_i x and of W_h h, [T, B, 3, H] with blocks [r | z | n], and of the start, [B, H].

    Args:
        gates: [T, B, 5, H], blocks [r | z | n | h | m]. grad: [T, B, H], of the states. w: [3, H, H], W_h.
    """
    d = cuda.shared.array((2, LARGEST, 3, ROWS), float32, ALIGNED)  # d_r, d_z, d_m of two steps
    carried = cuda.local.array(ROWS, float32)  # dL/dh from later steps
    unit, first, last = cuda.threadIdx.x, cuda.blockIdx.x * ROWS, len(by_start) - 1
    units = np.uint64(len(w[0]))
    for i in range(ROWS):
        carried[i] = 0
    for t in range(len(grad) - 1, -1, -1):
        half = t & 1
        for i in range(ROWS):
            row = min(first + i, last)
            r, z, n = gates[t, row, 0, unit], gates[t, row, 1, unit], gates[t, row, 2, unit]
            h, m = gates[t, row, 3, unit], gates[t, row, 4, unit]
            g = grad[t, row, unit] + carried[i]
            d_n, d_z = g * (ONE - z) * (ONE - n * n), g * (h - n) * z * (ONE - z)
            d_m, d_r = d_n * r, d_n * m * r * (ONE - r)
            by_x[t, row, 0, unit], by_x[t, row, 1, unit], by_x[t, row, 2, unit] = d_r, d_z, d_n
            by_h[t, row, 0, unit], by_h[t, row, 1, unit], by_h[t, row, 2, unit] = d_r, d_z, d_m
            d[half, unit, 0, i], d[half, unit, 1, i], d[half, unit, 2, i] = d_r, d_z, d_m
            carried[i] = g * z
        cuda.syncthreads()
        k = np.uint64(0)
        while k < units:
            w_r, w_z, w_n = w[0, k, unit], w[1, k, unit], w[2, k, unit]
            for i in range(ROWS):
                carried[i] += d[half, k, 0, i] * w_r
                carried[i] += d[half, k, 1, i] * w_z
                carried[i] += d[half, k, 2, i] * w_n
            k += np.uint64(1)
    for i in range(ROWS):
        by_start[min(first + i, last), unit] = carried[i]


def unroll(given: Tensor, start: Tensor, w_hh: Tensor, b_hh: Tensor) -> Tensor:
    """Return the states [T B, H] after all steps, from W_i x + b_i [T B, 3H] and the start [B, H]."""
    (rows, size), out = start.shape, given.new_empty(len(given), start.shape[1])
    w = w_hh.t().contiguous().view(size, 3, size)
    of_rows = given.view(-1, rows, 3, size), start.contiguous(), w, b_hh.reshape(3, size), out.view(-1, rows, size)
    compiler.launch(forward, start.device, -(-rows // ROWS), size, *of_rows)
    return out


def unroll_back(gates: Tensor, grad: Tensor, start: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W_i x and W_h h, [T B, 3H], and of the start [B, H].

    gates: [T B, 5H], as torch's fused GRU cell keeps them. grad: [T B, H], of the states.
    """
    rows, size = start.shape
    by_x, by_h, by_start = *(grad.new_empty(len(grad), 3 * size) for _ in range(2)), grad.new_empty(rows, size)
    found = by_x.view(-1, rows, 3, size), by_h.view(-1, rows, 3, size), by_start
    given = gates.view(-1, rows, 5, size), grad.contiguous().view(-1, rows, size), w_hh.reshape(3, size, size)
    compiler.launch(backward, start.device, -(-rows // ROWS), size, *given, *found)
    return by_x, by_h, by_start
