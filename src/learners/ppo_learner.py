"""Proximal policy optimisation for teams: MAPPO (central critic) and IPPO (a critic for each agent's own view).

Sources: PPO, Schulman et al. 2017, arXiv:1707.06347. GAE, Schulman et al. 2016, arXiv:1506.02438. MAPPO, Yu et al.
2022, arXiv:2103.01955. IPPO, de Witt et al. 2020, arXiv:2011.09533. Nothing here knows its rank: sums over ranks are
those of `SyncedOptimizer` and of `Dist`.

A *sample* is one agent at one step at which it has a choice. Dead agents have only one action; with `death_masking`
(of MAPPO) they are no samples, and every mean below is over samples of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn

from omagd.components import action_selectors
from omagd.components.action_selectors import LOG_PROB
from omagd.components.chunks import Chunks, Minibatches
from omagd.components.td_lambda import td_lambda_targets
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners.protocol import Data
from omagd.learners.synced_optimizer import (
    SKIPPED,
    LossModule,
    Stats,
    SyncedOptimizer,
    lr_scale,
    merge,
)
from omagd.modules import critics
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.kernels.linear import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, Packing
from omagd.utils.seeding import generator

ADAM_EPSILON = 1e-5  # as in MAPPO's published code
NORM_DECAY = 0.99  # of the value normaliser, per update


class PolicyArgs(BaseModel):
    """`learner_args` of PPO's loss of the policy, whatever the advantages come from."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    epochs: int = Field(default=5, ge=1)  # passes over each batch
    minibatches: int = Field(default=1, ge=1)  # parts of the batch, over all ranks, each with one step
    chunk_length: int = Field(default=0, ge=0)  # steps of the pieces that minibatches consist of; 0: whole episodes
    clip: float = Field(default=0.2, gt=0.0)  # bound of the probability ratio's distance from 1
    entropy: float = Field(default=0.01, ge=0.0)  # weight of the entropy bonus
    normalise_advantages: bool = True  # subtract the mean and divide by the deviation over the samples of all ranks
    death_masking: bool = True  # learn nothing from agents that have only one action
    anneal_lr: bool = False  # let the learning rate fall linearly, to 0 at t_max steps learned from


class PPOArgs(PolicyArgs):
    """`learner_args` of PPO with a critic."""

    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)  # 0: one-step advantages, 1: whole returns
    critic: str = "state"  # of the team: state | set (of units); of each agent: observation | agent_state
    critic_hidden: int = Field(default=128, ge=1)  # width of the critic
    value_weight: float = Field(default=0.5, gt=0.0)  # weight of the critic's loss
    value_clip: float | None = Field(default=0.2, gt=0.0)  # bound of a value's distance from the one before the update
    normalise_values: bool = True  # the critic predicts returns with running mean 0 and deviation 1

    @field_validator("critic")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in critics.REGISTRY:
            raise ValueError(f"learner_args.critic={name} is not known; known: {', '.join(critics.REGISTRY.names())}")
        return name


def log_softmax(logits: Tensor, available: Tensor) -> Tensor:
    """Return the log-softmax over available actions; unavailable ones get the type's least value, not -inf."""
    # -inf would make 0 * -inf = NaN in the entropy and its gradient.
    return logits.masked_fill(~available, torch.finfo(logits.dtype).min).log_softmax(dim=-1)


@dataclass(frozen=True)
class PPORows:
    """R rows of some chunks.

    Attributes:
        inputs: of the agents. packing: of the rows. start: [B, n, H], hidden states before the chunks; None: episodes.
        actions: [R, n] int64. available: [R, n, A] bool. log_prob: [R, n], of the actions when they were taken.
        state: [R, state_dim]. advantage, value, target: [R, n]; value: what the critic predicted before the update.
        weight: [R, n], 1 for samples; 0 where an agent has no choice, or where the rows stand in for a missing part.
    """

    inputs: AgentInputs
    packing: Packing
    start: Tensor | None
    actions: Tensor
    available: Tensor
    log_prob: Tensor
    state: Tensor
    advantage: Tensor
    value: Tensor
    target: Tensor
    weight: Tensor


