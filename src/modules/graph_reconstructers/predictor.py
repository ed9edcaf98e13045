"""Stage 2: a transformer that predicts the tokens of the nodes that an agent does not see.

Masked-token prediction as in BERT (Devlin et al. 2019, arXiv:1810.04805) and, over VQ tokens, MaskGIT (Chang et al.
2022, arXiv:2202.04200), with one difference: what is masked is not drawn at random, it is what the agent does not see.
Every unseen node of the predicted frame is MASK in training, evaluation and acting alike, and all of them are predicted
in one pass. The output is a distribution over the K codes and ABSENT (dead). The input is what an agent remembers of
each node: stacked frames of tokens, and when it was last seen. `PackedHistory` computes that for whole episodes in
learning, `SlotHistory` step by step in acting; both give the same `Frames`. Ids outside the codebook:

- input MASK = K: unseen now, alive or dead;
- input PAD = K + 1: before the episode's start, or never seen;
- input K + 2: unused; files of earlier versions have a row for it;
- output ABSENT = K: dead. The predictor never reads ABSENT: it must infer death from what it sees and remembers.

Shapes: F frames, k stacked frames s steps apart, S packed rows, B slots, n agents, N nodes, D features, K codes,
M masked tokens, d = d_model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omagd.config.env_info import EntityLayout
from omagd.config.schema import MaskPredictorConfig
from omagd.modules.graph_reconstructers.tokenizer import first_largest
from omagd.modules.ops import FastLinear, attend, autocast_bf16, fast_linear
from omagd.utils.packing import Packing

N_SPECIAL = 3


class Specials:
    """The ids outside a codebook of K codes; their meaning is at the top of this file."""

    def __init__(self, n_codes: int) -> None:
        self.n_codes = self.mask = self.absent = n_codes
        self.pad = n_codes + 1


@dataclass(frozen=True)
class Frames:
    """Input of the predictor for F frames.

    Attributes:
        ids: [F, k, N] int64, oldest first, the last one is predicted. step: [F] int64, step of the last one.
        last_ids: [F, N] int64, token when last seen before (PAD: never). age: [F, N] int64, steps since (0: never).
    """

    ids: Tensor
    step: Tensor
    last_ids: Tensor
    age: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Frames:
        return Frames(self.ids[rows], self.step[rows], self.last_ids[rows], self.age[rows])

    def __len__(self) -> int:
        return len(self.step)


def last_seen_step(seen: Tensor, packing: Packing) -> Tensor:
    """Return the step [S, n, N] at which each node was last seen strictly before each row; -1: never.

    The running maximum of the steps at which it was seen, shifted by one step. seen: [S, n, N] bool.
    """
    at = torch.where(seen, packing.places(seen.device)[1][:, None, None], -1)
    # The largest step so far at which it was seen is the last one; shifted, as a row must not see itself.
    padded = packing.pad(at, -1).cummax(dim=1).values
    before = torch.cat([torch.full_like(padded[:, :1], -1), padded[:, :-1]], dim=1)
    return packing.pack(before)


class PackedHistory:
    """Histories of whole packed episodes.

    Args:
        ids: [S, n, N] int64, tokens of every row, MASK where unseen. packing: of the rows.
    """

    def __init__(self, ids: Tensor, packing: Packing, config: MaskPredictorConfig, specials: Specials) -> None:
        self._ids, self._packing, self._config, self._specials = ids, packing, config, specials
        self._device = ids.device
        self._episode, self._step = packing.places(ids.device)
        self._last_step = last_seen_step(self._ids < self._specials.n_codes, packing)

    def frames(self, rows: Tensor, agents: Tensor) -> Frames:
        """Return the inputs of the frames (row [F], agent [F])."""
        step, episode = self._step[rows], self._episode[rows]
        back = torch.arange(self._config.stacked_steps - 1, -1, -1, device=self._device) * self._config.stacked_strip
        at = step[:, None] - back
        past = self._packing.row(at, episode[:, None])
        ids = self._ids[past, agents[:, None]]
        # Before the episode there was nothing, which is not the same as not seeing: PAD, not MASK.
        ids = torch.where((at < 0)[..., None], self._specials.pad, ids)
        last, nodes = self._last_step[rows, agents], torch.arange(ids.shape[-1], device=self._device)
        last_ids = self._ids[self._packing.row(last, episode[:, None]), agents[:, None], nodes]
        age = step[:, None] - last
        return Frames(ids, step, last_ids.masked_fill(last < 0, self._specials.pad), age.masked_fill(last < 0, 0))


class SlotHistory:
    """Histories of B battle slots while they are played; tensors stay where they are, since CUDA graphs hold addresses.

    Attributes:
        past: [(k - 1)·s + 1, B, n, N] int64, newest last. last_ids, last_step: [B, n, N] int64.
    """

    def __init__(
        self, shape: tuple[int, int, int], config: MaskPredictorConfig, specials: Specials, device: torch.device
    ) -> None:
        """Start empty; shape: (B, n, N)."""
        self._config, self._specials = config, specials
        depth = (config.stacked_steps - 1) * config.stacked_strip + 1
        self.past = torch.full((depth, *shape), specials.pad, device=device)
        self.last_ids = torch.full(shape, specials.pad, device=device)
        self.last_step = torch.full(shape, -1, device=device)

    def reset(self, which: Tensor) -> None:
        """Forget the slots `which` [B] bool."""
        slots = which.view(-1, 1, 1)
        for kept, blank in ((self.past, self._specials.pad), (self.last_ids, self._specials.pad), (self.last_step, -1)):
            kept.masked_fill_(slots, blank)

    def push(self, ids: Tensor, active: Tensor) -> None:
        """Add the tokens of this step, [B, n, N] with MASK where unseen, in the slots `active` [B] bool.

        Call `frames`, then `commit` after it.
        """
        moved = torch.cat([self.past[1:], ids.unsqueeze(0)])
        self.past.copy_(torch.where(active.view(-1, 1, 1), moved, self.past))

    def frames(self, rows: Tensor, step: Tensor) -> Frames:
        """Return the inputs of the agents `rows` [F] of B·n at `step` [B]."""
        now = step.index_select(0, rows // self.past.shape[2])
        ids = self.past[:: self._config.stacked_strip].flatten(1, 2).index_select(1, rows).transpose(0, 1)
        last_ids, last = (kept.flatten(0, 1).index_select(0, rows) for kept in (self.last_ids, self.last_step))
        return Frames(ids, now, last_ids, (now[:, None] - last).masked_fill_(last < 0, 0))

    def commit(self, step: Tensor, active: Tensor) -> None:
        """Record the pushed tokens as last seen at `step` [B] in the slots `active` [B] bool."""
        now = self.past[-1]
        # Only codes are sights; MASK leaves what was remembered.
        seen = (now < self._specials.n_codes) & active.view(-1, 1, 1)
        self.last_ids.copy_(torch.where(seen, now, self.last_ids))
        self.last_step.copy_(torch.where(seen, step.view(-1, 1, 1), self.last_step))

    def snapshot(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        return {name: getattr(self, name).clone() for name in ("past", "last_ids", "last_step")}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of the same sizes."""
        for name, value in snapshot.items():
            getattr(self, name).copy_(value)


