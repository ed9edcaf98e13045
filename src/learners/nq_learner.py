"""Deep Q-learning with a mixer (QMIX, VDN, independent learners): double Q-learning with TD(lambda) targets."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners.belief_loss import HEAD, BeliefCases, belief_loss, counts
from omagd.learners.protocol import Data, Draw, SavesParts
from omagd.learners.synced_optimizer import (
    OPTIMIZERS,
    SKIPPED,
    AgentLoss,
    Stats,
    SyncedOptimizer,
    lr_scale,
    moments_of_rewards,
    standardised,
)
from omagd.modules import mixers
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.mixers.mixer import MixerInputs, greedy_actions, mix
from omagd.modules.ops import add_at, autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import WEIGHT, PackedBatch, Packing, batch_targets
from omagd.utils.registry import described

MakeTargets = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Transitions:
    """What happened in the S rows of a batch.

    Args:
        actions: [S, n] int64. avail_actions: [S, n, A], 0 where an action was unavailable. state: [S, state_dim].
        valid_mask: [S] bool, False in closing rows. packing: of the rows. weight: [S], how much each counts, or None.
    """

    actions: Tensor
    avail_actions: Tensor
    state: Tensor
    valid_mask: Tensor
    packing: Packing
    weight: Tensor | None = None

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return how much each row counts in the loss, [S], 0 in closing rows."""
        valid = self.valid_mask.to(dtype)
        return valid if self.weight is None else valid * self.weight.to(dtype)


class QLoss(AgentLoss):
    """Half the squared TD error of the joint value of the actions taken, summed over the valid steps.

    L = 1/2 sum_t mask_t (Q_tot(s_t, a_t) - y_t)^2, where y has no gradient. The factor 1/2 is that of PyMARL2 and
    PyMARL3, which makes `grad_norm_clip` clip the same gradient.

    Args:
        agent, mixer: trained; every parameter takes part in every forward.
        bf16: whether matrix products use bf16.

    Attributes:
        errors: where it is a list, each forward appends sum_t |error| / sqrt(T) of its episodes, [B], as PyMARL2 does.
    """

    errors: list[Tensor] | None = None

    def __init__(self, agent: nn.Module, mixer: nn.Module, bf16: bool = False) -> None:
        super().__init__(agent, bf16)
        self.mixer = mixer

    def forward(
        self, inputs: AgentInputs, taken: Transitions, targets: MakeTargets, cases: BeliefCases | None = None
    ) -> tuple[Tensor, Stats]:
        """Return the sum of the loss, and its stats; with the `cases` of `belief` its sum is a second one, [2].

        targets: called once without gradients, with the values [S, n, A] of this forward, by which double Q-learning
            chooses actions; returns y, [S] or [S, n] as the mixer does. It runs in full precision, because bf16 would
            round small rewards away beside large values.
        Stats under PyMARL3's names: loss_td per step; td_error_abs, the same number there; q_taken_mean and
            target_mean per step and agent.
        """
        with autocast_bf16(taken.state.device, self.bf16):
            q, belief = self.unroll(inputs, taken.packing, cases)
            # y is a constant of the loss: its gradient would pull targets towards predictions (DQN, Mnih et al. 2015).
            with torch.no_grad(), autocast_bf16(taken.state.device, False):
                target = targets(q.detach().to(taken.state.dtype))
            # Q_tot of the actions that were taken; each agent's value comes from its own observations alone.
            values = MixerInputs(q, taken.actions, taken.avail_actions, taken.state)
            joint = mix(self.mixer, values).to(taken.state.dtype)
        # Closing rows hold the last observation of an episode; no action was taken there.
        valid_mask = taken.valid_mask.to(joint.dtype).view(-1, *[1] * (joint.dim() - 1))
        error = (joint - target) * valid_mask
        n_values = joint.shape[1:].numel()  # per row: one joint value, or one of each agent, which are averaged
        # QMIX, eq. 6, still a sum: `SyncedOptimizer` divides by the steps of all ranks, whose numbers differ.
        losses = self.error_loss(error, values)
        if losses.shape != error.shape:  # another one would be broadcast, and the sum be wrong
            shapes = f"{list(losses.shape)}, not a loss of each error, {list(error.shape)}"
            raise UserError(f"{described(type(self))}: error_loss returned {shapes}")
        weights = taken.weights(joint.dtype)
        loss = (losses * weights.view(valid_mask.shape)).sum() / n_values
        with torch.no_grad():
            if self.errors is not None:
                self.errors.append(_of_episodes(error, taken.packing))
            count = weights.sum()
            per_agent = valid_mask.sum() * q.shape[1]
            stats = {
                "loss_td": (loss.detach(), count),
                "td_error_abs": (loss.detach(), count),
                "q_taken_mean": ((joint * valid_mask).sum(), per_agent),
                "target_mean": ((target * valid_mask).sum(), per_agent),
            }
        return self.with_belief(loss, stats, belief)

    def error_loss(self, error: Tensor, values: MixerInputs) -> Tensor:
        """Return the loss of each TD error, [S] or [S, n]. values: of the actions, with gradients."""
        return 0.5 * error.square()


