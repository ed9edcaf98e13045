"""Stage 1: a vector-quantised autoencoder over the nodes of observation graphs.

Codebook as in van den Oord et al. 2017 (arXiv:1711.00937), appendix A.1: moved by exponential means of what is assigned
to each code, never by gradients. Shapes: M nodes, D features, E code dimensions, K codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omagd.config.env_info import EntityLayout
from omagd.config.schema import TokenizerConfig
from omagd.modules.graph_reconstructers.graphs import feature_mask
from omagd.modules.graph_reconstructers.layers import MLP

DISTANCES = 2**19  # held at once on a CPU
SMOOTHING = 1e-5  # keeps the share of an unused code above zero


class CodeSums(NamedTuple):
    """What one batch says about each code: how many nodes [K] int64 and the sum of their encodings [K, E]."""

    counts: Tensor
    totals: Tensor


class Quantized(NamedTuple):
    """Nodes through the codebook: encodings [M, E], codes' vectors [M, E], ids [M] int64, decoded features [M, D]."""

    encoded: Tensor
    code: Tensor
    ids: Tensor
    decoded: Tensor


class Tokenizer(nn.Module):
    """Turns nodes into ids 0 … K - 1 and ids into features. All-zero nodes are never given to it.

    Args:
        config: sizes and rules. layout: tells D.
    """

    codebook: Tensor
    cluster_size: Tensor
    embed_avg: Tensor
    ready: Tensor
    real: Tensor

    def __init__(self, config: TokenizerConfig, layout: EntityLayout) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.n_codes = config.n_codes
        inner = config.hidden_dim, config.n_layers, config.dropout
        self.encoder = MLP(layout.node_dim, config.code_dim, *inner)
        self.decoder = MLP(config.code_dim, layout.node_dim, *inner)
        codebook = torch.randn(config.n_codes, config.code_dim)
        self.register_buffer("codebook", codebook)
        self.register_buffer("cluster_size", torch.ones(config.n_codes))
        self.register_buffer("embed_avg", codebook.clone())
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))  # codebook started from data
        self.register_buffer("real", feature_mask(layout), persistent=False)

    def encode(self, nodes: Tensor, bf16: bool = False) -> Tensor:
        """Return encodings [..., E] of nodes [..., D]; of length one under `distance: cosine`."""
        encoded = self.encoder(nodes.to(self.codebook.dtype), bf16).to(self.codebook.dtype)
        return F.normalize(encoded, dim=-1) if self.config.distance == "cosine" else encoded

    @torch.no_grad()
    def quantize(self, encoded: Tensor) -> Tensor:
        """Return the id [...] int64 of the code nearest to each encoding [..., E]."""
        flat = encoded.detach().reshape(-1, encoded.shape[-1])
        # argmin |z - c|² = argmax z·c - |c|²/2; for cosine all codes have length one.
        bias = -0.5 * self.codebook.square().sum(-1)
        with torch.autocast(flat.device.type, enabled=False):
            ids = [first_largest(torch.addmm(bias, part, self.codebook.t())) for part in flat.split(self._chunk)]
        return torch.cat(ids).reshape(encoded.shape[:-1])

    def ids(self, nodes: Tensor) -> Tensor:
        """Return the ids [...] of nodes [..., D]."""
        return self.quantize(self.encode(nodes))

    def forward(self, nodes: Tensor, bf16: bool = False) -> Quantized:
        """Pass nodes [M, D] through the codebook; the decoder's gradient goes straight through to the encoder.

        bf16: whether a CPU takes the MLPs' products in bf16; distances are always whole.
        """
        encoded = self.encode(nodes, bf16)
        ids = self.quantize(encoded)
        code = self.codebook[ids]
        return Quantized(encoded, code, ids, self.decoder(encoded + (code - encoded).detach(), bf16))

    def decode(self, ids: Tensor) -> Tensor:
        """Return the features [..., D] of ids [...]."""
        return self.decoder(self.codebook[ids])

    @torch.no_grad()
    def table(self) -> Tensor:
        """Return the features of all codes, [K, D], as in eval mode."""
        training = self.training
        self.eval()
        table = self.decoder(self.codebook)
        self.train(training)
        return table

    @torch.no_grad()
    def sums(self, encoded: Tensor, ids: Tensor) -> CodeSums:
        """Return what encodings [M, E] with ids [M] add to each code."""
        counts = torch.bincount(ids, minlength=self.n_codes)
        return CodeSums(counts, torch.zeros_like(self.codebook).index_add_(0, ids, encoded.detach()))

    @torch.no_grad()
    def move(self, sums: CodeSums, finite: Tensor | None = None) -> None:
        """Move the codebook by the sums of all ranks' batches. finite: scalar bool; where False, nothing changes."""
        decay = self.config.ema_decay
        sizes = (self.cluster_size * decay).add_(sums.counts.to(self.cluster_size.dtype), alpha=1 - decay)
        means = (self.embed_avg * decay).add_(sums.totals, alpha=1 - decay)
        total = sizes.sum()
        size = (sizes + SMOOTHING) / (total + self.n_codes * SMOOTHING) * total
        moved = (sizes, means, self._unit(means / size[:, None]))
        for old, new in zip((self.cluster_size, self.embed_avg, self.codebook), moved, strict=True):
            old.copy_(new if finite is None else torch.where(finite, new, old))

    def dead(self) -> Tensor:
        """Return the ids [R] int64 of codes whose EMA count is below the threshold times the mean count."""
        limit = self.config.dead_code_threshold * self.cluster_size.sum() / self.n_codes
        return torch.nonzero(self.cluster_size < limit).flatten()

    @torch.no_grad()
    def place(self, codes: Tensor, encoded: Tensor, size: Tensor | float, finite: Tensor | None = None) -> None:
        """Put `codes` [R] at encodings [R, E], as if `size` nodes had been assigned to each.

        finite: scalar bool; where it is False, nothing changes. An encoding that is not finite moves no code.
        """
        good = encoded.isfinite().all(-1) if finite is None else encoded.isfinite().all(-1) & finite
        placed = torch.where(good[:, None], self._unit(encoded), self.codebook[codes])
        sizes = torch.as_tensor(size, dtype=self.cluster_size.dtype, device=codes.device)
        self.codebook[codes] = placed
        self.embed_avg[codes] = torch.where(good[:, None], placed * size, self.embed_avg[codes])
        self.cluster_size[codes] = torch.where(good, sizes, self.cluster_size[codes])

    @property
    def _chunk(self) -> int:
        """Nodes whose distances to all codes are held at once: as many as fit the cache of a CPU core."""
        return max(1, DISTANCES // self.n_codes) * (1 if self.codebook.device.type == "cpu" else 64)

    def _unit(self, codes: Tensor) -> Tensor:
        return F.normalize(codes, dim=-1) if self.config.distance == "cosine" else codes


def first_largest(values: Tensor) -> Tensor:
    """Return `values.argmax(1)` of values [M, K], on a CPU by NumPy, which does it several times as fast."""
    if values.device.type != "cpu":
        return values.argmax(1)
    return torch.from_numpy(values.detach().numpy().argmax(1))
