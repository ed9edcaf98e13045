"""A bidirectional LSTM over the agents of a team, who are few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

tanh_backward = torch.ops.aten.tanh_backward.grad_input


class TeamLSTM(nn.LSTM):
    """`nn.LSTM` over the agents in both directions (same parameters, names and start values).

    On a CPU the recurrence is unrolled here: one product for all agents' inputs in each direction, none for the hidden
    state before the first agent, which is zero. Equal to `nn.LSTM` but for the order of sums; measured, a seventh
    faster in a DDPG update. Gradients can be taken once, not twice.

    Args:
        hidden: features of an agent before, and of each direction after (H).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return [S, n, 2H] from x [S, n, H]: of the first agents before one, then of the last ones."""
        if x.is_cuda:
            return super().forward(x)[0]  # type: ignore[no-any-return]
        return _BothWays.apply(  # type: ignore[no-any-return]
            x,
            self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0,
            self.weight_ih_l0_reverse, self.weight_hh_l0_reverse, self.bias_ih_l0_reverse, self.bias_hh_l0_reverse,
        )  # fmt: skip


class _BothWays(torch.autograd.Function):
    """Both directions step by step: step k is agent k of the first and agent n - 1 - k of the second.

    Gates stand as [n, S, 2, 4H], in the order input, forget, cell, output; hidden and cell states as [n, S, 2, H].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """Return [S, n, 2H] from x [S, n, H] and weight_ih, weight_hh, bias_ih, bias_hh of each direction."""
        n, size = x.shape[1], x.shape[2]
        read = [_by_step(x), _by_step(x.flip(1))]
        gates = x.new_empty(n, len(x), 2, 4 * size)
        for way, given in enumerate(read):
            w_ih, _, b_ih, b_hh = weights[4 * way : 4 * way + 4]
            torch.addmm(b_ih + b_hh, given, w_ih.t(), out=gates.view(-1, 8 * size)[:, _columns(way, size)])
        hidden, cell, bent = x.new_empty(3, n, len(x), 2, size).unbind()
        for k in range(n):
            now = gates[k]
            if k:
                for way in (0, 1):
                    now[:, way].addmm_(hidden[k - 1, :, way], weights[4 * way + 1].t())
            entering, forgetting, new, leaving = now.split(size, -1)
            now[..., : 2 * size].sigmoid_()
            leaving.sigmoid_()
            torch.mul(entering, _tanh(new, out=new), out=cell[k])
            if k:
                cell[k].addcmul_(forgetting, cell[k - 1])
            torch.mul(_tanh(cell[k], out=bent[k]), leaving, out=hidden[k])
        ctx.save_for_backward(*read, *weights[:2], *weights[4:6], gates, hidden, cell, bent)
        return _by_agent(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of what is asked of the weights, from grad_out [S, n, 2H]."""
        *read, w_ih, w_hh, w_ih_r, w_hh_r, gates, hidden, cell, bent = ctx.saved_tensors
        grads = _walk_back(_by_order(grad_out), gates, cell, bent, (w_hh, w_hh_r))
        n, rows, size = len(gates), gates.shape[1], gates.shape[3] // 4
        flat = grads.view(-1, 8 * size)
        for_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            there, back = (
                torch.mm(flat[:, _columns(way, size)], weight).view(n, rows, size)
                for way, weight in enumerate((w_ih, w_ih_r))
            )
            for_x = (there + back.flip(0)).transpose(0, 1)
        if not any(ctx.needs_input_grad[1:]):
            return for_x, *[None] * 8
        out: list[Tensor | None] = []
        bias = flat.sum(0)
        for way, given in enumerate(read):
            of_way = flat[:, _columns(way, size)]
            before = hidden[: n - 1, :, way].reshape(-1, size)
            for_bias = bias[_columns(way, size)]
            out += [of_way.t() @ given, of_way[rows:].t() @ before, for_bias, for_bias.clone()]
        return for_x, *out


def _walk_back(given: Tensor, gates: Tensor, cell: Tensor, bent: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradients of the gates before they were bent, [n, S, 2, 4H], from `given` [n, S, 2, H] of the states.

    bent: tanh of `cell`, [n, S, 2, H]. weights: weight_hh of both directions.
    """
    size = cell.shape[-1]
    grads = torch.empty_like(gates)
    for_entering, for_forgetting, for_new, for_leaving = grads.split(size, -1)
    entering, forgetting, new, leaving = gates.split(size, -1)
    # What does not depend on later steps: one pass for all of them.
    _sigmoid_backward(new, entering, out=for_entering)
    _sigmoid_backward(cell[:-1], forgetting[1:], out=for_forgetting[1:])
    for_forgetting[0] = 0
    tanh_backward(entering, new, grad_input=for_new)
    _sigmoid_backward(bent, leaving, out=for_leaving)
    to_cell = tanh_backward(leaving, bent, grad_input=torch.empty_like(bent))
    carried = torch.zeros_like(cell[0])
    for k in reversed(range(len(gates))):
        carried.addcmul_(to_cell[k], given[k])
        grads[k].unflatten(-1, (4, size))[..., :3, :].mul_(carried.unsqueeze(-2))
        for_leaving[k].mul_(given[k])
        if k:
            carried.mul_(forgetting[k])
            for way, weight in enumerate(weights):
                given[k - 1, :, way].addmm_(grads[k, :, way], weight)
    return grads


def _tanh(x: Tensor, out: Tensor) -> Tensor:
    """Return the tanh, a third of the time of torch's own on a CPU: 2 sigmoid(2 x) - 1."""
    return torch.mul(x, 2, out=out).sigmoid_().mul_(2).sub_(1)


def _sigmoid_backward(given: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Return given y (1 - y); torch's own is slow where memory is not contiguous."""
    return torch.addcmul(y, y, y, value=-1, out=out).mul_(given)


def _columns(way: int, size: int) -> slice:
    return slice(4 * size * way, 4 * size * (way + 1))


def _by_step(x: Tensor) -> Tensor:
    """Return [n S, H] from [S, n, H]."""
    return x.transpose(0, 1).reshape(-1, x.shape[-1])


def _by_agent(hidden: Tensor) -> Tensor:
    """Return [S, n, 2H] from [n, S, 2, H], in which the second direction stands the other way round."""
    return torch.cat([hidden[:, :, 0], hidden[:, :, 1].flip(0)], -1).transpose(0, 1)


def _by_order(x: Tensor) -> Tensor:
    """Return [n, S, 2, H] from [S, n, 2H]: `_by_agent` undone, in memory of its own."""
    there, back = x.transpose(0, 1).chunk(2, -1)
    return torch.stack([there, back.flip(0)], 2)
