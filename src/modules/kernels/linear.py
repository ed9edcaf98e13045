"""Linear layers with their own backward pass: by oneDNN, over one-hots, and as QMIX's mixer.

Every function here computes what a plain expression of `modules/ops.py` computes. `g` is the gradient of the output.
A linear map y = x W^T + b has the gradients

    dL/dx = g W        dL/dW = g^T x        dL/db = sum of g over rows
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omagd.modules.kernels import arrays

ROWS_AT_ONCE = 2048  # rows that pass through several operations together, so that they stay in a core's cache
_CPUINFO = Path("/proc/cpuinfo")


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than torch's default (MKL) on this processor.

    A fixed rule instead of a measurement, because a machine must always compute the same bits: yes on AMD, where MKL
    does not use the widest instructions.
    """
    # Not by timing: which library multiplies decides the last bits.
    amd = _CPUINFO.is_file() and "AuthenticAMD" in _CPUINFO.read_text(errors="replace")
    return amd and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNLinear(torch.autograd.Function):
    """`F.linear` through oneDNN, x [R, in] to [R, out].

    Forward and dL/dx go through oneDNN, dL/dW through MKL, which is no slower there. Gradients as at the top of the
    file. Compared with `F.linear`: tests/test_networks.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [R, out] from x [R, in]."""
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias from grad [R, out]."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        # dL/dx = g W, dL/dW = g^T x, dL/db = sum of g: each only where it is asked for.
        return (
            _onednn(grad, weight.t(), None) if for_x else None,
            grad.t() @ x if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )


class LookupReLU(torch.autograd.Function):
    """relu(x W^T + table[index]): a linear layer over features and one-hots, then ReLU.

    With the ReLU's derivative, h = g where y > 0 and 0 elsewhere:

        dL/dx = h W        dL/dW = h^T x        dL/dtable[m] = sum of h over the rows with index m

    Shapes: x [R, d], W [out, d], table [M, out], index [R]. Rows pass in blocks of `ROWS_AT_ONCE`.
    Compared with that expression: tests/test_learning_kernels.py.
    """

    @staticmethod
    def forward(ctx: Any, kernels: Any, features: Tensor, weight: Tensor, table: Tensor, index: Tensor) -> Tensor:
        """Return [R, out]."""
        out = features.new_empty(len(features), len(weight))
        # Block by block: the table is added while the product is in the cache.
        for rows, x, places in zip(*(t.split(ROWS_AT_ONCE) for t in (out, features, index)), strict=True):
            torch.mm(x, weight.t(), out=rows)
            kernels.lookup_relu(*arrays(rows, table, places, rows))
        ctx.kernels, ctx.table_rows = kernels, len(table)
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
            grad = torch.empty_like(given)
            ctx.kernels.lookup_relu_backward(*arrays(given, y, places, grad, for_table))
            # dL/dW = h^T x, summed block by block.
            for_weight.addmm_(grad.t(), x)
            if for_features is not None:
                torch.mm(grad, weight, out=for_features[start : start + len(grad)])
            start += len(grad)
        return None, for_features, for_weight, for_table, None


class Mix(torch.autograd.Function):
    """QMIX's mixing network with its hypernetworks, the equations of `QMixer`: Q_tot = |w2|^T elu(a) + b2.

    a = |W1|^T q + b1; with x = W_f s + b_f, split in [x_1 | x_2 | b1 | x_b], W1 = A_1 relu(x_1) + c_1,
    w2 = A_2 relu(x_2) + c_2 and b2 = A_b relu(x_b) + c_b. Backward, with g = dL/dQ_tot and * by element:

        d_a = g |w2| * elu'(a)        d_b1 = d_a                     d_xb = g A_b where x_b > 0
        d_w2 = g elu(a) * sign(w2)    d_W1 = q d_a^T * sign(W1)      d_q = |W1| d_a
        d_x2 = A_2^T d_w2 where x_2 > 0, d_x1 = A_1^T d_W1 where x_1 > 0; weights and biases as above

    Compared with `QMixer` in float64: tests/test_learning_kernels.py.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, q: Tensor, state: Tensor, w_f: Tensor, b_f: Tensor, a_1: Tensor, c_1: Tensor,
        a_2: Tensor, c_2: Tensor, a_b: Tensor, c_b: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return [S] from q [S, n] and state [S, d]; W_f [., d], A_1 [n E, .], A_2 [E, .], A_b [1, E]."""
        size, first, second = len(a_2), a_1.shape[1], a_1.shape[1] + a_2.shape[1]
        q, head = q.contiguous(), torch.cat([a_b[0], c_b])
        x = state @ w_f.t()
        kernels.mix_inputs(*arrays(x, b_f), (x.shape[1] - 2 * size, x.shape[1] - size))  # no ReLU where b1 is
        # The second layers of W1 and w2; their biases are added in the kernel, which also takes absolute values.
        raw1, raw2 = x[:, :first] @ a_1.t(), x[:, first:second] @ a_2.t()
        hidden, joint = q.new_empty(len(q), size), q.new_empty(len(q))
        kernels.mix_forward(*arrays(q, raw1, c_1, raw2, c_2, x, head, hidden, joint))
        ctx.kernels = kernels
        ctx.save_for_backward(q, state, x, raw1, raw2, hidden, head, c_1, c_2, w_f, a_1, a_2)
        return joint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, state, weights and biases from grad [S]."""
        q, state, x, raw1, raw2, hidden, head, c_1, c_2, w_f, a_1, a_2 = ctx.saved_tensors
        kernels, size, first, second = ctx.kernels, len(a_2), a_1.shape[1], a_1.shape[1] + a_2.shape[1]
        for_q, for_1, for_2, for_x = (torch.empty_like(t) for t in (q, raw1, raw2, x))
        # Gradients of biases are sums over rows, added while the rows are in the cache.
        sums, of_first = q.new_zeros(3, max(len(a_1), size + 1)), q.new_zeros(x.shape[1])
        reads = (grad.contiguous(), q, raw1, c_1, raw2, c_2, x, head, hidden.clone())  # `hidden` is written
        kernels.mix_backward(*arrays(*reads, for_q, for_1, for_2, for_x, sums))
        kernels.mix_inputs_backward(*arrays(for_1 @ a_1, for_2 @ a_2, x, for_x, of_first))
        return (
            None, for_q, for_x @ w_f if ctx.needs_input_grad[2] else None, for_x.t() @ state, of_first,
            for_1.t() @ x[:, :first], sums[0, : len(a_1)], for_2.t() @ x[:, first:second], sums[1, :size],
            sums[2, :size][None], sums[2, size : size + 1],
        )  # fmt: skip
