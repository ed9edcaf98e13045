"""A GRU over packed episodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omagd.modules.kernels.linear import to_bf16, whole
from omagd.utils.packing import Packing

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input

ROWS_AT_ONCE = 2048  # of a time step: what one step works on stays in a core's cache
ROUNDING = 32  # rows of products are rounded up to a multiple, so that ragged batches share few prepared shapes


class PackedGRU(nn.Module):
    """`nn.GRUCell` (same parameters, names and start values) unrolled over packed episodes.

    Args:
        input_dim, hidden_dim: features of a row, H. bf16: whether products are taken in bf16 on a CPU (float32 weights
            and sums, see `fast_linear`).
    """

    def __init__(self, input_dim: int, hidden_dim: int, bf16: bool = False) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.bf16 = bf16
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_dim, input_dim))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_dim, hidden_dim))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_dim))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_dim))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_dim), 1 / math.sqrt(hidden_dim))

    def forward(self, x: Tensor, packing: Packing, start: Tensor | None = None) -> Tensor:
        """Return the hidden state after each row, [S, n, H], from x [S, n, input_dim].

        start: [B, n, H] hidden state before the first rows; None: zeros, as where episodes start.
        """
        n = x.shape[1]
        rows = [k * n for k in packing.batch_sizes]
        flat = x.reshape(-1, x.shape[-1])
        before = x.new_zeros(rows[0], self.hidden_dim) if start is None else start.reshape(rows[0], -1)
        out = self._library_unroll(flat, before, rows) if x.is_cuda else self._unroll(flat, before, rows)
        return out.view(-1, n, self.hidden_dim)

    def step(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the next hidden state [B, n, H] from x [B, n, input_dim] and hidden [B, n, H]."""
        flat = torch.gru_cell(
            x.flatten(0, 1), hidden.flatten(0, 1), self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        )
        return flat.view(hidden.shape)

    def _unroll(self, x: Tensor, before: Tensor, rows: list[int]) -> Tensor:
        low = self.bf16 and x.dtype == torch.float32
        return _Unroll.apply(x, before, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, rows, low)

    def _library_unroll(self, x: Tensor, before: Tensor, rows: list[int]) -> Tensor:
        """Do the same with torch's own packed GRU, which is one kernel on CUDA, in the type of the weights.

        Autocast would hand cuDNN's recurrence half precision (fp16), whatever type it is told: gradients of large
        batches underflow there. So what comes in is cast to the weights' type, and autocast is left.
        """
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        sizes, kind = torch.tensor(rows), self.weight_hh.dtype
        with whole(x.device):
            start = before.to(kind).unsqueeze(0)
            # Input, sizes, start; has biases, layers, dropout, trains (cuDNN keeps what backward needs), directions.
            return torch._VF.gru(x.to(kind), sizes, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False)[0]


class _Unroll(torch.autograd.Function):
    """The whole recurrence, some rows at a time and step by step, so that what is worked on stays in the cache.

    Gates stand as [new | reset | update | inner], `inner` being the hidden part of the candidate before it is gated:
    what the input gives them are the first three columns, what the hidden state gives the last three. So do their
    gradients. The candidate's two parts are kept doubled, as tanh(a) = 2 sigmoid(2 a) - 1 is three times as fast here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
        rows: list[int], low: bool,
    ) -> Tensor:  # fmt: skip
        """Return [R, H] from x [R, input_dim] and before [rows[0], H]; R = sum of `rows`, the rows of each step."""
        size, kind = w_hh.shape[1], torch.bfloat16 if low else x.dtype
        from_x, from_h, bias = _gate_weights(w_ih, w_hh, b_ih, b_hh)
        from_x, from_h, bias = from_x.t().to(kind), from_h.t().to(kind), bias.to(kind)
        keeps = any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        out = x.new_empty(len(x), size)
        minus_one = torch.tensor(-1.0, dtype=kind)
        for offset, blocks in _groups(rows):
            hidden = before[offset : offset + blocks[0].stop - blocks[0].start]
            for chunk in _chunks(blocks):
                place, sizes = slice(chunk[0].start, chunk[-1].stop), [b.stop - b.start for b in chunk]
                n_rows = place.stop - place.start
                read = to_bf16(x[place], _rounded(n_rows)) if low else x[place]
                gates = x.new_empty(len(read), 4 * size, dtype=kind)
                torch.addmm(bias[: 3 * size], read, from_x, out=gates[:, : 3 * size])
                gates[:, 3 * size :] = bias[3 * size :]
                parts = [p.split(sizes) for p in _parts(gates[:n_rows], size)]
                for k, after, from_hidden, both, new, reset, update, inner in zip(
                    sizes, out[place].split(sizes), *parts, strict=True
                ):
                    hidden = hidden[:k]
                    from_hidden.addmm_(hidden.to(kind), from_h)
                    both.sigmoid_()
                    torch.add(minus_one, new.addcmul_(reset, inner).sigmoid_(), alpha=2, out=new)
                    # h' = (1 - update) new + update h
                    hidden = torch.lerp(new.to(x.dtype), hidden, update.to(x.dtype), out=after)
                if keeps:
                    kept.append(gates)
        ctx.rows = rows
        ctx.save_for_backward(x, before, out, w_ih, w_hh, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, before, the weights and the biases from grad_out [R, H]."""
        x, before, out, w_ih, w_hh, *kept = ctx.saved_tensors
        size, kind = w_hh.shape[1], kept[0].dtype
        low = kind != x.dtype
        back_x, back_h = w_ih.roll(size, 0).to(kind), w_hh.to(kind)
        for_x, for_before = torch.empty_like(x), torch.empty_like(before)
        for_ih, for_hh, for_bias = torch.zeros_like(w_ih), torch.zeros_like(w_hh), x.new_zeros(4 * size)
        for offset, blocks in reversed(_groups(ctx.rows)):
            carried = x.new_zeros(blocks[0].stop - blocks[0].start, size)
            ahead = [slice(offset, offset + len(carried)), *blocks]
            sources = [before, *[out] * len(blocks)]
            t = len(blocks)
            for chunk in reversed(_chunks(blocks)):
                place, sizes = slice(chunk[0].start, chunk[-1].stop), [b.stop - b.start for b in chunk]
                n_rows = place.stop - place.start
                t -= len(chunk)
                hidden = torch.cat(
                    [s[a.start : a.start + k] for s, a, k in zip(sources[t:], ahead[t:], sizes, strict=False)]
                )
                gates = kept.pop()[:n_rows].to(x.dtype)
                grads = x.new_empty(n_rows, 4 * size)
                _walk_back(grads, carried, grad_out[place], hidden, gates, back_h, sizes)
                for_bias += grads.sum(dim=0)
                read = x[place]
                if low:
                    padded = _rounded(n_rows)
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
    """Return what makes the gates: from the input [3H, input_dim], from the hidden state [3H, H], biases [4H]."""
    size = w_hh.shape[1]
    twice, once = w_hh.new_full((size,), 2.0), w_hh.new_ones(2 * size)
    from_x = w_ih.roll(size, 0) * torch.cat([twice, once]).unsqueeze(1)
    from_h = w_hh * torch.cat([once, twice]).unsqueeze(1)
    both = (b_ih + b_hh)[: 2 * size]
    return from_x, from_h, torch.cat([2 * b_ih[2 * size :], both, 2 * b_hh[2 * size :]])


