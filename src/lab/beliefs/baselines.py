"""Predictions of unseen units that need no network, beside which a predictor is judged on the same cases.

    zeros                what an agent without reconstruction reads
    slot_mean            mean of that node over living unseen units
    last_seen            features at the last sight, zeros where there was none
    last_seen_or_mean    features at the last sight, else `slot_mean`
    map_constant         mean of (agent, node, step); where few were seen, of (node, step), then `slot_mean`
    ridge                linear regression on the agent's history, one for each node (Hoerl & Kennard 1970), clipped to
                         what was there in training: a view unlike all others makes a linear map go anywhere

All are fitted on the living unseen units of the training episodes. The ridge penalty of each node is chosen on the
validation episodes. Only sums over episodes are kept, so memory does not grow with them, and ranks add up theirs.
The cases (`Cases`) are the nodes that living agents do not see, with truth and last sight.
Shapes: S packed rows, n agents, N nodes, D features, F frames (one agent's view), P inputs of the regression, M missing
nodes in the order of `torch.nonzero(missing)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.modules.graph_reconstructers.graphs import GraphTables, alive, feature_mask, obs_to_nodes
from omagd.modules.graph_reconstructers.predictor import last_seen_step
from omagd.modules.ops import add_at
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch

Batches = Callable[[], Iterable[PackedBatch]]
"""Gives the episodes of a purpose, in batches that fit in memory; may be called several times."""


@dataclass(frozen=True)
class Cases:
    """All missing nodes of a batch: unseen, not the agent itself, of a living observer.

    Attributes:
        missing: [S, n, N] bool. row, agent, node: [M] int64, place of each. step: [M], of the episode.
        age: [M] int64, steps since the node was last seen, 0: never. last: [M, D], features then, zeros: never.
        truth: [M, D], zeros for the dead. living: [M] bool. obs: [S, n, obs_dim], observations.
        sights, ages: [S, n, N, D] and [S, n, N], as `last` and `age`, of all nodes, the seen ones included.
    """

    missing: Tensor
    row: Tensor
    agent: Tensor
    node: Tensor
    step: Tensor
    age: Tensor
    last: Tensor
    truth: Tensor
    living: Tensor
    obs: Tensor
    sights: Tensor
    ages: Tensor

    def __len__(self) -> int:
        return len(self.row)


def cases_of(batch: PackedBatch, layout: EntityLayout) -> Cases:
    """Return the cases of a batch with `obs` and `full_obs`. A sight counts if it is from an earlier step."""
    obs, full = batch["obs"], obs_to_nodes(batch["full_obs"], layout)
    nodes, packing = obs_to_nodes(obs, layout), batch.packing
    seen, missing = (marks & batch.valid_mask[:, None, None] for marks in GraphTables(layout, obs.device).sight(obs))
    step = packing.step.to(obs.device)
    # A sight at this very step would give the answer away.
    last = last_seen_step(seen, packing)
    rows = packing.row(last, packing.episode[:, None, None])
    agents, places = (torch.arange(size, device=obs.device) for size in nodes.shape[1:3])
    sights = torch.where((last < 0)[..., None], 0.0, nodes[rows, agents[:, None], places])
    ages = torch.where(last < 0, 0, step[:, None, None] - last)
    row, agent, node = torch.nonzero(missing, as_tuple=True)
    at = row, agent, node
    living = full.any(-1)[at]
    return Cases(missing, *at, step[row], ages[at], sights[at], full[at], living, obs, sights, ages)


SIMPLE = ("zeros", "slot_mean", "last_seen", "last_seen_or_mean", "map_constant")
BASELINES = (*SIMPLE, "ridge")
LEAST = 5
"""Fewest samples of a mean of `map_constant`."""

CONSTANT = 1e-6
"""A feature of a node whose values in training differ by less is constant: it is no news, and is not counted."""

PENALTIES = tuple(10.0**power for power in range(-7, 2))
"""Penalties of the ridge, relative to standardised inputs and a mean squared error."""

LEAST_SPREAD = 1e-3
"""Standard deviation of an input (they are of order 1) up to which it is left out: its weight would be noise."""

FIT_OPERATIONS = 1e12
"""About how many multiplications the regressions may take; maps with many units use a part of the frames."""


@dataclass(frozen=True)
class Baselines:
    """Fitted baselines.

    Attributes:
        varies: [N, D] bool, features that exist and are not constant over living units. slot_mean: [N, D].
        bounds: [2, N, D], smallest and largest values of living units.
        map_constant: [n, N, T + 1, D]. ridge: [N, P, D], weights. penalty: [N], of the ridge.
        layout: of observations. limit: T, longest episode.
    """

    varies: Tensor
    bounds: Tensor
    slot_mean: Tensor
    map_constant: Tensor
    ridge: Tensor
    penalty: Tensor
    layout: EntityLayout
    limit: int

    def predictions(self, cases: Cases) -> dict[str, Tensor]:
        """Return the prediction [M, D] of each baseline."""
        kind, never = cases.truth.dtype, (cases.age == 0)[:, None]
        mean = self.slot_mean.to(cases.truth)[cases.node]
        constant = self.map_constant[cases.agent, cases.node, cases.step.clamp(max=self.limit)]
        return {
            "zeros": torch.zeros_like(cases.truth),
            "slot_mean": mean,
            "last_seen": cases.last,
            "last_seen_or_mean": torch.where(never, mean, cases.last),
            "map_constant": constant.to(kind),
            "ridge": self._regressed(cases).to(kind),
        }

    def _regressed(self, cases: Cases) -> Tensor:
        out = torch.zeros(cases.truth.shape, dtype=torch.float64, device=cases.truth.device)
        inputs, frame = _inputs(cases, self.layout, self.limit)
        for node in cases.node.unique().tolist():
            where = cases.node == node
            out[where] = inputs[frame[where]] @ self.ridge[node]
        # A linear map extrapolates without bound; living units do not leave the range of training.
        low, high = self.bounds[:, cases.node].to(out)
        return torch.maximum(torch.minimum(out, high), low)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that was fitted."""
        return {
            name: getattr(self, name) for name in ("varies", "bounds", "slot_mean", "map_constant", "ridge", "penalty")
        }

    @classmethod
    def restored(cls, state: Mapping[str, Tensor], info: EnvInfo, device: torch.device, source: str) -> Baselines:
        """Return the baselines of a `state_dict`. source: of it. Errors: UserError for one that does not fit."""
        assert info.layout is not None
        layout, limit = info.layout, info.episode_limit
        n, dim, p = layout.n_nodes, layout.node_dim, _n_inputs(info)
        shapes = {
            "varies": (n, dim), "bounds": (2, n, dim), "slot_mean": (n, dim), "ridge": (n, p, dim), "penalty": (n,),
            "map_constant": (info.n_agents, n, limit + 1, dim),
        }  # fmt: skip
        for name, shape in shapes.items():
            value = state.get(name) if isinstance(state, Mapping) else None
            if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.isfinite().all():
                problem = f"{name} is missing, not finite or of another shape"
                raise UserError(f"{source}: its baselines do not fit ({problem}); train stage 2 again")
        return cls(**{name: state[name].to(device) for name in shapes}, layout=layout, limit=limit)


