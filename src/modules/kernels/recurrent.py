"""A GRU over packed episodes, with its own backward pass.

Equations (Cho et al. 2014, arXiv:1406.1078, in the variant of cuDNN and `torch.nn.GRU`, which applies the reset gate
after the product with the hidden state). For input x and hidden state h:

    r  = sigmoid(W_ir x + b_ir + W_hr h + b_hr)          reset gate
    z  = sigmoid(W_iz x + b_iz + W_hz h + b_hz)          update gate
    m  = W_hn h + b_hn                                   hidden part of the candidate ("inner")
    n  = tanh(a),  a = W_in x + b_in + r * m             candidate ("new")
    h' = (1 - z) * n + z * h

Backward, with g = dL/dh' (from the output of this step and from the next step); d_y is the gradient of the sum inside
the activation of y:

    d_n = g * (1 - z) * (1 - n^2)           d_z = g * (h - n) * z (1 - z)
    d_m = d_n * r                           d_r = d_n * m * r (1 - r)
    dL/dh = g * z + [d_r | d_z | d_m] W_h   dL/dx = [d_n | d_r | d_z] W_i
    dL/dW_h = sum of [d_r | d_z | d_m]^T h over rows        dL/dW_i = sum of [d_n | d_r | d_z]^T x over rows

Compared with `nn.GRUCell` under autograd, in values and gradients: tests/test_networks.py.
"""

from __future__ import annotations

import math
import warnings
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omagd.modules.kernels.compiled_unroll import CompiledUnroll, TiledUnroll
from omagd.modules.kernels.compiling import kernels_for, tile_kernels
from omagd.modules.kernels.forms import require_step
from omagd.modules.kernels.linear import ROUNDING, no_autocast, padded_rows, to_bf16
from omagd.utils.packing import Packing

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input

# cuDNN copies the weights, four parameters, side by side in each call; that takes no measurable time.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk of memory")

ROWS_AT_ONCE = 2048  # rows that pass through a step together, so that its data stays in a core's cache
LOW_ROWS = 4  # times as many in kernels that multiply in bf16: set-up is a larger share of such products