def _parts(gates: Tensor, size: int) -> list[Tensor]:
    """Return what a step works on: from_hidden, both (reset and update), new, reset, update, inner."""
    return [gates[:, size:], gates[:, size : 3 * size], *gates.split(size, dim=1)]


def _walk_back(
    grads: Tensor, carried: Tensor, grad_out: Tensor, hidden: Tensor, gates: Tensor, weight: Tensor, sizes: list[int]
) -> None:
    """Fill grads [R, 4H] of a chunk's gates, last step first; `carried` [k, H] is the hidden state's gradient.

    hidden: [R, H], before each row. gates: of the rows. weight: [3H, H].
    """
    size = hidden.shape[1]
    for_new, for_reset, for_update, for_inner = grads.split(size, dim=1)
    new, reset, update, inner = gates.split(size, dim=1)
    # What does not depend on the hidden state's gradient: one pass for all steps of the chunk.
    sigmoid_backward(hidden - new, update, grad_input=for_update)
    tanh_backward(1 - update, new, grad_input=for_new)
    torch.mul(for_new, reset, out=for_inner)
    sigmoid_backward(for_new * inner.mul_(0.5), reset, grad_input=for_reset)
    parts = (grad_out, grads.unflatten(1, (4, size)), grads[:, size:], update)
    steps = list(zip(sizes, *(p.split(sizes) for p in parts), strict=True))
    for k, given, of_gates, back, passes in reversed(steps):
        grad = carried[:k].add_(given)
        of_gates.mul_(grad.unsqueeze(1))
        grad.mul_(passes)
        if back.dtype == weight.dtype:
            grad.addmm_(back, weight)
        else:
            grad += torch.mm(back.to(weight.dtype), weight)


def _groups(rows: list[int]) -> list[tuple[int, list[slice]]]:
    """Cut the rows of all steps into groups of at most `ROWS_AT_ONCE` of a step: [(offset, blocks)].

    offset: of the group within a step. blocks: of the group's steps, which of all rows; as long as the group has some.
    """
    groups = []
    for offset in range(0, rows[0], ROWS_AT_ONCE):
        places = [(start + offset, start + min(k, offset + ROWS_AT_ONCE)) for start, k in _placed(rows) if k > offset]
        groups.append((offset, [slice(*place) for place in places]))
    return groups


def _placed(rows: list[int]) -> Iterator[tuple[int, int]]:
    return zip(accumulate(rows, initial=0), rows, strict=False)


def _chunks(blocks: list[slice]) -> list[list[slice]]:
    """Join neighbouring blocks of successive steps as long as they have at most `ROWS_AT_ONCE` rows together."""
    chunks = [[blocks[0]]]
    for block in blocks[1:]:
        joins = block.start == chunks[-1][-1].stop and block.stop - chunks[-1][0].start <= ROWS_AT_ONCE
        chunks[-1].append(block) if joins else chunks.append([block])
    return chunks


def _rounded(rows: int) -> int:
    return -(-rows // ROUNDING) * ROUNDING
