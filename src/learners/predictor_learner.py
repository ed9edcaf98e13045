"""Stage 2: trains the masked-token predictor (modules/graph_reconstructers/predictor.py) over a frozen tokenizer.

A frame is what one living agent sees at one step. Its unseen nodes are MASK in the input and are the targets: the code
of the node in `full_obs`, which only training reads, or ABSENT if the unit is dead. The loss is that of BERT's masked
language model (Devlin et al. 2019, arXiv:1810.04805), the mean cross-entropy of the M masked tokens of all ranks,

    sum of -log p_m[target_m]  /  M

Under `matching: type` a prediction is not compared with the target of its own position: in a frame and node type the
assignment of predictions to targets with the smallest sum of -log p is chosen first (as in DETR, Carion et al. 2020,
arXiv:2005.12872; Hungarian method, Kuhn 1955), without a gradient.
Shapes: S packed rows, n agents, N nodes, D features, F frames with a masked node, M masked tokens, K codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.learners.graph_metrics import Tokens, mean_of, token_stats
from omagd.learners.pretraining import GraphLearner, even_parts, places
from omagd.learners.protocol import Draw
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, merge
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.graph_reconstructers.predictor import Frames, MaskPredictor, PackedHistory
from omagd.modules.graph_reconstructers.reconstructor import Belief
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.ops import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch

ENUMERATED = 4  # up to so many tokens, all assignments are tried


@dataclass(frozen=True)
class Sample:
    """Frames of a batch with a masked node.

    Attributes:
        frames: inputs of F frames. masked: [F, N] bool. target: [M] int64, code or ABSENT, frame by frame.
        tokens: [M] int64, places of the targets among F · N. counted: [M] bool.
        rows, agents: [F], packed row and agent of each frame.
    """

    frames: Frames
    masked: Tensor
    target: Tensor
    tokens: Tensor
    counted: Tensor
    rows: Tensor
    agents: Tensor

    def parts(self, size: int) -> list[Sample]:
        """Return these frames in parts of about `size` frames, at least one part."""
        parts = even_parts(len(self.frames), size)
        return [self] if len(parts) == 1 else [self._part(part) for part in parts]

    def _part(self, rows: slice) -> Sample:
        """Return the frames `rows`."""
        first = int(self.masked[: rows.start].sum())
        cut = slice(first, first + int(self.masked[rows].sum()))
        tokens = self.tokens[cut] - rows.start * self.masked.shape[1]
        of_tokens = self.target[cut], tokens, self.counted[cut]
        return Sample(self.frames[rows], self.masked[rows], *of_tokens, self.rows[rows], self.agents[rows])


@dataclass(frozen=True)
class Graphs:
    """Graphs of all rows.

    Attributes:
        full_nodes: [S, n, N, D], nodes of `full_obs`. ids: [S, n, N], tokens of them, ABSENT for the dead.
        seen, missing: [S, n, N] bool.
    """

    full_nodes: Tensor
    ids: Tensor
    seen: Tensor
    missing: Tensor


class PredictorLoss(LossModule):
    """The loss at the top of this file, not yet divided by the number of tokens."""

    def __init__(self, predictor: MaskPredictor, info: EnvInfo, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        assert info.layout is not None
        self.predictor, self.layout = predictor, info.layout

    def forward(self, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the sum of the cross-entropy, and stats.

        DDP needs a gradient of every parameter, so a sample without frames returns 0 × the logits of a blank frame.
        """
        if not len(sample.frames):
            blank = self.predictor.blank_frame()
            nothing = self.predictor(blank, torch.ones_like(blank.last_ids, dtype=torch.bool)).sum() * 0.0
            return nothing, {}
        with autocast_bf16(sample.masked.device, self.bf16 and self.training):
            logits = self.predictor(sample.frames, sample.masked, sample.tokens)
        log_p = logits.to(self.predictor.table.dtype).log_softmax(-1)
        target = sample.target
        if self.predictor.config.matching == "type":
            target = target[match_types(log_p, target, sample.masked, self.layout)]
        # BERT's masked language model (section 3.1): -log p of the true token, at masked places alone.
        loss = -(log_p.gather(1, target[:, None])[:, 0] * sample.counted.to(log_p.dtype)).sum()
        with torch.no_grad():
            counted, dead = sample.counted, sample.target == self.predictor.specials.absent
            predicted_dead = (log_p[:, -1].exp() > 0.5).to(log_p.dtype)
            likeliest = log_p.gather(1, sample.target[:, None])[:, 0] >= log_p.amax(1)
            stats = {
                "graph_loss": (loss.detach(), counted.sum().to(log_p.dtype)),
                "top1": mean_of(likeliest.to(log_p.dtype), counted),
                "recall_absent": mean_of(predicted_dead, dead & counted),
                "recall_alive": mean_of(1 - predicted_dead, ~dead & counted),
            }
        return loss, stats


