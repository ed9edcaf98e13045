"""The operators of agents, mixers and predictors: each is a plain expression, and takes a fast form where one fits.

Fast forms are in `modules/kernels/`, with their own backward pass; tests compare both. They read weights and call no
`forward`, so they are for exactly the classes that they were written for (`is_only`): a subclass may compute something
else, and what acts must be what trains.
"""

from __future__ import annotations

import math
import warnings
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.modules.kernels import kernels_for, transformer
from omagd.modules.kernels.gru import FixedUnroll, Unroll, cuda_kernels
from omagd.modules.kernels.linear import LookupReLU, Mix, OneDNNLinear, prefers_onednn
from omagd.utils.packing import Packing
from omagd.utils.registry import require_step

SMALL = 1 << 28  # products of fewer float operations stay with torch: oneDNN's set-up for a new shape costs more

# cuDNN copies the weights, four parameters, side by side in each call; that takes no measurable time.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk of memory")


def add_at(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add the rows of `values` [M, ...] to those of `total` [n, ...] that `index` [M] names; return `total`.

    The same bits at every run.
    """
    if total.is_cuda:  # there `index_add_` adds in any order; `index_put_` sorts first
        return total.index_put_((index,), values, accumulate=True)
    return total.index_add_(0, index, values)


def is_only(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module and all its parts are of these classes, not of subclasses, and have no forward hooks."""
    parts = [module]  # `module.modules()` takes several times as long, and this is asked at every tick
    for part in parts:
        if type(part) not in kinds or part._forward_hooks or part._forward_pre_hooks:
            return False
        parts += [inner for inner in part._modules.values() if inner is not None]
    return True


def autocast_bf16(device: torch.device, bf16: bool) -> torch.autocast:
    """Return a context in which matrix products are in bf16, if `bf16`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, [..., out] from x [..., in], weight [out, in] and bias [out], in the type of x.

    float32 on a CPU: large products go through oneDNN where `prefers_onednn`. The result differs from `F.linear` only
    by the order of sums (about 1e-6 relative). Gradients can be taken once, not twice.
    """
    # A rule of sizes alone: the same batch gives the same bits at every call.
    rows = math.prod(x.shape[:-1])
    plain = x.dtype != torch.float32 or x.device.type != "cpu" or weight.dtype != x.dtype or rows == 0
    small = 2 * rows * weight.numel() < SMALL
    if plain or small or not prefers_onednn() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    out: Tensor = OneDNNLinear.apply(x.reshape(rows, -1), weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class FastLinear(nn.Linear):
    """`nn.Linear` (same parameters, names and initial values) computed by `fast_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] from x [..., in]."""
        return fast_linear(x, self.weight, self.bias)


def lookup_relu(x: Tensor, weight: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return relu(x weight^T + table[index]), [..., out] from x [..., in] and index [...] int64.

    A one-hot times a matrix picks one of its rows, so this is a linear layer over features and one-hots, then ReLU.
    """
    if torch.is_autocast_enabled("cpu"):
        return F.relu(fast_linear(x, weight) + F.embedding(index, table))
    flat, places = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    acts = torch.is_inference_mode_enabled()  # batches are small, and their sizes differ from tick to tick
    kernels = None if acts else kernels_for(x, flat.shape[0] * len(weight))
    if kernels is not None:
        out = LookupReLU.apply(kernels, flat, weight, table, places)  # type: ignore[no-untyped-call]
    else:
        # The table's rows first, the product added to them: one array instead of three.
        out = table.index_select(0, places).addmm_(flat, weight.t()).relu_()
    return cast(Tensor, out).view(*x.shape[:-1], -1)


def gru(
    x: Tensor, before: Tensor | None, rows: list[int], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> Tensor:
    """Return the hidden state after each row, [R, H], from packed rows x [R, input_dim].

    Cho et al. 2014 (arXiv:1406.1078), eq. 5 to 8, in the form of cuDNN and `nn.GRUCell`: with biases, and the reset
    gate behind the product with the hidden state. From a row's input x and the state h before it:

        r  = sigmoid(W_ir x + b_ir + W_hr h + b_hr)            reset gate
        z  = sigmoid(W_iz x + b_iz + W_hz h + b_hz)            update gate
        n  = tanh(W_in x + b_in + r * (W_hn h + b_hn))         candidate ("new")
        h' = (1 - z) * n + z * h

    before: [rows of the first step, H], the state before it; None: zeros. rows: of each step, decreasing. weights and
    biases: W_i, W_h, b_i, b_h, each with the blocks [r | z | n].
    """
    x, size, weights = x.to(w_hh.dtype), w_hh.shape[1], (w_ih, w_hh, b_ih, b_hh)
    # Under autocast cuDNN would run the recurrence in fp16, even when bf16 is asked for, and gradients of large batches
    # underflow there: so it has the type of the weights.
    with autocast_bf16(x.device, False):
        kernels = kernels_for(x, len(x) * size)
        if kernels is not None:
            # All steps as one operation: autograd keeps one node for them, and backward runs over them by itself.
            return cast(Tensor, Unroll.apply(kernels, rows, x, before, *weights))  # type: ignore[no-untyped-call]
        start = x.new_zeros(rows[0], size) if before is None else before.to(x.dtype)
        if rows[0] == rows[-1] and x.device.type == "cuda":
            of_rows = cuda_kernels(x, size)
            return cast(Tensor, FixedUnroll.apply(of_rows, x, start, *weights))  # type: ignore[no-untyped-call]
        # Arguments: input, batch sizes, start, weights, has biases, layers, dropout, training (whether cuDNN keeps what
        # backward needs), bidirectional.
        more = start[None], list(weights), True, 1, 0.0, torch.is_grad_enabled(), False
        # Arguments with packed rows need their sizes on the host; a CUDA graph has none.
        if rows[0] == rows[-1]:  # episodes of equal length: the plain form, which reads no sizes from the host
            return torch._VF.gru(x.unflatten(0, (len(rows), rows[0])), *more, False)[0].flatten(0, 1)
        return torch._VF.gru(x, torch.tensor(rows), *more)[0]


class PackedGRU(nn.Module):
    """`nn.GRUCell` (same parameters, names and initial values) unrolled over packed episodes.

    Args:
        input_dim, hidden_dim: features of a row, H.
    """

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        require_step(type(self), "the layers around it")
        self.hidden_dim = hidden_dim
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_dim, input_dim))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_dim, hidden_dim))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_dim))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_dim))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_dim), 1 / math.sqrt(hidden_dim))

    def forward(self, x: Tensor, packing: Packing, start: Tensor | None = None) -> Tensor:
        """Return the hidden state after each row, [S, n, H], from x [S, n, input_dim].

        start: [B, n, H] hidden state before the first rows; None: zeros, the start of an episode.
        """
        n = x.shape[1]
        rows = [k * n for k in packing.batch_sizes]
        before = None if start is None else start.flatten(0, 1)
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return gru(x.flatten(0, 1), before, rows, *weights).view(-1, n, self.hidden_dim)

    def step(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the next hidden state [B, n, H] from x [B, n, input_dim] and hidden [B, n, H]: `gru` of one row."""
        rows = (x.flatten(0, 1).to(hidden.dtype), hidden.flatten(0, 1))
        flat = torch.gru_cell(*rows, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return flat.view(hidden.shape)


def qmix_mix(
    q: Tensor, state: Tensor, first: nn.Linear, weight1: nn.Linear, weight2: nn.Linear, bias2: nn.Linear
) -> Tensor:
    """Return QMIX's joint value [S] from q [S, n] and state [S, state_dim]; the equation of `QMixer`.

    first: the first layers of all hypernetworks, [W1 | w2 | b1 | b2]. weight1, weight2, bias2: the second ones.
    """
    layers = first, weight1, weight2, bias2
    # Kernels compute in float32; in bf16 the layers multiply.
    kernels = None if torch.is_autocast_enabled("cpu") else kernels_for(state, len(state) * first.out_features)
    if kernels is not None and all(is_only(layer, FastLinear, nn.Linear) for layer in layers):
        weights = (parameter for layer in layers for parameter in (layer.weight, layer.bias))
        return cast(Tensor, Mix.apply(kernels, q, state, *weights))  # type: ignore[no-untyped-call]
    widths = [weight1.in_features, weight2.in_features, bias2.in_features, bias2.in_features]
    for_w1, for_w2, b1, for_b2 = first(state).split(widths, dim=-1)
    # QMIX, eq. 5: dQ_tot / dq_i >= 0, because weights are absolute and elu rises. Biases may have any sign.
    w1 = weight1(F.relu(for_w1)).abs().unflatten(-1, (q.shape[-1], -1))
    w2 = weight2(F.relu(for_w2)).abs()
    b2 = bias2(F.relu(for_b2)).squeeze(-1)
    # QMIX, figure 2: the state makes the weights, so that it need not enter monotonically.
    hidden = F.elu((w1 * q.unsqueeze(-1)).sum(dim=1) + b1)
    joint: Tensor = (hidden * w2).sum(dim=-1) + b2
    return joint


def attend(query: Tensor, key_value: Tensor, n_heads: int, p: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d / h)) v for each head, [F, n, d] (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    query: [F, n, d], of F frames. key_value: [F, L, 2 d]. p: dropout of the attention weights.
    """
    n_frames, _, d = query.shape
    kv = key_value.view(n_frames, key_value.shape[1], 2, n_heads, d // n_heads).permute(2, 0, 3, 1, 4)
    q = query.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    if query.device.type == "cpu" and n_frames and not p and not torch.is_autocast_enabled("cpu"):
        k, v = kv.contiguous().flatten(1, 2)
        mixed = transformer.Attention.apply(q.contiguous().flatten(0, 1), k, v)  # type: ignore[no-untyped-call]
        mixed = mixed.unflatten(0, (n_frames, n_heads))
    else:
        # Divided by sqrt(d / h), or softmax would saturate and pass no gradient (section 3.2.1).
        mixed = F.scaled_dot_product_attention(q, kv[0], kv[1], dropout_p=p)
    return mixed.transpose(1, 2).flatten(2)
