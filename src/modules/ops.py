"""The operators that models are made of: each is a plain expression, and takes a fast form where one fits.

Fast forms are in `modules/kernels/`, with their own backward pass; tests compare both. They read weights and call no
`forward`, so they are for exactly the classes that they were written for (`is_only`): a subclass may compute something
else, and what acts must be what trains.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.modules.kernels import kernels_for, transformer
from omagd.modules.kernels.gru import Unroll
from omagd.modules.kernels.linear import LookupReLU, OneDNNLinear, prefers_onednn
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing

SMALL = 1 << 28  # products of fewer float operations stay with torch: oneDNN's set-up for a new shape costs more
R = TypeVar("R")

# cuDNN copies the weights, four parameters, side by side in each call; that takes no measurable time.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk of memory")


def is_only(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module and all its parts are of these classes, not of subclasses, and have no forward hooks."""
    parts = [module]  # `module.modules()` takes several times as long, and this is asked at every tick
    for part in parts:
        if type(part) not in kinds or part._forward_hooks or part._forward_pre_hooks:
            return False
        parts += [inner for inner in part._modules.values() if inner is not None]
    return True


def overridden_alone(kind: type, name: str, other: str) -> type | None:
    """Return the class that `kind` has its method `other` from, if its method `name` is of a class below that one."""
    order = kind.__mro__
    one, inherited = (next(each for each in order if method in vars(each)) for method in (name, other))
    return inherited if order.index(one) < order.index(inherited) else None


def require_step(module: nn.Module, parts: str) -> None:
    """Reject a class with a `forward` of its own, which trains, and an inherited `step`, which acts; or the reverse.

    parts: the methods that both call, for the message. Errors: UserError.
    """
    for one, does, other, would in (("forward", "trains", "step", "act"), ("step", "acts", "forward", "train")):
        if (above := overridden_alone(type(module), one, other)) is not None:
            raise UserError(
                f"{type(module).__name__}: has a {one} of its own, which {does}, but would {would} with the {other} of"
                f" {above.__name__}. Override {parts}, which both call, or {other} too"
            )


def faster_by(form: Callable[..., R | None]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a plain method: `form`, called with the same arguments, may compute it; None: it does not fit."""

    def decorate(plain: Callable[..., R]) -> Callable[..., R]:
        @wraps(plain)
        def computed(self: nn.Module, *given: Any) -> R:
            # Kernels compute in float32; in bf16 the plain form multiplies as its layers say.
            made = None if torch.is_autocast_enabled("cpu") else form(self, *given)
            return plain(self, *given) if made is None else made

        return computed

    return decorate


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
    kernels = None if acts else kernels_for(x, len(flat) * len(weight))
    if kernels is not None:
        out = LookupReLU.apply(kernels, flat, weight, table, places)  # type: ignore[no-untyped-call]
    else:
        # The table's rows first, the product added to them: one array instead of three.
        out = table.index_select(0, places).addmm_(flat, weight.t()).relu_()
    return cast(Tensor, out).view(*x.shape[:-1], -1)


def gru(
    x: Tensor, before: Tensor | None, rows: list[int], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> Tensor:
    """Return the hidden state after each row, [R, H], from packed rows x [R, input_dim]; equations in `kernels/gru.py`.

    before: [rows of the first step, H], the state before it; None: zeros. rows: of each step, decreasing. weights and
    biases: as in `nn.GRUCell`. Large work in float32 on a CPU has a form with its own backward pass; all else goes
    through torch's packed GRU, one kernel on CUDA. Under autocast cuDNN would run the recurrence in fp16, even when
    bf16 is asked for, and gradients of large batches underflow there: so it has the type of the weights.
    """
    kernels, x = kernels_for(w_hh, len(x) * w_hh.shape[1]), x.to(w_hh.dtype)
    with autocast_bf16(x.device, False):
        if kernels is not None:
            # All steps as one operation: autograd keeps one node for them, and backward runs over them by itself.
            made = Unroll.apply(kernels, rows, x, before, w_ih, w_hh, b_ih, b_hh)  # type: ignore[no-untyped-call]
            return cast(Tensor, made)
        start = x.new_zeros(1, rows[0], w_hh.shape[1]) if before is None else before.to(x.dtype)[None]
        # Arguments: input, batch sizes, start, weights, has biases, layers, dropout, training (whether cuDNN keeps
        # what backward needs), bidirectional.
        more = start, [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, torch.is_grad_enabled(), False
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
        require_step(self, "the layers around it")
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
        """Return the next hidden state [B, n, H] from x [B, n, input_dim] and hidden [B, n, H]."""
        rows = (x.flatten(0, 1).to(hidden.dtype), hidden.flatten(0, 1))
        flat = torch.gru_cell(*rows, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return flat.view(hidden.shape)


def attend(query: Tensor, key_value: Tensor, n_heads: int, p: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d / h)) v for each head (Vaswani et al. 2017, arXiv:1706.03762), [F, n, d].

    query: [F, n, d]. key_value: [F, L, 2 d]. p: dropout of the attention weights.
    """
    n_frames, _, d = query.shape
    kv = key_value.view(n_frames, key_value.shape[1], 2, n_heads, d // n_heads).permute(2, 0, 3, 1, 4)
    q = query.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    if query.device.type == "cpu" and n_frames and not p and not torch.is_autocast_enabled("cpu"):
        k, v = kv.contiguous().flatten(1, 2)
        mixed = transformer.Attention.apply(q.contiguous().flatten(0, 1), k, v)  # type: ignore[no-untyped-call]
        mixed = mixed.unflatten(0, (n_frames, n_heads))
    else:
        # Divided by sqrt(d / h), or softmax would saturate and pass no gradient (Vaswani et al. 2017, section 3.2.1).
        mixed = F.scaled_dot_product_attention(q, kv[0], kv[1], dropout_p=p)
    return mixed.transpose(1, 2).flatten(2)


def cross_entropy(logits: Tensor, log_p: Tensor, target: Tensor) -> Tensor:
    """Return the sum over M tokens of -log p[target], differentiable in logits [M, K + 1].

    log_p: log_softmax of the logits, without a gradient. target: [M] int64.
    """
    return transformer.CrossEntropy.apply(logits, log_p, target)  # type: ignore[no-untyped-call]
