"""A GRU over packed episodes."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from omagd.components.packing import Packing


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
        gates_x = F.linear(x, self.weight_ih, self.bias_ih)
        return _Unroll.apply(gates_x, self.weight_hh, self.bias_hh, rows)

    def _library_unroll(self, x: Tensor, rows: list[int]) -> Tensor:
        """Do the same with torch's own packed GRU, which is one kernel on CUDA."""
        start = x.new_zeros(1, rows[0], self.hidden_dim)
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        sizes = torch.tensor(rows)
        # Input, sizes, start; has biases, layers, dropout, trains (cuDNN keeps what backward needs), both directions.
        return torch._VF.gru(x, sizes, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False)[0]


class _Unroll(torch.autograd.Function):
    """The recurrence alone: input gates in, hidden states out.

    Backward walks the gates back in time but leaves the product for the weights to the end: one for all steps.
    """

    @staticmethod
    def forward(ctx: Any, gates_x: Tensor, weight: Tensor, bias: Tensor, rows: list[int]) -> Tensor:
        """Return [R, H] from gates_x [R, 3H] (reset, update, new), R = the sum of `rows`, rows of each time step."""
        hidden_dim = weight.shape[1]
        out = gates_x.new_empty(len(gates_x), hidden_dim)
        keeps = any(ctx.needs_input_grad)
        # Kept for backward: reset and update gates, candidate, and the hidden part of the candidate before the gate.
        kept = gates_x.new_empty(len(gates_x), 4 * hidden_dim) if keeps else gates_x.new_empty(rows[0], 4 * hidden_dim)
        hidden = gates_x.new_zeros(rows[0], hidden_dim)
        weight_t = weight.t()
        for start, k in zip(accumulate(rows, initial=0), rows, strict=False):
            block = slice(start, start + k)
            here = kept[block] if keeps else kept[:k]
            gates_h = torch.addmm(bias, hidden[:k], weight_t)
            both, new, inner = here.split([2 * hidden_dim, hidden_dim, hidden_dim], dim=1)
            torch.add(gates_x[block, : 2 * hidden_dim], gates_h[:, : 2 * hidden_dim], out=both)
            both.sigmoid_()
            inner.copy_(gates_h[:, 2 * hidden_dim :])
            torch.addcmul(gates_x[block, 2 * hidden_dim :], both[:, :hidden_dim], inner, out=new)
            new.tanh_()
            # h' = (1 - z) new + z h
            torch.lerp(new, hidden[:k], both[:, hidden_dim:], out=out[block])
            hidden = out[block]
        ctx.rows = rows
        ctx.save_for_backward(kept if keeps else None, out, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of gates_x, weight and bias from grad_out [R, H]."""
        kept, out, weight = ctx.saved_tensors
        rows, hidden_dim = ctx.rows, weight.shape[1]
        starts = list(accumulate(rows, initial=0))
        first = grad_out.new_zeros(rows[0], hidden_dim)
        grad_x = torch.empty_like(kept[:, : 3 * hidden_dim])
        grad_h = torch.empty_like(grad_x)
        carried = first[:0]
        for t in range(len(rows) - 1, -1, -1):
            block = slice(starts[t], starts[t] + rows[t])
            before = first if t == 0 else out[starts[t - 1] : starts[t - 1] + rows[t]]
            grad = grad_out[block].clone()
            grad[: len(carried)] += carried
            reset, update, new, inner = kept[block].split(hidden_dim, dim=1)
            from_gates = grad_h[block]
            for_reset, for_update, for_inner = from_gates.split(hidden_dim, dim=1)
            through = grad * update
            for_new = (grad - through).mul_(1 - new * new)
            torch.mul(for_new, reset, out=for_inner)
            torch.mul(for_inner, (1 - reset).mul_(inner), out=for_reset)
            torch.mul(through, (before - new).mul_(1 - update), out=for_update)
            grad_x[block, : 2 * hidden_dim] = from_gates[:, : 2 * hidden_dim]
            grad_x[block, 2 * hidden_dim :] = for_new
            if t:
                carried = through.addmm_(from_gates, weight)
        pieces = [first, *(out[starts[t - 1] : starts[t - 1] + rows[t]] for t in range(1, len(rows)))]
        grad_weight = grad_h.t() @ torch.cat(pieces)
        return grad_x, grad_weight, grad_h.sum(dim=0), None
