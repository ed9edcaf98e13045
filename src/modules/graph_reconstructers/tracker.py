"""A predictor that tracks: for each agent and unit a belief that is carried through the episode.

What an agent knows of a unit without any network is kept exactly: its features when last seen, how long ago that was
(its *age*), and by how much the agent itself has moved since (its *drift*, a learned linear map of the own action and
of the change of the own features, summed). The network predicts what is left:

    base  = features when last seen, the position moved by drift  (never seen: the mean of the type)
    z     = base in standard deviations of the type from the mean (never seen: zeros)
    m     = z, flags and ages of all units, own action, agent, step: one vector for each agent
    x     = lrelu(W_x [z, z if seen now else 0, flags, r, relu(1 - r), drift] + W_c relu(W_m m)
                  + W_o [own z, own action] + e(agent, unit) + e(step)),      r: range of the base in sight ranges
    h'    = GRU(x, h)                                             a state for each agent and unit
    y     = W_y lrelu(W_z [h', x])                                the logit of being dead has a W_z of its own
    mean  = base + scale (f (W_l m + b_l) + g y_mean),  within the bounds of the type
    variance = floor² + softplus(y_variance), in the features' units,  p(dead) = sigmoid(y_dead)

W_l and b_l are ridge regression, fitted before training, with a map for each unit and class of age. The network learns
what regression misses. In training the gains f and g are 1 and there are no bounds; then the gains are chosen for each
type, class of age and feature on validation episodes, between 0 and 1, so that what has been learned by heart does no
harm: f = 1, g = 0 is the regression alone, f = g = 0 what was last seen, both with the drift. "Looked there and saw
nothing" is in the range of the base: a place within sight from which nothing is seen is empty.
Shapes: S packed rows or B slots (R for both), n agents, N nodes of which N - 1 are other units, D features, M missing
nodes, A actions, H = d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import MaskPredictorConfig
from omagd.modules.graph_reconstructers.belief import Belief
from omagd.modules.graph_reconstructers.graphs import feature_mask
from omagd.modules.ops import PackedGRU, require_step
from omagd.utils.packing import Packing

AGES = (0, 1, 3, 7, 15)  # upper ends of the classes of age but the last
N_CLASSES = len(AGES) + 1
FLOOR = 0.02  # smallest standard deviation of a feature, in its own unit: positions are in sight ranges
UNBOUNDED = 1e6  # larger than any feature
N_FLAGS = 4  # seen, never seen, and the age in two forms
SLOPE = 0.1  # of leaky ReLUs below 0, so that no unit dies
N_HATS = 8  # functions of the step
NEAR = 1e-12  # added to squared ranges, whose root has no gradient at 0
N_PLACE = 4  # range of the base, how far inside of the sight it is, drift


def age_class(age: Tensor) -> Tensor:
    """Return the class of ages: 0 never seen (-1), then 1, 2-3, 4-7, 8-15, 16 and more steps since.

    Units that are seen now (0) also have class 0; nothing is predicted of them.
    """
    return torch.bucketize(age.contiguous(), torch.tensor(AGES, device=age.device))


def age_features(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps since the last sight in two forms of about 0 to 1: fine for the first steps, and coarse."""
    return (steps / 8).tanh(), steps.log1p() / 3


@dataclass(frozen=True)
class Memory:
    """What agents know of their units after looking, without a network, for R rows.

    Attributes:
        last: [R, n, N, D], features when last seen, now included; zeros: never. age: [R, n, N] int64, steps since
            then; 0: seen now, -1: never. action: [R, n] int64, own last action, -1 at the start. change: [R, n, D] of
            the own features since the step before; meaningless in the first row, whose move no drift counts.
            step: [R] int64.
            missing: [R, n, N] bool.
    """

    last: Tensor
    age: Tensor
    action: Tensor
    change: Tensor
    step: Tensor
    missing: Tensor


class Output(NamedTuple):
    """Of M missing nodes: the three parts of the mean, the variance, all [M, D], and the logit of being dead, [M]."""

    base: Tensor
    regressed: Tensor
    learned: Tensor
    variance: Tensor
    dead_logit: Tensor


