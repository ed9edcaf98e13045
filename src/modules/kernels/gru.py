"""The GRU over packed rows with its own backward pass: Numba kernels in float32; on a GPU without them cuDNN's steps.

Its equations are those of `ops.gru`; m = W_hn h + b_hn is the hidden part of the candidate n ("inner").
Backward, with g = dL/dh' (from the output of this step and from the next step); d_y is the gradient of the sum inside
the activation of y:

    d_n = g * (1 - z) * (1 - n^2)           d_z = g * (h - n) * z (1 - z)
    d_m = d_n * r                           d_r = d_n * m * r (1 - r)
    dL/dh = g * z + [d_r | d_z | d_m] W_h   dL/dx = [d_n | d_r | d_z] W_i
    dL/dW_h = sum of [d_r | d_z | d_m]^T h over rows        dL/dW_i = sum of [d_n | d_r | d_z]^T x over rows

Compared with `torch.gru_cell` in values and gradients: tests/test_learning_kernels.py.
"""

from __future__ import annotations

import logging
import math
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omagd.modules.kernels import arrays
from omagd.utils.compiling import no_hang
from omagd.utils.errors import install
from omagd.utils.logging import PACKAGE

LOG = logging.getLogger(PACKAGE)
aten = torch.ops.aten
LARGEST = 128  # hidden units of the kernels for GPUs: beyond, weights leave a multiprocessor's cache
TOLERANCE = 1e-4  # between them and torch's steps, in their first use
ROWS_AT_ONCE = 2048  # rows that pass through a step together, so that its data stays in a core's cache

Groups = list[tuple[int, list[list[slice]]]]
"""Rows in the order of computing: (first row within each step, chunks of rows of one or more steps)."""


