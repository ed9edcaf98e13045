"""DDPG with one critic value per agent (Lillicrap et al. 2016), MADDPG (Lowe et al. 2017) and MATD3.

Actions are vectors over the discrete actions, and the environment gets one action drawn from each vector (`ddpg_mac`);
or they are continuous, in half widths of their bounds. An update takes a critic step, then an actor step, then moves
the target networks:

    critic: minimise (Q(o, a) - y)^2 with y = r + gamma (1 - terminated) Q'(o', pi'(o'))
    actor: maximise Q(o, pi(o))
    targets: theta' <- theta' + tau (theta - theta')

r is the agent's own reward where the environment gives one, otherwise the team's. With `joint` Q reads the
observations and actions of all agents. TD3 (Fujimoto et al. 2018) takes the smaller of two critics in y, adds noise to
pi', and moves actor and targets at every second update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.ddpg_mac import BARRED, DDPGMAC
from omagd.learners.protocol import Data, Draw, SavesParts
from omagd.learners.synced_optimizer import (
    SKIPPED,
    Adam,
    LossModule,
    Stats,
    SyncedOptimizer,
    lr_scale,
    moments_of_rewards,
    standardised,
)
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.agents.ff_agent import DDPGAgent, JointCritic, TwinCritics
from omagd.modules.ops import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, Packing, rewards_of_agents
from omagd.utils.seeding import stream_seed, uniform

Critic = Callable[..., Tensor]
"""Maps the agents' inputs and vectors over their actions [S, n, A] to values [S, n], or [2, S, n] of two critics."""


class DDPGArgs(BaseModel):
    """`learner_args` of DDPG."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    joint: bool = False  # critics read the observations and actions of all agents (MADDPG)
    twin: bool = False  # two critics; targets take the smaller value (TD3)
    target_noise: float = Field(default=0.0, ge=0.0)  # deviation of the noise on target actions, in half widths (TD3)
    target_noise_clip: float = Field(default=0.5, gt=0.0)  # bound of that noise
    policy_delay: int = Field(default=1, ge=1, le=2**16)  # updates of the critic for one of actor and targets (TD3)


class CriticLoss(LossModule):
    """Squared error (Q(o, a) - y)^2 of each agent's value, summed over steps and agents."""

    def __init__(self, critic: nn.Module, bf16: bool = False) -> None:
        super().__init__()
        self.critic, self.bf16 = critic, bf16

    def forward(self, inputs: AgentInputs, actions: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Stats]:
        """Return the sum of squared errors, and stats per step and agent.

        inputs: of S steps. actions: [S, n, A], the stored vectors. target: [S, n], y. valid: [S, 1], 0 where a row of
            a fixed shape is no step, else 1.
        """
        with autocast_bf16(target.device, self.bf16):
            q = self.critic(inputs, actions).to(target.dtype)
        valid = valid.expand_as(q)  # of both critics, where there are two
        # DDPG, eq. 4, summed over agents, each of which has a value of its own.
        error = (q - target) * valid
        loss = error.square().sum()
        with torch.no_grad():
            count, q_sum, target_sum = valid.sum(), (q * valid).sum(), (target * valid).sum()
            sums = {"td_error_abs": error.abs().sum(), "q_taken_mean": q_sum, "target_mean": target_sum}
        return loss, {name: (total, count) for name, total in {"loss_td": loss.detach(), **sums}.items()}


class ActorLoss(LossModule):
    """Negative value -Q(o, pi(o)) of the agents' own actions, summed over steps and agents.

    The critic is an argument and not a submodule, so its gradients are neither computed nor exchanged here.
    """

    def __init__(self, actor: nn.Module, continuous: bool, bf16: bool = False) -> None:
        super().__init__()
        self.actor, self.continuous, self.bf16 = actor, continuous, bf16

    def forward(
        self,
        inputs: AgentInputs,
        critic: Critic,
        noise: Tensor | None,
        valid: Tensor,
        available: Tensor,
        others: Tensor | None = None,
    ) -> tuple[Tensor, Stats]:
        """Return the negative sum of values, and stats per step and agent.

        inputs: of S steps. critic: with frozen weights. noise: [S, n, A], Gumbel noise for straight-through one-hot
            actions (Jang et al. 2017); None: the softmax itself. valid: as for the critic. available: [S, n, A] bool.
            others: [S, n, A], the actions of the other agents for a critic that reads them, else None.
        """
        with autocast_bf16(inputs.features.device, self.bf16):
            logits = self.actor(inputs).to(inputs.features.dtype)
            if not self.continuous:  # the critic has only learned actions that can be played
                logits = logits.masked_fill(~available, BARRED)
            policy = logits.tanh() * available if self.continuous else logits.softmax(-1)
            # Jang et al. 2017: the value of one action, as the environment takes it, with the softmax's gradient.
            actions = policy if noise is None else straight_through(logits + noise)
            q = critic(inputs, actions) if others is None else critic(inputs, actions, others)
            # TD3: the actor follows the first critic.
            value = ((q if q.dim() == 2 else q[0]).to(inputs.features.dtype) * valid).sum()
        with torch.no_grad():
            count = valid.sum() * logits.shape[1]
            stats = {"loss_actor": (-value.detach(), count)}
            if not self.continuous:
                stats["entropy"] = (torch.special.entr(policy) * valid.unsqueeze(-1)).sum(), count
        # DDPG, eq. 6: the critic's gradient at pi(o) passes through the action into the actor.
        return -value, stats


