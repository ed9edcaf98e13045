"""Matrix products through the faster library of the processor, in float32 or with bf16 products."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SMALL = 1 << 28  # float operations below which oneDNN's preparation of a product of a new shape eats its gain
PADDING = 256  # rows to which bf16 products are rounded up, so that ragged batches share few prepared shapes
_CPUINFO = Path("/proc/cpuinfo")


@cache
def prefers_onednn() -> bool:
    """Return whether float32 products are faster through oneDNN than through torch's default here.

    A fixed rule, so that a machine always computes alike: on AMD, where MKL holds back its widest instructions.
    """
    amd = _CPUINFO.is_file() and "AuthenticAMD" in _CPUINFO.read_text(errors="replace")
    return amd and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, bf16: bool = False) -> Tensor:
    """Return x weight^T + bias, [..., out] from x [..., in], weight [out, in] and bias [out], in the type of x.

    float32 on a CPU: forward and input gradient take the faster library where the product is large; equal to
    `F.linear` but for the order of sums (about 1e-6 relative). Gradients can be taken once, not twice.
    bf16 (float32 tensors on a CPU): factors are rounded to bf16, sums kept in float32 inside a product, products
    rounded to bf16 and returned as float32; the same for both gradients. Bias and its gradient stay float32. Products
    of fewer rows than `PADDING` are computed in float32, where they are faster.
    Everything else (float64, CUDA, no rows) is `F.linear`.
    """
    rows = math.prod(x.shape[:-1])
    plain = x.dtype != torch.float32 or x.device.type != "cpu" or weight.dtype != x.dtype or rows == 0
    if not plain and bf16 and rows >= PADDING:
        return _BF16Linear.apply(x, weight, bias)
    if plain or 2 * rows * weight.numel() < SMALL or not prefers_onednn():
        return F.linear(x, weight, bias)
    return _OneDNNLinear.apply(x, weight, bias)


class FastLinear(nn.Linear):
    """`nn.Linear` (same parameters, names and start values) through `fast_linear`.

    Args:
        in_features, out_features, bias: as there. bf16: whether products are taken in bf16 on a CPU.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, bf16: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.bf16 = bf16

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] from x [..., in]."""
        return fast_linear(x, self.weight, self.bias, self.bf16)


def lowered(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """Return the context in which a GPU takes products in bf16, if `bf16`; a CPU is told product by product."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 and device.type != "cpu" else nullcontext()


def whole(device: torch.device) -> AbstractContextManager[object]:
    """Return the context that ends `lowered` within it: products in the type of their factors."""
    return torch.autocast(device.type, enabled=False) if device.type != "cpu" else nullcontext()


def to_bf16(x: Tensor, rows: int) -> Tensor:
    """Return x [R, k] in bf16 with zeros below, [rows, k]."""
    out = x.new_empty((rows, x.shape[1]), dtype=torch.bfloat16)
    out[: len(x)] = x
    out[len(x) :] = 0
    return out


def padded_rows(rows: int) -> int:
    """Return the next multiple of `PADDING`."""
    return -(-rows // PADDING) * PADDING


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    """Forward and input gradient through oneDNN; the weights' gradient through MKL, which is no slower there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad = grad_out.reshape(-1, grad_out.shape[-1])
        return (
            _onednn(grad, weight.t(), None).view(x.shape) if for_x else None,
            grad.t() @ x.reshape(-1, x.shape[-1]) if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )


class _BF16Linear(torch.autograd.Function):
    """All three products in bf16; rows are padded with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low, low_weight = to_bf16(flat, padded_rows(len(flat))), weight.bfloat16()
        ctx.save_for_backward(low, low_weight)
        ctx.shape = x.shape
        out = torch.mm(low, low_weight.t())[: len(flat)]
        out = out.float() if bias is None else torch.add(bias, out)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        low, low_weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad = grad_out.reshape(-1, grad_out.shape[-1])
        low_grad = to_bf16(grad, len(low))
        return (
            torch.mm(low_grad, low_weight)[: len(grad)].float().view(ctx.shape) if for_x else None,
            torch.mm(low_grad.t(), low).float() if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )
