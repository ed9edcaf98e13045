"""The GRU of `recurrent.py` with its elementwise work in Numba kernels (`compiled.py`), on CPUs in float32 or bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omagd.modules.kernels.linear import ROUNDING, padded_rows, to_bf16

Groups = list[tuple[int, list[list[slice]]]]
"""Rows in the order of computing: (first row within each step, chunks of rows of one or more steps)."""


class CompiledUnroll(torch.autograd.Function):
    """`_Unroll` with all work between two products in one Numba kernel (`compiled.py`), for CPUs in float32.

    Groups, chunks and columns as there; the kernels add the biases, and a and m are not doubled. A start of None is
    zeros. bf16: products have factors and results in bf16, and so have the gates that are kept; all else, h too, is in
    float32. Their rows are rounded up: those beyond a step are of other steps or 0, and nobody reads the results. They
    are never unset: where a row is no whole number of blocks, oneDNN multiplies the beginning of the next one by 0.
    Compared with `nn.GRUCell`: tests/test_learning_kernels.py.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, groups: Groups, x: Tensor, before: Tensor | None, w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor, b_hh: Tensor, bf16: bool,
    ) -> Tensor:  # fmt: skip
        """Return [R, H] from x [R, input_dim] and before [rows of the first step, H]. groups: all rows, in order."""
        size, kind, spare = w_hh.shape[1], torch.bfloat16 if bf16 else w_hh.dtype, ROUNDING if bf16 else 0
        from_x, from_h = w_ih.roll(size, 0).t().to(kind), w_hh.t().to(kind)
        bias = torch.cat([b_ih[2 * size :], (b_ih + b_hh)[: 2 * size], b_hh[2 * size :]])
        start = w_hh.new_zeros(_first_rows(groups), size) if before is None else before.contiguous()
        out, low = w_hh.new_empty(len(x), size), w_hh.new_zeros(len(x) + spare if bf16 else 0, size, dtype=kind)
        gates = w_hh.new_empty(len(x) if any(ctx.needs_input_grad) else 0, 4 * size, dtype=kind)
        of_x, of_h = (w_hh.new_empty(_most_rows(groups) + spare, 3 * size, dtype=kind) for _ in range(2))
        reads, writes = (of_x, of_h, bias), (torch.empty_like(bias), gates, out, low)
        inputs, h0, h, outputs = map(kernels.arrays, (reads, (start,), (out,), writes))
        for offset, chunks in groups:
            last = None  # the first of these rows in the step before
            for chunk in chunks:
                first, n_rows = chunk[0].start, chunk[-1].stop - chunk[0].start
                _product(x, first, n_rows, from_x, of_x)
                for block in chunk:
                    k = block.stop - block.start
                    if last is not None:
                        _product(low if bf16 else out, last, k, from_h, of_h)
                    elif before is not None:
                        _product(start, offset, k, from_h, of_h)
                    else:
                        of_h[:k] = 0
                    place = (k, block.start - first, offset if last is None else last, block.start)
                    kernels.gru_forward(place, *inputs, *(h0 if last is None else h), *outputs)
                    last = block.start
        ctx.kernels, ctx.groups, ctx.starts = kernels, groups, before is not None
        ctx.save_for_backward(x, start, out, w_ih, w_hh, gates)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, before, the weights and the biases from grad_out [R, H], last step first."""
        x, start, out, w_ih, w_hh, gates = ctx.saved_tensors
        size, kind = w_hh.shape[1], gates.dtype
        spare, arrays = ROUNDING if kind != w_hh.dtype else 0, ctx.kernels.arrays
        back_x, back_h = w_ih.roll(size, 0).to(kind), w_hh.to(kind)
        for_x, for_start = torch.empty_like(x), torch.zeros_like(start)
        for_ih, for_hh = torch.zeros_like(w_ih), torch.zeros_like(w_hh)
        sums, room = w_hh.new_zeros(_steps(ctx.groups), 4 * size), _most_rows(ctx.groups) + spare
        grads, hidden = (w_hh.new_zeros(room, width, dtype=kind) for width in (4 * size, size))
        more = w_hh.new_empty(len(grads), size, dtype=kind)  # dL/dh through the products
        inputs, h0, h, others = map(arrays, ((grads, gates, grad_out.contiguous()), (start,), (out,), (hidden, sums)))
        for offset, chunks in ctx.groups:
            blocks = [block for chunk in chunks for block in chunk]
            carried = for_start[offset : offset + blocks[0].stop - blocks[0].start]
            both, n_more, t = arrays((carried, more)), 0, len(blocks)
            for chunk in reversed(chunks):
                first, n_rows = chunk[0].start, chunk[-1].stop - chunk[0].start
                for block in reversed(chunk):
                    k, t = block.stop - block.start, t - 1
                    place = (k, n_more, block.start - first, blocks[t - 1].start if t else offset, block.start, t)
                    ctx.kernels.gru_backward(place, *inputs, *both, *(h if t else h0), *others)
                    if t or ctx.starts:
                        _product(grads[:, size:], block.start - first, k, back_h, more)
                        n_more = k
                _weights_products((grads, x, hidden), (first, n_rows), back_x, (for_x, for_ih, for_hh))
            if ctx.starts:
                carried += more[:n_more]
        for_bias = sums.sum(dim=0)
        return (
            None, None, for_x, for_start if ctx.starts else None, for_ih.roll(-size, 0), for_hh,
            for_bias[: 3 * size].roll(-size), for_bias[size:], None,
        )  # fmt: skip


class TiledUnroll(torch.autograd.Function):
    """The same in bf16 with all steps in one kernel (`tiles.py`), for processors that multiply tiles.

    Sums stay in float32 from the products to the gates: what is rounded to bf16 are x, the h that enters products, the
    weights, the gates that are kept, and the gradients that enter products. K and H are multiples of 32.
    Compared with `nn.GRUCell`: tests/test_learning_kernels.py.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, tiles: Any, rows: list[int], x: Tensor, before: Tensor | None, w_ih: Tensor,
        w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return [R, H] from x [R, K] and before [rows of the first step, H]. rows: of each step."""
        size, width, keeps, kind = w_hh.shape[1], w_ih.shape[1], any(ctx.needs_input_grad), torch.bfloat16
        from_x, from_h = tiles.paired(w_ih.roll(size, 0).t()), tiles.paired(w_hh.t())
        bias = torch.cat([b_ih[2 * size :], (b_ih + b_hh)[: 2 * size], b_hh[2 * size :]])
        start = w_hh.new_zeros(rows[0], size) if before is None else before.contiguous()
        kept = padded_rows(len(x) + ROUNDING) if keeps else 0  # the last block reads 32 rows from its first one on
        out, gates, read = (
            w_hh.new_empty(n, k, dtype=t)
            for n, k, t in ((len(x), size, w_hh.dtype), (kept, 4 * size, kind), (kept, width + size, kind))
        )
        low = w_hh.new_zeros(ROUNDING, width + size, dtype=kind)
        steps, room = _steps_of(rows), w_hh.new_empty(ROUNDING, 4 * size)
        arrays = kernels.arrays((x.to(kind).contiguous(), start, from_x, from_h, bias, room, low, gates, read, out))
        tiles.gru_forward(tiles.shapes(), steps, *arrays)
        ctx.kernels, ctx.tiles, ctx.steps, ctx.starts = kernels, tiles, steps, before is not None
        ctx.save_for_backward(start, out, w_ih, w_hh, gates, read)
        ctx.kind = x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, before, the weights and the biases from grad_out [R, H]."""
        start, out, w_ih, w_hh, gates, read = ctx.saved_tensors
        (rows, size), width, tiles = out.shape, w_ih.shape[1], ctx.tiles
        back_x, back_h = tiles.paired(w_ih.roll(size, 0)), tiles.paired(w_hh)
        gates[rows:], read[rows:] = 0, 0
        for_x = read.new_empty(rows, width)
        room, for_start = start.new_empty(ROUNDING, size + width), torch.zeros_like(start)
        sums = start.new_zeros(len(ctx.steps), 4 * size)
        arrays = (grad_out.contiguous(), gates, start, out, back_x, back_h, room, for_start, for_x, sums)
        tiles.gru_backward(tiles.shapes(), ctx.steps, *ctx.kernels.arrays(arrays))
        for_bias = sums.sum(dim=0)
        # One product of [x | h] and all gradients: a quarter of it is not used, and it is the fastest way round.
        both = torch.mm(read.t(), gates).to(w_ih.dtype)
        for_ih, for_hh = both[:width, : 3 * size].t(), both[width:, size:].t()
        return (
            None, None, None, for_x.to(ctx.kind), for_start if ctx.starts else None, for_ih.roll(-size, 0),
            for_hh.contiguous(), for_bias[: 3 * size].roll(-size), for_bias[size:],
        )  # fmt: skip


