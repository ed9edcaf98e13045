"""A learner that changes one thing: the target averages over the next actions instead of taking the best one."""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.nq_learner import NQLearner
from omagd.modules.agents.agent import AgentInputs
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch

TEMPERATURE = 0.1


class SoftLearner(NQLearner):
    """QMIX with a softmax over each agent's available actions in place of the maximum.

    Everything else is inherited, training on several ranks included.
    """

    def __init__(self, mac: BasicMAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        super().__init__(mac, config, info, dist)
        if getattr(self.mixer, "reads_all_values", False):
            raise UserError(
                f"mixer={config.mixer}: learner={config.learner} averages values, so it needs a mixer of values"
            )

    @torch.no_grad()
    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the TD(lambda) target of every row, [S], from the trained agent's values q [S, n, A]."""
        target_q = self.target_agent(inputs, batch.packing)
        choosing = q if self.config.double_q else target_q
        logits = (choosing / TEMPERATURE).masked_fill(batch["avail_actions"] == 0, torch.finfo(q.dtype).min)
        expected = (logits.softmax(dim=-1) * target_q).sum(dim=-1)
        return self.td_targets(self.target_mixer(expected, state), batch)
