"""Base of learners that improve a policy by PPO's clipped loss, wherever their advantages come from.

Source: PPO, Schulman et al. 2017, arXiv:1707.06347. Nothing here knows its rank: sums over ranks are those of
`SyncedOptimizer` and of `Dist`.

A *sample* is one agent at one step at which it has a choice. Dead agents have only one action; with `death_masking`
(of MAPPO) they are no samples, and every mean below is over samples of all ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from omagd.components import action_selectors
from omagd.components.action_selectors import LOG_PROB
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners.belief_loss import HEAD, BeliefCases, belief_loss, counts, rows_read
from omagd.learners.protocol import NO_TARGETS, Data, Draw, SavesParts
from omagd.learners.synced_optimizer import SKIPPED, Adam, AgentLoss, Stats, SyncedOptimizer, lr_scale, merge, sums_of
from omagd.modules.agents.agent import AgentInputs, no_action
from omagd.modules.ops import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import EpisodeMeta, PackedBatch, Packing, few
from omagd.utils.seeding import generator

if TYPE_CHECKING:
    from omagd.components.gaussian import Gaussian

ADAM_EPSILON = 1e-5  # as in MAPPO's published code


class PolicyArgs(BaseModel):
    """`learner_args` of the loss of the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    epochs: int = Field(default=5, ge=1, le=2**16)  # passes over each batch
    minibatches: int = Field(default=1, ge=1, le=2**16)  # parts of the batch, over all ranks, each with one step
    chunk_length: Literal[0] = 0  # earlier versions could cut episodes in pieces; their runs have this key
    clip: float = Field(default=0.2, gt=0.0)  # bound of the probability ratio's distance from 1
    entropy: float = Field(default=0.01, ge=0.0)  # weight of the entropy bonus
    normalise_advantages: bool = True  # subtract the mean and divide by the deviation over the samples of all ranks
    death_masking: bool = True  # the policy learns nothing from agents that have only one action
    anneal_lr: bool = False  # let the learning rate fall linearly, to 0 at t_max steps learned from


Args = TypeVar("Args", bound=PolicyArgs)


def log_softmax(logits: Tensor, available: Tensor) -> Tensor:
    """Return the log-softmax over available actions; unavailable ones get the type's least value, not -inf."""
    # -inf would make 0 * -inf = NaN in the entropy and its gradient.
    return logits.masked_fill(~available, torch.finfo(logits.dtype).min).log_softmax(dim=-1)


