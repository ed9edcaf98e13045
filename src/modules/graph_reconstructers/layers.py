"""Layers of stages 1 and 2 that a CPU runs without waiting for memory: dropout, short attention, feed-forward, MLP.

On a CPU a mask of dropout is drawn from 16 random bits of each unit (a probability is met to 1/65536) out of torch's
generator, and softmax runs across attention matrices instead of along their rows, which are shorter than a vector
register. On other devices torch's own layers run.
Shapes: F frames, L tokens of a sequence, h heads, d = d_model, G = F·h, M chosen tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omagd.modules.kernels.linear import fast_linear

_LEVELS = 1 << 16  # values of 16 bits
_BLOCK = 1 << 16  # units that pass through several steps together, so that they stay in the cache


def linear(x: Tensor, layer: nn.Linear, bf16: bool = False) -> Tensor:
    """Return what `layer` makes of x, through the faster library of the processor; see `fast_linear`."""
    return fast_linear(x, layer.weight, layer.bias, bf16)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x with a share `p` of its units set to zero and the others scaled by 1 / (1 - p); x itself for p = 0."""
    if p == 0.0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return _Dropout.apply(x, p)


def gelu_dropout(x: Tensor, p: float) -> Tensor:
    """Return dropout(gelu(x))."""
    if x.device.type != "cpu" or p == 0.0:
        return dropout(F.gelu(x), p)
    return _GeluDropout.apply(x, p)


def attend(query: Tensor, key_value: Tensor, n_heads: int, p: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d / h)) v of every head, [F, n, d].

    query: [F, n, d]. key_value: [F, L, 2·d]. p: dropout of the attention weights.
    """
    n_frames, _, d = query.shape
    kv = key_value.view(n_frames, -1, 2, n_heads, d // n_heads).permute(2, 0, 3, 1, 4)
    q = query.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    if query.device.type == "cpu":
        k, v = kv.contiguous().flatten(1, 2)
        mixed = _Attention.apply(q.contiguous().flatten(0, 1), k, v, p).unflatten(0, (n_frames, n_heads))
    else:
        mixed = F.scaled_dot_product_attention(q, kv[0], kv[1], dropout_p=p)
    return mixed.transpose(1, 2).flatten(2)


class MLP(nn.Sequential):
    """Linear, ReLU, LayerNorm, dropout, as often as `n_layers` says, and a linear map to `d_out`."""

    def __init__(self, d_in: int, d_out: int, hidden: int, n_layers: int, p: float) -> None:
        layers: list[nn.Module] = []
        for _ in range(n_layers):
            layers += [nn.Linear(d_in, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Dropout(p)]
            d_in = hidden
        super().__init__(*layers, nn.Linear(d_in, d_out))
        self.p = p

    def forward(self, x: Tensor, bf16: bool = False) -> Tensor:
        """Return [..., d_out] from x [..., d_in]."""
        for layer in self:
            if isinstance(layer, nn.Linear):
                x = linear(x, layer, bf16)
            elif isinstance(layer, nn.Dropout):
                x = dropout(x, self.p if self.training else 0.0)
            else:
                x = layer(x)
        return x


def _mask(like: Tensor, p: float) -> Tensor:
    """Return, contiguous and for each unit of `like`, 0 with probability p and 1 / (1 - p) otherwise."""
    size, dropped = like.numel(), round(p * _LEVELS)
    lowest = dropped - _LEVELS // 2 - 1  # of the values -2^15 … 2^15 - 1, those up to here are dropped
    words = torch.empty((size + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    mask = torch.empty(like.shape, dtype=like.dtype)
    for part, its in zip(mask.view(-1).split(_BLOCK), words.view(torch.int16)[:size].split(_BLOCK), strict=True):
        part.copy_(its).sub_(lowest).clamp_(0.0, 1.0).mul_(_LEVELS / (_LEVELS - dropped))
    return mask


def _turn(x: Tensor) -> Tensor:
    """Return a matrix transposed, in memory too."""
    return x.t().contiguous()


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask = _mask(x, p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class _GeluDropout(torch.autograd.Function):
    """Keeps the derivative alone, which forward computes while everything is in the cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        out = _mask(x, p)
        slope = torch.empty_like(out)
        flat = (t.reshape(-1).split(_BLOCK) for t in (x, slope, out))
        for part, its_slope, its_out in zip(*flat, strict=True):
            torch.ops.aten.gelu_backward.grad_input(its_out, part, grad_input=its_slope)
            its_out.mul_(F.gelu(part))
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class _Attention(torch.autograd.Function):
    """Attention of G heads over q [G, n, e], k and v [G, L, e], all contiguous; softmax stands as [n, L, G]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        (groups, n, e), length = q.shape, k.shape[1]
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(e**-0.5)
        weights = _turn(scores.view(groups, -1)).view(n, length, groups).softmax(1)
        mask = _mask(weights, p) if p else None
        dropped = _turn((weights if mask is None else weights * mask).view(-1, groups)).view(groups, n, length)
        ctx.save_for_backward(q, k, v, weights, mask, dropped)
        return torch.bmm(dropped, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, mask, dropped = ctx.saved_tensors
        (groups, n, e), length, grad = q.shape, k.shape[1], grad.contiguous()
        for_weights = _turn(torch.bmm(grad, v.transpose(1, 2)).view(groups, -1)).view(n, length, groups)
        if mask is not None:
            for_weights.mul_(mask)
        for_scores = torch.ops.aten._softmax_backward_data(for_weights, weights, 1, weights.dtype).mul_(e**-0.5)
        for_scores = _turn(for_scores.view(-1, groups)).view(groups, n, length)
        for_v = torch.bmm(dropped.transpose(1, 2), grad)
        return torch.bmm(for_scores, k), torch.bmm(for_scores.transpose(1, 2), q), for_v, None
