"""MAPPO: an on-policy learner with a central critic (Yu et al. 2022, arXiv 2103.01955).

Actors share weights and read their own observations; the critic reads the state. Nothing here knows its rank: the sums
over ranks are those of `SyncedOptimizer` and of `Dist`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from omagd.components.action_selectors import draw
from omagd.components.episode_codec import Spec
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration
from omagd.learners.protocol import Data, learner_class
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, SyncedOptimizer, lr_scale, merge
from omagd.modules.agents.agent import AgentInputs
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, Packing, td_lambda_targets
from omagd.utils.seeding import generator

LOG_PROB = "log_prob"
"""The field that the controller stores with each row: log-probability of each agent's action, [S, n]."""


class MAPPOArgs(BaseModel):
    """`learner_args` of MAPPO."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    epochs: int = Field(default=5, ge=1)  # passes over each batch
    minibatches: int = Field(default=1, ge=1)  # parts of the batch, of all ranks together, each with one step
    clip: float = Field(default=0.2, gt=0.0)  # bound of the probability ratio's distance from 1
    value_clip: float = Field(default=0.2, gt=0.0)  # bound of the value's distance from the value before the update
    entropy: float = Field(default=0.01, ge=0.0)  # weight of the entropy bonus
    value_weight: float = Field(default=0.5, gt=0.0)  # weight of the critic's loss
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)  # 0: one-step advantages, 1: whole returns
    critic_hidden: int = Field(default=64, ge=1)  # width of the critic


class MAPPOController(BasicMAC):
    """Draws actions from the softmax of the agent's logits and stores their log-probabilities."""

    def __init__(self, config: Config, info: EnvInfo, device: torch.device, reconstructor: Any = None) -> None:
        if learner_class(config.learner).data != "on_policy":
            raise UserError(
                f"mac={config.mac} draws from logits: it needs learner=example_mappo, not learner={config.learner}"
            )
        super().__init__(config, info, device, reconstructor)

    @classmethod
    def extra_fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the field of the log-probabilities."""
        return {LOG_PROB: (torch.float32, (info.n_agents,))}

    def select_actions(
        self, q: np.ndarray, available: np.ndarray, explore: Exploration | None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return actions [B, n] and their log-probabilities; `q` are logits [B, n, A]. Greedy without `explore`."""
        possible = available | ~available.any(axis=-1, keepdims=True)  # rows that have ended: anything
        log_probs = log_softmax(torch.from_numpy(q), torch.from_numpy(possible)).numpy()
        if explore is None:
            actions = log_probs.argmax(axis=-1)
        else:
            actions = draw(np.exp(log_probs), explore.rng.random(q.shape[:2]))
        taken = np.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]
        return actions, {LOG_PROB: taken.astype(np.float32)}


def log_softmax(logits: Tensor, available: Tensor) -> Tensor:
    """Return the log-softmax over available actions; unavailable ones get the type's least value, not -inf."""
    return logits.masked_fill(~available, torch.finfo(logits.dtype).min).log_softmax(dim=-1)


@dataclass(frozen=True)
class Sample:
    """Rows of some episodes. weight: 1, or 0 for a stand-in where this rank has no episode of a minibatch."""

    batch: PackedBatch
    weight: float = 1.0