class Epochs:
    """The minibatches of each update, and a learning rate that falls with `anneal_lr`.

    Minibatches are of the episodes of all ranks. One process draws the same if it holds these in turns: the first of
    each rank, then the second of each rank, and so on. They are in the order of place in the rank's sample, and rank.

    Args:
        args: `epochs`, `minibatches` and `anneal_lr`. config: the run. optimizer: new, with the first learning rate.
        dist: the ranks.

    Attributes:
        learned_from: environment steps over all ranks, int64. taken: optimisation steps of the last update, as far as
            the host knows.
    """

    taken: int = 0

    def __init__(self, args: Any, config: Config, optimizer: torch.optim.Optimizer, dist: Dist) -> None:
        self._args, self._config, self._optimizer, self._dist = args, config, optimizer, dist
        self._lr = optimizer.param_groups[0]["lr"]
        # Saved with the optimizer: the rate under the name that torch's schedulers use, and the run's episodes.
        for group in optimizer.param_groups:
            group.update(initial_lr=group["lr"], episodes=0)
        self.learned_from, self._steps, self._episodes = torch.tensor(0), 0, 0

    def draw(self, lengths: Sequence[int], sample: Sequence[int], updates: int) -> list[list[int]]:
        """Return this rank's episodes of each minibatch of all epochs, and set the learning rate; all ranks call it.

        Episodes are places in this rank's batch, the longest first. No minibatch is empty on all ranks: there are
        fewer, but one, where there are fewer episodes. Lists are empty where only other ranks have episodes.

        lengths: rows of each episode of the batch. sample: its place in the rank's sample. updates: taken before.
        """
        # By steps learned from, not by updates: these depend on the number of minibatches.
        done = float(self.learned_from) / self._config.t_max
        if (most := self._config.max_episodes) is not None:  # which ends the run before `t_max`
            done = max(done, self._optimizer.param_groups[0].get("episodes", 0) / most)
        anneals = self._args.anneal_lr
        for group in self._optimizer.param_groups:
            first = group.setdefault("initial_lr", self._lr if anneals else group["lr"])  # earlier versions lack it
            group["lr"] = first * max(0.0, 1.0 - done) if anneals else first
        places = {index: place for place, index in enumerate(sample)}
        steps = self._dist.gather({index: lengths[place] - 1 for index, place in places.items()})
        episodes = sorted((i, rank, n) for rank, found in enumerate(steps) for i, n in found.items() if n)
        drawn = list[list[int]]()
        for _ in range(self._args.epochs):
            # Keyed by the number of updates, so that a resumed run draws the same minibatches. All ranks permute the
            # episodes of all ranks with equal generators, and take what is theirs.
            order = generator(self._config.seed, "minibatches", updates + len(drawn)).permutation(len(episodes))
            # The first minibatches are the larger ones.
            for chosen in np.array_split(order, self._args.minibatches)[: max(1, len(order))]:
                some = (episodes[i] for i in chosen)
                own = [places[index] for index, rank, _ in some if rank == self._dist.rank]
                drawn.append(sorted(own, key=lambda place: -lengths[place]))
        self._steps, self._episodes, self.taken = sum(n for _, _, n in episodes), len(episodes), len(drawn)
        return drawn

    def draw_fixed(self, draw: Draw, updates: int) -> Tensor:
        """Return the same of drawn episodes: minibatches [M, k] int64, filled up with an episode without steps."""
        lengths = draw.drawn[1].tolist()
        drawn = self.draw(lengths, range(len(lengths)), updates)
        size = few(max(map(len, drawn)))  # takes few values
        return torch.tensor([[*own, *[len(lengths) - 1] * (size - len(own))] for own in drawn])

    def finish(self, episodes: int) -> int:
        """Count what the last update has learned from; return its optimisation steps. episodes: of the run before."""
        self.learned_from += self._steps
        for group in self._optimizer.param_groups:
            group["episodes"] = episodes + self._episodes
        return self.taken


@dataclass(frozen=True, kw_only=True)
class PolicyRows:
    """R rows of some episodes.

    Attributes:
        inputs: of the agents. packing: of the rows.
        actions: [R, n] int64; continuous ones [R, n, d]. available: [R, n, A] bool. log_prob: [R, n], of the actions
            when they were taken.
        state: [R, state_dim]. advantage: [R, n].
        weight: [R, n], 1 for samples; 0 where an agent has no choice, or where the rows stand in for a missing part.
        value, target: [R, n], what a critic predicted before the update, and what it should; None without a critic.
        value_weight: [R, n], 1 where the critic learns; None: as `weight`.
        cases: of `belief_loss`, of the same rows; None without.
    """

    inputs: AgentInputs
    packing: Packing
    actions: Tensor
    available: Tensor
    log_prob: Tensor
    state: Tensor
    advantage: Tensor
    weight: Tensor
    value: Tensor | None = None
    target: Tensor | None = None
    value_weight: Tensor | None = None
    cases: BeliefCases | None = None

    def counts(self) -> Tensor:
        """Return the number of samples; where the critic has others, [2] with theirs."""
        weights = [self.weight] if self.value_weight is None else [self.weight, self.value_weight]
        return torch.stack([weight.sum() for weight in weights]).squeeze(0)

    def rows(self, which: Tensor, packing: Packing, every: int) -> PolicyRows:
        """Return the rows at the places `which` [R'] as rows of another packing. every: `belief_every`."""
        which = which.to(self.state.device, non_blocking=True)
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: value[which] for name, value in values.items() if isinstance(value, Tensor)}
        cases = None if self.cases is None else self.cases.among(which, rows_read(packing, every, which.device))
        return PolicyRows(**{**values, "inputs": self.inputs.rows(which), "packing": packing, "cases": cases})