class Known(NamedTuple):
    """What agents know of their units without the network, for R rows.

    base: [R, n, N, D]; z: the same in standard deviations. flags: [R, n, N, 4]. acted: [R, n, A], own last action.
    features: [R, n, known], all of it for each agent, which the linear part and the summary read.
    """

    base: Tensor
    z: Tensor
    flags: Tensor
    acted: Tensor
    features: Tensor


LinearPart = Callable[[Tensor, Tensor, Tensor], Tensor]


class Tracker(nn.Module):
    """The network at the top of this file.

    Args:
        config: `d_model` is H, `feedforward_dim` the width of the agent's summary. info: of an environment with a
            layout.

    Attributes:
        threshold: [3, 2], by type, a unit is taken for dead above this probability: one never seen, one seen before;
            chosen on validation episodes and saved.
        gain: [2, 3, 6, D], the factors f and g by type and class of age. mean, scale: [N, D], of the features of living
            units in training, by type; bounds: [2, N, D], their smallest and largest values. class_count: [6], living
            missing nodes in training by class of age, by which the loss is weighted.
    """

    threshold: Tensor
    linear_weight: Tensor
    linear_bias: Tensor
    gain: Tensor
    mean: Tensor
    scale: Tensor
    bounds: Tensor
    class_count: Tensor
    real: Tensor
    types: Tensor

    def __init__(self, config: MaskPredictorConfig, info: EnvInfo) -> None:
        super().__init__()
        require_step(self, "encode or decode")
        layout = info.layout
        assert layout is not None
        self.config, self.layout, self.limit = config, layout, info.episode_limit
        n_others, width, dim = layout.n_nodes - 1, config.d_model, layout.node_dim
        self.n_agents, self.n_actions, self.n_nodes, self.dim = info.n_agents, info.n_actions, layout.n_nodes, dim
        self.n_known = layout.n_nodes * (dim + N_FLAGS) + info.n_actions + info.n_agents + N_HATS
        self.motion = nn.Linear(info.n_actions + dim, 2, bias=False)
        self.summary = nn.Linear(self.n_known, config.feedforward_dim)
        self.context = nn.Linear(config.feedforward_dim, width)
        self.node = nn.Linear(2 * dim + N_FLAGS + N_PLACE, width)
        self.own = nn.Linear(dim + info.n_actions, width, bias=False)
        self.step_table = nn.Embedding(info.episode_limit + 1, width)
        self.slot = nn.Embedding(info.n_agents * n_others, width)
        self.gru = PackedGRU(width, width)
        self.join, self.join_dead = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.head, self.spread, self.dead = nn.Linear(width, dim), nn.Linear(width, dim), nn.Linear(width, 1)
        self.register_buffer("threshold", torch.full((3, 2), 0.5))
        self.register_buffer("linear_weight", torch.zeros(N_CLASSES, n_others * dim, self.n_known))
        self.register_buffer("linear_bias", torch.zeros(N_CLASSES, n_others * dim))
        self.register_buffer("gain", torch.ones(2, 3, N_CLASSES, dim))
        self.register_buffer("mean", torch.zeros(layout.n_nodes, dim))
        self.register_buffer("scale", torch.ones(layout.n_nodes, dim))
        unbounded = torch.full((layout.n_nodes, dim), UNBOUNDED)
        self.register_buffer("bounds", torch.stack([-unbounded, unbounded]))
        self.register_buffer("class_count", torch.zeros(N_CLASSES, dtype=torch.float64))
        self.register_buffer("real", feature_mask(layout)[1:].float(), persistent=False)
        self.register_buffer("types", torch.tensor(layout.node_types), persistent=False)
        nn.init.normal_(self.slot.weight, std=0.3)
        nn.init.normal_(self.step_table.weight, std=0.05)
        for part in (self.motion, self.head, self.spread, self.dead):  # begins with what was last seen
            nn.init.zeros_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, memory: Memory, packing: Packing) -> Output:
        """Return the beliefs about the missing nodes of whole packed episodes."""
        drift = self._drift(memory, packing)
        x, base, features = self.encode(memory, drift)
        hidden = self.gru(x.flatten(1, 2), packing).view(x.shape)
        return self.decode(hidden, x, base, features, memory.age, memory.missing)

    def step(self, memory: Memory, drift: Tensor, hidden: Tensor) -> tuple[Output, Tensor]:
        """Return the beliefs at one step, and the state after it; the same as `forward` for acting.

        drift: [B, n, N, 2]. hidden: [B, n, N - 1, H], the state before the step.
        """
        x, base, features = self.encode(memory, drift)
        hidden = self.gru.step(x.flatten(0, 1), hidden.flatten(0, 1)).view(x.shape)
        return self.decode(hidden, x, base, features, memory.age, memory.missing), hidden

    def moves(self, memory: Memory) -> Tensor:
        """Return by how much other units' relative positions change through the agent's own move, [R, n, 2]."""
        acted = self._one_hot(memory.action)
        return self.motion(torch.cat([acted, memory.change.to(acted.dtype)], dim=-1))

    def _drift(self, memory: Memory, packing: Packing) -> Tensor:
        """Return the sum of moves since each node was last seen, [S, n, N, 2]; zeros where it is seen or never was."""
        total = packing.pack(packing.pad(self.moves(memory)).cumsum(1))
        last_step = memory.step[:, None, None] - memory.age.clamp(min=0)  # never seen: now
        at = packing.row(last_step, packing.episode[:, None, None])
        agents = torch.arange(self.n_agents, device=total.device)[:, None]
        return total[:, :, None] - total[at, agents]

    def look(self, memory: Memory, drift: Tensor) -> Known:
        """Return what agents know of their units without the network. drift: [R, n, N, 2]."""
        dtype = drift.dtype
        x, y = self.layout.position
        age, never = memory.age, (memory.age < 0)[..., None]
        shift = F.pad(drift[..., :1], (x, self.dim - 1 - x)) + F.pad(drift[..., 1:], (y, self.dim - 1 - y))
        base = torch.where(never, self.mean, memory.last.to(dtype)) + torch.where(never, 0.0, shift)
        z = torch.where(never, 0.0, (base - self.mean) / self.scale)
        seen, since = (age == 0).to(dtype), age_features(age.clamp(min=0).to(dtype))
        flags = torch.stack([seen, never[..., 0].to(dtype), *since], dim=-1)
        agents = torch.eye(self.n_agents, dtype=dtype, device=base.device).expand(len(age), -1, -1)
        timed = self.step_basis(memory.step, dtype)[:, None].expand(-1, self.n_agents, -1)
        units, acted = torch.cat([z, flags], dim=-1), self._one_hot(memory.action)
        return Known(base, z, flags, acted, torch.cat([units.flatten(2), acted, agents, timed], dim=-1))

    def encode(self, memory: Memory, drift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cell's input [R, n, N - 1, H], the base [R, n, N - 1, D], and what agents know, [R, n, known].

        drift: [R, n, N, 2].
        """
        known = self.look(memory, drift)
        context = self.context(F.relu(self.summary(known.features)))
        context = context + self.own(torch.cat([known.z[:, :, 0], known.acted], dim=-1))
        context = context + F.embedding(memory.step.clamp(max=self.limit), self.step_table.weight)[:, None]
        others, z, flags = known.base[:, :, 1:], known.z[:, :, 1:], known.flags[:, :, 1:]
        far = others[..., list(self.layout.position)].square().sum(-1, keepdim=True).add(NEAR).sqrt()
        place = torch.cat([far, F.relu(1 - far), drift[:, :, 1:]], dim=-1)
        shown = torch.where(memory.age[:, :, 1:, None] == 0, z, 0.0)
        static = self.slot.weight.view(self.n_agents, self.n_nodes - 1, -1)
        inputs = self.node(torch.cat([z, shown, flags, place], dim=-1))
        return F.leaky_relu(inputs + context[:, :, None] + static, SLOPE), others, known.features

    def decode(
        self,
        hidden: Tensor,
        x: Tensor,
        base: Tensor,
        features: Tensor,
        age: Tensor,
        missing: Tensor,
        linear: LinearPart | None = None,
    ) -> Output:
        """Return the beliefs about the missing nodes from the cell's state and input [R, n, N - 1, H].

        base, features: from `encode`. age, missing: of `Memory`. linear: computes the linear part, as
            `_linear_part` does.
        """
        where = missing[:, :, 1:].flatten().nonzero().flatten()
        chosen = (value.flatten(0, 2).index_select(0, where) for value in (hidden, x, base))
        state, given, base = chosen
        both = torch.cat([state, given], dim=-1)
        joined, joined_dead = (F.leaky_relu(part(both), SLOPE) for part in (self.join, self.join_dead))
        ages = age_class(age[:, :, 1:]).flatten().index_select(0, where)
        regressed = (linear or self._linear_part)(features.flatten(0, 1), where, ages)
        scale = self.scale[1:].repeat(len(features) * self.n_agents, 1).index_select(0, where)
        variance = F.softplus(self.spread(joined.detach())) + FLOOR**2
        return Output(base, scale * regressed, scale * self.head(joined), variance, self.dead(joined_dead)[:, 0])

    def mean_of(self, out: Output, node: Tensor, gain: Tensor) -> Tensor:
        """Return the mean [M, D] of the nodes [M] with gains [2, M, D] or [2, 1, 1], within the bounds."""
        mean = out.base + gain[0] * out.regressed + gain[1] * out.learned
        return mean.clamp(*self.bounds[:, node])

    def taken_for_dead(self, out: Output, node: Tensor, ages: Tensor) -> Tensor:
        """Return which of the missing nodes [M], of these classes of age [M], are taken for dead, [M] bool."""
        return out.dead_logit.sigmoid() > self.threshold[self.types[node], (ages > 0).long()]

    def belief(self, out: Output, age: Tensor, missing: Tensor) -> Belief:
        """Return the beliefs about the missing nodes as agents receive them. age, missing: of `Memory`."""
        node, ages = torch.nonzero(missing)[:, 2], age_class(age[missing])
        real = self.real.to(out.base.dtype)[node - 1]
        mean = self.mean_of(out, node, self.gain[:, self.types[node], ages])
        taken = self.taken_for_dead(out, node, ages)
        features = torch.where(taken[:, None], 0.0, mean * real)
        return Belief(features.float(), out.dead_logit.sigmoid(), taken, out.variance.sqrt() * real)

    @torch.no_grad()
    def set_linear_part(self, weights: Tensor) -> None:
        """Set the linear part to weights [N - 1, 6, known, D], the last of `known` being the constant 1."""
        by_class = weights.permute(1, 0, 3, 2).flatten(1, 2)
        self.linear_weight.copy_(by_class[..., :-1])
        self.linear_bias.copy_(by_class[..., -1])

    def _linear_part(self, known: Tensor, where: Tensor, ages: Tensor) -> Tensor:
        """Return the linear part [M, D] from known [R·n, known], the places [M] among R·n·(N - 1), and classes [M]."""
        out = known.new_zeros((len(where), self.dim))
        rows, units = where // (self.n_nodes - 1), where % (self.n_nodes - 1)
        for age in range(N_CLASSES):
            chosen = (ages == age).nonzero().flatten()
            if len(chosen):
                some, place = torch.unique(rows[chosen], return_inverse=True)
                maps = F.linear(known.index_select(0, some), self.linear_weight[age], self.linear_bias[age])
                values = maps.view(-1, self.dim).index_select(0, place * (self.n_nodes - 1) + units[chosen])
                out = out.index_copy(0, chosen, values)
        return out

    def step_basis(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        """Return hat functions [R, 8] of the step [R]: linear in log2(1 + step), with knots at 0 to 7.

        The last one falls from 1 at step 127 to 0 at 255. After that only `step_table` tells the step.
        """
        at = step.clamp(max=self.limit).to(dtype).add(1).log2()
        return F.relu(1 - (at[:, None] - torch.arange(N_HATS, dtype=dtype, device=step.device)).abs())

    def _one_hot(self, action: Tensor) -> Tensor:
        """Return [R, n, A] of actions [R, n]; zeros for -1."""
        acted = F.one_hot(action.clamp(min=0), self.n_actions) * (action >= 0)[..., None]
        return acted.to(self.node.weight.dtype)
