"""Linear layers with their own backward pass: through oneDNN, in bf16, over one-hot inputs, and three in a row.

Every kernel here computes what a plain PyTorch expression computes; its docstring gives that expression, the gradient
and the test that compares both. `g` is the gradient of the output. A linear map y = x W^T + b has the gradients

    dL/dx = g W        dL/dW = g^T x        dL/db = sum of g over rows
"""

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

from omagd.modules.kernels.compiling import kernels_for

SMALL = 1 << 28  # products of fewer float operations stay with torch: oneDNN's set-up for a new shape costs more
PADDING = 256  # bf16 products round their rows up to a multiple, so that ragged batches need few set-ups
ROUNDING = 32  # the same for the steps of a recurrence
ROWS_AT_ONCE = 2048  # rows that pass through several operations together, so that they stay in a core's cache
_CPUINFO = Path("/proc/cpuinfo")


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than torch's default (MKL) on this processor.

    A fixed rule instead of a measurement, because a machine must always compute the same bits: yes on AMD, where MKL
    does not use the widest instructions.
    """
    amd = _CPUINFO.is_file() and "AuthenticAMD" in _CPUINFO.read_text(errors="replace")
    return amd and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, bf16: bool = False) -> Tensor:
    """Return x weight^T + bias, [..., out] from x [..., in], weight [out, in] and bias [out], in the type of x.

    float32 on a CPU: large products go through oneDNN where `prefers_onednn`. The result differs from `F.linear` only
    by the order of sums (about 1e-6 relative). Gradients can be taken once, not twice.
    bf16 (float32 tensors on a CPU): see `_BF16Linear`. Products of fewer than `PADDING` rows stay in float32, where
    they are faster.
    Everything else (float64, CUDA, no rows) is `F.linear`.
    """
    rows = math.prod(x.shape[:-1])
    plain = x.dtype != torch.float32 or x.device.type != "cpu" or weight.dtype != x.dtype or rows == 0
    in_bf16 = not plain and bf16 and rows >= PADDING
    if not in_bf16 and (plain or 2 * rows * weight.numel() < SMALL or not prefers_onednn()):
        return F.linear(x, weight, bias)
    kernel = _BF16Linear if in_bf16 else _OneDNNLinear
    out: Tensor = kernel.apply(x.reshape(rows, -1), weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


def apply_linear(x: Tensor, layer: nn.Linear, bf16: bool = False) -> Tensor:
    """Return `layer` applied to x, by `fast_linear` where it is no subclass; whether in bf16 is each call's choice."""
    if type(layer) is not nn.Linear:
        return layer(x)
    return fast_linear(x, layer.weight, layer.bias, bf16)


class FastLinear(nn.Linear):
    """`nn.Linear` (same parameters, names and initial values) computed by `fast_linear`.

    Args:
        in_features, out_features, bias: as there. bf16: whether a CPU multiplies in bf16.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, bf16: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.bf16 = bf16

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] from x [..., in]."""
        return fast_linear(x, self.weight, self.bias, self.bf16)


