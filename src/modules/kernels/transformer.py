"""Dropout, attention and cross-entropy for stages 1 and 2, with their own backward pass, on CPUs.

They are fast where torch's own wait for memory: dropout draws 16 random bits for each unit (a probability is met to
1/65536) from torch's generator, and softmax runs across attention matrices, because their rows are shorter than a
vector register. `g` is the gradient of the output.
Shapes: F frames, L tokens of a sequence, n query tokens, h heads, d = d_model, G = F h, M tokens, K codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from omagd.modules.kernels import arrays

_LEVELS = 1 << 16  # values of 16 bits
_BLOCK = 1 << 16  # units that pass through several operations together, so that they stay in the cache


def _words(size: int) -> Tensor:
    """Return random 16-bit numbers [size] of torch's generator: each 64-bit draw gives four."""
    return torch.empty((size + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:size]


def _threshold(p: float) -> tuple[int, float]:
    """Return the largest number that means "dropped" (the lowest p x 65536 do), and the scale of all others."""
    dropped = round(p * _LEVELS)
    return dropped - _LEVELS // 2 - 1, _LEVELS / (_LEVELS - dropped)  # numbers are -2^15 ... 2^15 - 1


def dropout_mask(like: Tensor, p: float) -> Tensor:
    """Return a dropout mask, contiguous: for each unit of `like` 0 with probability p and 1 / (1 - p) otherwise."""
    words, (lowest, scale) = _words(like.numel()), _threshold(p)
    mask = torch.empty(like.shape, dtype=like.dtype)
    for part, its in zip(mask.view(-1).split(_BLOCK), words.split(_BLOCK), strict=True):
        # 0 up to the threshold and 1 above it, without a comparison, which would make an array of bool.
        part.copy_(its).sub_(lowest).clamp_(0.0, 1.0).mul_(scale)
    return mask


def _transposed(x: Tensor) -> Tensor:
    """Return a matrix transposed, in memory too."""
    return x.t().contiguous()


class Dropout(torch.autograd.Function):
    """x * dropout_mask(x) with the same bits in one pass; what it keeps are random numbers, half as large as the mask.

    Compared with that expression: tests/test_learning_kernels.py.
    """

    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor, p: float) -> Tensor:
        """Return x times the mask of new random numbers."""
        words = _words(x.numel())
        ctx.kernels, ctx.p = kernels, p
        ctx.save_for_backward(words)
        return _times_mask(kernels, x, words, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient of x."""
        return None, _times_mask(ctx.kernels, grad, ctx.saved_tensors[0], ctx.p), None


def _times_mask(kernels: Any, x: Tensor, words: Tensor, p: float) -> Tensor:
    x, (lowest, scale) = x.contiguous(), _threshold(p)
    out = torch.empty_like(x)
    read, made, numbers = arrays(x.view(-1), out.view(-1), words)
    kernels.drop(read, numbers, lowest, np.float32(scale), made)
    return out


class GeluDropout(torch.autograd.Function):
    """y = gelu(x) * mask, gelu(x) = x Phi(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    dL/dx = g * slope with slope = mask * gelu'(x) = mask * (Phi(x) + x phi(x)), Phi and phi being the normal
    distribution and its density. Forward computes the slope while x is in the cache, and keeps nothing else.
    Compared with `F.gelu(x) * mask`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Return dropout(gelu(x))."""
        out = dropout_mask(x, p)
        slope = torch.empty_like(out)
        flat = (t.reshape(-1).split(_BLOCK) for t in (x, slope, out))
        for part, its_slope, its_out in zip(*flat, strict=True):
            # `gelu_backward` of the mask (still in `out`) is mask * gelu'(x).
            torch.ops.aten.gelu_backward.grad_input(its_out, part, grad_input=its_slope)
            its_out.mul_(F.gelu(part))
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        return grad * ctx.saved_tensors[0], None


class Attention(torch.autograd.Function):
    """Scaled dot-product attention of G heads: q [G, n, e], k and v [G, L, e], all contiguous, to [G, n, e].

    s = q k^T / sqrt(e), w = softmax(s) over the L keys, w' = w * mask (dropout), y = w' v. Backward:

        dL/dv = w'^T g        d_w = mask * (g v^T)        d_s = w * (d_w - sum over L of w * d_w)
        dL/dq = d_s k / sqrt(e)                           dL/dk = d_s^T q / sqrt(e)

    w, its mask and d_w are stored as [n, L, G], so that softmax runs over the second axis with G as vector lanes.
    Compared with `F.scaled_dot_product_attention`, and with dropout by `gradcheck`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        """Return [G, n, e]. p: dropout of the weights."""
        (groups, n, e), length = q.shape, k.shape[1]
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(e**-0.5)
        # Sixteen heads side by side in a register, instead of one row of a dozen scores.
        weights = _transposed(scores.view(groups, -1)).view(n, length, groups).softmax(1)
        mask = dropout_mask(weights, p) if p else None
        dropped = _transposed((weights if mask is None else weights * mask).view(-1, groups)).view(groups, n, length)
        ctx.save_for_backward(q, k, v, weights, mask, dropped)
        return torch.bmm(dropped, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v from grad [G, n, e]."""
        q, k, v, weights, mask, dropped = ctx.saved_tensors
        (groups, n, e), length, grad = q.shape, k.shape[1], grad.contiguous()
        for_weights = _transposed(torch.bmm(grad, v.transpose(1, 2)).view(groups, -1)).view(n, length, groups)
        if mask is not None:
            for_weights.mul_(mask)
        # d_s = w (d_w - sum of w d_w): a softmax sums to 1, so its gradient has no part along w.
        for_scores = torch.ops.aten._softmax_backward_data(for_weights, weights, 1, weights.dtype).mul_(e**-0.5)
        for_scores = _transposed(for_scores.view(-1, groups)).view(groups, n, length)
        # dL/dv = w'^T g, with the weights as they were used.
        for_v = torch.bmm(dropped.transpose(1, 2), grad)
        return torch.bmm(for_scores, k), torch.bmm(for_scores.transpose(1, 2), q), for_v, None


class CrossEntropy(torch.autograd.Function):
    """L = -sum over tokens of weight * log p[target], p = softmax(logits).

    dL/dlogits = weight * (p - onehot(target)), because d log p[t] / d logits = onehot(t) - p. Written at once instead
    of passing through three matrices of [M, K + 1]. Compared with `F.cross_entropy`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return the sum over tokens."""
        ctx.save_for_backward(log_p, target, weight)
        ctx.dtype = logits.dtype
        return -(log_p.gather(1, target[:, None])[:, 0] * weight).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        log_p, target, weight = ctx.saved_tensors
        scale = (weight * grad)[:, None]
        # weight (p - onehot): pulls the true token up and all others down by what they were given.
        return log_p.exp().mul_(scale).scatter_add_(1, target[:, None], -scale).to(ctx.dtype), None, None, None