class PredictorLearner(GraphLearner):
    """Trains a predictor in place, on one rank or several. The tokenizer is frozen in place."""

    # Feature error of all unseen nodes, the dead included, as the agent receives it.
    best_metric: ClassVar[str] = "error_all"

    def __init__(
        self, predictor: MaskPredictor, tokenizer: Tokenizer, config: Config, info: EnvInfo, dist: Dist
    ) -> None:
        loss = PredictorLoss(predictor, info, config.precision == "bf16")
        super().__init__("predictor", predictor, loss, config, info, dist)
        self.predictor, self.tokenizer = predictor, tokenizer.eval().requires_grad_(False)
        if not predictor.bound:  # a trained one keeps the table that it has learned with and acts with
            predictor.bind(tokenizer.table())
        predictor.recompute = config.enable_gradient_checkpointing

    def update(self, batch: PackedBatch, *, episodes: int = 0) -> Stats:
        """Take an optimizer step on this rank's batch."""
        sample = self.sample(batch)
        self._loss.train()
        count = torch.tensor(float(len(sample.target)), dtype=torch.float64)
        stats = self._learn(count, sample.parts(self.config.graph_frames_at_once))
        self.finish(episodes)
        return stats

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the step of `update` on drawn episodes; only launches work. inputs: `fixed_inputs` on the device."""
        return self._learn(inputs[2].sum().double(), self._fixed_parts(draw, inputs))

    def _learn(self, count: Tensor, parts: list[Sample]) -> Stats:
        """Take a step; on a device this only launches work. count: masked tokens of the parts."""
        result = self._step(count, *((part,) for part in parts))
        return {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped}

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return sums and counts over the unseen nodes of living observers on held-out episodes."""
        graphs = self.graphs(batch)
        sample = self.sample(batch, graphs)
        self._loss.eval()
        stats: Stats = {}
        for part in sample.parts(self.config.graph_frames_at_once) if len(sample.frames) else []:
            stats = merge(stats, self._evaluate(part, graphs))
        return stats

    @torch.no_grad()
    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each as the agent receives it.

        The spread is the standard deviation over the codes and ABSENT, which has zero features.
        """
        graphs = self.graphs(batch)
        sample = self.sample(batch, graphs)
        self._loss.eval()
        parts = [self._belief(part) for part in sample.parts(self.config.graph_frames_at_once) if len(part.frames)]
        if not parts:
            nothing = graphs.full_nodes.new_zeros((0, self.layout.node_dim))
            return graphs.missing, Belief(nothing, nothing[:, 0], nothing[:, 0].bool(), nothing)
        return graphs.missing, Belief(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _belief(self, sample: Sample) -> tuple[Tensor, ...]:
        predictor = self.predictor
        logits = predictor(sample.frames, sample.masked)
        p, guess, table = logits.softmax(-1), predictor.guess(logits), predictor.table
        mean = p[:, :-1] @ table
        # Var x = E x² - (E x)², over the codes and ABSENT.
        spread = (p[:, :-1] @ table.square() - mean.square()).clamp(min=0).sqrt()
        return guess.features.float(), p[:, -1], guess.absent, spread

    def _sight(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the seen and the missing nodes, [S, n, N] bool; dead observers and closing rows have neither."""
        (seen, missing), valid = self.columns.sight(batch["obs"]), batch.valid_mask[:, None, None]
        return seen & valid, missing & valid

    def units(self, batch: PackedBatch) -> Tensor:
        """Return the missing nodes, [S, n, N] bool."""
        return self._sight(batch)[1]

    @torch.no_grad()
    def graphs(self, batch: PackedBatch, fixed: bool = False) -> Graphs:
        """Return all graphs of a batch. fixed: in shapes that depend on no value."""
        full, (seen, missing) = obs_to_nodes(batch["full_obs"], self.layout), self._sight(batch)
        # Dead units are zeros in the full view: their target is ABSENT, not a code of zeros.
        present = full.any(-1) & seen[..., :1]
        ids = torch.full(present.shape, self.predictor.specials.absent, device=full.device)
        if fixed:
            ids = torch.where(present, self.tokenizer.ids(full.flatten(0, 2)).view(present.shape), ids)
        else:
            ids[present] = self.tokenizer.ids(full[present])
        return Graphs(full, ids, seen, missing)

    def sample(self, batch: PackedBatch, graphs: Graphs | None = None, marks: Sequence[Tensor] | None = None) -> Sample:
        """Return the frames with a missing node. marks: which frames and tokens count, for fixed shapes."""
        graphs = graphs or self.graphs(batch, fixed=marks is not None)
        of_frames, of_tokens = marks or (None, None)
        at, real = places(graphs.missing.any(-1), of_frames)
        rows, agents = at // graphs.missing.shape[1], at % graphs.missing.shape[1]
        frames = self._history(batch, graphs).frames(rows, agents)
        masked = graphs.missing[rows, agents] & real[:, None]
        tokens, counted = places(masked, of_tokens)
        return Sample(frames, masked, graphs.ids[rows, agents].flatten()[tokens], tokens, counted, rows, agents)

    def _history(self, batch: PackedBatch, graphs: Graphs) -> PackedHistory:
        specials = self.predictor.specials
        ids = torch.where(graphs.seen, graphs.ids, specials.mask)
        return PackedHistory(ids, batch.packing, self.predictor.config, specials)

    def _evaluate(self, sample: Sample, graphs: Graphs) -> Stats:
        """Return the metrics of the masked tokens, with those of the true codes (`code`)."""
        logits = self.predictor(sample.frames, sample.masked)
        log_p = logits.log_softmax(-1)
        guess = self.predictor.guess(logits)
        position = torch.nonzero(sample.masked)[:, 1]
        truth = graphs.full_nodes[sample.rows, sample.agents][sample.masked]
        real = self.tokenizer.real[position].to(log_p.dtype)
        code = self.predictor.table_with_absent()[sample.target]
        tokens = Tokens(sample.target, truth, real, self.predictor.types[position], code)
        # Units of one type are interchangeable: the loss may compare a guess with another unit of its type.
        matched = match_types(log_p, sample.target, sample.masked, self.layout)
        compared = sample.target[matched] if self.predictor.config.matching == "type" else sample.target
        loss = -log_p.gather(1, compared[:, None])
        return {**token_stats(log_p, guess, tokens, matched), "graph_loss": mean_of(loss[:, 0])}


