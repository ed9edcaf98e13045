"""QMIX's mixing network with its hypernetworks as one operation, its elementwise work in Numba kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omagd.modules.kernels.linear import PADDING, padded_rows, to_bf16


class CompiledMix(torch.autograd.Function):
    """Q_tot = |w2|^T elu(a) + b2 with a = |W1|^T q + b1, on CPUs in float32; the equations of `QMixer`.

    With x = W_f s + b_f, split in [x_1 | x_2 | b1 | x_b], W1 = A_1 relu(x_1) + c_1, w2 = A_2 relu(x_2) + c_2 and
    b2 = A_b relu(x_b) + c_b. Backward, with g = dL/dQ_tot and * by element:

        d_a = g |w2| * elu'(a)        d_b1 = d_a                     d_xb = g A_b where x_b > 0
        d_w2 = g elu(a) * sign(w2)    d_W1 = q d_a^T * sign(W1)      d_q = |W1| d_a
        d_x2 = A_2^T d_w2 where x_2 > 0, d_x1 = A_1^T d_W1 where x_1 > 0; weights and biases as in `linear.py`

    bf16: the products by W_f, A_1 and A_2 have factors and results in bf16, and so have x and the gradients that enter
    products; all else is in float32. Rows are rounded up with zeros. Compared with `QMixer` in float64:
    tests/test_learning_kernels.py.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, bf16: bool, q: Tensor, state: Tensor, w_f: Tensor, b_f: Tensor, a_1: Tensor,
        c_1: Tensor, a_2: Tensor, c_2: Tensor, a_b: Tensor, c_b: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return [S] from q [S, n] and state [S, d]; W_f [., d], A_1 [n E, .], A_2 [E, .], A_b [1, E]."""
        rows, size, kind = len(q), len(a_2), torch.bfloat16 if bf16 else q.dtype
        rounded = padded_rows(rows, PADDING) if bf16 else rows
        low = to_bf16(state, rounded) if bf16 else state
        weights = w_f, a_1, a_2 = w_f.to(kind), a_1.to(kind), a_2.to(kind)
        q, head = q.contiguous(), torch.cat([a_b[0], c_b])
        x = low @ w_f.t()
        linear = (x.shape[1] - 2 * size, x.shape[1] - size)  # where b1 is
        kernels.mix_inputs(*kernels.arrays((x[:rows], b_f)), linear)
        first, second = a_1.shape[1], a_1.shape[1] + a_2.shape[1]
        raw1, raw2 = x[:, :first] @ a_1.t(), x[:, first:second] @ a_2.t()
        hidden, joint = q.new_empty(rows, size), q.new_empty(rows)
        kernels.mix_forward(*kernels.arrays((q, raw1, c_1, raw2, c_2, x, head, hidden, joint)))
        ctx.kernels = kernels
        ctx.save_for_backward(q, low, x, raw1, raw2, hidden, head, c_1, c_2, *weights)
        return joint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, state, weights and biases from grad [S]."""
        q, low, x, raw1, raw2, hidden, head, c_1, c_2, w_f, a_1, a_2 = ctx.saved_tensors
        kernels, rows, size, (first, width2) = ctx.kernels, len(q), len(a_2), (a_1.shape[1], a_2.shape[1])
        for_q, for_1, for_2, for_x = (torch.empty_like(t) for t in (q, raw1, raw2, x))
        for_1[rows:], for_2[rows:], for_x[rows:] = 0, 0, 0
        sums, of_first = q.new_zeros(3, max(len(a_1), size + 1)), q.new_zeros(x.shape[1])
        reads = (grad.contiguous(), q, raw1, c_1, raw2, c_2, x, head, hidden.clone())  # `hidden` is written
        kernels.mix_backward(*kernels.arrays((*reads, for_q, for_1, for_2, for_x, sums)))
        through = ((for_1 @ a_1)[:rows], (for_2 @ a_2)[:rows])
        kernels.mix_inputs_backward(*kernels.arrays((*through, x, for_x, of_first)))
        products = (for_x.t() @ low, for_1.t() @ x[:, :first], for_2.t() @ x[:, first : first + width2])
        w_f_grad, a_1_grad, a_2_grad = (product.to(q.dtype) for product in products)
        state_grad = (for_x @ w_f)[:rows].to(q.dtype) if ctx.needs_input_grad[3] else None
        return (
            None, None, for_q, state_grad, w_f_grad, of_first, a_1_grad, sums[0, : len(a_1)], a_2_grad, sums[1, :size],
            sums[2, :size][None], sums[2, size : size + 1],
        )  # fmt: skip
