"""Stage 2 with `kind: tracker`: trains the predictor that tracks (modules/graph_reconstructers/tracker.py).

Over the M missing nodes of all ranks, with features y, predicted mean and variance v = s², and dead_m in {0, 1}, which
only training reads (from `full_obs`):

    sum of w_m × ((1 - dead_m) mean over features of (e² / sg(s) + sg(s) (sg(e)² / v + log v)) + BCE(p(dead), dead_m))
    / sum of w_m,                                                      e = y - mean, sg: no gradient

The mean has the gradient of the likelihood weighted by s (twice the β-NLL of Seitzer et al. 2022, arXiv:2203.09168,
β = ½), which does not neglect what is hard to predict; the variance learns from the same state of the network without
changing it. w_m is 1 for the dead. For the living of class of age c it is proportional to 1 / sqrt(p_c), with mean 1
over the living, where p_c, at least `RAREST`, is the share of the class among living missing nodes so far, stages 2 and
3 together: units seen a moment ago are rare and must count. The learning rate falls from `graph_lr` to a fiftieth along
a half cosine over `graph_pretrain_epochs`.
Shapes: S packed rows, n agents, N nodes, D features, M missing nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners import tracker_fitting
from omagd.learners.graph_metrics import feature_error, mean_of
from omagd.learners.pretraining import GraphLearner
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, merge
from omagd.learners.tracker_samples import Sample, sample_of
from omagd.modules.graph_reconstructers.belief import Belief
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.graph_reconstructers.tracker import N_CLASSES, Output, Tracker
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch

RAREST = 0.002  # smallest share of a class, so that its weight stays finite
FRAMES = 4  # a frame takes about a quarter of the memory that one of `graph_frames_at_once` takes in other predictors
LEAST_LR = 0.02


class TrackerLoss(LossModule):
    """The loss at the top of this file, not yet divided by the sum of weights.

    Args:
        tracker: trained.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def forward(self, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the sum of weight × loss, and stats. Without a missing node it is 0 with gradients of 0."""
        return self.of(self.tracker(sample.memory, sample.packing), sample)

    def of(self, out: Output, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the same from what the tracker predicts."""
        dtype = out.base.dtype
        real = self.tracker.real.to(dtype)[sample.node - 1]
        error = (out.base + out.regressed + out.learned - sample.target.to(dtype)).square()
        spread = out.variance.detach().sqrt()
        likelihood = error / spread + (error.detach() / out.variance + out.variance.log()) * spread
        living = (~sample.dead).to(dtype)
        weight = sample.weight.to(dtype)
        each = living * (likelihood * real).sum(-1) / real.sum(-1)
        each = each + F.binary_cross_entropy_with_logits(out.dead_logit, 1 - living, reduction="none")
        loss = (weight * each).sum()
        with torch.no_grad():
            taken = self.tracker.taken_for_dead(out, sample.node, sample.ages).to(dtype)
            stats = {
                "graph_loss": (loss.detach(), sample.weight.sum()),
                "recall_absent": mean_of(taken, sample.dead),
                "recall_alive": mean_of(1 - taken, ~sample.dead),
            }
        return loss, stats


class TrackerLearner(GraphLearner):
    """Trains a tracker in place, on one rank or several.

    Args:
        predictor: the tracker. tokenizer: not read; trackers work on features.
    """

    in_parts = True
    frames_each = FRAMES
    best_metric = "error_all"  # feature error of all unseen nodes, the dead included, as the agent receives it

    def __init__(self, predictor: Tracker, tokenizer: Tokenizer, config: Config, info: EnvInfo, dist: Dist) -> None:
        self._loss: TrackerLoss
        super().__init__("predictor", predictor, TrackerLoss(predictor), config, info, dist)
        self.predictor = predictor
        self._lr = [group["lr"] for group in self.optimizer.param_groups]

    def update(self, batch: PackedBatch) -> Stats:
        """Take an optimizer step on this rank's batch."""
        parts = [self.sample(part) for part in self.parts(batch)]
        counts = torch.stack([torch.bincount(part.ages[~part.dead], minlength=N_CLASSES) for part in parts])
        counts = self.dist.sum(counts.sum(0).double())
        parts = [self._weighted(part, self.predictor.class_count + counts) for part in parts]
        share = min(1.0, self.updates / self.config.graph_pretrain_epochs)
        for group, lr in zip(self.optimizer.param_groups, self._lr, strict=True):
            group["lr"] = lr * max(LEAST_LR, 0.5 * (1 + math.cos(math.pi * share)))
        self._loss.train()
        weight = torch.stack([part.weight.double().sum() for part in parts]).sum()
        result = self._step(weight, *((part,) for part in parts))
        self.predictor.class_count += torch.where(result.finite, counts, 0.0)
        self.updates += 1
        return {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped}

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return sums and counts over the unseen nodes of living observers on held-out episodes."""
        self._loss.eval()
        stats: Stats = {}
        for part in self.parts(batch):
            sample = self._weighted(self.sample(part), self.predictor.class_count)
            if len(sample.target):
                out = self.predictor(sample.memory, sample.packing)
                stats = merge(stats, {**self._loss.of(out, sample)[1], **self._errors(out, sample)})
        return stats

    @torch.no_grad()
    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each as the agent receives it."""
        self._loss.eval()
        sample = self.sample(batch)
        out = self.predictor(sample.memory, sample.packing)
        return sample.memory.missing, self.predictor.belief(out, sample.memory.age, sample.memory.missing)

    def begin(self, batches: Callable[[], Iterable[PackedBatch]]) -> None:
        """Set the means and scales of features, and the linear part to ridge regression; called by all ranks.

        batches: yields this rank's training episodes, each time that it is called.
        """
        tracker_fitting.fit_scale(self.predictor, batches(), self.layout, self.dist)
        tracker_fitting.fit_regression(self.predictor, batches, self.layout, self.dist)

    def calibrate(self, batches: Iterable[PackedBatch]) -> None:
        """Choose the gains and the thresholds of `taken for dead` on validation episodes; called by all ranks."""
        self._loss.eval()
        samples = (self.sample(part) for batch in batches for part in self.parts(batch))
        tracker_fitting.calibrate(self.predictor, samples, self.dist)

    def sample(self, batch: PackedBatch) -> Sample:
        """Return what the loss reads, with weights of 1."""
        return sample_of(batch, self.layout)

    def _weighted(self, sample: Sample, counts: Tensor) -> Sample:
        """Return the sample with weights by class of age; counts: [6], living missing nodes of each class."""
        share = (counts / counts.sum().clamp(min=1)).clamp(min=RAREST)
        by_age = share.rsqrt() / (share.rsqrt() * counts).sum().clamp(min=1e-9) * counts.sum().clamp(min=1)
        by_age = by_age if bool(counts.sum() > 0) else torch.ones_like(by_age)
        weight = torch.where(sample.dead, 1.0, by_age[sample.ages]).to(sample.weight.dtype)
        return replace(sample, weight=weight)

    def _errors(self, out: Output, sample: Sample) -> Stats:
        """Return the feature error of all missing nodes and of the living ones, and the share of the dead."""
        belief = self.predictor.belief(out, sample.memory.age, sample.memory.missing)
        error = feature_error(belief.features, sample.target, self.predictor.real[sample.node - 1])
        return {
            "error_all": mean_of(error),
            "error_alive": mean_of(error, ~sample.dead),
            "absent_share": mean_of(sample.dead.to(error.dtype)),
        }