class PPOLoss(LossModule):
    """Clipped policy loss, clipped value loss and entropy bonus, summed over the steps taken.

    With the probability ratio rho = pi(a|o) / pi_old(a|o) and the normalised advantage A, of each agent and step:

        policy  = -min(rho A, clip(rho, 1 - c, 1 + c) A)                       (Schulman et al. 2017, equation 7)
        value   = max((V - G)^2, (V_old + clip(V - V_old, -v, v) - G)^2) / 2   (MAPPO, appendix; G: lambda-return)
        loss    = mean over agents of (policy - entropy weight * entropy) + value weight * value
    """

    def __init__(self, agent: nn.Module, critic: nn.Module, args: MAPPOArgs) -> None:
        super().__init__()
        self.agent, self.critic, self.args = agent, critic, args

    def forward(self, inputs: AgentInputs, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the summed loss and stats over the steps taken."""
        args, batch = self.args, sample.batch
        taken = batch.valid_mask.to(torch.float32) * sample.weight  # [S]; 0 in closing rows
        log_probs = log_softmax(self.agent(inputs, batch.packing), batch["avail_actions"].bool())
        chosen = log_probs.gather(-1, batch["actions"].long().unsqueeze(-1)).squeeze(-1)
        # Closing rows have no action: the difference is masked before exp, so that it cannot overflow there.
        ratio = ((chosen - batch[LOG_PROB]) * taken.unsqueeze(-1)).exp()
        advantage = batch["advantage"].unsqueeze(-1)
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        policy = -torch.min(ratio * advantage, clipped * advantage).mean(dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean(dim=-1)  # p log p is 0 for unavailable actions
        value, old = self.critic(batch["state"]).squeeze(-1), batch["value"]
        near = old + (value - old).clamp(-args.value_clip, args.value_clip)
        error = 0.5 * torch.max((value - batch["return"]).square(), (near - batch["return"]).square())
        loss = ((policy - args.entropy * entropy + args.value_weight * error) * taken).sum()
        count = taken.sum()
        terms = {
            "loss_policy": policy,
            "loss_value": error,
            "entropy": entropy,
            "clipped_share": (ratio != clipped).to(taken.dtype).mean(dim=-1),
            "value_mean": value,
        }
        stats = {name: ((term.detach() * taken).sum(), count) for name, term in terms.items()}
        return loss, {"loss_ppo": (loss.detach(), count), **stats}


class MAPPOLearner:
    """Trains a controller's agent and a central critic on the episodes that were just collected.

    Args:
        mac: whose agent is trained. config, info: the run and its environment. dist: the ranks.
    """

    data: Data = "on_policy"
    loss_name = "loss_ppo"
    args_model = MAPPOArgs
    precisions = ("float32",)

    def __init__(self, mac: MAPPOController, config: Config, info: EnvInfo, dist: Dist) -> None:
        if not isinstance(mac, MAPPOController):
            raise UserError(f"learner={config.learner} needs mac=mappo_mac, not mac={config.mac}")
        self.mac, self.config, self.info, self.dist = mac, config, info, dist
        self.args = MAPPOArgs.model_validate(config.learner_args)
        width = self.args.critic_hidden
        self.critic = nn.Sequential(
            nn.Linear(info.state_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        ).to(dist.device)
        loss = PPOLoss(mac.agent, self.critic, self.args)
        self.optimizer = torch.optim.Adam(loss.parameters(), lr=config.lr * lr_scale(config, dist.world_size), eps=1e-5)
        self._step = SyncedOptimizer(loss, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)
        self.updates = 0

    @staticmethod
    def steps_per_batch(config: Config) -> int:
        """Return epochs times minibatches."""
        args = MAPPOArgs.model_validate(config.learner_args)
        return args.epochs * args.minibatches

    def warm_up(self) -> None:
        """Run discarded passes on a made-up batch of one episode."""
        packing = Packing((2,))
        like = next(self.critic.parameters())
        n, actions = self.info.n_agents, self.info.n_actions
        data = {
            "avail_actions": torch.ones(2, n, actions, dtype=torch.uint8, device=like.device),
            "actions": torch.zeros(2, n, dtype=torch.uint8, device=like.device),
            "state": like.new_zeros(2, self.info.state_dim),
            LOG_PROB: like.new_zeros(2, n),
            **{name: like.new_zeros(2) for name in ("advantage", "return", "value")},
        }
        self._step.warm_up(AgentInputs.blank(2, self.info, like), Sample(PackedBatch(data, packing, (0,))))

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take `epochs` times `minibatches` steps; return their merged stats. `episodes` is not used."""
        batch = self._with_advantages(batch)
        merged: Stats = {}
        owners = self._owners(batch.packing.n_episodes)
        for _ in range(self.args.epochs):
            for sample in self._minibatches(batch, owners):
                rows = len(sample.batch.packing.step) - sample.batch.packing.n_episodes
                parts = [replace(sample, batch=part) for part in sample.batch.split(self.config.accumulate)]
                steps = torch.tensor(rows * int(sample.weight))
                result = self._step(steps, *((self.mac.inputs(part.batch), part) for part in parts))
                self.updates += 1
                merged = merge(merged, {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped})
        return merged

    @torch.no_grad()
    def _with_advantages(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch with values, lambda-returns and advantages that are normalised over all ranks.

        GAE(lambda) (Schulman et al. 2016) is the lambda-return minus the value. An episode that was truncated
        bootstraps from the value of its closing row.
        """
        value = self.critic(batch["state"]).squeeze(-1)
        reward, terminated = batch["reward"], batch["terminated"].to(value.dtype)
        returns = td_lambda_targets(reward, terminated, value, batch.packing, self.config.gamma, self.args.gae_lambda)
        taken = batch.valid_mask.to(value.dtype)
        advantage = (returns - value) * taken
        moments = torch.stack([taken.sum(), advantage.sum(), advantage.square().sum()]).double()
        count, total, squares = self.dist.sum(moments).unbind()
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        normalised = ((advantage - mean) / (deviation + 1e-8)).to(value.dtype) * taken
        return replace(batch, data={**batch.data, "advantage": normalised, "return": returns, "value": value})

    def _owners(self, n_episodes: int) -> list[tuple[int, int]]:
        """Return (place, rank) of the episodes of all ranks, in one order for any distribution over ranks."""
        counts = self.dist.counts(n_episodes)
        return sorted((place, rank) for rank, count in enumerate(counts) for place in range(count))

    def _minibatches(self, batch: PackedBatch, owners: list[tuple[int, int]]) -> Iterator[Sample]:
        """Yield this rank's share of random minibatches of whole episodes, which are drawn alike on all ranks."""
        order = generator(self.config.seed, "minibatches", self.updates).permutation(len(owners))
        position = {place: i for i, place in enumerate(batch.sample_index)}
        for chosen in np.array_split(order, self.args.minibatches)[: len(order)]:  # no empty ones
            own = [position[owners[i][0]] for i in chosen if owners[i][1] == self.dist.rank]
            yield Sample(batch.select(own)) if own else Sample(batch.select([0]), weight=0.0)

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        return {"agent": self.mac.agent, "critic": self.critic}

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer and number of steps."""
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
