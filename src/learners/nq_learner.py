"""QMIX and VDN: double Q-learning with TD(lambda) targets on packed episodes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omagd.components.td_lambda import td_lambda_targets
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.protocol import Data
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, SyncedOptimizer, all_finite, copy_where
from omagd.modules import mixers
from omagd.modules.agents.inputs import AgentInputs
from omagd.modules.kernels.compiling import maybe_compile
from omagd.modules.kernels.linear import lowered, whole
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, Packing

MakeTargets = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Transitions:
    """What was done in the rows of a batch.

    Args:
        actions: [S, n] int64. state: [S, state_dim]. happened: [S] bool, False in closing rows. packing: of the rows.
    """

    actions: Tensor
    state: Tensor
    valid_mask: Tensor
    packing: Packing


class QLoss(LossModule):
    """Half the squared error of the joint value of the actions taken, summed over the steps that happened.

    The half is PyMARL2's and PyMARL3's, so that `grad_norm_clip` cuts the same gradient here as there.

    Args:
        agent, mixer: what is trained; every parameter takes part in every forward.
        bf16: products on a GPU in bf16 (on a CPU the modules see to it themselves).
    """

    def __init__(self, agent: nn.Module, mixer: nn.Module, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.agent = agent
        self.mixer = mixer

    def forward(self, inputs: AgentInputs, played: Transitions, targets: MakeTargets) -> tuple[Tensor, Stats]:
        """Return half the sum of squared errors, and stats over the steps that happened.

        targets: called once, without gradients, with the values [S, n, A] of this forward (double Q-learning chooses
            actions by them); returns targets, [S] or [S, n] as the mixer does. Target networks live behind it, outside
            this module. Whole precision: small rewards would vanish beside large values in bf16's 8 bits.
        Stats as PyMARL3 logs them: loss_td per step; td_error_abs, which is the same number there too; q_taken_mean
            and target_mean per step and agent.
        """
        with lowered(played.state.device, self.bf16):
            q = self.agent(inputs, played.packing)
            with torch.no_grad(), whole(played.state.device):
                target = targets(q.detach().to(played.state.dtype))
            taken = q.gather(-1, played.actions.unsqueeze(-1)).squeeze(-1)
            joint = self.mixer(taken, played.state).to(played.state.dtype)
        valid_mask = played.valid_mask.to(joint.dtype).view(-1, *[1] * (joint.dim() - 1))
        error = (joint - target) * valid_mask
        values = joint.shape[1:].numel()  # of a row: 1, or one of each agent, over which is averaged
        loss = 0.5 * error.square().sum() / values
        with torch.no_grad():
            count = valid_mask.sum()
            shares = count * taken.shape[1]
            stats = {
                "loss_td": (loss.detach(), count),
                "td_error_abs": (loss.detach(), count),
                "q_taken_mean": ((joint * valid_mask).sum(), shares),
                "target_mean": ((target * valid_mask).sum(), shares),
            }
        return loss, stats


class NQLearner:
    """Trains a controller's agent and a mixer; whether it synchronises depends on `dist` alone.

    Args:
        mac: whose agent is trained. config, info: the run and its environment. dist: the ranks.
    """

    data: Data = "replay"
    loss_name = "loss_td"

    def __init__(self, mac: BasicMAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        self.mac = mac
        self.config = config
        self.info = info
        self.device = dist.device
        self.mixer: nn.Module = mixers.REGISTRY.get(config.mixer)(config, info).to(self.device, mac.dtype)
        objective = QLoss(mac.agent, self.mixer, config.precision == "bf16")
        lr = config.lr * lr_scale(config, dist.world_size)
        self.optimizer = torch.optim.Adam(objective.parameters(), lr=lr, fused=True)
        self._step = SyncedOptimizer(objective, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)
        # Copied after wrapping, which made the ranks' weights equal.
        self.target_agent = _frozen_copy(mac.agent)
        self.target_mixer = _frozen_copy(self.mixer)
        maybe_compile(config, self.mixer, self.target_mixer)
        self.updates = 0
        self._copied_at = (0, 0)  # episodes, updates: the key that counts may change when a training is continued

    @staticmethod
    def how_targets_move(config: Config, environments: int) -> str:
        """Return, in words, how often targets are copied with so many `environments` of all ranks."""
        until_copied = math.ceil(config.target_update_interval / environments)
        every = config.target_update_updates or until_copied * config.updates_per_iteration
        return f"targets copied every {every} updates"

    def warm_up(self) -> None:
        """Run a discarded forward and backward on a made-up batch; once, before anything is loaded."""
        packing = Packing((3, 2))
        rows = sum(packing.lengths)
        like = next(self.mac.agent.parameters())
        inputs = AgentInputs.blank(rows, self.info, like)
        actions = torch.zeros(rows, self.info.n_agents, dtype=torch.int64, device=self.device)
        state = like.new_zeros(rows, self.info.state_dim)
        played = Transitions(actions, state, ~packing.closing.to(self.device), packing)
        self._step.warm_up(inputs, played, lambda q: torch.zeros_like(self.mixer(q[..., 0], state)))

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take one step on this rank's batch, then copy the targets if that is due.

        episodes: played so far by all ranks. Returns sums and counts of this rank; grad_norm is the global one.
        """
        # The number of steps taken, told without waiting for the device.
        count = torch.tensor(len(batch.packing.step) - batch.packing.n_episodes)
        result = self._step(count, *(self._part(part.to(self.device)) for part in batch.split(self.config.accumulate)))
        self.updates += 1
        self._copy_targets_if_due(episodes)
        return {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped}

    def _part(self, batch: PackedBatch) -> tuple[AgentInputs, Transitions, MakeTargets]:
        """Return the objective's arguments for some episodes."""
        inputs = self.mac.inputs(batch)
        state = batch["state"].to(self.mac.dtype)
        played = Transitions(batch["actions"].long(), state, batch.valid_mask, batch.packing)
        return inputs, played, lambda q: self.targets(q, inputs, batch, state)

    @torch.no_grad()
    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the TD(lambda) target of every row, [S], from the trained agent's values q [S, n, A].

        `double_q`: the trained agent chooses the action that the target network values; else the target chooses itself.
        """
        bf16 = self.config.precision == "bf16"
        with lowered(self.device, bf16):  # the networks' products alone; what is made of them is whole
            target_q = self.target_agent(inputs, batch.packing).to(q.dtype)
        choosing = q if self.config.double_q else target_q
        # Added rather than filled in, which takes six times as long on a CPU.
        action_mask = (batch["avail_actions"].to(choosing.dtype) - 1) * torch.finfo(choosing.dtype).max
        best = (choosing + action_mask).max(dim=-1, keepdim=True).indices
        with lowered(self.device, bf16):
            values = self.target_mixer(target_q.gather(-1, best).squeeze(-1), state).to(q.dtype)
        reward, terminated = batch["reward"].to(values.dtype), batch["terminated"].to(values.dtype)
        if values.dim() > 1:  # no mixer: values of single agents
            terminated = terminated.unsqueeze(-1)
            reward = batch["agent_reward"].to(values.dtype) if "agent_reward" in batch else reward.unsqueeze(-1)
        return td_lambda_targets(reward, terminated, values, batch.packing, self.config.gamma, self.config.td_lambda)

    def modules(self) -> dict[str, nn.Module]:
        """Return what is trained, by the names of its weight files."""
        return {"agent": self.mac.agent, "mixer": self.mixer}

    def state_dict(self) -> dict[str, Any]:
        """Return what continuing needs beside `modules()`: optimizer, targets, counters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "target_agent": self.target_agent.state_dict(),
            "target_mixer": self.target_mixer.state_dict(),
            "updates": self.updates,
            "copied_at": list(self._copied_at),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`; the weights of `modules()` are loaded by the caller."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.target_agent.load_state_dict(state["target_agent"])
        self.target_mixer.load_state_dict(state["target_mixer"])
        self.updates = state["updates"]
        episodes, updates = state["copied_at"]
        self._copied_at = (episodes, updates)

    def _copy_targets_if_due(self, episodes: int) -> None:
        by_updates = self.config.target_update_updates
        if by_updates is None:
            due = episodes - self._copied_at[0] >= self.config.target_update_interval
        else:
            due = self.updates - self._copied_at[1] >= by_updates
        if due:
            pairs = ((self.target_agent, self.mac.agent), (self.target_mixer, self.mixer))
            old = [tensor for target, _ in pairs for tensor in target.state_dict().values()]
            new = [tensor for _, trained in pairs for tensor in trained.state_dict().values()]
            copy_where(all_finite(new), old, new)  # weights that have overflowed do not reach the targets
            self._copied_at = (episodes, self.updates)


def lr_scale(config: Config, world_size: int) -> float:
    """Return what learning rates are multiplied by: 1, the root of W or W (`lr_scaling` none, sqrt, linear)."""
    return {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}[config.lr_scaling]


def _frozen_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False).eval()