class PackedGRU(nn.Module):
    """`nn.GRUCell` (same parameters, names and initial values) unrolled over packed episodes.

    Args:
        input_dim, hidden_dim: features of a row, H. bf16: whether a CPU multiplies in bf16 (weights and sums stay in
            float32, see `fast_linear`).
    """

    def __init__(self, input_dim: int, hidden_dim: int, bf16: bool = False) -> None:
        super().__init__()
        require_step(self, "the layers around it")
        self.hidden_dim = hidden_dim
        self.bf16 = bf16
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_dim, input_dim))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_dim, hidden_dim))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_dim))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_dim))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_dim), 1 / math.sqrt(hidden_dim))

    def forward(self, x: Tensor, packing: Packing, start: Tensor | None = None, bf16: bool | None = None) -> Tensor:
        """Return the hidden state after each row, [S, n, H], from x [S, n, input_dim], which may be in bf16.

        start: [B, n, H] hidden state before the first rows; None: zeros, the start of an episode. bf16: of this call;
            None: as the module has it.
        """
        n = x.shape[1]
        rows = [k * n for k in packing.batch_sizes]
        flat = x.reshape(-1, x.shape[-1])
        before = None if start is None else start.reshape(rows[0], -1)
        bf16 = self.bf16 if bf16 is None else bf16
        out = self._library_unroll(flat, before, rows) if x.is_cuda else self._unroll(flat, before, rows, bf16)
        return out.view(-1, n, self.hidden_dim)

    def step(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the next hidden state [B, n, H] from x [B, n, input_dim] and hidden [B, n, H]."""
        rows = (x.flatten(0, 1).to(hidden.dtype), hidden.flatten(0, 1))
        flat = torch.gru_cell(*rows, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return flat.view(hidden.shape)

    def _unroll(self, x: Tensor, before: Tensor | None, rows: list[int], bf16: bool) -> Tensor:
        bf16 = bf16 and self.weight_hh.dtype == torch.float32
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        kernels = kernels_for(self.weight_hh, len(x) * self.hidden_dim)
        whole_tiles = self.hidden_dim % ROUNDING == 0 and self.weight_ih.shape[1] % ROUNDING == 0
        tiles = tile_kernels() if kernels is not None and bf16 and whole_tiles else None
        if tiles is not None:
            return TiledUnroll.apply(kernels, tiles, rows, x, before, *weights)  # type: ignore[no-untyped-call]
        if kernels is not None:
            at_once = ROWS_AT_ONCE * (LOW_ROWS if bf16 else 1)
            groups = [(offset, _chunks(blocks, at_once)) for offset, blocks in _groups(rows, at_once)]
            return CompiledUnroll.apply(kernels, groups, x, before, *weights, bf16)  # type: ignore[no-untyped-call]
        x = x.to(self.weight_hh.dtype)
        before = x.new_zeros(rows[0], self.hidden_dim) if before is None else before
        return _Unroll.apply(x, before, *weights, rows, bf16)  # type: ignore[no-untyped-call]

    def _library_unroll(self, x: Tensor, before: Tensor | None, rows: list[int]) -> Tensor:
        """Do the same by torch's packed GRU, one kernel on CUDA, in the type of the weights.

        Under autocast cuDNN would run the recurrence in fp16, even when bf16 is asked for, and gradients of large
        batches underflow there. So autocast is suspended and the inputs are cast to the type of the weights.
        """
        weights: list[Tensor] = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        kind = self.weight_hh.dtype
        with no_autocast(x.device):
            start = x.new_zeros(1, rows[0], self.hidden_dim, dtype=kind) if before is None else before.to(kind)[None]
            flags = True, 1, 0.0, torch.is_grad_enabled(), False  # of the list below, from "has biases" on
            if rows[0] == rows[-1]:  # episodes of equal length: the plain form, which reads no sizes from the host
                dense = x.to(kind).unflatten(0, (len(rows), rows[0]))
                return torch._VF.gru(dense, start, weights, *flags, False)[0].flatten(0, 1)
            # Arguments: input, batch sizes, start, weights, has biases, layers, dropout, training (whether cuDNN keeps
            # what backward needs), bidirectional.
            return torch._VF.gru(x.to(kind), torch.tensor(rows), start, weights, *flags)[0]


class _Unroll(torch.autograd.Function):
    """All steps of the GRU in one operation; equations and gradients are at the top of the file.

    Rows of a step are independent of each other, so up to `ROWS_AT_ONCE` of them go through all steps before the next
    ones start (a *group*), and short steps share one product with the input (a *chunk*): the data stays in the cache.

    Layout of the 4H columns of `gates`, and of their gradients: [n | r | z | m]. The input contributes to the first
    three (W_i, its blocks rotated), the hidden state to the last three (W_h, in its own order). Forward works on 2a
    and 2m instead of a and m, because tanh(a) = 2 sigmoid(2a) - 1 is three times as fast here as tanh.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
        rows: list[int], bf16: bool,
    ) -> Tensor:  # fmt: skip
        """Return [R, H] from x [R, input_dim] and before [rows[0], H]; R = sum of `rows`, the rows of each step."""
        size, kind = w_hh.shape[1], torch.bfloat16 if bf16 else x.dtype
        from_x, from_h, bias = _gate_weights(w_ih, w_hh, b_ih, b_hh)
        from_x, from_h, bias = from_x.t().to(kind), from_h.t().to(kind), bias.to(kind)
        keeps = any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        out = x.new_empty(len(x), size)
        minus_one = torch.tensor(-1.0, dtype=kind)
        for offset, blocks in _groups(rows, ROWS_AT_ONCE):
            hidden = before[offset : offset + blocks[0].stop - blocks[0].start]
            for chunk in _chunks(blocks, ROWS_AT_ONCE):
                place, sizes = slice(chunk[0].start, chunk[-1].stop), [b.stop - b.start for b in chunk]
                n_rows = place.stop - place.start
                read = to_bf16(x[place], padded_rows(n_rows, ROUNDING)) if bf16 else x[place]
                gates = x.new_empty(len(read), 4 * size, dtype=kind)
                torch.addmm(bias[: 3 * size], read, from_x, out=gates[:, : 3 * size])
                gates[:, 3 * size :] = bias[3 * size :]
                parts = [p.split(sizes) for p in _columns(gates[:n_rows], size)]
                for k, after, from_hidden, both, new, reset, update, inner in zip(
                    sizes, out[place].split(sizes), *parts, strict=True
                ):
                    hidden = hidden[:k]
                    from_hidden.addmm_(hidden.to(kind), from_h)  # adds W_h h to r, z and 2m
                    both.sigmoid_()  # r and z
                    # 2a = 2 (W_in x + b_in) + r * 2m, and n = 2 sigmoid(2a) - 1
                    torch.add(minus_one, new.addcmul_(reset, inner).sigmoid_(), alpha=2, out=new)
                    # h' = n + z * (h - n) = (1 - z) * n + z * h
                    hidden = torch.lerp(new.to(x.dtype), hidden, update.to(x.dtype), out=after)
                if keeps:
                    kept.append(gates)
        ctx.rows = rows
        ctx.save_for_backward(x, before, out, w_ih, w_hh, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, before, the weights and the biases from grad_out [R, H], last step first."""
        x, before, out, w_ih, w_hh, *kept = ctx.saved_tensors
        size, kind = w_hh.shape[1], kept[0].dtype
        bf16 = kind != x.dtype
        back_x, back_h = w_ih.roll(size, 0).to(kind), w_hh.to(kind)
        for_x, for_before = torch.empty_like(x), torch.empty_like(before)
        for_ih, for_hh, for_bias = torch.zeros_like(w_ih), torch.zeros_like(w_hh), x.new_zeros(4 * size)
        for offset, blocks in reversed(_groups(ctx.rows, ROWS_AT_ONCE)):
            carried = x.new_zeros(blocks[0].stop - blocks[0].start, size)
            ahead = [slice(offset, offset + len(carried)), *blocks]
            sources = [before, *[out] * len(blocks)]
            t = len(blocks)
            for chunk in reversed(_chunks(blocks, ROWS_AT_ONCE)):
                place, sizes = slice(chunk[0].start, chunk[-1].stop), [b.stop - b.start for b in chunk]
                n_rows = place.stop - place.start
                t -= len(chunk)
                hidden = torch.cat(
                    [s[a.start : a.start + k] for s, a, k in zip(sources[t:], ahead[t:], sizes, strict=False)]
                )
                gates = kept.pop()[:n_rows].to(x.dtype)
                grads = x.new_empty(n_rows, 4 * size)
                _backward_through_time(grads, carried, grad_out[place], hidden, gates, back_h, sizes)
                for_bias += grads.sum(dim=0)
                read = x[place]
                if bf16:
                    padded = padded_rows(n_rows, ROUNDING)
                    grads, read, hidden = (to_bf16(value, padded) for value in (grads, read, hidden))
                    for_x[place] = torch.mm(grads[:, : 3 * size], back_x)[:n_rows]
                    for_ih += torch.mm(grads[:, : 3 * size].t(), read)
                    for_hh += torch.mm(grads[:, size:].t(), hidden)
                else:
                    torch.mm(grads[:, : 3 * size], back_x, out=for_x[place])
                    for_ih.addmm_(grads[:, : 3 * size].t(), read)
                    for_hh.addmm_(grads[:, size:].t(), hidden)
            for_before[offset : offset + len(carried)] = carried
        return (
            for_x, for_before, for_ih.roll(-size, 0), for_hh,
            for_bias[: 3 * size].roll(-size), for_bias[size:], None, None,
        )  # fmt: skip


def _gate_weights(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of `gates`: of the input [3H, input_dim], of the hidden state [3H, H], and biases [4H].

    torch's blocks are [r | z | n]; the input's are rotated to [n | r | z]. The blocks of 2a and 2m are doubled.
    """
    size = w_hh.shape[1]
    twice, once = w_hh.new_full((size,), 2.0), w_hh.new_ones(2 * size)
    from_x = w_ih.roll(size, 0) * torch.cat([twice, once]).unsqueeze(1)
    from_h = w_hh * torch.cat([once, twice]).unsqueeze(1)
    both = (b_ih + b_hh)[: 2 * size]
    return from_x, from_h, torch.cat([2 * b_ih[2 * size :], both, 2 * b_hh[2 * size :]])


def _columns(gates: Tensor, size: int) -> list[Tensor]:
    """Return views of columns: [r | z | m], to which the hidden state contributes; [r | z]; then n, r, z, m."""
    return [gates[:, size:], gates[:, size : 3 * size], *gates.split(size, dim=1)]


def _backward_through_time(
    grads: Tensor, carried: Tensor, grad_out: Tensor, hidden: Tensor, gates: Tensor, weight: Tensor, sizes: list[int]
) -> None:
    """Fill grads [R, 4H] with [d_n | d_r | d_z | d_m] of a chunk's rows; `carried` [k, H] becomes dL/dh before it.

    hidden: [R, H], h before each row. gates: [R, 4H]. weight: W_h [3H, H]. sizes: rows of each step.
    """
    size = hidden.shape[1]
    for_new, for_reset, for_update, for_inner = grads.split(size, dim=1)
    new, reset, update, inner = gates.split(size, dim=1)
    # First the factors of g in d_n, d_r, d_z, d_m: they need no later step, so the whole chunk is computed at once.
    sigmoid_backward(hidden - new, update, grad_input=for_update)  # (h - n) z (1 - z)
    tanh_backward(1 - update, new, grad_input=for_new)  # (1 - z) (1 - n^2)
    torch.mul(for_new, reset, out=for_inner)
    sigmoid_backward(for_new * inner.mul_(0.5), reset, grad_input=for_reset)  # halved: forward kept 2m
    # Then g itself, step by step backwards.
    parts = (grad_out, grads.unflatten(1, (4, size)), grads[:, size:], update)
    steps = list(zip(sizes, *(p.split(sizes) for p in parts), strict=True))
    for k, given, of_gates, of_hidden, z in reversed(steps):
        grad = carried[:k].add_(given)
        of_gates.mul_(grad.unsqueeze(1))
        grad.mul_(z)
        if of_hidden.dtype == weight.dtype:
            grad.addmm_(of_hidden, weight)
        else:
            grad += torch.mm(of_hidden.to(weight.dtype), weight)


def _groups(rows: list[int], at_once: int) -> list[tuple[int, list[slice]]]:
    """Return groups of at most `at_once` rows of a step: [(offset, blocks)].

    offset: first row of the group within each step. blocks: its rows among all rows, one slice for each step that it
    reaches.
    """
    groups = []
    for offset in range(0, rows[0], at_once):
        steps = zip(accumulate(rows, initial=0), rows, strict=False)
        end = offset + at_once
        groups.append((offset, [slice(start + offset, start + min(k, end)) for start, k in steps if k > offset]))
    return groups


def _chunks(blocks: list[slice], at_once: int) -> list[list[slice]]:
    """Join blocks of successive steps that are neighbours and have at most `at_once` rows together."""
    chunks = [[blocks[0]]]
    for block in blocks[1:]:
        joins = block.start == chunks[-1][-1].stop and block.stop - chunks[-1][0].start <= at_once
        chunks[-1].append(block) if joins else chunks.append([block])
    return chunks
