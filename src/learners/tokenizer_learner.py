"""Stage 1: trains the tokenizer (VQ-VAE, van den Oord et al. 2017, arXiv:1711.00937) on fully observed graphs.

A sample is the graph of one living agent at one step. With x the nodes, z their encodings, e their codes, y the decoded
features and sg = "no gradient", its loss is

    mean over the features of present nodes of (y - x)^2  +  commitment * mean over present nodes and E of (z - sg(e))^2

and the loss of a batch is the mean over the samples of all ranks. The paper's third term, which pulls codes towards
encodings, is replaced by its EMA update of the codebook (`Tokenizer.move`), fed with the sums of all ranks.
Shapes: P nodes, D features, E code dimensions, K codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.graph_metrics import node_stats, perplexity_stats
from omagd.learners.pretraining import GraphLearner, even_parts
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, merge
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.tokenizer import CodeSums, Tokenizer
from omagd.modules.ops import autocast_bf16
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
            of its episode in the sample as drawn. n_graphs: number of graphs.
    """

    features: Tensor
    position: Tensor
    graph: Tensor
    episode: Tensor
    n_graphs: int

    def parts(self, size: int) -> list[Nodes]:
        """Return these nodes in parts of about `size` graphs, at least one part."""
        parts = even_parts(self.n_graphs, size)
        return [self] if len(parts) == 1 else [self._part(part.start, part.stop) for part in parts]

    def _part(self, first: int, end: int) -> Nodes:
        """Return the graphs `first` to `end`."""
        ends = torch.searchsorted(self.graph, torch.tensor([first, end], device=self.graph.device))
        cut = slice(*ends.tolist())
        return Nodes(self.features[cut], self.position[cut], self.graph[cut] - first, self.episode[cut], end - first)


class TokenizerLoss(LossModule):
    """The loss at the top of this file, summed over graphs.

    Args:
        tokenizer: trained. bf16: whether training multiplies in bf16.
    """

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
        error = ((out.decoded - nodes.features.to(real.dtype)).square() * real).sum(-1)
        commitment = (out.encoded - out.code.detach()).square().mean(-1)
        # Mean within each graph, then the sum over graphs: a node counts by its share of its own graph.
        mse = (error / self._per_graph(nodes, real.sum(-1))).sum()
        stay = (commitment / self._per_graph(nodes, torch.ones_like(error))).sum()
        # VQ-VAE, eq. 3, without its second term, which the moving averages of the codebook replace.
        loss = mse + tokenizer.config.commitment * stay
        n_graphs = torch.as_tensor(float(nodes.n_graphs), device=loss.device)
        sums = tokenizer.sums(out.encoded, out.ids)
        stats = {
            "graph_loss": (loss.detach(), n_graphs),
            "commitment": (stay.detach(), n_graphs),
            CODE_SUMS: (sums.totals, sums.counts),
            **node_stats(nodes.features, out.decoded.detach(), nodes.position, tokenizer, detailed=not self.training),
        }
        return loss, stats

    @staticmethod
    def _per_graph(nodes: Nodes, weight: Tensor) -> Tensor:
        """Return for each node the sum of `weight` [P] over its graph, [P]."""
        total = weight.new_zeros(nodes.n_graphs).index_add_(0, nodes.graph, weight)
        return total[nodes.graph]


class TokenizerLearner(GraphLearner):
    """Trains a tokenizer in place, on one rank or several."""

    best_metric: ClassVar[str] = "mse"  # held-out, lower is better

    def __init__(self, tokenizer: Tokenizer, config: Config, info: EnvInfo, dist: Dist) -> None:
        loss = TokenizerLoss(tokenizer, config.precision == "bf16")
        super().__init__("tokenizer", tokenizer, loss, config, info, dist)
        self.tokenizer = tokenizer
        self._started = False

    def update(self, batch: PackedBatch) -> Stats:
        """Take an optimizer step on this rank's batch, then update the codebook by the assignments of all ranks."""
        nodes = self.sample(batch)
        self._loss.train()
        if not self._started:
            self._start_codebook(nodes)
        parts = nodes.parts(self.config.graph_frames_at_once)
        result = self._step(torch.tensor(nodes.n_graphs), *((part,) for part in parts))
        self.updates += 1
        stats = dict(result.stats)
        total, count = stats.pop(CODE_SUMS)
        # Sums of all ranks: every rank moves the codebook alike.
        sums = CodeSums(self.dist.sum(count), self.dist.sum(total))
        if result.stepped:
            self.tokenizer.move(sums, result.finite)
            self._revive_if_due(nodes, result.finite)
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
        none = torch.zeros_like(self.tokenizer.cluster_size)
        _, used = stats.pop(CODE_SUMS, (none, none))
        used = self.dist.sum(used.to(none.dtype))
        return {**stats, **perplexity_stats(used)} if used.any() else stats

    def sample(self, batch: PackedBatch) -> Nodes:
        """Return the nodes of `batch` to train on: present nodes of living observers at steps that happened."""
        full = batch["full_obs"]
        # A dead observer's view is all zeros, and a closing row has no step: neither is a sample.
        counts = alive(full) & batch.valid_mask[:, None]
        episode = torch.tensor(batch.sample_index)[batch.packing.episode].to(full.device, non_blocking=True)
        episode = episode[:, None].expand_as(counts)[counts]
        graphs = obs_to_nodes(full[counts], self.layout)
        # A node of zeros is a dead unit: it is never encoded, and moves no code.
        present = ~unseen(graphs)
        graph, position = torch.nonzero(present, as_tuple=True)
        return Nodes(graphs[present], position, graph, episode[graph], len(graphs))

    def _start_codebook(self, nodes: Nodes) -> None:
        """Initialise the codebook with encodings of the first batch, unless that has been done."""
        self._started = bool(self.tokenizer.ready)
        if self._started:
            return
        codes = torch.arange(self.tokenizer.n_codes, device=self.dist.device)
        drawn = self._draw(nodes, len(codes), "codebook")
        if drawn is not None:
            self.tokenizer.place(codes, drawn, 1.0)
            self.tokenizer.ready.fill_(True)

    def _revive_if_due(self, nodes: Nodes, finite: Tensor) -> None:
        """Every `revive_interval` updates, move dead codes to encodings of this batch, if the update was `finite`."""
        interval, last = self.tokenizer.config.revive_interval, (1 - QUIET_SHARE) * self.config.graph_pretrain_epochs
        if not interval or self.updates % interval or self.updates > last:
            return
        dead = self.tokenizer.dead()  # the same on all ranks
        if len(dead):
            drawn = self._draw(nodes, len(dead), "revive")
            if drawn is not None:
                self.tokenizer.place(dead, drawn, self.tokenizer.cluster_size.mean(), finite)

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
