"""The tokenizer and the predictor for acting: eval mode, no gradients, and nothing computed twice.

Weights are fixed here, so everything that depends on them alone is computed once: scaled and joined attention weights,
sums of embeddings, weights in oneDNN's layout. Results equal those of `Tokenizer` and `MaskPredictor` in eval mode up
to rounding: tests/test_reconstruction.py. That holds for exactly these classes: `freeze` and `freeze_tokenizer` let
subclasses act by their own methods.

Shapes: F frames, k stacked frames, L = k·N tokens of a frame (N with the GRU), M tokens to guess, d = d_model, K codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omagd.modules.graph_reconstructers.predictor import Block, Frames, Guess, MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import MLP, Tokenizer, first_largest
from omagd.modules.kernels.linear import prefers_onednn
from omagd.modules.ops import is_only

WIDE = 128  # smaller products cost less through torch's default than through oneDNN
SAFE = 80.0  # attention scores up to which exp neither overflows nor underflows in float32
FLOATS_AT_ONCE = 1 << 17  # floats of the tokens that pass together, so that they stay in the cache
ROUND = 4  # frames are padded to multiples of this: few shapes, and no product of one row
PLACES = 4 * ROUND  # tokens to guess likewise


@cache
def _packs_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 on this processor; elsewhere torch does, slowly."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class FrozenLinear:
    """x weight^T + bias for fixed weights [out, in], converted once to the layout of the faster library.

    bf16: whether a CPU multiplies in bf16.
    """

    def __init__(self, weight: Tensor, bias: Tensor, bf16: bool = False) -> None:
        fast = _packs_bf16() if bf16 else min(weight.shape) >= WIDE and prefers_onednn()
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and fast
        self._type = torch.bfloat16 if bf16 else weight.dtype
        self._weight, self._bias = weight.to(self._type).contiguous(), bias.to(self._type)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Return [M, out] from x [M, in], passed through GELU if `gelu`; its type is the one that is multiplied in."""
        x = x.to(self._type)
        if self._packed:
            then = "gelu" if gelu else "none"
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, then, [], "none")
        x = F.linear(x, self._weight, self._bias)
        return F.gelu(x) if gelu else x


class FrozenNorm:
    """A layer norm with fixed weights, without the cost of calling a module."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.weight, self.bias = norm.weight, norm.bias
        self._shape, self._eps = norm.normalized_shape, norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return `norm(x)`."""
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self._eps)


class FrozenBlock:
    """One `Block` of the predictor in eval mode.

    One product gives each head its query, key, value and a constant 1. With u = exp(q.k), attention is (sum of u v) /
    (sum of u): the weighted sum of the constant is the divisor, and no softmax is needed. exp is safe without
    subtracting the row's maximum where a bound on the scores, computed from the weights, is below `SAFE`.
    """

    def __init__(self, block: Block, bf16: bool) -> None:
        d, heads = block.query.weight.shape[0], block.n_heads
        self._heads, self._width = heads, d // heads
        scale = 1.0 / math.sqrt(self._width)
        weight = torch.cat([block.query.weight * scale, block.key_value.weight])
        bias = torch.cat([block.query.bias * scale, block.key_value.bias])
        # Rows head by head: query, key, value, and a zero row whose bias is the constant 1.
        weight = F.pad(weight.view(3, heads, self._width, d).transpose(0, 1).flatten(1, 2), (0, 0, 0, 1))
        bias = F.pad(bias.view(3, heads, self._width).transpose(0, 1).flatten(1), (0, 1), value=1.0)
        # Their scale and shift are not merged into the next layer, because torch is twice as fast with them.
        self._norm_in, self._norm_out = FrozenNorm(block.norm_in), FrozenNorm(block.norm_out)
        self._safe = self._bound(weight * block.norm_in.weight, bias + weight @ block.norm_in.bias) < SAFE
        self._attend = FrozenLinear(weight.flatten(0, 1), bias.flatten(), bf16)
        self._merge = FrozenLinear(block.merge.weight, block.merge.bias, bf16)
        self._widen = FrozenLinear(block.widen.weight, block.widen.bias, bf16)
        self._narrow = FrozenLinear(block.narrow.weight, block.narrow.bias, bf16)

    def _bound(self, weight: Tensor, bias: Tensor) -> float:
        """Return an upper bound of |q.k| over all inputs.

        A normalised input has at most the length sqrt(d), so |q| <= ||W_q|| sqrt(d) + |b_q|, the same for k, and
        |q.k| <= |q| |k| (Cauchy-Schwarz). The norm's scale and shift are part of `weight` and `bias`.
        """
        longest = torch.linalg.matrix_norm(weight[:, :-1].unflatten(1, (3, -1)), 2) * math.sqrt(weight.shape[-1])
        longest = longest + bias[:, :-1].unflatten(1, (3, -1)).norm(dim=-1)
        return float((longest[:, 0] * longest[:, 1]).max())

    def __call__(self, x: Tensor, n_frames: int, which: Tensor | None) -> Tensor:
        """Return [F·L, d] for x [F·L, d], or [M, d] for its rows `which` [M]."""
        joined = self._attend(self._norm_in(x)).view(n_frames, -1, self._heads, 3 * self._width + 1)
        joined = joined.to(torch.promote_types(joined.dtype, torch.float32)).transpose(1, 2)
        mixed = _mix_by_numpy(joined, self._safe) if x.device.type == "cpu" else _mix(joined, self._safe)
        if which is not None:
            mixed, x = mixed.index_select(0, which), x.index_select(0, which)
        x = x + self._merge(mixed)
        return x + self._narrow(self._widen(self._norm_out(x), gelu=True))