@dataclass(frozen=True)
class Advantages:
    """What an update learns from: `advantage`; of a critic `value`, `target`, `value_weight`. As in `PolicyRows`."""

    advantage: Tensor
    value: Tensor | None = None
    target: Tensor | None = None
    value_weight: Tensor | None = None


class PolicyLoss(AgentLoss, Generic[Args]):
    """Clipped policy loss and entropy bonus, summed over samples.

    With the probability ratio r = pi(a|o) / pi_old(a|o) and the advantage A:

        policy = -min(r A, clip(r, 1 - c, 1 + c) A)                       (PPO, equation 7)
        loss   = policy - w_e entropy

    Args:
        agent: trained; every parameter takes part in every forward. args: the weights.
        bf16: whether matrix products use bf16.

    Attributes:
        gaussian: the density of continuous actions; None: actions are discrete.
    """

    gaussian: Gaussian | None = None

    def __init__(self, agent: nn.Module, args: Args, bf16: bool = False) -> None:
        super().__init__(agent, bf16)
        self.args = args

    def policy(self, outputs: Tensor, rows: PolicyRows) -> tuple[Tensor, Tensor]:
        """Return log pi of the taken actions and the entropies of the policy, [R, n] each. outputs: [R, n, A]."""
        if self.gaussian is not None:
            taken = self.gaussian.log_prob(outputs, rows.actions, rows.available)
            return taken, self.gaussian.entropy(outputs, rows.available)
        log_probs = log_softmax(outputs, rows.available)
        taken = log_probs.gather(-1, rows.actions.unsqueeze(-1)).squeeze(-1)
        return taken, -(log_probs.exp() * log_probs).sum(dim=-1)  # p log p is 0 for unavailable actions

    def forward(self, rows: PolicyRows) -> tuple[Tensor, Stats]:
        """Return the summed losses, and stats per sample; the sum of `belief` is the last one."""
        with autocast_bf16(rows.state.device, self.bf16):
            logits, belief = self.unroll(rows.inputs, rows.packing, rows.cases)
        total, stats = self.terms(rows, logits)
        n = rows.weight.sum()
        loss = (total.detach() * n / rows.counts().clamp(min=1)).sum()  # a critic may have other samples
        stats = {"loss_ppo": (loss, n), **stats}
        return self.with_belief(total, stats, belief)

    def terms(self, rows: PolicyRows, logits: Tensor) -> tuple[Tensor, Stats]:
        """Return the summed loss, since ranks and parts have different numbers of samples, and what is logged of it.

        logits: [R, n, A], of the agent.
        """
        args, kind = self.args, rows.advantage.dtype
        chosen, entropy = self.policy(logits.to(kind), rows)
        # Masked before exp, so that rows without a sample cannot overflow.
        change = (chosen - rows.log_prob) * rows.weight
        # r = pi / pi_old of the same action: the importance weight of an episode that an earlier policy has played.
        ratio = change.exp()
        # Beyond 1 ± c a better action has no more gradient, so that one batch moves the policy only so far.
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        # PPO, eq. 7. The minimum keeps the gradient of changes that have made things worse.
        policy = -torch.min(ratio * rows.advantage, clipped * rows.advantage)
        # The bonus of PPO, eq. 9: a policy that is certain too early would stop exploring.
        terms = {
            "loss_policy": policy,
            "entropy": entropy,
            "clipped_share": (ratio != clipped).to(kind),
            "kl": ratio - 1 - change,  # Schulman's estimate of KL(pi_old, pi), never negative
        }
        return ((policy - args.entropy * entropy) * rows.weight).sum(), weighted(terms, rows.weight)


def weighted(terms: Mapping[str, Tensor], weight: Tensor) -> Stats:
    """Return the weighted sum of each term [R, n], and the sum of the weights [R, n]."""
    return {name: ((term.detach() * weight).sum(), weight.sum()) for name, term in terms.items()}


