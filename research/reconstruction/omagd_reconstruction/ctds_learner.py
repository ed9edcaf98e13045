"""CTDS: agents imitate a teacher that sees everything (Zhao et al. 2022, https://arxiv.org/abs/2203.08412).

The teacher is a second agent of the same class that reads `full_obs`. It and the mixer learn by the loss of QMIX, as
the arm `use_full_obs=True` does. The student, which acts, reads its own observations and learns the teacher's values:

    L = 1/2 sum_t mask_t sum_i sum_{a available} (Q_i(o_i, a) - Q_i'(full_i, a))^2 / sum_t mask_t

with agents i, and the teacher's values Q' before its step, without gradient. All values are distilled, not those of
the actions taken alone, as in the authors' code (https://github.com/cathyhxh/CTDS), which also sums over agents and
actions and has an optimizer for each network. Three things differ from it:

- Unavailable actions are left out: no target ever reads the teacher's values of them.
- The factor 1/2, that of `QLoss`, makes `grad_norm_clip` clip alike at half the value.
- The student plays the training episodes. In the authors' code the teacher does, so their students learn from states
  that other policies reach than their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omagd import controllers
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners.nq_learner import NQLearner
from omagd.learners.protocol import Data
from omagd.learners.synced_optimizer import SKIPPED, Adam, LossModule, Stats, SyncedOptimizer, lr_scale
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.ops import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, Packing


class Teacher(NQLearner):
    """QMIX that keeps the values of its last update, before the step: one tensor [S, n, A] for each part of the batch.

    Args: as of `NQLearner`.
    """

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        super().__init__(mac, config, info, dist)
        self.values: list[Tensor] = []

    @torch.no_grad()
    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the TD(lambda) target of every row, [S], from the values q [S, n, A], which are kept."""
        self.values.append(q)
        return super().targets(q, inputs, batch, state)


class StudentLoss(LossModule):
    """Half the squared distance to the teacher's values, summed over valid steps, agents and available actions.

    Args:
        agent: the student. bf16: as of `QLoss`.
    """

    def __init__(self, agent: nn.Module, bf16: bool) -> None:
        super().__init__()
        self.agent, self.bf16 = agent, bf16

    def forward(self, inputs: AgentInputs, batch: PackedBatch, taught: Tensor) -> tuple[Tensor, Stats]:
        """Return the sum of the loss, and its stats, per step. taught: [S, n, A], the teacher's values."""
        with autocast_bf16(taught.device, self.bf16):
            q = self.agent(inputs, batch.packing)
        counted = (batch["avail_actions"] != 0) & batch.valid_mask[:, None, None]
        loss = 0.5 * (q.to(taught.dtype) - taught).where(counted, 0.0).square().sum()
        return loss, {"loss_student": (loss.detach(), batch.valid_mask.sum().to(loss.dtype))}


class CTDSLearner:
    """Trains a teacher with a mixer, and a controller's agent, the student, on one rank or many.

    Args:
        mac: the student's controller. config, info: the run and its environment. dist: the ranks.

    Errors: UserError where the student sees everything.
    """

    data: Data = "replay"
    loss_name = "loss_td"
    reads_full_obs = True
    how_targets_move = staticmethod(NQLearner.how_targets_move)

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        if config.use_full_obs:
            raise UserError(f"use_full_obs=True: learner={config.learner} shows the teacher everything. Leave it out")
        self.mac, self.config, self.info, self.device = mac, config, info, dist.device
        seeing = {"use_full_obs": True, "use_team_obs": False, "use_graph_reconstruction": False}
        seer = config.model_copy(update={**seeing, "belief_loss": "none"})
        above: MAC = controllers.REGISTRY.build(config.mac, seer, info, dist.device)
        above.agent.to(mac.dtype)
        self.teacher = Teacher(above, seer, info, dist)
        loss = StudentLoss(mac.agent, config.precision == "bf16")
        self.optimizer = self.teacher.optimizer
        self.student_optimizer = Adam(loss.parameters(), lr=config.lr * lr_scale(config, dist.world_size))
        limits = config.grad_norm_clip, config.bucket_cap_mb
        self._step = SyncedOptimizer(loss, self.student_optimizer, dist, *limits)

    def warm_up(self) -> None:
        """Run discarded passes of both losses on a made-up batch; call it once, before anything is loaded."""
        self.teacher.warm_up()
        like = next(self.mac.agent.parameters())
        values = like.new_ones(2, self.info.n_agents, self.info.n_actions)
        batch = PackedBatch({"avail_actions": values}, Packing((2,)), (0,))
        self._step.warm_up(AgentInputs.blank(2, self.info, like), batch, values)

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take a step of the teacher, and one of the student to the values before it, on this rank's batch.

        Returns sums and counts of this rank; grad_norm and grad_norm_student are the global ones.
        """
        batch = batch.to(self.device)
        self.teacher.values.clear()
        stats = self.teacher.update(batch, episodes=episodes)
        pairs = zip(batch.split(self.config.accumulate), self.teacher.values, strict=True)
        count = torch.tensor(sum(batch.packing.lengths) - batch.packing.n_episodes)
        learned = stats[SKIPPED][0] == 0
        result = self._step(count, *((self.mac.inputs(part), part, taught) for part, taught in pairs), where=learned)
        return {**stats, **result.stats, "grad_norm_student": result.norm, SKIPPED: result.skipped}

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files; the agent is the student."""
        return {"agent": self.mac.agent, "teacher": self.teacher.mac.agent, "mixer": self.teacher.mixer}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside `modules()`."""
        return {**self.teacher.state_dict(), "student_optimizer": self.student_optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; the caller loads the weights of `modules()`."""
        self.teacher.load_state_dict(state)
        self.student_optimizer.load_state_dict(state["student_optimizer"])