def autocast_bf16(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """Return the context in which a GPU multiplies in bf16, if `bf16`. On a CPU each product decides for itself."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 and device.type != "cpu" else nullcontext()


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return the context that suspends `autocast_bf16`: products have the type of their factors."""
    return torch.autocast(device.type, enabled=False) if device.type != "cpu" else nullcontext()


def to_bf16(x: Tensor, rows: int) -> Tensor:
    """Return x [R, k] in bf16, padded with rows of zeros to [rows, k]."""
    out = x.new_empty((rows, x.shape[1]), dtype=torch.bfloat16)
    out[: len(x)] = x
    out[len(x) :] = 0
    return out


def padded_rows(rows: int, multiple: int = PADDING) -> int:
    """Return the next multiple."""
    return -(-rows // multiple) * multiple


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    """`F.linear` through oneDNN, x [R, in] to [R, out].

    Forward and dL/dx go through oneDNN, dL/dW through MKL, which is no slower there. Gradients as at the top of the
    file. Compared with `F.linear`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t(), None) if for_x else None,
            grad.t() @ x if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )


class _BF16Linear(torch.autograd.Function):
    """`F.linear` with bf16 factors, x [R, in] to [R, out].

    With r = rounding to bf16: y = r(r(x) r(W)^T) + b, dL/dx = r(r(g) r(W)), dL/dW = r(r(g)^T r(x)); sums inside a
    product, the bias and its gradient stay in float32. Rows are padded with zeros, which add nothing to any product.
    Compared with exactly these roundings: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low, low_weight = to_bf16(x, padded_rows(len(x))), weight.bfloat16()
        ctx.save_for_backward(low, low_weight)
        out = torch.mm(low, low_weight.t())[: len(x)]
        return out.float() if bias is None else torch.add(bias, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        low, low_weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        low_grad = to_bf16(grad, len(low))
        return (
            torch.mm(low_grad, low_weight)[: len(grad)].float() if for_x else None,
            torch.mm(low_grad.t(), low).float() if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )


def lookup_relu(features: Tensor, weight: Tensor, table: Tensor, index: Tensor, bf16: bool = False) -> Tensor:
    """Return relu(features weight^T + table[index]), [R, out], in bf16 perhaps if `bf16`; see `_LookupReLU`."""
    kernels = kernels_for(features, len(features) * len(weight))
    return _LookupReLU.apply(kernels, features, weight, table, index, bf16)  # type: ignore[no-untyped-call]


class _LookupReLU(torch.autograd.Function):
    """relu(x W^T + table[index]): a linear layer over features and one-hots, then ReLU.

    A one-hot times a matrix picks one of its rows, so products with one-hots become a look-up in `table`. With the
    ReLU's derivative, h = g where y > 0 and 0 elsewhere:

        dL/dx = h W        dL/dW = h^T x        dL/dtable[m] = sum of h over the rows with index m

    Shapes: x [R, d], W [out, d], table [M, out], index [R]. Rows pass in blocks of `ROWS_AT_ONCE`.
    Compared with that expression: tests/test_networks.py; with explicit one-hots: tests/test_networks.py.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, features: Tensor, weight: Tensor, table: Tensor, index: Tensor, bf16: bool
    ) -> Tensor:
        """Return [R, out]. bf16: the products of forward and of dL/dW round their factors, that of dL/dx does not.

        Kernels return bf16 then, and take its gradient in bf16: the next product rounds it anyway.
        """
        kind = torch.bfloat16 if bf16 and kernels is not None else features.dtype
        out = features.new_empty(len(features), len(weight), dtype=kind)
        weight_t = weight.t().bfloat16() if bf16 else weight.t()
        for rows, x, places in zip(*(t.split(ROWS_AT_ONCE) for t in (out, features, index)), strict=True):
            low = torch.mm(to_bf16(x, ROWS_AT_ONCE), weight_t)[: len(rows)] if bf16 else None
            if kernels is not None:
                product = torch.mm(x, weight_t, out=rows) if low is None else low
                kernels.lookup_relu(*kernels.arrays((product, table, places, rows)))
                continue
            torch.index_select(table, 0, places, out=rows)
            rows.addmm_(x, weight_t) if low is None else rows.add_(low)
            rows.relu_()
        ctx.kernels, ctx.bf16, ctx.table_rows = kernels, bf16, len(table)
        ctx.save_for_backward(features, weight, index, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of features, weight and table from grad_out [R, out]."""
        features, weight, index, out = ctx.saved_tensors
        for_features = torch.empty_like(features) if ctx.needs_input_grad[1] else None
        for_weight, for_table = torch.zeros_like(weight), weight.new_zeros(ctx.table_rows, len(weight))
        start, grad_out = 0, grad_out.contiguous()
        for y, x, places, given in zip(*(t.split(ROWS_AT_ONCE) for t in (out, features, index, grad_out)), strict=True):
            if ctx.kernels is None:
                grad = torch.ops.aten.threshold_backward(given, y, 0)  # zero where the ReLU was
                for_table += torch.ops.aten.embedding_dense_backward(grad, places, len(for_table), -1, False)
            else:
                grad = torch.empty_like(given)
                ctx.kernels.lookup_relu_backward(*ctx.kernels.arrays((given, y, places, grad, for_table)))
            if ctx.bf16:
                for_weight += torch.mm(to_bf16(grad, ROWS_AT_ONCE).t(), to_bf16(x, ROWS_AT_ONCE))
            else:
                for_weight.addmm_(grad.t(), x)
            if for_features is not None:
                torch.mm(grad.to(weight.dtype), weight, out=for_features[start : start + len(grad)])
            start += len(grad)
        return None, for_features, for_weight, for_table, None, None


def three_layers(x: Tensor, *parameters: Tensor) -> Tensor:
    """Return linear(relu(linear(relu(linear(x))))), [R, out]; parameters: W1, b1, W2, b2, W3, b3."""
    return _ThreeLayers.apply(x, *parameters)  # type: ignore[no-untyped-call]


class _ThreeLayers(torch.autograd.Function):
    """W3 relu(W2 relu(W1 x + b1) + b2) + b3 as one operation: at DDPG's sizes, autograd's bookkeeping counts.

    Backward goes through the layers from the last to the first. Each has the gradients at the top of the file; between
    two layers g becomes g W, set to zero where the ReLU's output was zero.
    Shapes: x [R, in], W1 [H, in], W2 [H, H], W3 [out, H].
    Compared with `F.linear` and `F.relu`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor) -> Tensor:
        """Return [R, out] from x [R, in]."""
        first = torch.addmm(b1, x, w1.t()).relu_()
        second = torch.addmm(b2, first, w2.t()).relu_()
        ctx.save_for_backward(x, first, second, w1, w2, w3)
        return torch.addmm(b3, second, w3.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and, unless the weights are frozen, of all weights and biases."""
        x, first, second, w1, w2, w3 = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        out: list[Tensor | None] = []
        for read, weight in ((second, w3), (first, w2), (x, w1)):
            out = [grad.t() @ read, grad.sum(0), *out] if trains else [None, None, *out]
            if read is not x:
                grad = grad @ weight
                torch.ops.aten.threshold_backward.grad_input(grad, read, 0, grad_input=grad)
        return grad @ w1 if ctx.needs_input_grad[0] else None, *out
