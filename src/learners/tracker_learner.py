"""Stage 2 with `kind: tracker`: trains the predictor that tracks (modules/graph_reconstructers/tracker.py).

Over the M missing nodes of all ranks, with features y, predicted mean and variance v = s², and dead_m in {0, 1}, which
only training reads (from `full_obs`):

    sum of w_m × ((1 - dead_m) mean over features of (e² / sg(s) + sg(s) (sg(e)² / v + log v)) + BCE(p(dead), dead_m))
    / sum of w_m,                                                      e = y - mean, sg: no gradient

The mean has the gradient of the likelihood weighted by s (Seitzer et al. 2022, arXiv:2203.09168, β = ½), which does not
neglect what is hard to predict; the variance learns from the same state of the network without changing it. w_m is 1
for the dead and the root of the inverse share of the node's class of age among living missing nodes so far: units seen
a moment ago are rare and must count. The learning rate falls from
`graph_lr` to a fiftieth along a half cosine over `graph_pretrain_epochs`.
Shapes: S packed rows, n agents, N nodes, D features, M missing nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import last_actions
from omagd.learners.belief_cases import bounded
from omagd.learners.graph_metrics import feature_error, mean_of
from omagd.learners.pretraining import GraphLearner
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, merge
from omagd.modules.graph_reconstructers.belief import Belief
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.graph_reconstructers.tracker import AGES, UNBOUNDED, Memory, Output, Tracker, age_class
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, Packing

RAREST = 0.002  # smallest share of a class, so that its weight stays finite
FRAMES = 4  # as many frames as `graph_frames_at_once` holds tokens of the masked predictor take less memory
MISSED = 0.035  # of the dead seen before that may be missed
TAKEN = 0.001, 0.03  # of the living that may be taken for dead: never seen, seen before
BINS, LARGEST = 4800, 12.0  # bins of the logit of being dead, and its largest size, for choosing thresholds
GAINS = (1.0, 0.75, 0.5, 0.25, 0.0)
PAIRS = sorted(((f, g) for f in GAINS for g in GAINS), key=(1.0, 0.0).__ne__)  # the regression alone is the first
MARGIN = 1.0  # standard errors by which a pair must be better than the first
LEAST_LR, LEAST_SCALE = 0.02, 1e-3
COMMON = (100.0, 30.0, 10.0, 300.0, 1000.0)  # penalties of the common maps of the regression
DEVIATION = (1e12, 10000.0, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0)  # of deviations from them; the first: none
JUDGED = 5  # about every fifth training episode chooses the penalties


@dataclass(frozen=True)
class Sample:
    """Whole episodes with what is true of their missing nodes.

    Attributes:
        memory, packing: inputs. target: [M, D], zeros for the dead. dead: [M] bool. ages: [M], class of age.
        weight: [M], of each node in the loss.
    """

    memory: Memory
    packing: Packing
    target: Tensor
    dead: Tensor
    ages: Tensor
    weight: Tensor


def memory_of(batch: PackedBatch, nodes: Tensor, seen: Tensor, missing: Tensor) -> Memory:
    """Return what agents know at each row of packed episodes; nodes [S, n, N, D], seen and missing [S, n, N] bool."""
    packing, (n_agents, n_nodes) = batch.packing, seen.shape[1:]
    step = packing.step.to(nodes.device)
    at = packing.pad(torch.where(seen, step[:, None, None], -1), -1).cummax(dim=1).values
    last_step = packing.pack(at)
    sizes = torch.tensor(packing.batch_sizes)
    starts = (sizes.cumsum(0) - sizes).to(nodes.device)
    rows = starts[last_step.clamp(min=0)] + packing.episode.to(nodes.device)[:, None, None]
    agents, units = torch.arange(n_agents, device=nodes.device)[:, None], torch.arange(n_nodes, device=nodes.device)
    never = last_step < 0
    last = torch.where(never[..., None], 0.0, nodes[rows, agents, units])
    age = torch.where(never, -1, step[:, None, None] - last_step)
    own = nodes[:, :, 0]
    before = starts[(step - 1).clamp(min=0)] + packing.episode.to(nodes.device)  # at the start the row itself
    return Memory(last, age, last_actions(batch["actions"], packing), own - own[before], step, missing)


class TrackerLoss(LossModule):
    """The loss at the top of this file, not yet divided by the sum of weights.

    Args:
        tracker: trained. bf16: whether training multiplies in bf16; evaluation never does.
    """

    def __init__(self, tracker: Tracker, bf16: bool = False) -> None:
        super().__init__()
        self.tracker, self.bf16 = tracker, bf16

    def forward(self, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the sum of weight × loss, and stats. Without a missing node it is 0 with gradients of 0."""
        out = self.tracker(sample.memory, sample.packing, self.bf16 and self.training)
        where = torch.nonzero(sample.memory.missing)[:, 2]
        kind = out.base.dtype
        real = self.tracker.real.to(kind)[where - 1]
        error = (out.base + out.regressed + out.learned - sample.target.to(kind)).square()
        spread = out.variance.detach().sqrt()
        likelihood = error / spread + (error.detach() / out.variance + out.variance.log()) * spread
        living = (~sample.dead).to(kind)
        weight = sample.weight.to(kind)
        each = living * (likelihood * real).sum(-1) / real.sum(-1)
        each = each + F.binary_cross_entropy_with_logits(out.dead, 1 - living, reduction="none")
        loss = (weight * each).sum()
        with torch.no_grad():
            taken = self.tracker.belief(out, sample.memory).taken_for_dead.to(kind)
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
        loss = TrackerLoss(predictor, config.precision == "bf16")
        super().__init__("predictor", predictor, loss, config, info, dist)
        self.predictor = predictor
        self._lr = [group["lr"] for group in self.optimizer.param_groups]

    def update(self, batch: PackedBatch) -> Stats:
        """Take an optimizer step on this rank's batch."""
        parts = [self.sample(part) for part in self.parts(batch)]
        counts = torch.stack([torch.bincount(part.ages[~part.dead], minlength=len(AGES) + 1) for part in parts])
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
                stats = merge(stats, {**self._loss(sample)[1], **self._errors(sample)})
        return stats

    @torch.no_grad()
    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each as the agent receives it."""
        self._loss.eval()
        sample = self.sample(batch)
        return sample.memory.missing, self._belief(sample)

    @torch.no_grad()
    def calibrate(self, batches: Iterable[PackedBatch]) -> None:
        """Choose the gains and the thresholds of `taken for dead`, for each type, on validation episodes of all ranks.

        The gains minimise the squared error of the living; others than the regression alone must be better by
        `MARGIN`. The threshold of units seen before is the highest at which at most `MISSED` of the dead are missed.
        Units never seen are nearly always alive: theirs is 1/2. Both are raised until at most `TAKEN` of the living are
        taken for dead.
        """
        self._loss.eval()
        tracker, device = self.predictor, self.dist.device
        kinds, classes = len(tracker.gain[0]), len(AGES) + 1
        shape = 2, len(PAIRS), *tracker.gain.shape[1:]  # by how much the error is larger than the first pair's; squares
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        bins = torch.zeros(kinds, classes, 2, BINS, dtype=torch.float64, device=device)  # type, age, dead
        for part in (part for batch in batches for part in self.parts(batch)):
            sample = self.sample(part)
            out = tracker(sample.memory, sample.packing)
            kind = tracker.types[torch.nonzero(sample.memory.missing)[:, 2]]
            sums += self._errors_of_pairs(sample, out, kind)
            place = ((out.dead.double().clamp(-LARGEST, LARGEST) + LARGEST) / (2 * LARGEST) * BINS).long()
            group = (kind * classes + sample.ages) * 2 + sample.dead.long()
            bins += torch.bincount(group * BINS + place.clamp(max=BINS - 1), minlength=bins.numel()).view(bins.shape)
        sums, bins = self.dist.sum(sums), self.dist.sum(bins)
        tracker.gain.copy_(_gain(sums, bins[:, :, 0].sum(-1)))
        tracker.threshold.copy_(_threshold(torch.stack([bins[:, 0], bins[:, 1:].sum(1)], dim=1)))

    def _errors_of_pairs(self, sample: Sample, out: Output, kind: Tensor) -> Tensor:
        """Return by how much the squared errors of living units, of the types [M], are larger than the first pair's.

        Sums of that and of its square by type, class of age and feature, [2, pairs, 3, 6, D].
        """
        tracker, living = self.predictor, ~sample.dead
        node = torch.nonzero(sample.memory.missing)[living, 2]
        out = Output(*(value[living] for value in out))
        target, place = sample.target[living], (kind[living], sample.ages[living])
        sums = torch.zeros(2, len(PAIRS), *tracker.gain.shape[1:], dtype=torch.float64, device=target.device)
        first: Tensor | None = None
        for i, pair in enumerate(PAIRS):
            error = (tracker.mean_of(out, node, out.base.new_tensor(pair)[:, None, None]) - target).square().double()
            first = error if first is None else first
            for total, value in zip(sums[:, i], (error - first, (error - first).square()), strict=True):
                total.index_put_(place, value, accumulate=True)
        return sums

    @torch.no_grad()
    def sample(self, batch: PackedBatch) -> Sample:
        """Return what the loss reads, with weights of 1. Of dead observers and closing rows no node is missing."""
        nodes, full = obs_to_nodes(batch["obs"], self.layout), obs_to_nodes(batch["full_obs"], self.layout)
        living = alive(batch["obs"])[..., None]
        hidden = unseen(nodes)
        missing = hidden & living & batch.valid_mask[:, None, None]
        memory = memory_of(batch, nodes, ~hidden & living, missing)
        target = full[missing]
        dead = (target == 0).all(-1)
        ages = age_class(memory.age[missing])
        return Sample(memory, batch.packing, target, dead, ages, torch.ones_like(target[:, 0]))

    @torch.no_grad()
    def begin(self, batches: Callable[[], Iterable[PackedBatch]]) -> None:
        """Set the means and scales of features, and the linear part to ridge regression; called by all ranks.

        For each unit: what is left of a living unit's features after its base, in standard deviations, on everything
        that the agent knows. There is a map for units never seen, and one for units seen before with a deviation for
        each class of age. Each has a penalty of its own for allies and for enemies, that with the smallest error on
        about every `JUDGED`th episode when fitted on the others: classes with few cases keep to the common map.

        batches: yields this rank's training episodes, each time that it is called.
        """
        self._set_scale(batches())
        types = self.predictor.types[1:]
        weights = torch.zeros(len(types), len(AGES) + 1, self.predictor.n_known + 1, self.layout.node_dim).double()
        for kind in torch.unique(types):  # one after the other: the sums are large
            units = (types == kind).nonzero().flatten()
            weights[units.cpu()] = _ridge(self._gram(batches(), units + 1), weights.shape[2]).cpu()
        self.predictor.set_straight(weights)

    def _gram(self, batches: Iterable[PackedBatch], units: Tensor) -> Tensor:
        """Return the sums [2, U, 6, size, size + D] of the regressions for units [U], and those of what judges them."""
        tracker, dim, size = self.predictor, self.layout.node_dim, self.predictor.n_known + 1
        gram = torch.zeros(2, len(units), len(AGES) + 1, size, size + dim, dtype=torch.float64, device=units.device)
        for batch in bounded(batches):
            sample = self.sample(batch)
            memory, kind = sample.memory, tracker.scale.dtype
            still = torch.zeros((*memory.age.shape, 2), dtype=kind, device=batch.device)
            _, base, known = tracker.encode(memory, still)
            known = F.pad(known, (0, 1), value=1.0).double()
            row, agent, node = torch.nonzero(memory.missing).unbind(1)
            left = ((sample.target - base[row, agent, node - 1]) / tracker.scale[node]).double()
            judges = _judges(batch)[row]
            group = (judges.long() * self.layout.n_nodes + node) * (len(AGES) + 1) + sample.ages
            counts = ~sample.dead & torch.isin(node, units)
            for one in torch.unique(group[counts]).tolist():
                chosen = (group == one) & counts
                x, (which, age) = known[row[chosen], agent[chosen]], divmod(one, len(AGES) + 1)
                judge, at = divmod(which, self.layout.n_nodes)
                gram[judge, units.tolist().index(at), age] += x.t() @ torch.cat([x, left[chosen]], dim=1)
        return self.dist.sum(gram)

    def _set_scale(self, batches: Iterable[PackedBatch]) -> None:
        """Set mean, standard deviation and bounds of the features of living units by type, over all ranks."""
        tracker, dim = self.predictor, self.layout.node_dim
        sums = torch.zeros(3, 2 * dim + 1, dtype=torch.float64, device=self.dist.device)
        largest = torch.full((3, 2 * dim), -torch.inf, device=self.dist.device)  # of the negative values, of the values
        for batch in batches:
            full = obs_to_nodes(batch["full_obs"], self.layout)[batch.valid_mask]
            present = ~unseen(full) & alive(batch["obs"])[batch.valid_mask][..., None]
            values = full[present].double()
            rows = torch.cat([values, values.square(), torch.ones_like(values[:, :1])], dim=1)
            types = tracker.types.expand(present.shape)[present]
            sums.index_add_(0, types, rows)
            both = torch.cat([-values, values], dim=1).to(largest)
            largest.scatter_reduce_(0, types[:, None].expand_as(both), both, "amax")
        total, squares, count = self.dist.sum(sums).split([dim, dim, 1], dim=1)
        mean = total / count.clamp(min=1)
        spread = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
        most = torch.from_numpy(np.stack(self.dist.gather(largest.cpu().numpy())).max(0)).to(largest)
        most = torch.where(most.isfinite(), most, UNBOUNDED)  # of a type that was never there
        low, high = most[tracker.types].split(dim, dim=1)
        tracker.bounds.copy_(torch.stack([-low, high]))
        tracker.mean.copy_(mean[tracker.types])
        tracker.scale.copy_(torch.where(spread < LEAST_SCALE, 1.0, spread)[tracker.types])

    def _weighted(self, sample: Sample, counts: Tensor) -> Sample:
        """Return the sample with weights by class of age; counts: [6], living missing nodes of each class."""
        share = (counts / counts.sum().clamp(min=1)).clamp(min=RAREST)
        by_age = share.rsqrt() / (share.rsqrt() * counts).sum().clamp(min=1e-9) * counts.sum().clamp(min=1)
        by_age = by_age if bool(counts.sum() > 0) else torch.ones_like(by_age)
        weight = torch.where(sample.dead, 1.0, by_age[sample.ages]).to(sample.weight.dtype)
        return replace(sample, weight=weight)

    def _belief(self, sample: Sample) -> Belief:
        out = self.predictor(sample.memory, sample.packing)
        return self.predictor.belief(out, sample.memory)

    def _errors(self, sample: Sample) -> Stats:
        """Return the feature error of all missing nodes and of the living ones, and the share of the dead."""
        belief = self._belief(sample)
        where = torch.nonzero(sample.memory.missing)[:, 2]
        error = feature_error(belief.features, sample.target, self.predictor.real[where - 1])
        return {
            "error_all": mean_of(error),
            "error_alive": mean_of(error, ~sample.dead),
            "absent_share": mean_of(sample.dead.to(error.dtype)),
        }


def _gain(sums: Tensor, count: Tensor) -> Tensor:
    """Return the gains [2, 3, 6, D] from the sums of `_errors_of_pairs` and the number [3, 6] of living units."""
    mean, square = sums / count[:, :, None].clamp(min=1)
    error = ((square - mean.square()).clamp(min=0) / count[:, :, None].clamp(min=1)).sqrt()
    pairs = torch.tensor(PAIRS, device=sums.device)
    return pairs[(mean + MARGIN * error).argmin(0)].movedim(-1, 0)


def _threshold(bins: Tensor) -> Tensor:
    """Return the thresholds [3, 2] from the numbers of units by type, seen before, dead and bin, [3, 2, 2, BINS]."""
    below = bins.cumsum(-1)  # the end of each bin
    total = below[..., -1:]
    allowed = total[:, :, 0] * (1 - total.new_tensor(TAKEN)[:, None])
    ends = 1 + (below[:, :, 0] < allowed).sum(-1)  # of the first bin with so few of the living above
    recalls = (below[:, 1, 1] <= MISSED * total[:, 1, 1]).sum(-1)  # of the last bin with so few of the dead below
    ends[:, 1] = torch.maximum(ends[:, 1], recalls)
    threshold = (2 * LARGEST * ends.double() / BINS - LARGEST).sigmoid()
    threshold[:, 0] = threshold[:, 0].clamp(min=0.5)
    return threshold


def _judges(batch: PackedBatch) -> Tensor:
    """Return which rows [S] are of episodes that choose the penalties: by their actions, the same on any rank."""
    episode, step = batch.packing.episode.to(batch.device), batch.packing.step.to(batch.device)
    digest = torch.zeros(batch.packing.n_episodes, dtype=torch.int64, device=batch.device)
    digest.index_add_(0, episode, batch["actions"].long().sum(-1) * (step + 1))
    return (digest % JUDGED == JUDGED - 1)[episode]


def _ridge(gram: Tensor, size: int) -> Tensor:
    """Return the maps [U, 6, size, D] of units of one type from the sums [2, U, 6, size, size + D] of `_gram`."""
    common = torch.stack([gram[:, :, 0], gram[:, :, 1:].sum(2)], dim=2)
    around = common.new_zeros(*common.shape[1:4], gram.shape[-1] - size)
    maps, judged = _judged(common, around, around, COMMON, size)
    seen, tried = (value[:, 1:].expand(-1, len(AGES), -1, -1) for value in (maps, judged))
    deviating, _ = _judged(gram[:, :, 1:], seen, tried, DEVIATION, size)
    return torch.cat([maps[:, :1], deviating], dim=1)


def _judged(
    gram: Tensor, around: Tensor, tried: Tensor, penalties: tuple[float, ...], size: int
) -> tuple[Tensor, Tensor]:
    """Return maps [U, C, size, D] that deviate from `around` under the best penalties, and those without the judges.

    gram: [2, U, C, size, size + D]. tried: what the maps without the judges deviate from. penalties: the one with the
    smallest error on the judges, summed over units, is taken for each of C.
    """
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)

    def solved(sums: Tensor, start: Tensor, penalty: Tensor) -> Tensor:
        inputs = sums[..., :size]
        return start + torch.linalg.solve(inputs + penalty * eye, sums[..., size:] - inputs @ start)

    inputs, targets = gram[1].split([size, gram.shape[-1] - size], dim=-1)
    errors = []
    for penalty in gram.new_tensor(penalties):
        maps = solved(gram[0], tried, penalty)
        errors.append((maps * (inputs @ maps - 2 * targets)).sum((0, 2, 3)))
    best = gram.new_tensor(penalties)[torch.stack(errors).argmin(0)][:, None, None]
    return solved(gram.sum(0), around, best), solved(gram[0], tried, best)