def _mix(joined: Tensor, safe: bool) -> Tensor:
    """Return the output of all attention heads, [F·L, d].

    joined: [F, h, L, 3 d/h + 1], query, key, value and 1 of each head. safe: whether scores are within `SAFE`.
    """
    width = joined.shape[-1] // 3
    query, key, value = joined.split([width, width, width + 1], dim=-1)
    # With a dozen scores a row, softmax would cost several times as much as these products.
    score = query @ key.transpose(2, 3)
    if not safe:
        score -= score.amax(-1, keepdim=True)
    mixed = (score.exp_() @ value).transpose(1, 2)
    return (mixed[..., :width] / mixed[..., width:]).flatten(2).flatten(0, 1)


def _mix_by_numpy(joined: Tensor, safe: bool) -> Tensor:
    """Return `_mix` in half the time on a CPU: NumPy multiplies strided small matrices without copying them."""
    frames, heads, length, size = joined.shape
    width, parts = size // 3, joined.numpy()
    score = parts[..., :width] @ parts[..., width : 2 * width].swapaxes(2, 3)
    if not safe:
        score -= score.max(-1, keepdims=True)
    mixed = np.empty((frames, length, heads, width + 1), parts.dtype)
    np.matmul(np.exp(score, out=score), parts[..., 2 * width :], out=mixed.swapaxes(1, 2))
    return torch.from_numpy(mixed[..., :width] / mixed[..., width:]).view(frames * length, heads * width)


def _exp(x: Tensor) -> Tensor:
    """Return exp(x), in place; on a CPU by NumPy, in half the time."""
    if x.device.type != "cpu":
        return x.exp_()
    np.exp(x.numpy(), out=x.numpy())
    return x


class FrozenTokenizer:
    """`Tokenizer.ids` in eval mode; construct it again when the weights change."""

    @torch.no_grad()
    def __init__(self, tokenizer: Tokenizer) -> None:
        *hidden, last = [layer for layer in tokenizer.encoder if isinstance(layer, nn.Linear)]
        norms = [FrozenNorm(layer) for layer in tokenizer.encoder if isinstance(layer, nn.LayerNorm)]
        linears = [FrozenLinear(layer.weight, layer.bias) for layer in hidden]
        self._layers = list(zip(linears, norms, strict=True))
        self._last = FrozenLinear(last.weight, last.bias)
        # argmin |z - e|^2 = argmax z.e - |e|^2 / 2; for cosine neither the length of z nor the bias matters.
        self._codes = tokenizer.codebook.t().contiguous()
        cosine = tokenizer.config.distance == "cosine"
        self._bias = tokenizer.codebook.square().sum(-1) * (0.0 if cosine else -0.5)

    @torch.inference_mode()
    def __call__(self, nodes: Tensor) -> Tensor:
        """Return the ids [M] of nodes [M, D]."""
        x = nodes
        for linear, norm in self._layers:
            x = norm(linear(x).relu_())
        return first_largest(torch.addmm(self._bias, self._last(x), self._codes))