def _of_episodes(error: Tensor, packing: Packing) -> Tensor:
    """Return sum_t |error| / sqrt(T) of each episode, [B], from errors [S] or [S, n], of which the mean counts."""
    of_rows = error.abs().flatten(1).mean(dim=1) if error.dim() > 1 else error.abs()
    steps = torch.tensor(packing.lengths).sub(1).clamp(min=1).to(error)
    return add_at(torch.zeros_like(steps), packing.episode.to(error.device), of_rows) / steps.sqrt()


class QLearner(SavesParts):
    """Base of learners of a mixed value: agent, mixer, loss and optimizer, on one rank or many.

    Attributes:
        loss_class: the loss; subclasses may replace it by another `QLoss`.
    """

    loss_name = "loss_td"
    loss_class: ClassVar[type[QLoss]] = QLoss

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        self.mac, self.config, self.info = mac, config, info
        self.device = dist.device
        self.mixer: nn.Module = mixers.REGISTRY.build(config.mixer, config, info).to(self.device, mac.dtype)
        self.loss = loss = self.make_loss()
        loss.belief = self.belief = belief_loss(config, mac)
        self.rewards = moments_of_rewards(loss, config)
        lr = config.lr * lr_scale(config, dist.world_size)
        self.optimizer = OPTIMIZERS[config.optimizer](loss.parameters(), lr=lr)
        self.step = SyncedOptimizer(loss, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)

    def make_loss(self) -> QLoss:
        """Return the loss; a subclass may build one that reads its own keys."""
        return self.loss_class(self.mac.agent, self.mixer, self.config.precision == "bf16")

    def steps(self) -> tuple[SyncedOptimizer, ...]:
        """Return what takes optimisation steps."""
        return (self.step,)

    def warm_up(self) -> None:
        """Run a discarded forward and backward on a made-up batch; call it once, before anything is loaded."""
        packing = Packing((3, 2))
        n_rows, n_agents = sum(packing.lengths), self.info.n_agents
        like = next(self.mac.agent.parameters())
        actions = torch.zeros(n_rows, n_agents, dtype=torch.int64, device=self.device)
        available = torch.ones(n_rows, n_agents, self.info.n_actions, device=self.device)
        state = like.new_zeros(n_rows, self.info.state_dim)
        taken = Transitions(actions, available, state, ~packing.closing.to(self.device, non_blocking=True), packing)
        inputs = AgentInputs.blank(n_rows, self.info, like)
        none = () if self.belief is None else (self.belief.blank(n_rows, n_agents, like),)
        self.step.warm_up(
            inputs, taken, lambda q: torch.zeros_like(mix(self.mixer, MixerInputs(q, actions, available, state))), *none
        )

    def learn(self, count: Tensor, parts: Sequence[PackedBatch]) -> Stats:
        """Take one step; on a device this only launches work. count: valid steps of the parts."""
        if self.belief is None:
            result = self.step(count, *(self._part(part) for part in parts))
        else:
            cases = [self.belief.cases(part) for part in parts]
            self.belief.observe(cases, self.step.dist)
            both = zip(parts, cases, strict=True)
            result = self.step(counts(count, cases), *((*self._part(part), each) for part, each in both))
        return {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped}

    def _part(self, batch: PackedBatch) -> tuple[AgentInputs, Transitions, MakeTargets]:
        """Return the arguments of the loss for some episodes."""
        inputs = self.mac.inputs(batch)
        state = batch["state"].to(self.mac.dtype)
        actions = batch["actions"].long()
        weight = batch[WEIGHT] if WEIGHT in batch else None
        taken = Transitions(actions, batch["avail_actions"], state, batch.valid_mask, batch.packing, weight)
        return inputs, taken, lambda q: self.targets(q, inputs, batch, state)

    @abstractmethod
    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the target of every row, [S], or [S, n] without a mixer, from the trained agent's values [S, n, A]."""

    def td_targets(self, values: Tensor, batch: PackedBatch, taken: Tensor | None = None) -> Tensor:
        """Return the TD(lambda) targets of values [S], or [S, n] without a mixer: those of the next state's actions.

        taken: of the actions that were taken, where Q(lambda) corrects by them.
        """
        return batch_targets(values, batch, self.config.gamma, self.config.td_lambda, taken)

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        head = {} if self.belief is None else {HEAD: self.belief.head}
        return {"agent": self.mac.agent, "mixer": self.mixer, **head}

    def saved(self) -> dict[str, Any]:
        """Return the optimizer, and moments of the belief head and of rewards, by their keys in `state_dict`."""
        moments = {"belief": self.belief and self.belief.running, "rewards": self.rewards}
        return {"optimizer": self.optimizer, **{k: part.moments for k, part in moments.items() if part is not None}}


