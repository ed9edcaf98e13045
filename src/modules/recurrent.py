"""A GRU over packed episodes."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from omagd.utils.packing import Packing

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input


class PackedGRU(nn.Module):
    """`nn.GRUCell` (same parameters, names and start values) unrolled over packed episodes from a zero hidden state.

    Args:
        input_dim, hidden_dim: features of a row, H.
    """

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_dim, input_dim))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_dim, hidden_dim))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_dim))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_dim))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_dim), 1 / math.sqrt(hidden_dim))

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """Return the hidden state after each row, [S, n, H], from x [S, n, input_dim]; episodes start from zero."""
        n = x.shape[1]
        rows = [k * n for k in packing.batch_sizes]
        flat = x.reshape(-1, x.shape[-1])
        out = self._library_unroll(flat, rows) if x.is_cuda else self._unroll(flat, rows)
        return out.view(-1, n, self.hidden_dim)

    def step(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the next hidden state [B, n, H] from x [B, n, input_dim] and hidden [B, n, H]."""
        flat = torch.gru_cell(
            x.flatten(0, 1), hidden.flatten(0, 1), self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        )
        return flat.view(hidden.shape)

    def _unroll(self, x: Tensor, rows: list[int]) -> Tensor:
        # The recurrence wants the candidate's rows first (see `_Unroll`).
        weight, bias = (p.roll(self.hidden_dim, 0) for p in (self.weight_ih, self.bias_ih))
        return _Unroll.apply(F.linear(x, weight, bias), self.weight_hh, self.bias_hh, rows)

    def _library_unroll(self, x: Tensor, rows: list[int]) -> Tensor:
        """Do the same with torch's own packed GRU, which is one kernel on CUDA."""
        start = x.new_zeros(1, rows[0], self.hidden_dim)
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        sizes = torch.tensor(rows)
        # Input, sizes, start; has biases, layers, dropout, trains (cuDNN keeps what backward needs), both directions.
        return torch._VF.gru(x, sizes, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False)[0]


class _Unroll(torch.autograd.Function):
    """The recurrence alone: input gates in, hidden states out.

    Backward walks the gates back in time but leaves the product for the weights to the end: one for all steps. Columns
    stand as [new | reset | update] in the input gates and as [reset | update | inner] in the hidden ones, `inner` being
    the hidden part of the candidate before it is gated: so the gradients of both are overlapping slices of one buffer,
    [new | reset | update | inner].
    """

    @staticmethod
    def forward(ctx: Any, gates_x: Tensor, weight: Tensor, bias: Tensor, rows: list[int]) -> Tensor:
        """Return [R, H] from gates_x [R, 3H], R = the sum of `rows`, the rows of each time step."""
        size = weight.shape[1]
        keeps = any(ctx.needs_input_grad)
        n_kept = len(gates_x) if keeps else rows[0]
        gates, new = gates_x.new_empty(n_kept, 3 * size), gates_x.new_empty(n_kept, size)
        out = gates_x.new_empty(len(gates_x), size)
        hidden = gates_x.new_zeros(rows[0], size)
        weight_t = weight.t()
        for start, k in zip(accumulate(rows, initial=0), rows, strict=False):
            block = slice(start, start + k)
            kept = block if keeps else slice(k)
            from_x, here, candidate = gates_x[block], gates[kept], new[kept]
            torch.addmm(bias, hidden[:k], weight_t, out=here)
            here[:, : 2 * size].add_(from_x[:, size:]).sigmoid_()
            torch.addcmul(from_x[:, :size], here[:, :size], here[:, 2 * size :], out=candidate)
            # tanh(a) = 2 sigmoid(2 a) - 1, which is three times as fast here.
            candidate.mul_(2).sigmoid_().mul_(2).sub_(1)
            # h' = (1 - update) new + update h
            hidden = torch.lerp(candidate, hidden[:k], here[:, size : 2 * size], out=out[block])
        ctx.rows = rows
        if keeps:
            ctx.save_for_backward(gates, new, out, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of gates_x, weight and bias from grad_out [R, H]."""
        gates, new, out, weight = ctx.saved_tensors
        rows, size = ctx.rows, weight.shape[1]
        starts = list(accumulate(rows, initial=0))
        befores = [grad_out.new_zeros(rows[0], size)]
        befores += [out[start : start + k] for start, k in zip(starts, rows[1:], strict=False)]
        grads = grad_out.new_empty(len(grad_out), 4 * size)
        carried = befores[0][:0]
        for t in range(len(rows) - 1, -1, -1):
            block = slice(starts[t], starts[t + 1])
            for_new, for_reset, for_update, for_inner = grads[block].split(size, dim=1)
            reset, update, inner = gates[block].split(size, dim=1)
            grad = grad_out[block].clone()
            grad[: len(carried)] += carried
            through = grad * update
            tanh_backward(grad - through, new[block], grad_input=for_new)
            torch.mul(for_new, reset, out=for_inner)
            sigmoid_backward(for_new * inner, reset, grad_input=for_reset)
            sigmoid_backward((befores[t] - new[block]).mul_(grad), update, grad_input=for_update)
            if t:
                carried = through.addmm_(grads[block, size:], weight)
        grad_h = grads[:, size:]
        grad_weight = grad_h.t() @ torch.cat(befores)
        return grads[:, : 3 * size], grad_weight, grad_h.sum(dim=0), None