def fit_baselines(training: Batches, validation: Batches, info: EnvInfo, dist: Dist) -> Baselines:
    """Fit all baselines; equal on every rank. Called by all ranks.

    training, validation: this rank's episodes with `obs` and `full_obs`.
    """
    assert info.layout is not None
    layout, limit = info.layout, info.episode_limit
    shape = info.n_agents, layout.n_nodes, limit + 1
    total = torch.zeros((math.prod(shape), layout.node_dim), dtype=torch.float64, device=dist.device)
    count = torch.zeros((math.prod(shape), 1), dtype=torch.float64, device=dist.device)
    extremes, frames = torch.full((2, layout.n_nodes, layout.node_dim), -torch.inf), 0  # the largest of -x and of x
    for batch in training():
        cases, full = cases_of(batch, layout), obs_to_nodes(batch["full_obs"], layout)
        frames += int(cases.missing.any(-1).sum())
        # What dead observers are shown, or what a closing row holds, no agent could have known.
        counted = (alive(batch["obs"]) & batch.valid_mask[:, None])[..., None] & full.any(-1)
        found = [torch.where(counted[..., None], each, -torch.inf).amax((0, 1)).cpu() for each in (-full, full)]
        extremes = torch.maximum(extremes, torch.stack(found))
        where = cases.living
        flat = (cases.agent[where] * shape[1] + cases.node[where]) * shape[2] + cases.step[where].clamp(max=limit)
        add_at(total, flat, cases.truth[where].double())
        add_at(count, flat, torch.ones_like(flat, dtype=torch.float64)[:, None])
    slot_mean, map_constant = _means(dist.sum(total).view(*shape, -1), dist.sum(count).view(*shape, 1))
    bounds = torch.from_numpy(np.stack(dist.gather(extremes.numpy())).max(0)).to(dist.device)
    bounds = torch.where(bounds.isfinite(), bounds * torch.tensor([-1.0, 1.0]).view(2, 1, 1).to(bounds), 0.0)
    varies = (bounds[1] - bounds[0] >= CONSTANT) & feature_mask(layout).to(bounds.device)
    each = layout.n_nodes * _n_inputs(info) ** 2
    every = max(1, -(-dist.sum_int(frames) * each // int(FIT_OPERATIONS)))
    # One number for all ranks, so that they leave out the frames that one process would leave out.
    weights, penalty = _fit_ridge(training, validation, info, varies, every, dist)
    return Baselines(varies, bounds, slot_mean, map_constant, weights, penalty, layout, limit)


def _means(total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return `slot_mean` and `map_constant` from sums [n, N, T + 1, D] and counts [n, N, T + 1, 1]."""
    by_step = total.sum(0), count.sum(0)
    mean = by_step[0].sum(1) / by_step[1].sum(1).clamp(min=1)
    # From the coarsest mean to the finest that has enough samples.
    constant = torch.where(by_step[1] >= LEAST, by_step[0] / by_step[1].clamp(min=1), mean[:, None])
    constant = torch.where(count >= LEAST, total / count.clamp(min=1), constant)
    return mean.float(), constant.float()


def _knots(limit: int) -> list[int]:
    """Return the steps between which the effect of time is linear: dense at the start, where teams approach."""
    knots = list(range(min(16, limit) + 1))
    while knots[-1] < limit:
        knots.append(min(limit, max(knots[-1] + 2, int(1.25 * knots[-1]))))
    return knots


def _unit_dims(layout: EntityLayout) -> list[int]:
    """Return the number of features of each node other than the agent itself."""
    return [layout.ally_dim] * layout.n_allies + [layout.enemy_dim] * layout.n_enemies


def _n_inputs(info: EnvInfo) -> int:
    """Return P: 1, own observation, history of each unit, agent, step."""
    assert info.layout is not None
    history = sum(dim + 3 for dim in _unit_dims(info.layout))
    return 1 + info.layout.obs_dim + history + info.n_agents + len(_knots(info.episode_limit))


def _inputs(cases: Cases, layout: EntityLayout, limit: int, every: int = 1) -> tuple[Tensor, Tensor]:
    """Return the inputs [F, P] float64 of all frames with a missing node, and the frame of each case, [M].

    1, the agent's observation, of each unit its features at the last sight, whether there was one, its age and the
    inverse of that; who the agent is; a hat function of the step at each knot. every: take only frames of which step
    plus agent is a multiple of it, the same ones on any number of ranks; the frame of other cases is -1.
    """
    n_agents = cases.missing.shape[1]
    chosen = cases.missing.any(-1)
    step_of_row = torch.zeros(len(cases.missing), dtype=torch.int64, device=chosen.device)
    step_of_row[cases.row] = cases.step
    agents = torch.arange(n_agents, device=chosen.device)
    if every > 1:
        chosen = chosen & ((step_of_row[:, None] + agents) % every == 0)
    rows, who = torch.nonzero(chosen, as_tuple=True)
    number = torch.full(chosen.shape, -1, dtype=torch.int64, device=chosen.device)
    number[rows, who] = torch.arange(len(rows), device=chosen.device)
    parts = [torch.ones((len(rows), 1), device=chosen.device), cases.obs[rows, who]]
    sights, ages = cases.sights[rows, who], cases.ages[rows, who].double()
    known = torch.stack([ages > 0, ages / limit, (ages > 0) / ages.clamp(min=1)], dim=-1)
    for node, dim in enumerate(_unit_dims(layout), start=1):
        parts += [sights[:, node, :dim], known[:, node]]
    parts.append((who[:, None] == agents).double())
    knots = torch.tensor(_knots(limit), dtype=torch.float64, device=chosen.device)
    parts.append(_hats(step_of_row[rows].double().clamp(max=limit), knots))
    return torch.cat([part.double() for part in parts], dim=1), number[cases.row, cases.agent]


def _hats(at: Tensor, knots: Tensor) -> Tensor:
    """Return piecewise linear functions [F, k], each 1 at its knot and 0 at the others."""
    right = torch.searchsorted(knots, at).clamp(1, len(knots) - 1)
    share = (at - knots[right - 1]) / (knots[right] - knots[right - 1])
    out = torch.zeros((len(at), len(knots)), dtype=torch.float64, device=at.device)
    places = torch.arange(len(at), device=at.device)
    out[places, right - 1] = 1 - share
    out[places, right] = share
    return out


def _normal(batches: Iterable[PackedBatch], info: EnvInfo, every: int, dist: Dist) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normal equations of all nodes, sums over living unseen units of all ranks.

    Sums of x x' [N, P, P], of x y' [N, P, D] and of y² [N, D].
    """
    layout, p = info.layout, _n_inputs(info)
    assert layout is not None
    n, dim = layout.n_nodes, layout.node_dim
    gram, cross, square = (
        torch.zeros(shape, dtype=torch.float64, device=dist.device) for shape in ((n, p, p), (n, p, dim), (n, dim))
    )
    for batch in batches:
        cases = cases_of(batch, layout)
        inputs, frame = _inputs(cases, layout, info.episode_limit, every)
        for node in range(1, n):
            where = (cases.node == node) & cases.living & (frame >= 0)
            x, y = inputs[frame[where]], cases.truth[where].double()
            gram[node] += x.T @ x
            cross[node] += x.T @ y
            square[node] += y.square().sum(0)
    return dist.sum(gram), dist.sum(cross), dist.sum(square)


def _fit_ridge(
    training: Batches, validation: Batches, info: EnvInfo, varies: Tensor, every: int, dist: Dist
) -> tuple[Tensor, Tensor]:
    """Return the weights [N, P, D] and the penalties [N] that have the smallest errors on the validation episodes.

    A node with few samples needs a larger one than the others. Where validation has no sample of a node: the one that
    suits all nodes together.
    """
    fitted, judged = (_normal(batches(), info, every, dist) for batches in (training, validation))
    gram, cross, square = judged
    found = torch.zeros((len(PENALTIES), *cross.shape), dtype=torch.float64, device=dist.device)
    errors = torch.zeros((len(PENALTIES), len(gram)), dtype=torch.float64, device=dist.device)
    share = varies.double() / varies.sum(-1, keepdim=True).clamp(min=1)
    for node in range(1, len(gram)):
        for i, weights in enumerate(_solutions(fitted[0][node], fitted[1][node])):
            found[i, node] = weights
            # |y - Xw|² = y'y - 2 w'X'y + w'X'Xw: no samples are kept, only their sums.
            error = square[node] - 2 * (weights * cross[node]).sum(0) + (weights * (gram[node] @ weights)).sum(0)
            errors[i, node] = (error * share[node]).sum()
    # Hoerl & Kennard 1970 leave the penalty open: the one that predicts held-out episodes best.
    best = torch.where(gram[:, 0, 0] > 0, errors.argmin(0), errors.sum(1).argmin())
    nodes_at = torch.arange(len(best), device=best.device)
    return found[best, nodes_at], torch.tensor(PENALTIES, dtype=torch.float64, device=best.device)[best]


def _solutions(gram: Tensor, cross: Tensor) -> Iterable[Tensor]:
    """Yield the weights [P, D] of each penalty a, the minimum of

        mean of |y - b - w · z|²  +  a |w|²,   z the inputs, standardised, b not penalised

    gram, cross: sums of x x' and of x y', the first input being 1. Solved by the eigenvectors of the correlations.
    """
    count = gram[0, 0]
    if count < 1:
        yield from (torch.zeros_like(cross) for _ in PENALTIES)
        return
    mean, target = gram[0] / count, cross[0] / count
    # One decomposition serves all penalties: (Q diag(v) Q' + a I)^-1 = Q diag(1 / (v + a)) Q'.
    centred = gram / count - mean[:, None] * mean
    scale = centred.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(scale > LEAST_SPREAD, 1 / scale.clamp(min=LEAST_SPREAD), 0.0)
    values, vectors = torch.linalg.eigh(centred * inverse[:, None] * inverse)
    right = vectors.T @ ((cross / count - mean[:, None] * target) * inverse[:, None])
    for penalty in PENALTIES:
        weights = inverse[:, None] * (vectors @ (right / (values.clamp(min=0) + penalty)[:, None]))
        weights[0] = target - mean @ weights
        yield weights
