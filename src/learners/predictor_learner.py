"""Stage 2: trains the masked-token predictor over a frozen tokenizer.

Shapes: S packed rows, n agents, N nodes, D features, F frames with something masked, M masked tokens, K codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.graph_metrics import Tokens, mean_of, token_stats
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, SyncedOptimizer, lr_scale, merge
from omagd.modules.graph_reconstructers.graphs import alive, feature_mask, match_types, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.history import Frames, PackedHistory
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.kernels.linear import lowered
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch
from omagd.utils.seeding import stream_seed, uniform


@dataclass(frozen=True)
class Sample:
    """Frames of a batch in which something is masked.

    Attributes:
        frames: inputs of F frames. masked: [F, N] bool. target: [M] int64, code or ABSENT, frame by frame.
        weight: [M], of each token in the loss. rows, agents: [F], where the frames come from.
    """

    frames: Frames
    masked: Tensor
    target: Tensor
    weight: Tensor
    rows: Tensor
    agents: Tensor

    def parts(self, size: int) -> list[Sample]:
        """Return these frames in parts of about `size` frames, at least one part."""
        n_parts = max(1, -(-len(self.frames) // size))
        if n_parts == 1:
            return [self]
        firsts = [len(self.frames) * i // n_parts for i in range(n_parts + 1)]
        ends = [0, *self.masked.sum(1).cumsum(0)[torch.tensor(firsts[1:]) - 1].tolist()]
        cuts = zip(pairwise(firsts), pairwise(ends), strict=True)
        return [self._part(slice(*frames), slice(*tokens)) for frames, tokens in cuts]

    def _part(self, frames: slice, tokens: slice) -> Sample:
        of_frames = self.frames[frames], self.masked[frames]
        return Sample(*of_frames, self.target[tokens], self.weight[tokens], self.rows[frames], self.agents[frames])


@dataclass(frozen=True)
class Graphs:
    """Graphs of all rows: nodes as seen and as they are [S, n, N, D], ids of the latter [S, n, N] (K: dead), masks."""

    seen_nodes: Tensor
    full_nodes: Tensor
    ids: Tensor
    seen: Tensor
    missing: Tensor


class PredictorLoss(LossModule):
    """Weighted cross-entropy of the masked tokens, summed.

    Args:
        predictor: trained. info: of the environment. bf16: whether matrix products are taken in bf16 in training.
    """

    def __init__(self, predictor: MaskPredictor, info: EnvInfo, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        assert info.layout is not None
        self.predictor, self.layout = predictor, info.layout

    def forward(self, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the sum of weight × cross-entropy; a sample without frames still reaches every parameter."""
        if not len(sample.frames):
            blank = self.predictor.blank_frame()
            nothing = self.predictor(blank, torch.ones_like(blank.last_ids, dtype=torch.bool)).sum() * 0.0
            return nothing, {}
        bf16 = self.bf16 and self.training
        with lowered(sample.masked.device, bf16):
            logits = self.predictor(sample.frames, sample.masked, bf16)
        log_p = logits.detach().to(self.predictor.table.dtype).log_softmax(-1)
        target = sample.target
        if self.predictor.config.matching == "type":
            target = target[match_types(log_p, target, sample.masked, self.layout)]
        loss = cross_entropy(logits, log_p, target, sample.weight)
        with torch.no_grad():
            dead = sample.target == self.predictor.specials.absent
            taken_dead = (log_p[:, -1].exp() > 0.5).to(log_p.dtype)
            likeliest = log_p.gather(1, sample.target[:, None])[:, 0] >= log_p.amax(1)
            stats = {
                "graph_loss": (loss.detach(), sample.weight.sum()),
                "top1": mean_of(likeliest.to(log_p.dtype)),
                "recall_absent": mean_of(taken_dead, dead),
                "recall_alive": mean_of(1 - taken_dead, ~dead),
            }
        return loss, stats


