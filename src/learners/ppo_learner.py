"""Proximal policy optimisation for teams: MAPPO (central critic) and IPPO (a critic for each agent's own view).

Sources: PPO, Schulman et al. 2017, arXiv:1707.06347. GAE, Schulman et al. 2016, arXiv:1506.02438. MAPPO, Yu et al.
2022, arXiv:2103.01955. IPPO, de Witt et al. 2020, arXiv:2011.09533.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from omagd.learners.policy_learner import Advantages, PolicyArgs, PolicyLearner, PolicyLoss, PolicyRows, weighted
from omagd.learners.synced_optimizer import RunningMoments, Stats
from omagd.modules import critics
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.ops import autocast_bf16
from omagd.utils.errors import unknown_name
from omagd.utils.packing import PackedBatch, batch_targets


class PPOArgs(PolicyArgs):
    """`learner_args` of PPO with a critic."""

    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)  # 0: one-step advantages, 1: whole returns
    critic: str = (
        "state"  # of the team: state (of each agent with its own rewards) | set; of each: observation | agent_state
    )
    critic_hidden: int = Field(default=128, ge=1, le=2**16)  # width of the critic
    value_weight: float = Field(default=0.5, gt=0.0)  # weight of the critic's loss
    value_clip: float | None = Field(default=0.2, gt=0.0)  # bound of a value's distance from the one before the update
    normalise_values: bool = True  # the critic predicts returns with running mean 0 and deviation 1

    @field_validator("critic")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in critics.REGISTRY:
            raise ValueError(unknown_name("learner_args.critic", name, critics.REGISTRY.names()).message)
        return name


class PPOLoss(PolicyLoss[PPOArgs]):
    """Clipped policy loss, entropy bonus and value loss, summed over samples.

    The loss of the policy is that of `PolicyLoss`. With value V and target G:

        value = max((V - G)^2, (V_old + clip(V - V_old, -v, v) - G)^2) / 2    (MAPPO, appendix; without v: the first)
        loss  = loss of the policy + w_v value

    Args:
        agent, critic: trained; every parameter takes part in every forward. args: the weights.
        bf16: whether matrix products use bf16.
    """

    def __init__(self, agent: nn.Module, critic: nn.Module, args: PPOArgs, bf16: bool = False) -> None:
        super().__init__(agent, args, bf16)
        self.critic = critic

    def terms(self, rows: PolicyRows, logits: Tensor) -> tuple[Tensor, Stats]:
        """Return the summed loss, and what is logged of it."""
        loss, stats = super().terms(rows, logits)
        with autocast_bf16(rows.state.device, self.bf16):
            value = self.critic(rows.inputs, rows.state)
        value = _per_agent(value.to(loss.dtype), rows.weight)
        error, own = self._value_error(value, rows), rows.value_weight
        weight = rows.weight if own is None else own
        of_critic = self.args.value_weight * (error * weight).sum()
        # Each mean is over its own samples, so that `value_weight` means the same wherever the critic learns.
        loss = loss + of_critic if own is None else torch.stack([loss, of_critic])
        return loss, {**stats, **weighted({"loss_value": error, "value_mean": value}, weight)}

    def _value_error(self, value: Tensor, rows: PolicyRows) -> Tensor:
        assert rows.value is not None and rows.target is not None
        # MAPPO, appendix: the value moves from the one before the update by at most v in one batch.
        error = (value - rows.target).square()
        limit = self.args.value_clip
        if limit is not None:
            near = rows.value + (value - rows.value).clamp(-limit, limit)
            error = torch.max(error, (near - rows.target).square())
        return 0.5 * error


class PPOLearner(PolicyLearner[PPOArgs]):
    """Trains a controller's agent, and a critic, on the episodes that were just collected."""

    args_model: ClassVar[type[Any]] = PPOArgs

    def make_loss(self, bf16: bool) -> PPOLoss:
        """Return the loss, which holds agent and critic."""
        made = critics.REGISTRY.build(self.args.critic, self.config, self.info, self.args.critic_hidden)
        self.critic: nn.Module = made.to(self.dist.device, self.mac.dtype)
        loss = PPOLoss(self.mac.agent, self.critic, self.args, bf16)
        # A part of the loss, because it is of what an update changes, as weights are.
        # Unlike PopArt (van Hasselt et al. 2016), the critic's last layer is not rescaled when moments change.
        loss.value_norm = self.value_norm = RunningMoments(self.dist.device)
        return loss

    def advantages(
        self, batch: PackedBatch, inputs: AgentInputs, state: Tensor, weight: Tensor, *origin: Tensor
    ) -> Advantages:
        """Return advantages, the critic's values and its targets, [S, n] each.

        GAE(lambda) is the lambda-return minus the value. An episode that was truncated bootstraps from the value of its
        closing row; at their step limit most environments terminate (`continuing_episode=False`). Each agent learns
        from its own reward where the critic values agents one by one and the environment reports rewards of agents.
        """
        with autocast_bf16(state.device, self.config.precision == "bf16"):
            predicted = self.critic(inputs, state).to(weight.dtype)
        mean, deviation = self.value_norm.scale
        # Back to units of returns, in which rewards are added.
        value = (predicted * deviation + mean).to(predicted.dtype)
        # An agent that has left earns no more: returns bootstrap from its value, which must be learned there, too.
        own = batch.valid_mask.unsqueeze(-1).to(weight.dtype).expand_as(weight) if "agent_reward" in batch else None
        if value.dim() > 1 and own is None:
            value = _of_those_who_act(value, self.choices(batch))
        # GAE (Schulman et al. 2016, eq. 16): the sum of (gamma lambda)^k delta is the lambda-return minus the value.
        returns = batch_targets(value, batch, self.config.gamma, self.args.gae_lambda)
        advantage = self.normalised(_per_agent(returns - value, weight), weight)
        # Targets in the units of the moments after this batch, which the next predictions will be read in.
        returns = _per_agent(returns, weight)
        if self.args.normalise_values:
            self.value_norm.add(self.sums(returns, weight if own is None else own))
        mean, deviation = self.value_norm.scale
        target = ((returns - mean) / deviation).to(predicted.dtype)
        return Advantages(advantage, _per_agent(predicted, weight), target, own)

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        return {**super().modules(), "critic": self.critic}

    def saved(self) -> dict[str, Any]:
        """Return also the moments of the value normaliser."""
        return {**super().saved(), "value_norm": self.value_norm.moments}


def _of_those_who_act(value: Tensor, acts: Tensor) -> Tensor:
    """Return values [S, n] with the mean of those who act, [S, n] bool, for the others, such as the dead.

    One return is for all: what an agent did last bootstraps from it, but a dead agent sees nothing to tell it by.
    """
    count = acts.sum(-1, keepdim=True)
    mean = value.masked_fill(~acts, 0).sum(-1, keepdim=True) / count.clamp(min=1)
    return torch.where(acts | (count == 0), value, mean)


def _per_agent(values: Tensor, like: Tensor) -> Tensor:
    """Return values [S] or [S, n] as [S, n], the shape of `like`."""
    return values if values.dim() > 1 else values.unsqueeze(-1).expand_as(like)