class PPOLoss(LossModule):
    """Clipped policy loss, value loss and entropy bonus, summed over samples.

    With the probability ratio r = pi(a|o) / pi_old(a|o), advantage A, value V, target G:

        policy = -min(r A, clip(r, 1 - c, 1 + c) A)                       (PPO, equation 7)
        value  = max((V - G)^2, (V_old + clip(V - V_old, -v, v) - G)^2) / 2    (MAPPO, appendix; without v: the first)
        loss   = policy - w_e entropy + w_v value

    Args:
        agent, critic: trained; every parameter takes part in every forward. critic: None for advantages without one.
        args: the weights. bf16: whether matrix products on a GPU use bf16.
    """

    def __init__(self, agent: nn.Module, critic: nn.Module | None, args: PPOArgs, bf16: bool = False) -> None:
        super().__init__()
        self.agent, self.critic, self.args, self.bf16 = agent, critic, args, bf16

    def forward(self, rows: PPORows) -> tuple[Tensor, Stats]:
        """Return the summed loss, and stats per sample."""
        args, kind = self.args, rows.advantage.dtype
        with autocast_bf16(rows.state.device, self.bf16):
            begun = () if rows.start is None else (rows.start,)
            logits = self.agent(rows.inputs, rows.packing, *begun)
            value = None if self.critic is None else self.critic(rows.inputs, rows.state)
        log_probs = log_softmax(logits.to(kind), rows.available)
        chosen = log_probs.gather(-1, rows.actions.unsqueeze(-1)).squeeze(-1)
        # Masked before exp, so that rows without a sample cannot overflow.
        change = (chosen - rows.log_prob) * rows.weight
        ratio = change.exp()
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        policy = -torch.min(ratio * rows.advantage, clipped * rows.advantage)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)  # p log p is 0 for unavailable actions
        loss = policy - args.entropy * entropy
        terms = {
            "loss_policy": policy,
            "entropy": entropy,
            "clipped_share": (ratio != clipped).to(kind),
            "kl": ratio - 1 - change,  # Schulman's estimate of KL(pi_old, pi), never negative
        }
        if value is not None:
            value = _per_agent(value.to(kind), rows.weight)
            error = self._value_error(value, rows)
            loss = loss + args.value_weight * error
            terms.update(loss_value=error, value_mean=value)
        total, count = (loss * rows.weight).sum(), rows.weight.sum()
        stats = {name: ((term.detach() * rows.weight).sum(), count) for name, term in terms.items()}
        return total, {"loss_ppo": (total.detach(), count), **stats}

    def _value_error(self, value: Tensor, rows: PPORows) -> Tensor:
        error = (value - rows.target).square()
        limit = self.args.value_clip
        if limit is not None:
            near = rows.value + (value - rows.value).clamp(-limit, limit)
            error = torch.max(error, (near - rows.target).square())
        return 0.5 * error


class ValueNorm:
    """Running mean and deviation of the critic's targets, the same on all ranks (van Hasselt et al. 2016, PopArt).

    Exponential averages over updates, corrected for their start at 0 as in Adam.
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self.moments = torch.zeros(3, dtype=torch.float64, device=device)  # averages of 1, x and x^2

    def add(self, sums: Tensor) -> None:
        """Count a batch by its sums over all ranks, (count, sum of x, sum of x^2) in float64."""
        if self.enabled:
            averages = sums / sums[0].clamp(min=1)
            self.moments = NORM_DECAY * self.moments + (1 - NORM_DECAY) * averages

    @property
    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation, float64 scalars; 0 and 1 at the start and where values are not normalised."""
        weight, first, second = self.moments
        some = weight.clamp(min=1e-30)
        mean = first / some
        deviation = (second / some - mean.square()).clamp(min=1e-4).sqrt()
        return mean, torch.where(weight > 0, deviation, 1.0)