class PredictorLearner:
    """Trains a predictor; whether it synchronises depends on `dist` alone.

    Args:
        predictor: trained in place. tokenizer: frozen here. config, info: the run and its environment. dist: the ranks.
    """

    loss_name = "graph_loss"
    best_metric = "error"  # held-out feature error as the agent receives it, lower is better

    def __init__(
        self, predictor: MaskPredictor, tokenizer: Tokenizer, config: Config, info: EnvInfo, dist: Dist
    ) -> None:
        assert info.layout is not None
        self.predictor, self.config, self.info, self.dist = predictor, config, info, dist
        self.tokenizer = tokenizer.eval().requires_grad_(False)
        self.layout = info.layout
        self.updates = 0
        predictor.bind(tokenizer.table())
        self._real = feature_mask(info.layout).to(dist.device)
        self._kinds = torch.tensor(info.layout.node_types, device=dist.device)
        self._loss = PredictorLoss(predictor, info, config.precision == "bf16")
        predictor.recompute = config.enable_gradient_checkpointing
        lr = config.graph_lr * lr_scale(config, dist.world_size)
        self.optimizer = torch.optim.Adam(predictor.parameters(), lr=lr, fused=True)
        self._step = SyncedOptimizer(self._loss, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)

    def warm_up(self, batch: PackedBatch | None = None) -> int:
        """Run a discarded forward and backward on `batch` (or on nothing); return how many passes that was."""
        self._loss.train()
        return self._step.warm_up(self._nothing() if batch is None else self.sample(batch, self.graphs(batch)))

    def update(self, batch: PackedBatch) -> Stats:
        """Take one step on this rank's batch."""
        graphs = self.graphs(batch)
        sample = self.sample(batch, graphs, hide=True)
        self._loss.train()
        parts = sample.parts(self.config.graph_frames_at_once)
        result = self._step(self._count(sample), *((part,) for part in parts))
        self._count_slots(graphs, result.finite)
        self.updates += 1
        return {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped}

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return sums and counts over the unseen nodes of living observers on held-out episodes."""
        graphs = self.graphs(batch)
        sample = self.sample(batch, graphs)
        history = self._history(batch, graphs)
        training = self._loss.training
        self._loss.eval()
        stats: Stats = {}
        for part in sample.parts(self.config.graph_frames_at_once) if len(sample.frames) else []:
            stats = merge(stats, self._evaluate(part, graphs, history))
        self._loss.train(training)
        return stats

    def modules(self) -> dict[str, nn.Module]:
        """Return what is trained, by name."""
        return {"predictor": self.predictor}

    def state_dict(self) -> dict[str, Any]:
        """Return what continuing needs beside `modules()`."""
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]

    @torch.no_grad()
    def graphs(self, batch: PackedBatch) -> Graphs:
        """Return all graphs of a batch. Dead observers and closing rows have nothing seen and nothing missing."""
        nodes, full = obs_to_nodes(batch["obs"], self.layout), obs_to_nodes(batch["full_obs"], self.layout)
        counts = (alive(batch["obs"]) & batch.valid_mask[:, None])[..., None]
        hidden = unseen(nodes)
        present = ~unseen(full) & counts
        ids = torch.full(present.shape, self.predictor.specials.absent, device=full.device)
        ids[present] = self.tokenizer.ids(full[present])
        return Graphs(nodes, full, ids, ~hidden & counts, hidden & counts)

    def sample(self, batch: PackedBatch, graphs: Graphs, hide: bool = False) -> Sample:
        """Return the frames with something to predict. hide: also mask some seen nodes at random (`mask_ratio`)."""
        hidden = self._draw_hidden(batch, graphs.seen) if hide else torch.zeros_like(graphs.seen)
        masked = graphs.missing | hidden
        rows, agents = torch.nonzero(masked.any(-1), as_tuple=True)
        frames = self._history(batch, graphs).frames(rows, agents)
        frames.ids[:, -1] = torch.where(hidden[rows, agents], self.predictor.specials.hidden, frames.ids[:, -1])
        masked = masked[rows, agents]
        early = (frames.step < self.config.mask_predictor_config.early_steps)[:, None].expand_as(masked)[masked]
        weight = torch.where(early, self.config.mask_predictor_config.early_step_weight, 1.0)
        return Sample(frames, masked, graphs.ids[rows, agents][masked], weight, rows, agents)

    def _history(self, batch: PackedBatch, graphs: Graphs) -> PackedHistory:
        specials = self.predictor.specials
        ids = torch.where(graphs.seen, graphs.ids, specials.mask)
        return PackedHistory(ids, batch.packing, self.predictor.config, specials)

    def _draw_hidden(self, batch: PackedBatch, seen: Tensor) -> Tensor:
        """Draw which seen nodes [S, n, N] are masked, by (seed, update, place of the episode in the union)."""
        ratio = self.predictor.config.mask_ratio
        if not ratio:
            return torch.zeros_like(seen)
        packing, (n_agents, n_nodes) = batch.packing, seen.shape[1:]
        before = sum(self.dist.counts(packing.n_episodes)[: self.dist.rank])  # episodes that lower ranks have drawn
        place = torch.tensor(batch.sample_index)[packing.episode] + before
        row = (place * (self.info.episode_limit + 1) + packing.step).to(seen.device)
        number = row[:, None] * (n_agents * n_nodes) + torch.arange(n_agents * n_nodes, device=seen.device)
        key = stream_seed(self.config.seed, "hidden", self.updates)
        hidden = (uniform(number, key).view(seen.shape) < ratio) & seen
        hidden[..., 0] = False
        return hidden

    def _count(self, sample: Sample) -> Tensor:
        if self.config.mask_predictor_config.early_step_weight == 1.0:
            return torch.tensor(len(sample.target), device=self.dist.device)
        return sample.weight.double().sum()

    def _nothing(self) -> Sample:
        blank = self.predictor.blank_frame()
        none = torch.zeros(0, dtype=torch.int64, device=self.dist.device)
        masked = torch.zeros((0, self.layout.n_nodes), dtype=torch.bool, device=self.dist.device)
        return Sample(blank[:0], masked, none, none.float(), none, none)

    @torch.no_grad()
    def _count_slots(self, graphs: Graphs, finite: Tensor) -> None:
        """Add this batch's unseen nodes (all ranks') to the mean of each slot, where the update was `finite`."""
        missing = graphs.missing.flatten(0, 1)
        total = torch.einsum("rn,rnd->nd", missing.double(), graphs.full_nodes.flatten(0, 1).double())
        both = torch.cat([total, missing.sum(0)[:, None].double()], dim=1)
        both = self.dist.sum(both)
        both = torch.where(finite & both.isfinite().all(), both, 0.0)
        self.predictor.slot_sum += both[:, :-1]
        self.predictor.slot_count += both[:, -1]

    def _evaluate(self, sample: Sample, graphs: Graphs, history: PackedHistory) -> Stats:
        logits = self.predictor(sample.frames, sample.masked)
        log_p = logits.log_softmax(-1)
        guess = self.predictor.guess(logits)
        slot = torch.nonzero(sample.masked)[:, 1]
        last_rows, never = history.last_rows(sample.rows, sample.agents)
        nodes = torch.arange(self.layout.n_nodes, device=slot.device)
        last = graphs.seen_nodes[last_rows, sample.agents[:, None], nodes][sample.masked]
        never = never[sample.masked][:, None]
        mean = (self.predictor.slot_sum / self.predictor.slot_count.clamp(min=1)[:, None]).to(last.dtype)[slot]
        baselines = {
            "slot_mean": mean,
            "last_seen": torch.where(never, 0.0, last),
            "last_seen_or_mean": torch.where(never, mean, last),
            "code": self.predictor.table_with_absent()[sample.target],
        }
        truth = graphs.full_nodes[sample.rows, sample.agents][sample.masked]
        real = self._real[slot].to(log_p.dtype)
        tokens = Tokens(sample.target, truth, real, self._kinds[slot], baselines)
        matched = match_types(log_p, sample.target, sample.masked, self.layout)
        compared = sample.target[matched] if self.predictor.config.matching == "type" else sample.target
        loss = -(log_p.gather(1, compared[:, None])[:, 0] * sample.weight.to(log_p.dtype)).sum()
        return {**token_stats(log_p, guess, tokens, matched), "graph_loss": (loss, sample.weight.sum())}


def cross_entropy(logits: Tensor, log_p: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over tokens of weight [M] × -log p [M, K + 1] of the target [M], with logits' gradient.

    log_p: the logits' log_softmax, without a gradient.
    """
    return _CrossEntropy.apply(logits, log_p, target, weight.to(log_p.dtype))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """The gradient, weight × (p - one of the target), is written once instead of passing through three matrices."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(log_p, target, weight)
        ctx.dtype = logits.dtype
        return -(log_p.gather(1, target[:, None])[:, 0] * weight).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_p, target, weight = ctx.saved_tensors
        scale = (weight * grad)[:, None]
        return log_p.exp().mul_(scale).scatter_add_(1, target[:, None], -scale).to(ctx.dtype), None, None, None