class FrozenPredictor:
    """`MaskPredictor.guess` of its own logits in eval mode; construct it again when the weights change.

    Args:
        predictor: trained. bf16: whether a CPU multiplies the transformer, but not the head, in bf16.
    """

    @torch.no_grad()
    def __init__(self, predictor: MaskPredictor, bf16: bool = False) -> None:
        config, tokens = predictor.config, predictor.token_table()
        self._n_nodes, self.limit, self._mean = predictor.n_nodes, predictor.limit, config.decode == "mean"
        self._specials = predictor.specials
        head = predictor.head_weight()
        self._gru = predictor.gru if config.use_gru else None
        self.last_seen, self.tokens, self.strip = config.last_seen, tokens, config.stacked_strip
        self._lay_tables(predictor, tokens)
        self.group = max(32, FLOATS_AT_ONCE // self.static.shape[1])
        self._blocks = [FrozenBlock(cast(Block, block), bf16) for block in predictor.blocks]
        self._norm_in, self._norm_head = FrozenNorm(predictor.norm), FrozenNorm(predictor.norm_head)
        self._head = FrozenLinear(head, predictor.head.bias)
        self._table = predictor.table_with_absent()
        # One product decodes: shares × this = [sum of shares × features | sum of shares | share of ABSENT]. Rows are
        # padded to a multiple of 16, which multiplies faster.
        dim = self._table.shape[1]
        self._decode = head.new_zeros(-(-(dim + 2) // 16) * 16, len(self._table))
        self._decode[:dim] = self._table.t()
        self._decode[dim], self._decode[dim + 1, -1] = 1.0, 1.0

    def _lay_tables(self, predictor: MaskPredictor, tokens: Tensor) -> None:
        """Add up the embeddings that depend on step and place alone, and map all tokens for `last_seen`."""
        static = predictor.kind(predictor.types) + predictor.position.weight
        if self._gru is None:
            static = (static + predictor.frame.weight[:, None]).flatten(0, 1)
        self.length = len(static)
        self.static = (predictor.step.weight[:, None] + static).flatten(1)
        if self.last_seen:
            self.recall, self.age = predictor.recall(tokens), predictor.age.weight

    @torch.inference_mode()
    def __call__(self, frames: Frames, which: Tensor) -> Guess:
        """Predict the tokens `which` [M] of F·N, ascending; each frame has at least one. Frames pass in groups."""
        guesses = []
        for start in range(0, len(frames), self.group):
            part = frames[start : start + self.group]
            first, last = start * self._n_nodes, (start + len(part)) * self._n_nodes
            inside = (which >= first) & (which < last)
            wanted = which if len(part) == len(frames) else which[inside] - first
            guesses.append(self.decoded(self.logits(part, wanted)))
        if len(guesses) == 1:
            return guesses[0]
        return Guess(*(torch.cat(part) for part in zip(*guesses, strict=True)))

    def logits(self, frames: Frames, which: Tensor) -> Tensor:
        """Return [M, K + 1] of the tokens `which` [M] among the F·N of the last frames."""
        n_frames, n_wanted = len(frames), len(which)
        tokens = which
        if self.length > self._n_nodes:
            tokens = which + (which // self._n_nodes + 1) * (self.length - self._n_nodes)
        x = self._embed(frames, which, tokens)
        rest = -n_frames % ROUND
        if rest:
            x = F.pad(x, (0, 0, 0, rest * self.length))
        return self.through_blocks(x, n_frames + rest, F.pad(tokens, (0, -n_wanted % PLACES)), n_wanted)

    def through_blocks(self, x: Tensor, n_frames: int, wanted: Tensor, n_wanted: int) -> Tensor:
        """Return the logits [M, K + 1] of embedded tokens x [F·L, d].

        Args:
            n_frames: F, a multiple of `ROUND`. wanted: the rows of the M tokens in x, followed by zeros up to a
                multiple of `PLACES`. n_wanted: M.
        """
        x = self._norm_in(x)
        for block in self._blocks[:-1]:
            x = block(x, n_frames, None)
        x = self._blocks[-1](x, n_frames, wanted)
        return self._head(self._norm_head(x))[:n_wanted]

    def _embed(self, frames: Frames, which: Tensor, tokens: Tensor) -> Tensor:
        """Return the embedded tokens [F·L, d]; `tokens` [M]: the rows of `which` in them."""
        x = self._without_memory(frames)
        if self.last_seen:
            last = frames.last_ids.reshape(-1).index_select(0, which)
            age = frames.age.reshape(-1).index_select(0, which).clamp_(max=self.limit)
            x.index_add_(0, tokens, self.recall.index_select(0, last) + self.age.index_select(0, age))
        return x

    def _without_memory(self, frames: Frames) -> Tensor:
        """Return the embedded tokens [F·L, d] but for what `last_seen` adds to the missing ones."""
        x = self.static.index_select(0, frames.step.clamp(max=self.limit)).view(len(frames) * self.length, -1)
        x += self.tokens.index_select(0, frames.ids.reshape(-1)) if self._gru is None else self._through_gru(frames.ids)
        return x

    def everywhere(self, frames: Frames, missing: Tensor) -> Guess:
        """Predict all nodes but the first of all frames, [F·(N - 1)] rows: as `ResidentReconstruction` asks for.

        Its work has fixed shapes.

        missing: [F, N] bool; guesses of other nodes mean nothing.
        """
        n_frames, n_nodes = missing.shape
        x = self._without_memory(frames)
        if self.last_seen:
            memory = self.recall.index_select(0, frames.last_ids.flatten())
            memory = memory + self.age.index_select(0, frames.age.flatten().clamp(max=self.limit))
            memory = torch.where(missing.flatten().unsqueeze(-1), memory, 0.0).view(n_frames, n_nodes, -1)
            x.view(n_frames, self.length, -1)[:, -n_nodes:] += memory
        rest = -n_frames % ROUND
        last = torch.arange(n_frames, device=x.device).unsqueeze(-1) * self.length + self.length
        wanted = (last - torch.arange(n_nodes - 1, 0, -1, device=x.device)).flatten()
        places = F.pad(wanted, (0, -len(wanted) % PLACES))
        x = F.pad(x, (0, 0, 0, rest * self.length))
        return self.decoded(self.through_blocks(x, n_frames + rest, places, len(wanted)))

    def _through_gru(self, ids: Tensor) -> Tensor:
        assert self._gru is not None
        n_frames, k, n_nodes = ids.shape
        flat = F.embedding(ids, self.tokens).transpose(1, 2).reshape(n_frames * n_nodes, k, -1)
        return self._gru(flat)[1][0]

    def decoded(self, logits: Tensor) -> Guess:
        """Return `MaskPredictor.guess` of the logits, which are overwritten; under `decode: mean` ids are -1."""
        dim = self._table.shape[1]
        share, sums = self._shares(logits)
        total = sums[:, dim]
        absent = sums[:, dim + 1] > 0.5 * total
        if self._mean:
            features = sums[:, :dim] / total[:, None]
            ids = torch.full_like(absent, -1, dtype=torch.int64)
            return Guess(features.masked_fill_(absent[:, None], 0.0), ids, absent)
        ids = torch.where(absent, self._specials.absent, first_largest(share[:, :-1]))
        return Guess(self._table[ids], ids, absent)

    def sums(self, logits: Tensor) -> Tensor:
        """Return [M, at least D + 2] of the logits, which are overwritten, for softmax before its division.

        Columns: the sum of shares × features of the codes, D of them; the sum of all shares; the share of ABSENT.
        """
        return self._shares(logits)[1]

    def _shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        share = _exp(logits.sub_(logits.amax(-1, keepdim=True)))
        return share, F.linear(share, self._decode)


class ByForward:
    """`MaskPredictor.guess` of the logits of the predictor's own forward, for acting.

    Args: as of `FrozenPredictor`.
    """

    def __init__(self, predictor: MaskPredictor, bf16: bool = False) -> None:
        self._predictor, self._bf16 = predictor, bf16

    @torch.inference_mode()
    def __call__(self, frames: Frames, which: Tensor) -> Guess:
        """Predict the tokens `which` [M] of F·N, ascending."""
        masked = torch.zeros(frames.last_ids.numel(), dtype=torch.bool, device=which.device)
        masked[which] = True
        return self._predictor.guess(self._predictor(frames, masked.view(frames.last_ids.shape), self._bf16))


def freeze(predictor: MaskPredictor, bf16: bool = False) -> FrozenPredictor | ByForward:
    """Return a predictor for acting with its current weights."""
    parts = nn.Embedding, nn.Linear, nn.LayerNorm, nn.GRU, nn.ModuleList
    return (FrozenPredictor if is_only(predictor, MaskPredictor, Block, *parts) else ByForward)(predictor, bf16)


def freeze_tokenizer(tokenizer: Tokenizer) -> Callable[[Tensor], Tensor]:
    """Return what gives the ids [M] of nodes [M, D] with the tokenizer's current weights."""
    parts = nn.Linear, nn.ReLU, nn.LayerNorm, nn.Dropout
    return FrozenTokenizer(tokenizer) if is_only(tokenizer, Tokenizer, MLP, *parts) else tokenizer.ids
