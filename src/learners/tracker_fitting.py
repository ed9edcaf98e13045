"""What the tracker of stage 2 fits without gradients: scales of features, its regression, gains and thresholds.

Each function changes the tracker in place and is called by all ranks: they exchange sums, so any number of ranks fits
the same. Shapes: M missing nodes, U units, D features, 6 classes of age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.learners.belief_cases import bounded
from omagd.learners.tracker_samples import Sample, sample_of
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.tracker import AGES, N_CLASSES, UNBOUNDED, Output, Tracker
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch

LEAST_SCALE = 1e-3
# Penalties. Of equal errors the first wins, so it is the one where no episode is held out.
COMMON = (100.0, 30.0, 10.0, 300.0, 1000.0)  # of the shared models of the regression
DEVIATION = (1e12, 10000.0, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0)  # of the offsets of an age; the first: no offset
HELD_OUT = 5  # about every fifth training episode chooses the penalties
MISSED = 0.035  # of the dead seen before that may be missed
TAKEN = 0.001, 0.03  # of the living that may be taken for dead: never seen, seen before
BINS, LARGEST = 4800, 12.0  # bins of the logit of being dead, and its largest size, for choosing thresholds
GAINS = (1.0, 0.75, 0.5, 0.25, 0.0)
FIRST = 1.0, 0.0  # the regression alone
PAIRS = [FIRST, *(pair for pair in product(GAINS, GAINS) if pair != FIRST)]
MARGIN = 1.0  # standard errors by which a pair must be better than the first


@torch.no_grad()
def fit_scale(tracker: Tracker, batches: Iterable[PackedBatch], layout: EntityLayout, dist: Dist) -> None:
    """Set mean, standard deviation and bounds of the features of living units by type."""
    dim = layout.node_dim
    sums = torch.zeros(3, 2 * dim + 1, dtype=torch.float64, device=dist.device)
    largest = torch.full((3, 2 * dim), -torch.inf, device=dist.device)  # of the negative values, of the values
    for batch in batches:
        full = obs_to_nodes(batch["full_obs"], layout)[batch.valid_mask]
        present = ~unseen(full) & alive(batch["obs"])[batch.valid_mask][..., None]
        values = full[present].double()
        rows = torch.cat([values, values.square(), torch.ones_like(values[:, :1])], dim=1)
        types = tracker.types.expand(present.shape)[present]
        sums.index_add_(0, types, rows)
        both = torch.cat([-values, values], dim=1).to(largest)
        largest.scatter_reduce_(0, types[:, None].expand_as(both), both, "amax")
    total, squares, count = dist.sum(sums).split([dim, dim, 1], dim=1)
    mean = total / count.clamp(min=1)
    spread = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
    most = torch.from_numpy(np.stack(dist.gather(largest.cpu().numpy())).max(0)).to(largest)
    most = torch.where(most.isfinite(), most, UNBOUNDED)  # of a type that was never there
    low, high = most[tracker.types].split(dim, dim=1)
    tracker.bounds.copy_(torch.stack([-low, high]))
    tracker.mean.copy_(mean[tracker.types])
    tracker.scale.copy_(torch.where(spread < LEAST_SCALE, 1.0, spread)[tracker.types])


@torch.no_grad()
def fit_regression(
    tracker: Tracker, batches: Callable[[], Iterable[PackedBatch]], layout: EntityLayout, dist: Dist
) -> None:
    """Set the linear part to ridge regression, after `fit_scale`.

    For each unit: what is left of a living unit's features after its base (without drift), in standard deviations, on
    everything that the agent knows. There is a model for units never seen, and one for units seen before with an offset
    for each class of age. Each has a penalty of its own for allies and for enemies, that with the smallest error on
    about every `HELD_OUT`th episode when fitted on the others: classes with few cases keep to the shared model.

    batches: yields this rank's training episodes, each time that it is called.
    """
    types = tracker.types[1:]
    weights = torch.zeros(len(types), N_CLASSES, tracker.n_known + 1, layout.node_dim).double()
    for kind in torch.unique(types):  # one after the other: the sums are large
        units = (types == kind).nonzero().flatten()
        weights[units.cpu()] = _ridge(_gram(tracker, batches(), layout, units + 1, dist), weights.shape[2]).cpu()
    tracker.set_linear_part(weights)


def _gram(tracker: Tracker, batches: Iterable[PackedBatch], layout: EntityLayout, units: Tensor, dist: Dist) -> Tensor:
    """Return the sums [2, U, 6, size, size + D] of the regressions for units [U], and those of held-out episodes."""
    size, n_units = tracker.n_known + 1, len(units)
    gram = torch.zeros(2 * n_units * N_CLASSES, size, size + layout.node_dim, dtype=torch.float64, device=units.device)
    number = torch.full((layout.n_nodes,), -1, device=units.device)  # of a node among `units`
    number[units] = torch.arange(n_units, device=units.device)
    for batch in bounded(batches):
        sample = sample_of(batch, layout)
        memory = sample.memory
        row, agent, node = torch.nonzero(memory.missing).unbind(1)
        counted = ~sample.dead & (number[node] >= 0)
        row, agent, node, age = row[counted], agent[counted], node[counted], sample.ages[counted]
        # Without drift, as before training. With what `motion` has learned until a refresh, the error after the refresh
        # was 2 % larger (3s_vs_5z_sight5, .0091 and .0089): the network learns what differs.
        no_drift = torch.zeros((*memory.age.shape, 2), dtype=tracker.scale.dtype, device=batch.device)
        known = tracker.look(memory, no_drift)
        left = (sample.target[counted] - known.base[row, agent, node]) / tracker.scale[node]
        group = (_held_out(batch)[row] * n_units + number[node]) * N_CLASSES + age
        order = group.argsort(stable=True)  # rows of a group stand together, so that each takes one product
        x = F.pad(known.features.double(), (0, 1), value=1.0)[row[order], agent[order]]
        rows = torch.cat([x, left[order].double()], dim=1)
        counts = torch.bincount(group, minlength=len(gram)).tolist()
        for total, part in zip(gram, rows.split(counts), strict=True):
            if len(part):
                total += part[:, :size].t() @ part
    return dist.sum(gram.view(2, n_units, N_CLASSES, *gram.shape[1:]))


def _held_out(batch: PackedBatch) -> Tensor:
    """Return which rows [S] are of episodes that choose the penalties: by their actions, the same on any rank."""
    episode, step = batch.packing.episode.to(batch.device), batch.packing.step.to(batch.device)
    digest = torch.zeros(batch.packing.n_episodes, dtype=torch.int64, device=batch.device)
    digest.index_add_(0, episode, batch["actions"].long().sum(-1) * (step + 1))
    return (digest % HELD_OUT == HELD_OUT - 1)[episode]


def _ridge(gram: Tensor, size: int) -> Tensor:
    """Return the models [U, 6, size, D] of units of one type from the sums [2, U, 6, size, size + D] of `_gram`."""
    common = torch.stack([gram[:, :, 0], gram[:, :, 1:].sum(2)], dim=2)
    zeros = common.new_zeros(*common.shape[1:4], gram.shape[-1] - size)
    models, models_train = _with_best_penalty(common, zeros, zeros, COMMON, size)
    center, center_train = (value[:, 1:].expand(-1, len(AGES), -1, -1) for value in (models, models_train))
    deviating, _ = _with_best_penalty(gram[:, :, 1:], center, center_train, DEVIATION, size)
    return torch.cat([models[:, :1], deviating], dim=1)


def _with_best_penalty(
    gram: Tensor, center: Tensor, center_train: Tensor, penalties: tuple[float, ...], size: int
) -> tuple[Tensor, Tensor]:
    """Return models [U, C, size, D] that are drawn to `center`, fitted on all episodes, and on those not held out.

    A model B minimises the sum of |y - B'x|² plus a |B - C|², with the center C and a penalty a:
    B = C + (X'X + aI)⁻¹ (X'Y - X'X C). The last input is 1, and its weight is penalised too.

    gram: [2, U, C, size, size + D], the second of held-out episodes. center_train: the center without those episodes.
    penalties: the one with the smallest error on held-out episodes, summed over units, is taken for each of C.
    """
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)

    def solved(sums: Tensor, start: Tensor, penalty: Tensor) -> Tensor:
        inputs = sums[..., :size]
        return start + torch.linalg.solve(inputs + penalty * eye, sums[..., size:] - inputs @ start)

    inputs, targets = gram[1].split([size, gram.shape[-1] - size], dim=-1)
    errors = []
    for penalty in gram.new_tensor(penalties):
        models = solved(gram[0], center_train, penalty)
        errors.append((models * (inputs @ models - 2 * targets)).sum((0, 2, 3)))
    best = gram.new_tensor(penalties)[torch.stack(errors).argmin(0)][:, None, None]
    return solved(gram.sum(0), center, best), solved(gram[0], center_train, best)


@torch.no_grad()
def calibrate(tracker: Tracker, samples: Iterable[Sample], dist: Dist) -> None:
    """Choose the gains and the thresholds of `taken for dead`, for each type, on validation episodes of all ranks.

    The gains minimise the squared error of the living; others than the regression alone must be better by `MARGIN`. The
    threshold of units seen before is the highest at which at most `MISSED` of the dead are missed. Units never seen are
    nearly always alive: theirs is 1/2. Both are raised until at most `TAKEN` of the living are taken for dead.
    """
    n_types = len(tracker.gain[0])
    shape = 2, len(PAIRS), *tracker.gain.shape[1:]  # by how much the error is larger than the first pair's; squares
    sums = torch.zeros(shape, dtype=torch.float64, device=dist.device)
    bins = torch.zeros(n_types, N_CLASSES, 2, BINS, dtype=torch.float64, device=dist.device)  # type, age, dead
    for sample in samples:
        out = tracker(sample.memory, sample.packing)
        types = tracker.types[sample.node]
        sums += _errors_of_pairs(tracker, sample, out, types)
        place = ((out.dead_logit.double().clamp(-LARGEST, LARGEST) + LARGEST) / (2 * LARGEST) * BINS).long()
        group = (types * N_CLASSES + sample.ages) * 2 + sample.dead.long()
        bins += torch.bincount(group * BINS + place.clamp(max=BINS - 1), minlength=bins.numel()).view(bins.shape)
    sums, bins = dist.sum(sums), dist.sum(bins)
    tracker.gain.copy_(_gain(sums, bins[:, :, 0].sum(-1)))
    tracker.threshold.copy_(_threshold(torch.stack([bins[:, 0], bins[:, 1:].sum(1)], dim=1)))


def _errors_of_pairs(tracker: Tracker, sample: Sample, out: Output, types: Tensor) -> Tensor:
    """Return by how much the squared errors of living units, of the types [M], are larger than the first pair's.

    Sums of that and of its square by type, class of age and feature, [2, pairs, 3, 6, D].
    """
    living = ~sample.dead
    node = sample.node[living]
    out = Output(*(value[living] for value in out))
    target, place = sample.target[living], (types[living], sample.ages[living])
    sums = torch.zeros(2, len(PAIRS), *tracker.gain.shape[1:], dtype=torch.float64, device=target.device)
    first: Tensor | None = None
    for i, pair in enumerate(PAIRS):
        error = (tracker.mean_of(out, node, out.base.new_tensor(pair)[:, None, None]) - target).square().double()
        first = error if first is None else first
        for total, value in zip(sums[:, i], (error - first, (error - first).square()), strict=True):
            total.index_put_(place, value, accumulate=True)
    return sums


def _gain(sums: Tensor, count: Tensor) -> Tensor:
    """Return the gains [2, 3, 6, D] from the sums of `_errors_of_pairs` and the number [3, 6] of living units.

    The standard error takes cases for independent. Steps of an episode are alike, so it is too small.
    """
    mean, square = sums / count[:, :, None].clamp(min=1)
    error = ((square - mean.square()).clamp(min=0) / count[:, :, None].clamp(min=1)).sqrt()
    pairs = torch.tensor(PAIRS, device=sums.device)
    return pairs[(mean + MARGIN * error).argmin(0)].movedim(-1, 0)


def _threshold(bins: Tensor) -> Tensor:
    """Return the thresholds [3, 2] from the numbers of units by type, seen before, dead and bin, [3, 2, 2, BINS]."""
    below = bins.cumsum(-1)  # the end of each bin
    total = below[..., -1:]
    allowed = total[:, :, 0] * (1 - total.new_tensor(TAKEN)[:, None])
    end_bin = 1 + (below[:, :, 0] < allowed).sum(-1)  # the first with so few of the living above
    last_bin = (below[:, 1, 1] <= MISSED * total[:, 1, 1]).sum(-1)  # the last with so few of the dead below
    end_bin[:, 1] = torch.maximum(end_bin[:, 1], last_bin)
    threshold = (2 * LARGEST * end_bin.double() / BINS - LARGEST).sigmoid()
    threshold[:, 0] = threshold[:, 0].clamp(min=0.5)
    return threshold