class PPOLearner:
    """Trains a controller's agent, and a critic, on the episodes that were just collected.

    Args:
        mac: whose agent is trained. config, info: the run and its environment. dist: the ranks.
    """

    data: Data = "on_policy"
    loss_name = "loss_ppo"
    args_model: ClassVar[type[Any]] = PPOArgs  # of another learner: without the keys of a critic

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        if not action_selectors.draws(config.action_selector):
            raise UserError(
                f"action_selector={config.action_selector}: learner={config.learner} needs actions that are drawn from"
                " the agent's logits. Use action_selector=softmax"
            )
        self.mac, self.config, self.info, self.dist = mac, config, info, dist
        self.lr = config.lr * lr_scale(config, dist.world_size)
        self.args = self.args_model.model_validate(config.learner_args)
        self.critic = self._new_critic()
        loss = PPOLoss(mac.agent, self.critic, self.args, config.precision == "bf16")
        self.optimizer = torch.optim.Adam(loss.parameters(), lr=self.lr, eps=ADAM_EPSILON, fused=True)
        self._step = SyncedOptimizer(loss, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)
        self.value_norm = ValueNorm(self.args.normalise_values, dist.device)
        self.updates = 0
        self.steps = 0  # environment steps learned from, over all ranks

    def _new_critic(self) -> nn.Module | None:
        """Return the critic, or None for a learner without one."""
        made = critics.REGISTRY.get(self.args.critic)(self.config, self.info, self.args.critic_hidden)
        return made.to(self.dist.device, self.mac.dtype)

    @classmethod
    def steps_per_batch(cls, config: Config) -> int:
        """Return epochs times minibatches."""
        args = cls.args_model.model_validate(config.learner_args)
        return args.epochs * args.minibatches

    def warm_up(self) -> None:
        """Run discarded passes on a made-up chunk of two rows."""
        packing, like = Packing((2,)), next(self.mac.agent.parameters())
        n, a = self.info.n_agents, self.info.n_actions
        each, state = like.new_zeros(2, n), like.new_zeros(2, self.info.state_dim)
        inputs = AgentInputs.blank(2, self.info, like)
        actions = torch.zeros(2, n, dtype=torch.int64, device=like.device)
        available = torch.ones(2, n, a, dtype=torch.bool, device=like.device)
        start = self.mac.agent.init_hidden(1) if self.args.chunk_length else None
        self._step.warm_up(PPORows(inputs, packing, start, actions, available, each, state, each, each, each, each))

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take `epochs` times `minibatches` steps; return their merged stats. `episodes` is not used."""
        rows = self._judged(batch)
        memory = self._memory(rows)
        minibatches = Minibatches(batch, self.args.chunk_length, self.dist)
        self._anneal(minibatches.steps)
        merged: Stats = {}
        parts: list[PPORows] = []
        for _ in range(self.args.epochs):
            draws = generator(self.config.seed, "minibatches", self.updates)
            for chunks in minibatches.draw(self.args.minibatches, draws):
                if not parts or self.args.minibatches > 1:  # a single minibatch has the same rows in every epoch
                    parts = _parts(rows, memory, chunks, self.config.accumulate)
                count = torch.stack([part.weight.sum() for part in parts]).sum()
                result = self._step(count, *((part,) for part in parts))
                self.updates += 1
                merged = merge(merged, {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped})
        return merged

    def _anneal(self, steps: int) -> None:
        """Set the learning rate of a batch of so many environment steps over all ranks (`anneal_lr`)."""
        if self.args.anneal_lr:
            left = max(0.0, 1.0 - self.steps / self.config.t_max)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * left
        self.steps += steps

    @torch.no_grad()
    def _judged(self, batch: PackedBatch) -> PPORows:
        """Return all rows of a batch with advantages, values and targets."""
        inputs, available = self.mac.inputs(batch), batch["avail_actions"].bool()
        state, kind = batch["state"].to(self.mac.dtype), self.mac.dtype
        # Closing rows have no action. An agent with one action, such as a dead one, has no choice to learn from.
        choices = available.sum(dim=-1) > 1 if self.args.death_masking else torch.ones_like(available[..., 0])
        weight = (choices & batch.valid_mask.unsqueeze(-1)).to(kind)
        advantage, value, target = self._advantages(batch, inputs, state, weight)
        actions, log_prob = batch["actions"].long(), batch[LOG_PROB].to(kind)
        return PPORows(
            inputs, batch.packing, None, actions, available, log_prob, state, advantage, value, target, weight
        )

    def _advantages(
        self, batch: PackedBatch, inputs: AgentInputs, state: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, the critic's values and its targets, [S, n] each.

        GAE(lambda) is the lambda-return minus the value. An episode that was truncated bootstraps from the value of its
        closing row. Each agent learns from its own reward where the critic values agents one by one and the environment
        reports rewards of agents.
        """
        assert self.critic is not None
        with autocast_bf16(state.device, self.config.precision == "bf16"):
            predicted = self.critic(inputs, state).to(weight.dtype)
        mean, deviation = self.value_norm.scale
        value, reward = (predicted * deviation + mean).to(predicted.dtype), batch["reward"].to(predicted.dtype)
        terminated = batch["terminated"].to(predicted.dtype)
        if value.dim() > 1:
            terminated = terminated.unsqueeze(-1)
            reward = batch["agent_reward"].to(predicted.dtype) if "agent_reward" in batch else reward.unsqueeze(-1)
        returns = td_lambda_targets(reward, terminated, value, batch.packing, self.config.gamma, self.args.gae_lambda)
        advantage = self._normalised(_per_agent(returns - value, weight), weight)
        returns = _per_agent(returns, weight)
        self.value_norm.add(self._sums(returns, weight))
        mean, deviation = self.value_norm.scale
        return advantage, _per_agent(predicted, weight), ((returns - mean) / deviation).to(predicted.dtype)

    def _sums(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return the number of samples of all ranks, and the sums of their values and of the squares, in float64."""
        values, weight = values.double(), weight.double()
        return self.dist.sum(torch.stack([weight.sum(), (values * weight).sum(), (values.square() * weight).sum()]))

    def _normalised(self, advantage: Tensor, weight: Tensor) -> Tensor:
        """Return advantages [S, n] with mean 0 and deviation 1 over the samples of all ranks."""
        if not self.args.normalise_advantages:
            return advantage * weight
        count, total, squares = self._sums(advantage, weight).unbind()
        mean = total / count.clamp(min=1)
        deviation = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
        return ((advantage - mean) / (deviation + 1e-8)).to(advantage.dtype) * weight

    @torch.no_grad()
    def _memory(self, rows: PPORows) -> Tensor | None:
        """Return the hidden state after each row, [S, n, H], for chunks that begin within an episode.

        They stay as they were at the beginning of the update, when the policy that collected the episodes left them.
        """
        if not self.args.chunk_length:
            return None
        with autocast_bf16(rows.state.device, self.config.precision == "bf16"):
            return self.mac.agent.hidden_states(rows.inputs, rows.packing)

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        return {"agent": self.mac.agent, **({} if self.critic is None else {"critic": self.critic})}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside `modules()`: optimizer, numbers of steps, value normaliser."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "steps": self.steps,
            "value_norm": self.value_norm.moments,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; the caller loads the weights of `modules()`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.steps = state.get("steps", 0)  # checkpoints before `anneal_lr` have none
        self.value_norm.moments.copy_(state["value_norm"])


def _per_agent(values: Tensor, like: Tensor) -> Tensor:
    """Return values [S] or [S, n] as [S, n], the shape of `like`."""
    return values if values.dim() > 1 else values.unsqueeze(-1).expand_as(like)


def _parts(rows: PPORows, memory: Tensor | None, chunks: Chunks | None, parts: int) -> list[PPORows]:
    """Return this rank's rows of a minibatch, in at most `parts` parts; rows of weight 0 where it has none."""
    if chunks is None:  # every rank must take part in every step
        first = _rows(rows, torch.zeros(1, dtype=torch.int64), Packing((1,)))
        start = None if memory is None else torch.zeros_like(memory[:1])
        return [replace(first, weight=torch.zeros_like(first.weight), start=start)]
    return [_of_chunks(rows, memory, part) for part in chunks.split(parts)]


def _of_chunks(rows: PPORows, memory: Tensor | None, chunks: Chunks) -> PPORows:
    chosen = _rows(rows, chunks.rows, chunks.packing)
    if memory is None:
        return chosen
    before = chunks.before.to(memory.device)
    start = memory[before.clamp(min=0)]
    return replace(chosen, start=torch.where((before < 0).view(-1, 1, 1), torch.zeros_like(start), start))


def _rows(rows: PPORows, which: Tensor, packing: Packing) -> PPORows:
    which = which.to(rows.state.device)
    names = ("actions", "available", "log_prob", "state", "advantage", "value", "target", "weight")
    return PPORows(rows.inputs.rows(which), packing, None, **{name: getattr(rows, name)[which] for name in names})