class NQLearner(QLearner):
    """Learns from replay, with target networks."""

    data: Data = "replay"

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        super().__init__(mac, config, info, dist)
        # Copied after wrapping for DDP, which makes the weights of all ranks equal.
        copies = (copy.deepcopy(module) for module in self.valuing())
        self.target_agent, self.target_mixer = (module.requires_grad_(False).eval() for module in copies)
        # Episodes and updates at the last copy: a resumed run may count by the other key.
        self._copied_at = (0, 0)

    def valuing(self) -> tuple[nn.Module, nn.Module]:
        """Return the agent and the mixer whose copies value the next states."""
        return self.mac.agent, self.mixer

    @staticmethod
    def how_targets_move(config: Config, environments: int) -> str:
        """Return, in words, how often targets are copied with `environments` over all ranks."""
        until_copied = math.ceil(config.target_update_interval / environments)
        every = config.target_update_updates or until_copied * config.updates_per_iteration
        return f"targets copied every {every} updates"

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take one step on this rank's batch, then copy the targets if that is due.

        episodes: collected so far by all ranks. Returns sums and counts of this rank; grad_norm is the global one.
        """
        # The number of valid steps, known without waiting for the device; with weights their sum.
        count = torch.tensor(len(batch.packing.step) - batch.packing.n_episodes)
        if WEIGHT in batch:
            count = (batch[WEIGHT] * batch.valid_mask).sum()
            self.loss.errors = []
        parts = batch.split(self.config.accumulate)
        stats = self.learn(count, [part.to(self.device) for part in parts])
        self.finish(episodes)
        return stats

    def learn(self, count: Tensor, parts: Sequence[PackedBatch]) -> Stats:
        """Take one step, by rewards of order 1 with `standardise_rewards`."""
        return super().learn(count, standardised(parts, self.rewards, self.step.dist))

    def errors(self) -> Tensor:
        """Return the error of each episode of the last batch that had weights, [B], in the order of its packing."""
        found = self.loss.errors or []
        ordered = torch.empty(sum(map(len, found)), device=self.device)
        for place, part in enumerate(found):
            ordered[place :: len(found)] = part
        return ordered

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the numbers of the drawn episodes."""
        return (draw.drawn,)

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the step of `update` on drawn episodes; only launches work. inputs: `fixed_inputs` on the device."""
        (drawn,) = inputs
        return self.learn((drawn[1] - 1).sum(), draw.batches(drawn, self.config.accumulate))

    @torch.no_grad()
    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the TD(lambda) target of every row, [S], from the trained agent's values q [S, n, A].

        The target network values the greedy actions a*: v(t) = Q_tot'(s_t, a*). With `double_q` (van Hasselt et al.
        2016) the trained agent chooses them, a* = argmax Q; otherwise the target network does, a* = argmax Q'.
        """
        bf16 = self.config.precision == "bf16"
        with autocast_bf16(self.device, bf16):  # only the networks' matrix products; everything else in full precision
            target_q = self.target_agent(inputs, batch.packing).to(q.dtype)
        # Each agent's own argmax is part of that of Q_tot, since mixers are monotonic (QMIX, eq. 4 and 5).
        # Double DQN, eq. 4: what one network overestimates, the other one need not.
        best = greedy_actions(q if self.config.double_q else target_q, batch["avail_actions"])
        # v(s) = Q_tot'(s, a*), the team's value; with `mixer=none` each agent's own.
        actions = [best, batch["actions"].long()] if self.config.q_lambda else [best]
        inputs_of = (MixerInputs(target_q, chosen, batch["avail_actions"], state) for chosen in actions)
        with autocast_bf16(self.device, bf16):
            values, *taken = [mix(self.target_mixer, each).to(q.dtype) for each in inputs_of]
        return self.td_targets(values, batch, *taken)

    def saved(self) -> dict[str, Any]:
        """Return also the target networks."""
        return {**super().saved(), "target_agent": self.target_agent, "target_mixer": self.target_mixer}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside `modules()`: the parts of `saved`, and counters."""
        return {**super().state_dict(), "copied_at": list(self._copied_at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; the caller loads the weights of `modules()`."""
        super().load_state_dict(state)
        episodes, updates = state["copied_at"]
        self._copied_at = (episodes, updates)

    def finish(self, episodes: int) -> None:
        """Do what follows a step: count it, and copy the targets if that is due."""
        self.updates += 1
        # Targets stand still between copies (DQN): otherwise each step would move what the next one aims at.
        by_updates = self.config.target_update_updates
        if by_updates is None:
            due = episodes - self._copied_at[0] >= self.config.target_update_interval
        else:
            due = self.updates - self._copied_at[1] >= by_updates
        if due:
            pairs = [*zip((self.target_agent, self.target_mixer), self.valuing(), strict=True)]
            old = [tensor for target, _ in pairs for tensor in target.state_dict().values()]
            new = [tensor for _, trained in pairs for tensor in trained.state_dict().values()]
            # Weights that have overflowed do not reach the targets: a norm is finite only if every entry is. The device
            # decides; the host does not wait.
            finite = torch.stack(torch._foreach_norm([t for t in new if t.is_floating_point()])).isfinite().all()
            for before, after in zip(old, new, strict=True):
                before.copy_(torch.where(finite, after, before))
            self._copied_at = (episodes, self.updates)


class NQGraphLearner(NQLearner):
    """`NQLearner` for graph controllers: it trains on the reconstructions that were stored when steps were played."""

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        info.layout_for(f"learner={config.learner}", config.env)
        super().__init__(mac, config, info, dist)
