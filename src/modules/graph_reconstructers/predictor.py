"""Stage 2: a transformer that predicts the tokens of the nodes that an agent does not see.

Masked-token prediction as in BERT (Devlin et al. 2019, arXiv:1810.04805) and, over VQ tokens, MaskGIT (Chang et al.
2022, arXiv:2202.04200), with one difference: what is masked is not drawn at random, it is what the agent does not see.
Every unseen node of the predicted frame is MASK in training, evaluation and acting alike, and all of them are predicted
in one pass. The output is a distribution over the K codes and ABSENT (dead).

Shapes: F frames, k stacked frames, N nodes, D features, K codes, M masked tokens, d = d_model. Ids: history.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omagd.config.env_info import EntityLayout
from omagd.config.schema import MaskPredictorConfig
from omagd.modules.graph_reconstructers.history import N_SPECIAL, Frames, Specials
from omagd.modules.ops import apply_linear, attend, dropout, fast_linear, gelu_dropout, no_autocast


def sinusoidal(n: int, d: int) -> Tensor:
    """Return the position table [n, d] of Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.

    Columns 2i and 2i + 1 of row t are the sine and the cosine of t / 10000^(2i / d).
    """
    rate = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / max(d, 1)))
    angle = torch.arange(n)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d]


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + feed-forward(norm(x)) with GELU."""

    def __init__(self, config: MaskPredictorConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads, self.p = config.n_heads, config.dropout
        self.norm_in, self.norm_out = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key_value, self.merge = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.widen, self.narrow = nn.Linear(d, config.feedforward_dim), nn.Linear(config.feedforward_dim, d)

    def forward(self, x: Tensor, wanted: Tensor | None, n_out: int, bf16: bool = False) -> Tensor:
        """Return the block's output for x [F, L, d]: [F, L, d], or [M, d] for the tokens `wanted`.

        The last block needs outputs for the masked tokens only; they still attend to all L tokens.
        wanted: [M] int64, places among the F · n_out last tokens. n_out: number of query tokens; L where
            `wanted` is None. bf16: whether a CPU multiplies the linear maps in bf16.
        """
        p = self.p if self.training else 0.0
        normed = self.norm_in(x)
        query, out = apply_linear(normed[:, -n_out:], self.query, bf16), x[:, -n_out:]
        mixed = attend(query, apply_linear(normed, self.key_value, bf16), self.n_heads, p)
        if wanted is not None:
            out, mixed = (rows.flatten(0, 1).index_select(0, wanted) for rows in (out, mixed))
        out = out + dropout(apply_linear(mixed, self.merge, bf16), p)
        hidden = gelu_dropout(apply_linear(self.norm_out(out), self.widen, bf16), p)
        return out + dropout(apply_linear(hidden, self.narrow, bf16), p)


class Guess(NamedTuple):
    """Decoded predictions: features [M, D] (zero where absent), ids [M] (ABSENT where absent), absent [M] bool."""

    features: Tensor
    ids: Tensor
    absent: Tensor


class MaskPredictor(nn.Module):
    """A distribution over the codes and ABSENT for every masked token of a frame.

    Input of a token: token embedding + type + position in the graph + step of the episode (+ which of the stacked
    frames, without the GRU), and with `last_seen`, for masked tokens, a linear map of the token when last seen plus an
    embedding of its age; LayerNorm; `n_layers` blocks.

    Args:
        config: sizes and options. n_codes: K. layout: gives N, types and D. episode_limit: longest episode in steps.

    Attributes:
        recompute: gradient checkpointing: whether backward computes the blocks' activations again.
    """

    code_features: Tensor
    table: Tensor
    types: Tensor

    def __init__(self, config: MaskPredictorConfig, n_codes: int, layout: EntityLayout, episode_limit: int) -> None:
        super().__init__()
        d, dim, self.n_nodes, self.limit = config.d_model, layout.node_dim, layout.n_nodes, episode_limit
        self.config, self.specials, self.recompute = config, Specials(n_codes), False
        self.token = nn.Embedding(n_codes + N_SPECIAL, d)
        self.kind, self.position = nn.Embedding(3, d), nn.Embedding(self.n_nodes, d)
        self.step = nn.Embedding.from_pretrained(sinusoidal(episode_limit + 1, d), freeze=False)
        if config.use_gru:
            self.gru = nn.GRU(d, d, batch_first=True)
        else:
            self.frame = nn.Embedding(config.stacked_steps, d)
        if config.last_seen:
            self.recall = nn.Linear(d, d)
            self.age = nn.Embedding.from_pretrained(sinusoidal(episode_limit + 1, d), freeze=False)
        self.norm = nn.LayerNorm(d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm_head, self.head = nn.LayerNorm(d), nn.Linear(d, n_codes + 1)
        if config.code_features:
            self.feature_in, self.feature_out = nn.Linear(dim, d, bias=False), nn.Linear(2 * dim, d, bias=False)
        self.register_buffer("table", torch.zeros(n_codes, dim))
        self.register_buffer("code_features", torch.zeros(n_codes + N_SPECIAL, dim))
        # Nothing reads these two; files and checkpoints of earlier versions have them.
        self.register_buffer("slot_sum", torch.zeros(self.n_nodes, dim, dtype=torch.float64))
        self.register_buffer("slot_count", torch.zeros(self.n_nodes, dtype=torch.float64))
        self.register_buffer("types", torch.tensor(layout.node_types), persistent=False)
        for table in (self.token, self.kind, self.position):
            nn.init.normal_(table.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)

    @property
    def bound(self) -> bool:
        """Whether it has the features of a tokenizer's codes."""
        return bool(self.table.any())

    @torch.no_grad()
    def bind(self, table: Tensor) -> None:
        """Store the decoded features [K, D] of the frozen tokenizer's codes; they are part of the state dict.

        With `code_features`, embeddings and head use them standardised over the codebook and clipped to [-5, 5].
        """
        self.table.copy_(table)
        spread = table.std(0, correction=0).clamp(min=1e-3)
        self.code_features.zero_()
        self.code_features[: len(table)] = ((table - table.mean(0)) / spread).clamp(-5, 5)

    def forward(self, frames: Frames, masked: Tensor, bf16: bool = False) -> Tensor:
        """Return logits [M, K + 1] of the `masked` [F, N] tokens of the last frame, frame by frame.

        bf16: whether a CPU multiplies the linear maps in bf16.
        """
        tokens = self.token_table()
        x = F.embedding(frames.ids, tokens)
        static = self.kind(self.types) + self.position.weight + self._embed(self.step, frames.step)[:, None]
        x = self._stack(x, static)
        if self.config.last_seen:
            memory = apply_linear(F.embedding(frames.last_ids, tokens), self.recall, bf16)
            memory = torch.where(masked[..., None], memory + self._embed(self.age, frames.age), 0.0)
            x = torch.cat([x[:, : -self.n_nodes], x[:, -self.n_nodes :] + memory], dim=1)
        x = dropout(self.norm(x), self.config.dropout if self.training else 0.0)
        for block in self.blocks[:-1]:
            x = self._pass(block, x, None, x.shape[1], bf16)
        wanted = torch.nonzero(masked.flatten()).flatten()
        x = self._pass(self.blocks[-1], x, wanted, self.n_nodes, bf16)
        return fast_linear(self.norm_head(x), self.head_weight(), self.head.bias, bf16)

    def _pass(self, block: nn.Module, x: Tensor, wanted: Tensor | None, n_out: int, bf16: bool) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, x, wanted, n_out, bf16, use_reentrant=False)
        return block(x, wanted, n_out, bf16)

    def _stack(self, x: Tensor, static: Tensor) -> Tensor:
        """Return x [F, k, N, d] as one sequence: [F, N, d] by a GRU over each node's frames, else [F, k·N, d]."""
        if self.config.use_gru:
            n_frames, k, n_nodes, d = x.shape
            flat = x.transpose(1, 2).reshape(n_frames * n_nodes, k, d)
            with no_autocast(flat.device):  # cuDNN would run the recurrence in fp16: see `PackedGRU`
                last = self.gru(flat.to(self.head.weight.dtype))[1][0]
            return last.view(n_frames, n_nodes, d) + static
        return (x + self.frame.weight[:, None] + static[:, None]).flatten(1, 2)

    def _embed(self, table: nn.Embedding, steps: Tensor) -> Tensor:
        return F.embedding(steps.clamp(max=self.limit), table.weight)

    def token_table(self) -> Tensor:
        """Return the embeddings [K + 3, d] of all input ids.

        With `code_features` each code's embedding gets a linear map of its features, so that codes with nearly the same
        features have nearly the same embedding from the start.
        """
        weight: Tensor = self.token.weight
        return weight + self.feature_in(self.code_features) if self.config.code_features else weight

    def head_weight(self) -> Tensor:
        """Return the head's weights [K + 1, d] of all output ids.

        With `code_features` each code's weights get a linear map of its features f and f^2: a logit can then be minus a
        squared distance between predicted and coded features, up to what all codes share. ABSENT has no features.
        """
        weight: Tensor = self.head.weight
        if self.config.code_features:
            coded = self.code_features[: len(weight)].clone()
            coded[-1] = 0.0
            weight = weight + self.feature_out(torch.cat([coded, coded.square()], dim=-1))
        return weight

    def blank_frame(self) -> Frames:
        """Return one frame from before any episode."""
        size, device = (1, self.n_nodes), self.table.device
        ids = torch.full((1, self.config.stacked_steps, self.n_nodes), self.specials.pad, device=device)
        age = torch.zeros(size, dtype=torch.int64, device=device)
        return Frames(ids, age[:, 0], ids[:, -1], age)

    def table_with_absent(self) -> Tensor:
        """Return the features [K + 1, D] of output ids; ABSENT is zero."""
        return torch.cat([self.table, torch.zeros_like(self.table[:1])])

    def guess(self, logits: Tensor) -> Guess:
        """Decode logits [M, K + 1] with p = softmax(logits).

        ABSENT where p(ABSENT) > 1/2, which is where dead is likelier than alive; its features are zero. Else
        `decode: mean`: the expected features, sum over codes of p_c × table[c] (ABSENT counts as zero features), which
            minimise the expected squared error;
        `decode: argmax`: the features of the likeliest code.
        """
        p = logits.softmax(-1)
        absent = p[:, -1] > 0.5
        ids = torch.where(absent, self.specials.absent, p[:, :-1].argmax(-1))
        if self.config.decode == "argmax":
            return Guess(self.table_with_absent()[ids], ids, absent)
        return Guess(torch.where(absent[:, None], 0.0, p[:, :-1] @ self.table), ids, absent)