def straight_through(logits: Tensor) -> Tensor:
    """Return the most likely action as a one-hot vector, with the gradient of the softmax."""
    soft = logits.softmax(-1)
    return one_hot(logits).to(soft.dtype) + soft - soft.detach()


def one_hot(logits: Tensor) -> Tensor:
    """Return the most likely action as a one-hot vector [..., A], int64."""
    return F.one_hot(logits.argmax(-1), logits.shape[-1])


@dataclass(frozen=True)
class Steps:
    """The S steps of a batch.

    Attributes:
        valid: [S, 1], 0 where a row of a fixed shape is no step, else 1.
        before, after: the agents' inputs before and after the action. taken: [S, n, A], vectors over the actions.
        reward: [S, n]. ended: [S], 1 where the episode terminated. noise: [S, n, A] for the actor step (discrete
            actions) or for the targets (continuous ones), or None.
        available: [2, S, n, A] bool, before and after the action: actions, or the numbers that a continuous one has.
    """

    valid: Tensor
    before: AgentInputs
    after: AgentInputs
    taken: Tensor
    reward: Tensor
    ended: Tensor
    noise: Tensor | None
    available: Tensor


class DDPGLearner(SavesParts):
    """Trains a controller's agent (the actor) and a critic on one rank or many.

    Errors: UserError for another controller or agent.
    """

    data: Data = "replay"
    loss_name = "loss_td"
    args_model = DDPGArgs
    continuous: ClassVar[bool] = True

    def __init__(self, mac: DDPGMAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        if not isinstance(mac, DDPGMAC):
            raise UserError(f"learner={config.learner} needs mac=ddpg_mac, not mac={config.mac}")
        if not isinstance(mac.agent, DDPGAgent):
            raise UserError(f"learner={config.learner} needs agent=ddpg or agent=bicnet, not agent={config.agent}")
        self.mac, self.config, self.info, self.dist = mac, config, info, dist
        self.device = dist.device
        self.args = DDPGArgs.model_validate(config.learner_args)
        if self.args.target_noise and info.box is None:
            raise UserError(f"learner_args.target_noise={self.args.target_noise}: is for continuous actions. Use 0.0")
        self._draws = config.gumbel_softmax or self.args.target_noise > 0
        make = partial(JointCritic if self.args.joint else mac.agent.new_critic, config, info)
        self.critic: nn.Module = (TwinCritics(make) if self.args.twin else make()).to(self.device, mac.dtype)
        bf16, scale = config.precision == "bf16", lr_scale(config, dist.world_size)
        actor, critic = ActorLoss(mac.agent, info.box is not None, bf16), CriticLoss(self.critic, bf16)
        self.rewards = moments_of_rewards(critic, config)
        self.optimizer = Adam(actor.parameters(), lr=config.lr * scale)
        critic_lr = config.lr if config.critic_lr is None else config.critic_lr
        self.critic_optimizer = Adam(critic.parameters(), lr=critic_lr * scale)
        limits = config.grad_norm_clip, config.bucket_cap_mb
        self._actor_step = SyncedOptimizer(actor, self.optimizer, dist, *limits)
        self._critic_step = SyncedOptimizer(critic, self.critic_optimizer, dist, *limits)
        # Copied after wrapping for DDP, which makes the weights of all ranks equal.
        self.target_agent = copy.deepcopy(mac.agent).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        # Gradients pass through this critic to the actions, and none is computed for its weights, which it shares.
        shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self.critic.parameters()}
        self._frozen_critic = copy.deepcopy(self.critic, shared)
        self._followers: list[Tensor] = [*self.target_agent.parameters(), *self.target_critic.parameters()]
        self._followed: list[Tensor] = [*mac.agent.parameters(), *self.critic.parameters()]
        self._moves = torch.zeros((), dtype=torch.bool, device=self.device)  # whether the last update moves the targets

    @staticmethod
    def how_targets_move(config: Config, environments: int) -> str:
        """Return, in words, how targets move."""
        delay = DDPGArgs.model_validate(config.learner_args).policy_delay
        return f"targets follow by {config.tau:g} at every {'update' if delay == 1 else f'{delay} updates'}"

    def warm_up(self) -> None:
        """Run discarded forwards and backwards on a made-up batch; call it once, before anything is loaded."""
        inputs = AgentInputs.blank(2, self.info, next(self.mac.agent.parameters()))
        values = inputs.features.new_zeros(2, self.info.n_agents)
        actions = values.unsqueeze(-1).expand(-1, -1, self.info.action_dim)
        valid = values[:, :1]
        self._critic_step.warm_up(inputs, actions, values, valid)
        others = self._others(actions)
        self._actor_step.warm_up(inputs, self._frozen_critic, None, valid, actions.bool(), others)

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take a critic step and an actor step on this rank's batch, then move the targets.

        episodes: not used here. Returns sums and counts of this rank; the gradient norms (`grad_norm` of the critic,
        `grad_norm_actor`) are the global ones.
        """
        key = self._key(batch.packing.n_episodes)
        found = [part.to(self.device) for part in batch.split(self.config.accumulate)]
        batches = standardised(found, self.rewards, self.dist)
        parts = [self._steps(part, torch.tensor(part.sample_index), key) for part in batches]
        stats = self._learn(torch.tensor(self.info.n_agents * len(batch.packing.acting)), parts, key[2])
        self.finish(episodes)
        return stats

    def _key(self, here: int) -> Tensor:
        """Return what an update depends on, [3] int64 (CPU). A collective where there is noise.

        The key of its noise, the episodes of lower ranks in it, and whether actor and targets move.
        """
        due = (self.updates + 1) % self.args.policy_delay == 0
        if not self._draws:
            return torch.tensor([0, 0, due])
        before = sum(self.dist.counts(here)[: self.dist.rank])
        return torch.tensor([stream_seed(self.config.seed, "gumbel", self.updates), before, due])

    def steps(self) -> tuple[SyncedOptimizer, ...]:
        """Return what takes optimisation steps."""
        return self._critic_step, self._actor_step

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the numbers of the drawn episodes, and the key of the noise."""
        return draw.drawn, self._key(draw.drawn.shape[1])

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the steps of `update` on drawn episodes; only launches work. inputs: `fixed_inputs` on the device."""
        drawn, key = inputs
        batches = standardised(draw.batches(drawn, self.config.accumulate), self.rewards, self.dist)
        place = torch.arange(drawn.shape[1], device=self.device)
        parts = [self._steps(part, place[i :: len(batches)], key) for i, part in enumerate(batches)]
        return self._learn(self.info.n_agents * (drawn[1] - 1).sum(), parts, key[2])

    def _others(self, taken: Tensor) -> Tensor | None:
        """Return the actions of the other agents for a critic that reads them, [S, n, A]."""
        return taken if self.args.joint else None

    def _learn(self, count: Tensor, parts: list[Steps], due: Tensor) -> Stats:
        """Take both steps. count: steps of all agents. due: 1 where actor and targets move, too."""
        of_critic = ((part.before, part.taken, self._targets(part), part.valid) for part in parts)
        critic = self._critic_step(count, *of_critic)
        stats = {**critic.stats, "grad_norm": critic.norm}
        if due.device.type == "cpu" and not due:  # a graph, which cannot know, computes a step that is not taken
            self._moves.zero_()
            return {**stats, SKIPPED: critic.skipped}
        of_actor = (
            (
                part.before, self._frozen_critic, part.noise if self.info.box is None else None, part.valid,
                part.available[0], self._others(part.taken),
            )
            for part in parts
        )  # fmt: skip
        due = due.to(self.device, non_blocking=True)
        actor = self._actor_step(count, *of_actor, where=critic.finite & due.bool())
        self._moves.copy_(actor.finite & (actor.norm[1] > 0))
        skipped, one = actor.skipped
        # An update that leaves the actor as it is by `policy_delay` was not skipped.
        left = skipped * torch.maximum(due, ~critic.finite), one
        return {**stats, **actor.stats, "grad_norm_actor": actor.norm, SKIPPED: left}

    @torch.no_grad()
    def finish(self, episodes: int) -> None:
        """Count an update, and move both targets, theta' <- theta' + tau (theta - theta'), if it took its steps."""
        self.updates += 1
        if self._moves.device.type == "cpu":  # one number is faster than one tensor for each parameter
            if self._moves:
                torch._foreach_lerp_(self._followers, self._followed, self.config.tau)
            return
        # On a GPU the host does not know whether it did: a share of 0 changes nothing.
        share = self._moves * self.config.tau
        torch._foreach_lerp_(self._followers, self._followed, [share] * len(self._followed))

    def _steps(self, batch: PackedBatch, place: Tensor, key: Tensor) -> Steps:
        """Return the steps of (a part of) a batch. place: [B], of the episodes in this rank's sample."""
        packing, dtype, inputs = batch.packing, self.mac.dtype, self.mac.inputs(batch)
        # Rows in which an action was taken, and the row after each.
        rows = packing.acting, packing.next_row[packing.acting]
        now, later = (row.to(self.device, non_blocking=True) for row in rows)
        available = batch["avail_actions"][..., : self.info.action_dim].bool()
        return Steps(
            valid=batch.valid_mask[now].to(dtype).unsqueeze(-1),
            before=inputs.rows(now),
            after=inputs.rows(later),
            taken=self.mac.taken(batch)[now].to(dtype),
            reward=rewards_of_agents(batch)[now].to(dtype).expand(-1, self.info.n_agents),
            ended=batch["terminated"][now].to(dtype),
            noise=self._noise(packing, place, key) if self._draws else None,
            available=torch.stack([available[row] for row in (now, later)]),
        )

    @torch.no_grad()
    def _targets(self, steps: Steps) -> Tensor:
        """Return y [S, n]."""
        # Actor and critic of the targets: y must not move with every step of the trained ones.
        logits = self.target_agent(steps.after)
        if self.info.box is not None:
            actions = self._smoothed(logits.tanh(), steps.noise) * steps.available[1]
        else:
            logits = logits.masked_fill(~steps.available[1], BARRED)
            actions = one_hot(logits).to(logits.dtype) if self.config.gumbel_softmax else logits.softmax(-1)
        value = self.target_critic(steps.after, actions).to(steps.reward.dtype)
        # TD3, eq. 10: the smaller of two values is not too large where one critic errs upwards.
        value = value if value.dim() == 2 else value.amin(dim=0)
        # DDPG, eq. 5. A terminal step has no value after it; one that was only cut off has.
        return steps.reward + self.config.gamma * (1.0 - steps.ended).unsqueeze(-1) * value

    def _smoothed(self, actions: Tensor, noise: Tensor | None) -> Tensor:
        """Return target actions with clipped noise (TD3, eq. 14), between the bounds."""
        if noise is None:
            return actions
        limit = self.args.target_noise_clip
        return (actions + (self.args.target_noise * noise).clamp(-limit, limit)).clamp(-1.0, 1.0)

    def _noise(self, packing: Packing, place: Tensor, key: Tensor) -> Tensor:
        """Return noise of the steps, [S, n, A], computed where the packing is: Gumbel, normal for continuous actions.

        u depends on seed, update and the step's place in the batch of all ranks.
        """
        n, actions, longest = self.info.n_agents, self.info.action_dim, self.info.episode_limit + 1
        row = ((place + key[1])[packing.episode] * longest + packing.step)[packing.acting]
        number = row[:, None] * (n * actions) + torch.arange(n * actions, device=row.device)
        u = uniform(number, key[0]).clamp(1e-12)
        # -log(-log u) is Gumbel's; the inverse of the normal distribution at u is sqrt(2) erf^-1(2 u - 1).
        noise = -(-u.log()).log() if self.info.box is None else math.sqrt(2) * torch.special.erfinv(2 * u - 1)
        return noise.view(-1, n, actions).to(self.device, self.mac.dtype, non_blocking=True)

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        return {"agent": self.mac.agent, "critic": self.critic}

    def saved(self) -> dict[str, Any]:
        """Return optimizers, target networks and moments of rewards, by their keys in `state_dict`."""
        targets = {"target_agent": self.target_agent, "target_critic": self.target_critic}
        rewards = {} if self.rewards is None else {"rewards": self.rewards.moments}
        return {"optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer, **targets, **rewards}
