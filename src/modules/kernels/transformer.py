"""Attention for stages 1 and 2, with its own backward pass, on CPUs.

It is fast where torch's own waits for memory: softmax runs across attention matrices, because their rows are shorter
than a vector register. `g` is the gradient of the output.
Shapes: F frames, L tokens of a sequence, n query tokens, h heads, d = d_model, G = F h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _transposed(x: Tensor) -> Tensor:
    """Return a matrix transposed, in memory too."""
    return x.t().contiguous()


class Attention(torch.autograd.Function):
    """Scaled dot-product attention of G heads: q [G, n, e], k and v [G, L, e], all contiguous, to [G, n, e].

    s = q k^T / sqrt(e), w = softmax(s) over the L keys, y = w v. Backward:

        dL/dv = w^T g         d_w = g v^T                 d_s = w * (d_w - sum over L of w * d_w)
        dL/dq = d_s k / sqrt(e)                           dL/dk = d_s^T q / sqrt(e)

    w and d_w are stored as [n, L, G], so that softmax runs over the second axis with G as vector lanes.
    Compared with `F.scaled_dot_product_attention`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [G, n, e]."""
        (groups, n, e), length = q.shape, k.shape[1]
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(e**-0.5)
        # Sixteen heads side by side in a register, instead of one row of a dozen scores.
        weights = _transposed(scores.view(groups, -1)).view(n, length, groups).softmax(1)
        by_head = _transposed(weights.view(-1, groups)).view(groups, n, length)
        ctx.save_for_backward(q, k, v, weights, by_head)
        return torch.bmm(by_head, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v from grad [G, n, e]."""
        q, k, v, weights, by_head = ctx.saved_tensors
        (groups, n, e), length, grad = q.shape, k.shape[1], grad.contiguous()
        for_weights = _transposed(torch.bmm(grad, v.transpose(1, 2)).view(groups, -1)).view(n, length, groups)
        # d_s = w (d_w - sum of w d_w): a softmax sums to 1, so its gradient has no part along w.
        for_scores = torch.ops.aten._softmax_backward_data(for_weights, weights, 1, weights.dtype).mul_(e**-0.5)
        for_scores = _transposed(for_scores.view(-1, groups)).view(groups, n, length)
        # dL/dv = w^T g.
        for_v = torch.bmm(by_head.transpose(1, 2), grad)
        return torch.bmm(for_scores, k), torch.bmm(for_scores.transpose(1, 2), q), for_v