def sinusoidal(n: int, d: int) -> Tensor:
    """Return the position table [n, d] of Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.

    Columns 2i and 2i + 1 of row t are the sine and the cosine of t / 10000^(2i / d).
    """
    rate = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / max(d, 1)))
    # Wave lengths from 2 pi to 10000 x 2 pi: near steps differ in the first columns, far ones in the last.
    angle = torch.arange(n)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d]


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + feed-forward(norm(x)) with GELU."""

    def __init__(self, config: MaskPredictorConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads, self.p = config.n_heads, config.dropout
        self.norm_in, self.norm_out = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key_value, self.merge = FastLinear(d, d), FastLinear(d, 2 * d), FastLinear(d, d)
        self.widen, self.narrow = FastLinear(d, config.feedforward_dim), FastLinear(config.feedforward_dim, d)

    def forward(self, x: Tensor, wanted: Tensor | None, n_out: int) -> Tensor:
        """Return the block's output for x [F, L, d]: [F, L, d], or [M, d] for the tokens `wanted`.

        The last block needs outputs for the masked tokens only; they still attend to all L tokens.
        wanted: [M] int64, places among the F · n_out last tokens. n_out: number of query tokens; L where
            `wanted` is None.
        """
        p = self.p if self.training else 0.0
        # Pre-norm (Xiong et al. 2020): the sum of all blocks reaches the head unscaled, which trains without warm-up.
        normed = self.norm_in(x)
        query, out = self.query(normed[:, -n_out:]), x[:, -n_out:]
        mixed = attend(query, self.key_value(normed), self.n_heads, p)
        if wanted is not None:
            out, mixed = (rows.flatten(0, 1).index_select(0, wanted) for rows in (out, mixed))
        out = out + F.dropout(self.merge(mixed), p)
        hidden = F.dropout(F.gelu(self.widen(self.norm_out(out))), p)
        return out + F.dropout(self.narrow(hidden), p)


class Guess(NamedTuple):
    """Decoded predictions: features [M, D] (zero where absent), ids [M] (ABSENT where absent), absent [M] bool."""

    features: Tensor
    ids: Tensor
    absent: Tensor


class MaskPredictor(nn.Module):
    """A distribution over the codes and ABSENT for every masked token of a frame.

    Input of a token: token embedding + type + position in the graph + step of the episode (+ which of the stacked
    frames, without the GRU); with `last_seen`, for masked tokens, a linear map of the token when last seen plus an
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
            self.recall = FastLinear(d, d)
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
        # Standardised, so that a feature in cells does not drown one between 0 and 1.
        spread = table.std(0, correction=0).clamp(min=1e-3)
        self.code_features.zero_()
        self.code_features[: len(table)] = ((table - table.mean(0)) / spread).clamp(-5, 5)

    def forward(self, frames: Frames, masked: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Return logits [M, K + 1] of the `masked` [F, N] tokens of the last frame, frame by frame.

        wanted: [M] int64, places among F · N of the tokens to predict in place of the masked ones, for work of fixed
            shapes.
        """
        tokens = self.token_table()
        # BERT's input (figure 2): the sum of embeddings of token, type, place and time.
        x = F.embedding(frames.ids, tokens)
        static = self.kind(self.types) + self.position.weight + self._embed(self.step, frames.step)[:, None]
        x = self._stack(x, static)
        if self.config.last_seen:
            memory = self.recall(F.embedding(frames.last_ids, tokens))
            # What is seen needs no memory of itself; of what is not, the last token and its age say where it may be.
            memory = torch.where(masked[..., None], memory + self._embed(self.age, frames.age), 0.0)
            x = torch.cat([x[:, : -self.n_nodes], x[:, -self.n_nodes :] + memory], dim=1)
        x = F.dropout(self.norm(x), self.config.dropout, self.training)
        for block in self.blocks[:-1]:
            x = self._pass(block, x, None, x.shape[1])
        # MaskGIT (section 3.2) in a single step: all masked tokens at once, none reads another's guess.
        if wanted is None:
            wanted = torch.nonzero(masked.flatten()).flatten()
        x = self._pass(self.blocks[-1], x, wanted, self.n_nodes)
        return fast_linear(self.norm_head(x), self.head_weight(), self.head.bias)

    def _pass(self, block: nn.Module, x: Tensor, wanted: Tensor | None, n_out: int) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(block, x, wanted, n_out, use_reentrant=False))
        return block(x, wanted, n_out)

    def _stack(self, x: Tensor, static: Tensor) -> Tensor:
        """Return x [F, k, N, d] as one sequence: [F, N, d] by a GRU over each node's frames, else [F, k·N, d]."""
        if self.config.use_gru:
            n_frames, k, n_nodes, d = x.shape
            flat = x.transpose(1, 2).reshape(n_frames * n_nodes, k, d)
            with autocast_bf16(flat.device, False):  # cuDNN would run the recurrence in fp16: see `PackedGRU`
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
            # -|f - c|² = 2 f c - c² - f², where f² is the same for all codes c: linear in [c, c²].
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
        # Dead where that is likelier than alive, whichever single code is the likeliest.
        absent = p[:, -1] > 0.5
        ids = torch.where(absent, self.specials.absent, first_largest(p[:, :-1]))
        if self.config.decode == "argmax":
            return Guess(self.table_with_absent()[ids], ids, absent)
        # The mean minimises the expected squared error, but may be a place between two where the unit is not.
        return Guess(torch.where(absent[:, None], 0.0, p[:, :-1] @ self.table), ids, absent)