@cache
def _orders(m: int) -> Tensor:
    """Return all orders of m things, [m!, m]."""
    return torch.tensor(list(permutations(range(m))))


def cheapest(cost: Tensor) -> Tensor:
    """Return the assignment with the smallest sum of costs: for each prediction its target, [G, m] int64.

    cost: [G, m (prediction), m (target)] of G groups. All m! orders up to `ENUMERATED`, else SciPy's Hungarian method.
    """
    m = cost.shape[1]
    if m <= ENUMERATED:
        orders = _orders(m).to(cost.device, non_blocking=True)
        rows = torch.arange(m, device=cost.device)
        totals = cost[:, rows, orders].sum(-1)
        return orders[totals.argmin(-1)]
    solved = [linear_sum_assignment(one)[1] for one in cost.detach().cpu().double().numpy()]
    return torch.stack([torch.from_numpy(columns) for columns in solved]).to(cost.device, non_blocking=True)


@torch.no_grad()
def match_types(log_p: Tensor, targets: Tensor, masked: Tensor, layout: EntityLayout) -> Tensor:
    """Return the index [M] (among the masked tokens) of the target that each prediction is compared with.

    Tokens are matched within each frame and type, ALLY or ENEMY; groups of the same size m are solved together.
    log_p: [M, K + 1] of the masked tokens, frame by frame. targets: [M]. masked: [F, N] bool with M set.
    """
    matched = torch.arange(len(targets), device=targets.device)
    place = torch.full(masked.shape, -1, dtype=torch.int64, device=masked.device)
    place[masked] = matched
    types = torch.tensor(layout.node_types, device=masked.device)
    for kind in (ALLY, ENEMY):
        rows = place[:, types == kind]
        counts = (rows >= 0).sum(1)
        for m in counts[counts > 1].unique().tolist():
            group = rows[counts == m]
            tokens = group[group >= 0].view(-1, m)
            # -log p of each target under each prediction; their sum is the loss of an assignment (DETR, eq. 1).
            cost = -log_p[tokens[:, :, None], targets[tokens][:, None, :]]
            matched[tokens] = tokens.gather(1, cheapest(cost))
    return matched