class Unroll(torch.autograd.Function):
    """All steps of the GRU in one operation, with all work between two products in one Numba kernel.

    Rows of a step are independent of each other, so up to `ROWS_AT_ONCE` of them go through all steps before the next
    ones start (a *group*); short steps share one product with the input (a *chunk*): the data stays in the cache.

    Layout of the 4H columns of `gates`, and of their gradients: [n | r | z | m]. The input contributes to the first
    three (W_i, its blocks rotated: torch's are [r | z | n]), the hidden state to the last three (W_h, in its order).
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, rows: list[int], x: Tensor, before: Tensor | None, w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor, b_hh: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return [R, H] from x [R, input_dim] and before [rows[0], H], None: zeros. rows: of each step, decreasing."""
        size, groups = w_hh.shape[1], _groups(rows)
        # Blocks [r | z | n] become [n | r | z], so that what both products share is side by side.
        from_x, from_h = w_ih.roll(size, 0).t(), w_hh.t()
        bias = torch.cat([b_ih[2 * size :], (b_ih + b_hh)[: 2 * size], b_hh[2 * size :]])
        start = w_hh.new_zeros(rows[0], size) if before is None else before.contiguous()
        out = w_hh.new_empty(len(x), size)
        gates = w_hh.new_empty(len(x) if any(ctx.needs_input_grad) else 0, 4 * size)
        of_x, of_h = (w_hh.new_empty(_most_rows(groups), 3 * size) for _ in range(2))
        inputs, outputs = arrays(of_x, of_h, bias), arrays(torch.empty_like(bias), gates, out)
        h0, h = arrays(start, out)
        for offset, chunks in groups:
            # Rows of a step depend on nothing but the same rows of the step before: groups are independent.
            last = None  # the first of these rows in the step before
            for chunk in chunks:
                first, n_rows = chunk[0].start, chunk[-1].stop - chunk[0].start
                # The input's part of a whole chunk at once: a few large products instead of one for each step.
                torch.mm(x[first : first + n_rows], from_x, out=of_x[:n_rows])
                for block in chunk:
                    k, begin = block.stop - block.start, offset if last is None else last
                    if last is None and before is None:
                        of_h[:k] = 0
                    else:
                        torch.mm((start if last is None else out)[begin : begin + k], from_h, out=of_h[:k])
                    place = (k, block.start - first, begin, block.start)
                    kernels.gru_forward(place, *inputs, h0 if last is None else h, *outputs)
                    last = block.start
        ctx.kernels, ctx.rows, ctx.groups, ctx.starts = kernels, rows, groups, before is not None
        ctx.save_for_backward(x, start, out, w_ih, w_hh, gates)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, before, the weights and the biases from grad_out [R, H], last step first."""
        x, start, out, w_ih, w_hh, gates = ctx.saved_tensors
        size, room = w_hh.shape[1], _most_rows(ctx.groups)
        back_x = w_ih.roll(size, 0)
        for_x, for_start = torch.empty_like(x), torch.zeros_like(start)
        for_ih, for_hh = torch.zeros_like(w_ih), torch.zeros_like(w_hh)
        sums = w_hh.new_zeros(len(ctx.rows), 4 * size)
        grads, hidden, more = (w_hh.new_empty(room, width) for width in (4 * size, size, size))
        inputs, others = arrays(grads, gates, grad_out.contiguous()), arrays(hidden, sums)
        h0, h = arrays(start, out)
        for offset, chunks in ctx.groups:
            blocks = [block for chunk in chunks for block in chunk]
            carried = for_start[offset : offset + blocks[0].stop - blocks[0].start]
            both, n_more, t = arrays(carried, more), 0, len(blocks)  # `more`: dL/dh through the product
            for chunk in reversed(chunks):
                first, end = chunk[0].start, chunk[-1].stop
                for block in reversed(chunk):
                    k, t = block.stop - block.start, t - 1
                    place = (k, n_more, block.start - first, blocks[t - 1].start if t else offset, block.start, t)
                    ctx.kernels.gru_backward(place, *inputs, *both, h if t else h0, *others)
                    if t or ctx.starts:
                        begin, n_more = block.start - first, k
                        # dL/dh through the gates: [d_r | d_z | d_m] W_h; before the first step only for a given start.
                        torch.mm(grads[begin : begin + k, size:], w_hh, out=more[:k])
                made = grads[: end - first]
                torch.mm(made[:, : 3 * size], back_x, out=for_x[first:end])
                # dL/dW of a chunk while its gradients are in the cache, not of all rows in the end.
                for_ih.addmm_(made[:, : 3 * size].t(), x[first:end])
                for_hh.addmm_(made[:, size:].t(), hidden[: end - first])
            if ctx.starts:
                carried += more[:n_more]
        for_bias = sums.sum(dim=0)
        return (
            None, None, for_x, for_start if ctx.starts else None, for_ih.roll(-size, 0), for_hh,
            for_bias[: 3 * size].roll(-size), for_bias[size:],
        )  # fmt: skip


class FixedUnroll(torch.autograd.Function):
    """All steps of the GRU on a GPU, for steps of equally many rows, with a backward pass of our own.

    The recurrence is that of the kernels in `gru_cuda`; without them of cuDNN, whose own backward pass adds the
    gradients of biases in one slow kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, x: Tensor, start: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
    ) -> Tensor:
        """Return [T rows, H] from x [T rows, input_dim] and start [rows, H]."""
        if kernels is None:
            # Arguments as in `ops`; nothing is kept for a backward pass.
            more = [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, False
            out: Tensor = torch._VF.gru(x.unflatten(0, (-1, len(start))), start[None], *more)[0].flatten(0, 1)
        else:
            out = kernels.unroll(torch.addmm(b_ih, x, w_ih.t()), start, w_hh, b_hh)
        ctx.kernels = kernels
        ctx.save_for_backward(x, start, out, w_ih, w_hh, b_ih, b_hh)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, start, the weights and the biases from grad_out [T rows, H]."""
        x, start, out, w_ih, w_hh, b_ih, b_hh = ctx.saved_tensors
        before = torch.cat([start, out[: -len(start)]])
        # All states are known, so the gates of all steps are computed together.
        gates = aten._thnn_fused_gru_cell(x @ w_ih.t(), before @ w_hh.t(), before, b_ih, b_hh)[1]
        unroll_back = step_by_step_back if ctx.kernels is None else ctx.kernels.unroll_back
        by_x, by_h, for_start = unroll_back(gates, grad_out, start, w_hh)
        return None, by_x @ w_ih, for_start, by_x.t() @ x, by_h.t() @ before, by_x.sum(0), by_h.sum(0)


def step_by_step_back(gates: Tensor, grad: Tensor, start: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W_i x and W_h h, [T rows, 3H], and of the start, last step first: see `gru_cuda`."""
    carried, rows = torch.zeros_like(start), len(start)
    of_x, of_h = [], []
    for of_out, of_step in zip(reversed(grad.split(rows)), reversed(gates.split(rows)), strict=True):
        for_x, for_h, past, *_ = aten._thnn_fused_gru_cell_backward(of_out + carried, of_step, False)
        carried = torch.addmm(past, for_h, w_hh)
        of_x.append(for_x)
        of_h.append(for_h)
    return torch.cat(of_x[::-1]), torch.cat(of_h[::-1]), carried


def cuda_kernels(x: Tensor, size: int) -> ModuleType | None:
    """Return the recurrence for rows like x and so many units in one kernel, None where torch's steps are used."""
    fits = x.dtype == torch.float32 and size <= LARGEST and torch.cuda.is_initialized()  # not by a simulated GPU
    return _tried(x.device) if fits else None


@cache
def _tried(device: torch.device) -> ModuleType | None:
    """Return the module of kernels where they compute what torch's steps do; else None, and a line says why."""
    if find_spec("numba_cuda") is None:
        LOG.info("numba-cuda is not installed: GRUs learn step by step, which is slower. %s", install("gpu"))
        return None

    def wave(frequency: float, *shape: int) -> Tensor:  # numbers without a generator, whose state would move
        return torch.arange(math.prod(shape), device=device).mul(frequency).sin().view(shape)

    # Three steps, a block that is not full, and two warps of threads: they meet at the barriers.
    given, start, grad = wave(1.3, 15, 120), wave(1.7, 5, 40), wave(2.9, 15, 40)
    w, b = wave(2.1, 120, 40) / 5, wave(2.3, 120)
    states, kept = [start], []
    for of_x in given.split(len(start)):
        state, gates = aten._thnn_fused_gru_cell(of_x, states[-1] @ w.t(), states[-1], torch.zeros_like(b), b)
        states.append(state)
        kept.append(gates)
    gates = torch.cat(kept)
    wanted = torch.cat(states[1:]), *step_by_step_back(gates, grad, start, w)
    try:
        with no_hang():
            kernels = import_module("omagd.modules.kernels.gru_cuda")
            found = kernels.unroll(given, start, w, b), *kernels.unroll_back(gates, grad, start, w)
        problem = "" if all(map(partial(torch.allclose, atol=TOLERANCE), found, wanted)) else "they compute wrongly"
    except Exception as error:  # noqa: BLE001  of numba-cuda or the driver, of many kinds
        problem = (str(error) or type(error).__name__).strip().partition("\n")[0]
    if problem:
        LOG.warning("kernels of GRUs cannot be used (%s): they learn step by step, which is slower", problem)
    return None if problem else kernels


def _groups(rows: list[int]) -> Groups:
    """Return the order of computing of steps with these numbers of rows, at most `ROWS_AT_ONCE` rows of a step."""
    groups = []
    for offset in range(0, rows[0], ROWS_AT_ONCE):
        steps = zip(accumulate(rows, initial=0), rows, strict=False)
        end = offset + ROWS_AT_ONCE
        blocks = [slice(start + offset, start + min(k, end)) for start, k in steps if k > offset]
        groups.append((offset, _chunks(blocks)))
    return groups


def _chunks(blocks: list[slice]) -> list[list[slice]]:
    """Join blocks of successive steps that are neighbours and have at most `ROWS_AT_ONCE` rows together."""
    chunks = [[blocks[0]]]
    for block in blocks[1:]:
        joins = block.start == chunks[-1][-1].stop and block.stop - chunks[-1][0].start <= ROWS_AT_ONCE
        chunks[-1].append(block) if joins else chunks.append([block])
    return chunks


def _most_rows(groups: Groups) -> int:
    """Return the rows of the largest chunk."""
    return max(chunk[-1].stop - chunk[0].start for _, chunks in groups for chunk in chunks)
