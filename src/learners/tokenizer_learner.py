"""Stage 1: trains the tokenizer (VQ-VAE, van den Oord et al. 2017, arXiv:1711.00937) on fully observed graphs.

A sample is the graph of one living agent at one step. With x the nodes, z their encodings, e their codes, y the decoded
features and sg = "no gradient", its loss is

    mean over the features of present nodes of (y - x)^2  +  commitment * mean over present nodes and E of (z - sg(e))^2

and the loss of a batch is the mean over the samples of all ranks. The paper's third term, which pulls codes towards
encodings, is replaced by its EMA update of the codebook (`Tokenizer.move`), fed with the sums of all ranks.
Shapes: P nodes, D features, E code dimensions, K codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.graph_metrics import node_stats, perplexity_stats
from omagd.learners.pretraining import GraphLearner, even_parts, places
from omagd.learners.protocol import Draw
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, merge
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.graph_reconstructers.tokenizer import CodeSums, Tokenizer
from omagd.modules.ops import add_at, autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch
from omagd.utils.seeding import generator

CODE_SUMS = "code_sums"
QUIET_SHARE = 0.1  # last share of all updates, in which no code is revived: the codebook converges


@dataclass(frozen=True)
class Nodes:
    """Present nodes of living observers, graph after graph.

    Attributes:
        features: [P, D]. position: [P] int64, in its graph. graph: [P] int64, which graph. episode: [P] int64, place
            of its episode in the sample as drawn. counted: [P] bool. graphs: [number of graphs] bool, which count.
    """

    features: Tensor
    position: Tensor
    graph: Tensor
    episode: Tensor
    counted: Tensor
    graphs: Tensor

    def parts(self, size: int) -> list[Nodes]:
        """Return these nodes in parts of about `size` graphs, at least one part."""
        parts = even_parts(len(self.graphs), size)
        return [self] if len(parts) == 1 else [self._part(part.start, part.stop) for part in parts]

    def _part(self, first: int, end: int) -> Nodes:
        """Return the graphs `first` to `end`."""
        ends = torch.searchsorted(self.graph, torch.tensor([first, end], device=self.graph.device))
        cut = slice(*ends.tolist())
        each = (self.features[cut], self.position[cut], self.graph[cut] - first, self.episode[cut], self.counted[cut])
        return Nodes(*each, self.graphs[first:end])


class TokenizerLoss(LossModule):
    """The loss at the top of this file, summed over graphs."""

    def __init__(self, tokenizer: Tokenizer, bf16: bool = False) -> None:
        super().__init__()
        self.tokenizer, self.bf16 = tokenizer, bf16

    def forward(self, nodes: Nodes) -> tuple[Tensor, Stats]:
        """Return the sum over graphs of reconstruction error + commitment, and stats.

        Besides scalars the stats hold `code_sums`: (sums of encodings [K, E], counts [K]) for the codebook.
        """
        tokenizer = self.tokenizer
        with autocast_bf16(nodes.features.device, self.bf16 and self.training):
            out = tokenizer(nodes.features)
        # 1 for features that come from the observation; padding and the fixed head of SELF are not reconstructed.
        real = tokenizer.real[nodes.position].to(out.encoded.dtype)
        counted = nodes.counted.to(real.dtype)
        error = ((out.decoded - nodes.features.to(real.dtype)).square() * real).sum(-1) * counted
        commitment = (out.encoded - out.code.detach()).square().mean(-1) * counted
        # Mean within each graph, then the sum over graphs: a node counts by its share of its own graph.
        mse = (error / self._per_graph(nodes, real.sum(-1) * counted)).sum()
        stay = (commitment / self._per_graph(nodes, counted)).sum()
        # VQ-VAE, eq. 3, without its second term, which the moving averages of the codebook replace.
        loss = mse + tokenizer.config.commitment * stay
        n_graphs = nodes.graphs.sum().to(loss.dtype)
        sums = tokenizer.sums(out.encoded, out.ids, nodes.counted)
        compared = nodes.features, out.decoded.detach(), nodes.position, tokenizer, nodes.counted
        stats = {
            "graph_loss": (loss.detach(), n_graphs),
            "commitment": (stay.detach(), n_graphs),
            CODE_SUMS: (sums.totals, sums.counts),
            **node_stats(*compared, detailed=not self.training),
        }
        return loss, stats

    @staticmethod
    def _per_graph(nodes: Nodes, weight: Tensor) -> Tensor:
        """Return for each node the sum of `weight` [P] over its graph, [P]; 1 for one that does not count."""
        return add_at(weight.new_zeros(len(nodes.graphs)), nodes.graph, weight)[nodes.graph].clamp(min=1)


class TokenizerLearner(GraphLearner):
    """Trains a tokenizer in place, on one rank or several."""

    best_metric: ClassVar[str] = "mse"  # held-out, lower is better

    def __init__(self, tokenizer: Tokenizer, config: Config, info: EnvInfo, dist: Dist) -> None:
        loss = TokenizerLoss(tokenizer, config.precision == "bf16")
        super().__init__("tokenizer", tokenizer, loss, config, info, dist)
        self.tokenizer = tokenizer
        self._started = False
        self._drawn: Callable[[], Nodes]  # of the update at hand
        self._sound = torch.ones((), dtype=torch.bool, device=self.device)  # whether it changed anything

    def update(self, batch: PackedBatch, *, episodes: int = 0) -> Stats:
        """Take an optimizer step on this rank's batch, then update the codebook by the assignments of all ranks."""
        nodes = self.sample(batch)
        self._loss.train()
        self._begin(lambda: nodes)
        stats = self._learn(torch.tensor(len(nodes.graphs)), nodes.parts(self.config.graph_frames_at_once))
        self.finish(episodes)
        return stats

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the drawn episodes, and which places count; the first update initialises the codebook before."""
        self._begin(lambda: self.sample(draw.batches(draw.drawn.to(self.device), 1)[0]))
        return super().fixed_inputs(draw)

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the step of `update` on drawn episodes; only launches work. inputs: `fixed_inputs` on the device."""
        return self._learn(inputs[1].sum(), self._fixed_parts(draw, inputs))

    def finish(self, episodes: int) -> None:
        """Do what follows a step: count it, and revive dead codes if that is due, whose number the host waits for.

        Every `revive_interval` updates these move to encodings of this batch, if the update changed them.
        """
        super().finish(episodes)
        interval, last = self.tokenizer.config.revive_interval, (1 - QUIET_SHARE) * self.config.graph_pretrain_epochs
        if not interval or self.updates % interval or self.updates > last:
            return
        dead = self.tokenizer.dead()  # the same on all ranks
        if len(dead) and (drawn := self._draw(self._drawn(), len(dead), "revive")) is not None:
            self.tokenizer.place(dead, drawn, self.tokenizer.cluster_size.mean(), self._sound)

    def _learn(self, count: Tensor, parts: list[Nodes]) -> Stats:
        """Take a step and move the codebook; on a device this only launches work. count: graphs of the parts."""
        result = self._step(count, *((part,) for part in parts))
        stats = dict(result.stats)
        total, codes = stats.pop(CODE_SUMS)
        # Sums of all ranks: every rank moves the codebook alike.
        sums = CodeSums(self.dist.sum(codes), self.dist.sum(total))
        self._sound.copy_(result.finite & (sums.counts.sum() > 0))
        self.tokenizer.move(sums, self._sound)
        uses = perplexity_stats(sums.counts)
        uses = {name: (total * result.finite, count * result.finite) for name, (total, count) in uses.items()}
        return {**stats, **uses, "grad_norm": result.norm, SKIPPED: result.skipped}

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return sums and counts on held-out episodes; perplexity and codes in use are those of all ranks together.

        All ranks must call it, because their code counts are summed here.
        """
        nodes = self.sample(batch)
        self._loss.eval()
        stats: Stats = {}
        for part in nodes.parts(self.config.graph_frames_at_once):
            stats = merge(stats, self._loss(part)[1])
        stats = dict(stats)
        used = self.dist.sum(stats.pop(CODE_SUMS)[1])
        return {**stats, **perplexity_stats(used)} if used.any() else stats

    def units(self, batch: PackedBatch) -> Tensor:
        """Return the nodes to train on, [S, n, N] bool: present nodes of living observers at steps that happened."""
        # A dead unit is a node of zeros, a dead observer's view is all zeros: they are never encoded, and move no code.
        return self.columns.sight(batch["full_obs"])[0] & batch.valid_mask[:, None, None]

    def sample(self, batch: PackedBatch, marks: Sequence[Tensor] | None = None) -> Nodes:
        """Return the nodes of `batch` to train on. marks: which graphs and nodes count, for fixed shapes."""
        present, n_nodes = self.units(batch), self.layout.n_nodes
        living = present[..., 0].flatten()  # an observer sees itself
        graphs, nodes = marks or (None, None)
        at, counted = places(present, nodes)
        graph = (living.cumsum(0) - 1).clamp(min=0)[at // n_nodes]
        episode = batch.packing.places(batch.device)[0]
        if batch.sample_index:  # else as drawn
            episode = torch.tensor(batch.sample_index).to(batch.device, non_blocking=True)[episode]
        features = obs_to_nodes(batch["full_obs"], self.layout).flatten(0, 2)[at]
        graphs = torch.ones(int(living.sum()), dtype=torch.bool, device=batch.device) if graphs is None else graphs
        return Nodes(features, at % n_nodes, graph, episode[at // present[0].numel()], counted, graphs)

    def _begin(self, drawn: Callable[[], Nodes]) -> None:
        """Begin an update on nodes: initialise the codebook with encodings of the first, unless that has been done."""
        self._drawn = drawn
        self._started = self._started or bool(self.tokenizer.ready)
        if self._started:
            return
        codes = torch.arange(self.tokenizer.n_codes, device=self.dist.device)
        encoded = self._draw(drawn(), len(codes), "codebook")
        if encoded is not None:
            self.tokenizer.place(codes, encoded, 1.0)
            self.tokenizer.ready.fill_(True)
            self._started = True

    @torch.no_grad()
    def _draw(self, nodes: Nodes, wanted: int, purpose: str) -> Tensor | None:
        """Return encodings [wanted, E] of nodes drawn uniformly from all ranks' batches; None if there is no node.

        Nodes are numbered by (rank, episode as drawn, step, agent, position), independently of the number of ranks.
        Each rank contributes the drawn nodes that it holds, and all ranks encode the same nodes.
        """
        sizes = self.dist.counts(len(nodes.features))
        total, offset = sum(sizes), sum(sizes[: self.dist.rank])
        if not total:
            return None
        # Drawn by seed and update from the nodes of all ranks, so that the number of ranks does not matter.
        picks = generator(self.config.seed, purpose, self.updates).choice(total, wanted, replace=total < wanted)
        local = torch.from_numpy(picks).to(nodes.features.device, non_blocking=True) - offset
        mine = (local >= 0) & (local < len(nodes.features))
        order = torch.argsort(nodes.episode, stable=True)
        drawn = nodes.features.new_zeros(wanted, nodes.features.shape[1])
        drawn[mine] = nodes.features[order[local[mine]]]
        self.tokenizer.eval()
        encoded = self.tokenizer.encode(self.dist.sum(drawn))
        self.tokenizer.train()
        return encoded