def _steps_of(rows: list[int]) -> np.ndarray[Any, Any]:
    """Return the first row and the number of rows of each step, [T, 2]."""
    numbers = np.array(rows, np.int64)
    return np.stack([numbers.cumsum() - numbers, numbers], axis=1)


def _product(factor: Tensor, first: int, k: int, weight: Tensor, out: Tensor) -> None:
    """Set out[:k] to the product of factor's k rows from `first` on and `weight`, in the type of `weight`.

    In bf16 the next rows of `factor` round k up, and their products stand behind the others in `out`.
    """
    if weight.dtype == torch.bfloat16:
        rounded = padded_rows(k, ROUNDING)
        rows = factor[first : first + rounded]
        rows = rows if rows.dtype == weight.dtype else to_bf16(rows[:k], rounded)
    else:
        rows = factor[first : first + k]
    torch.mm(rows, weight, out=out[: len(rows)])


def _weights_products(
    factors: tuple[Tensor, Tensor, Tensor],
    place: tuple[int, int],
    back_x: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Set a chunk's rows of for_x, and add to for_ih and for_hh.

    factors: the chunk's gradients [., 4H], all x [R, .], and the chunk's h [., H]; in bf16 the first and the last have
    room for rounding rows up. place: first row of the chunk in x, and its rows. results: for_x, for_ih, for_hh.
    """
    (grads, x, hidden), (first, rows), (for_x, for_ih, for_hh) = factors, place, results
    size = hidden.shape[1]
    read, out = x[first : first + rows], for_x[first : first + rows]
    if grads.dtype == for_ih.dtype:
        made = grads[:rows]
        torch.mm(made[:, : 3 * size], back_x, out=out)
        for_ih.addmm_(made[:, : 3 * size].t(), read)
        for_hh.addmm_(made[:, size:].t(), hidden[:rows])
    else:
        rounded = padded_rows(rows, ROUNDING)
        made, before = grads[:rounded], hidden[:rounded]
        made[rows:], before[rows:] = 0, 0
        out.copy_(torch.mm(made[:, : 3 * size], back_x)[:rows])
        low = x[first : first + rounded] if x.dtype == grads.dtype else to_bf16(read, rounded)
        for_ih += torch.mm(made[: len(low), : 3 * size].t(), low)
        for_hh += torch.mm(made[:, size:].t(), before)


def _most_rows(groups: Groups) -> int:
    """Return the rows of the largest chunk."""
    return max(chunk[-1].stop - chunk[0].start for _, chunks in groups for chunk in chunks)


def _first_rows(groups: Groups) -> int:
    """Return the rows of the first step."""
    return max(offset + chunks[0][0].stop - chunks[0][0].start for offset, chunks in groups)


def _steps(groups: Groups) -> int:
    return sum(len(chunk) for chunk in groups[0][1])
