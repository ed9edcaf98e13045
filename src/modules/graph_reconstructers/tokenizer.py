"""Stage 1: a vector-quantised autoencoder (VQ-VAE) that gives each node of an observation graph a discrete code.

Van den Oord et al. 2017 (arXiv:1711.00937). A node x is encoded as z = enc(x); its id is that of the nearest code,
i = argmin_c |z - e_c|^2; the decoder reads that code, y = dec(e_i). Choosing a code has no gradient, so

- the decoder's gradient passes *straight through* to the encoder, as if y were dec(z);
- the *commitment* loss pulls z towards its code (learners/tokenizer_learner.py);
- the *codebook* follows the encodings by exponential moving averages (EMA, appendix A.1), not by gradients: it is a
  buffer, and learners/tokenizer_learner.py feeds it the sums over all ranks;
- *dead* codes, which no node uses any more, are moved to encodings of the current batch.

Shapes: M nodes, D features, E code dimensions, K codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from omagd.config.env_info import EntityLayout
from omagd.config.schema import TokenizerConfig
from omagd.modules.graph_reconstructers.graphs import feature_mask
from omagd.modules.ops import FastLinear, add_at

DISTANCES = 2**18  # distances between nodes and codes that a CPU computes at once
SMOOTHING = 1e-5  # Laplace smoothing of the EMA counts: no division by zero for an unused code


class CodeSums(NamedTuple):
    """The nodes that a batch assigns to each code: their number [K] int64 and the sum of their encodings [K, E]."""

    counts: Tensor
    totals: Tensor


class Quantized(NamedTuple):
    """Nodes through the codebook: encodings [M, E], codes [M, E], ids [M] int64, decoded features [M, D]."""

    encoded: Tensor
    code: Tensor
    ids: Tensor
    decoded: Tensor


class MLP(nn.Sequential):
    """`n_layers` times Linear, ReLU, LayerNorm, dropout; then a linear map to `d_out`."""

    def __init__(self, d_in: int, d_out: int, hidden: int, n_layers: int, p: float) -> None:
        layers: list[nn.Module] = []
        for _ in range(n_layers):
            # ReLU in the memory of the linear map, whose gradient needs its input alone.
            layers += [FastLinear(d_in, hidden), nn.ReLU(inplace=True), nn.LayerNorm(hidden), nn.Dropout(p)]
            d_in = hidden
        super().__init__(*layers, FastLinear(d_in, d_out))


class Tokenizer(nn.Module):
    """Maps nodes to ids 0 ... K - 1 and ids to features. It is never given an all-zero (unseen or dead) node."""

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
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))  # codebook initialised from data
        self.register_buffer("real", feature_mask(layout), persistent=False)

    def encode(self, nodes: Tensor) -> Tensor:
        """Return encodings [..., E] of nodes [..., D]."""
        encoded: Tensor = self.encoder(nodes.to(self.codebook.dtype))
        return encoded.to(self.codebook.dtype)

    @torch.no_grad()
    def quantize(self, encoded: Tensor) -> Tensor:
        """Return the id [...] int64 of the code nearest to each encoding [..., E]."""
        flat = encoded.detach().reshape(-1, encoded.shape[-1])
        # argmin |z - e|^2 = argmax z.e - |e|^2 / 2, since |z|^2 is the same for all codes. That is one product with
        # the codebook.
        # VQ-VAE, eq. 1 and 2: the nearest code.
        bias = -0.5 * self.codebook.square().sum(-1)
        with torch.autocast(flat.device.type, enabled=False):
            # As many nodes at once as fit the cache of a CPU core with their distances to all codes.
            parts = flat.split(max(1, DISTANCES // self.n_codes) * (1 if flat.device.type == "cpu" else 64))
            room = flat.new_empty(len(parts[0]), self.n_codes)  # for all: new memory takes longer than the product
            scores = (torch.addmm(bias, part, self.codebook.t(), out=room[: len(part)]) for part in parts)
            return torch.cat([first_largest(of_part) for of_part in scores]).reshape(encoded.shape[:-1])

    def ids(self, nodes: Tensor) -> Tensor:
        """Return the ids [...] of nodes [..., D], as `forward` does."""
        if type(self).forward is not Tokenizer.forward:
            return self(nodes).ids
        return self.quantize(self.encode(nodes))

    def forward(self, nodes: Tensor) -> Quantized:
        """Pass nodes [M, D] through the codebook."""
        encoded = self.encode(nodes)
        ids = self.quantize(encoded)
        code = self.codebook[ids]
        # Straight-through estimator (section 3.2): the value is e_i, the gradient that of z.
        return Quantized(encoded, code, ids, self.decoder(encoded + (code - encoded).detach()))

    def decode(self, ids: Tensor) -> Tensor:
        """Return the features [..., D] of ids [...]."""
        return self.decoder(self.codebook[ids])

    @torch.no_grad()
    def table(self) -> Tensor:
        """Return the decoded features of all codes, [K, D], without dropout."""
        training = self.training
        self.eval()
        table = self.decode(torch.arange(self.n_codes, device=self.codebook.device))
        self.train(training)
        return table

    @torch.no_grad()
    def sums(self, encoded: Tensor, ids: Tensor, counted: Tensor | None = None) -> CodeSums:
        """Return what encodings [M, E] with ids [M] contribute to each code. counted: [M] bool; None: all are."""
        one, encoded = torch.ones_like(ids), encoded.detach()
        if counted is not None:
            one, encoded = one * counted, encoded * counted[:, None]
        # `bincount` would make the host wait for the largest id.
        counts = one.new_zeros(self.n_codes).index_add_(0, ids, one)
        return CodeSums(counts, add_at(torch.zeros_like(self.codebook), ids, encoded))

    @torch.no_grad()
    def move(self, sums: CodeSums, finite: Tensor | None = None) -> None:
        """Update the codebook by one batch (all ranks' sums). finite: scalar bool; where False, nothing changes.

        With decay gamma, for each code c (appendix A.1, here with Laplace smoothing):
            n_c <- gamma n_c + (1 - gamma) (number of its encodings)        `cluster_size`
            m_c <- gamma m_c + (1 - gamma) (sum of its encodings)           `embed_avg`
            e_c  = m_c / n'_c,  n'_c = (n_c + eps) / (sum of n + K eps) * (sum of n)
        """
        decay = self.config.ema_decay
        # VQ-VAE, appendix A.1, eq. 6 to 8: codes are running means of the encodings that chose them.
        sizes = (self.cluster_size * decay).add_(sums.counts.to(self.cluster_size.dtype), alpha=1 - decay)
        means = (self.embed_avg * decay).add_(sums.totals, alpha=1 - decay)
        total = sizes.sum()
        # Laplace smoothing: an unused code does not divide by 0, and the total stays.
        size = (sizes + SMOOTHING) / (total + self.n_codes * SMOOTHING) * total
        moved = (sizes, means, means / size[:, None])
        for old, new in zip((self.cluster_size, self.embed_avg, self.codebook), moved, strict=True):
            old.copy_(new if finite is None else torch.where(finite, new, old))

    def dead(self) -> Tensor:
        """Return the ids [R] int64 of dead codes: EMA count below `dead_code_threshold` times the mean count.

        The published code compares with a share of the batch size, which calls all of 1,024 codes dead at every update.
        """
        # Nearest codes win more and more encodings; those that win none would stay where they are (codebook collapse).
        limit = self.config.dead_code_threshold * self.cluster_size.sum() / self.n_codes
        return torch.nonzero(self.cluster_size < limit).flatten()

    @torch.no_grad()
    def place(self, codes: Tensor, encoded: Tensor, size: Tensor | float, finite: Tensor | None = None) -> None:
        """Move `codes` [R] to encodings [R, E], as if `size` nodes had been assigned to each.

        finite: scalar bool; where it is False, nothing changes. An encoding that is not finite moves no code.
        """
        # The device decides, so that the host need not wait for it.
        good = encoded.isfinite().all(-1) if finite is None else encoded.isfinite().all(-1) & finite
        placed = torch.where(good[:, None], encoded, self.codebook[codes])
        sizes = torch.as_tensor(size, dtype=self.cluster_size.dtype, device=codes.device)
        self.codebook[codes] = placed
        self.embed_avg[codes] = torch.where(good[:, None], placed * size, self.embed_avg[codes])
        self.cluster_size[codes] = torch.where(good, sizes, self.cluster_size[codes])


def first_largest(values: Tensor) -> Tensor:
    """Return `values.argmax(1)` of values [M, K]; on a CPU by NumPy, which is several times as fast."""
    if values.device.type != "cpu":
        return values.argmax(1)
    return torch.from_numpy(values.detach().numpy().argmax(1))