class PolicyLearner(SavesParts, Generic[Args]):
    """Trains a controller's agent on the episodes that were just collected."""

    data: Data = "on_policy"
    loss_name = "loss_ppo"
    counts_updates: ClassVar[bool] = True
    continuous: ClassVar[bool] = True
    unread: ClassVar[dict[str, str]] = {
        "td_lambda": "has a key of its own, learner_args.gae_lambda, where it has a critic",
        **NO_TARGETS,
    }
    args_model: ClassVar[type[Any]]  # of `learner_args`; a subclass of PolicyArgs

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        if not action_selectors.draws(config.action_selector):
            raise UserError(
                f"action_selector={config.action_selector}: learner={config.learner} needs actions that are drawn from"
                " the agent's logits. Use action_selector=softmax"
            )
        self.mac, self.config, self.info, self.dist = mac, config, info, dist
        self.args: Args = self.args_model.model_validate(config.learner_args)
        loss = self.make_loss(config.precision == "bf16")
        loss.belief = self.belief = belief_loss(config, mac)
        loss.gaussian = None if info.box is None else action_selectors.new_selector(config, info)
        self.optimizer = Adam(loss.parameters(), lr=config.lr * lr_scale(config, dist.world_size), eps=ADAM_EPSILON)
        self.step = SyncedOptimizer(loss, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)
        self.device = dist.device
        self.epochs = Epochs(self.args, config, self.optimizer, dist)

    def make_loss(self, bf16: bool) -> PolicyLoss[Args]:
        """Return the loss, which holds all that is trained."""
        return PolicyLoss(self.mac.agent, self.args, bf16)

    @abstractmethod
    def advantages(
        self, batch: PackedBatch, inputs: AgentInputs, state: Tensor, weight: Tensor, *origin: Tensor
    ) -> Advantages:
        """Return the advantages of a batch of S rows.

        state: [S, state_dim]. weight: [S, n], of `PolicyRows`. origin: what `origin` returned, on the device.
        """

    def origin(self, meta: Sequence[EpisodeMeta]) -> tuple[Tensor, ...]:
        """Return, on the CPU, what `advantages` needs of the origin of B episodes: nothing, or tensors [B]."""
        return ()

    @classmethod
    def steps_per_batch(cls, config: Config) -> int:
        """Return epochs times minibatches, the most steps that a batch can have; `updates` counts those taken."""
        args = cls.args_model.model_validate(config.learner_args)
        return int(args.epochs * args.minibatches)

    def warm_up(self) -> None:
        """Run discarded passes on two made-up rows."""
        like = next(self.mac.agent.parameters())
        n, a = self.info.n_agents, self.info.n_actions
        each = like.new_zeros(2, n)
        rows = PolicyRows(
            inputs=AgentInputs.blank(2, self.info, like), packing=Packing((2,)),
            actions=no_action(self.info, 2, like.device).clamp(min=0),
            available=torch.ones(2, n, a, dtype=torch.bool, device=like.device),
            state=like.new_zeros(2, self.info.state_dim),
            log_prob=each, advantage=each, weight=each, value=each, target=each,
            cases=None if self.belief is None else self.belief.blank(2, n, like),
        )  # fmt: skip
        self.step.warm_up(rows)

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take a step on each minibatch of each epoch; return their merged stats. `episodes` is not used."""
        drawn = self.epochs.draw(batch.packing.lengths, batch.sample_index, self.updates)
        stats = self._learn(self.all_rows(batch), drawn)
        self.finish(episodes)
        return stats

    def steps(self) -> tuple[SyncedOptimizer, ...]:
        """Return what takes optimisation steps."""
        return (self.step,)

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the numbers of the drawn episodes, the minibatches of all epochs, and what `origin` says."""
        return draw.drawn, self.epochs.draw_fixed(draw, self.updates), *self.origin(draw.meta)

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the steps of `update` on drawn episodes; only launches work. inputs: `fixed_inputs` on the device."""
        drawn, minibatches, *origin = inputs
        (batch,) = draw.batches(drawn, 1)
        return self._learn(self.all_rows(batch, origin), minibatches)

    def finish(self, episodes: int) -> None:
        """Count what was learned from; updates without a sample count where only the device knows of them."""
        self.updates += self.epochs.finish(episodes)

    def _learn(self, rows: PolicyRows, minibatches: Sequence[Sequence[int]] | Tensor) -> Stats:
        """Take a step on each minibatch; return their merged stats."""
        merged: Stats = {}
        parts: list[PolicyRows] = []
        taken = 0
        for own in minibatches:
            if not parts or self.args.minibatches > 1:  # a single one has the same rows in every epoch
                parts = self._parts(rows, own)
            count = torch.stack([part.counts() for part in parts]).sum(0)
            if self.belief is not None:
                count = counts(count, [part.cases for part in parts if part.cases is not None])
            result = self.step(count, *((part,) for part in parts))
            taken += result.stepped
            merged = merge(merged, {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped})
        self.epochs.taken = taken
        return merged

    @torch.no_grad()
    def all_rows(self, batch: PackedBatch, origin: Sequence[Tensor] | None = None) -> PolicyRows:
        """Return all rows of a batch with their advantages. origin: on the device; None: that of the batch."""
        if origin is None:
            origin = [value.to(self.device, non_blocking=True) for value in self.origin(batch.meta)]
        inputs, available = self.mac.inputs(batch), batch["avail_actions"].bool()
        state, kind = batch["state"].to(self.mac.dtype), self.mac.dtype
        weight = (self.choices(batch) & batch.valid_mask.unsqueeze(-1)).to(kind)  # closing rows have no action
        found = self.advantages(batch, inputs, state, weight, *origin)
        cases = None
        if self.belief is not None:
            cases = self.belief.cases(batch, every=1)
            self.belief.observe([cases], self.dist)
        return PolicyRows(
            cases=cases,
            inputs=inputs,
            packing=batch.packing,
            actions=batch["actions"].long() if self.info.box is None else batch["actions"].to(kind),
            available=available,
            log_prob=batch[LOG_PROB].to(kind),
            state=state,
            weight=weight,
            **vars(found),
        )

    def choices(self, batch: PackedBatch) -> Tensor:
        """Return which agents learn from what they do in each row, [S, n] bool.

        MAPPO's death masking: the only action of an agent, such as a dead one, says nothing of the policy.
        """
        available = batch["avail_actions"].bool()
        return available.sum(dim=-1) > 1 if self.args.death_masking else torch.ones_like(available[..., 0])

    def sums(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return the number of samples of all ranks, and the sums of their values and of the squares, in float64."""
        return self.dist.sum(sums_of(values, weight))

    def normalised(self, advantage: Tensor, weight: Tensor) -> Tensor:
        """Return advantages [S, n], with mean 0 and deviation 1 over the samples of all ranks if the run wants that."""
        if not self.args.normalise_advantages:
            return advantage * weight
        # Over the samples of all ranks: with a mean of its own each rank would follow another gradient.
        count, total, squares = self.sums(advantage, weight).unbind()
        mean = total / count.clamp(min=1)
        deviation = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
        return ((advantage - mean) / (deviation + 1e-8)).to(advantage.dtype) * weight

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        return {"agent": self.mac.agent, **({} if self.belief is None else {HEAD: self.belief.head})}

    def saved(self) -> dict[str, Any]:
        """Return the optimizer, the steps learned from and the belief head's moments, by their keys in `state_dict`."""
        belief = {} if self.belief is None else {"belief": self.belief.running.moments}
        return {"optimizer": self.optimizer, "steps": self.epochs.learned_from, **belief}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; the caller loads the weights of `modules()`."""
        # A number in checkpoints of earlier versions; before `anneal_lr` they had none.
        super().load_state_dict({**state, "steps": torch.as_tensor(state.get("steps", 0))})

    def _parts(self, rows: PolicyRows, episodes: Sequence[int] | Tensor) -> list[PolicyRows]:
        """Return this rank's rows of a minibatch, in `accumulate` parts at most; rows of weight 0 where it has none."""
        every = self.config.belief_every
        if not len(episodes):  # every rank must take part in every step
            first = rows.rows(torch.zeros(1, dtype=torch.int64), Packing((1,)), every)
            none = first.cases and replace(first.cases, counted=torch.zeros_like(first.cases.counted))
            zeros = torch.zeros_like(first.weight)
            own = None if first.value_weight is None else zeros
            return [replace(first, weight=zeros, value_weight=own, cases=none)]
        parts = min(self.config.accumulate, len(episodes))
        return [rows.rows(*rows.packing.steps_of(episodes[i::parts]), every) for i in range(parts)]
