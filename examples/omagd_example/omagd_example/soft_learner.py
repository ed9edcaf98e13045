"""A learner that changes one thing: the target averages over the next actions instead of taking the best one."""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.components.td_lambda import td_lambda_targets
from omagd.learners.nq_learner import NQLearner
from omagd.modules.agents.agent import AgentInputs
from omagd.utils.packing import PackedBatch

TEMPERATURE = 0.1


class SoftLearner(NQLearner):
    """QMIX with a softmax over each agent's available actions where the maximum stood.

    Everything else is inherited, the work of several ranks included: there is no rank in this file.
    """

    @torch.no_grad()
    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the TD(lambda) target of every row, [S], from the trained agent's values q [S, n, A]."""
        target_q = self.target_agent(inputs, batch.packing)
        choosing = q if self.config.double_q else target_q
        logits = (choosing / TEMPERATURE).masked_fill(batch["avail_actions"] == 0, torch.finfo(q.dtype).min)
        expected = (logits.softmax(dim=-1) * target_q).sum(dim=-1)
        values = self.target_mixer(expected, state)
        reward, terminated = batch["reward"].to(values.dtype), batch["terminated"].to(values.dtype)
        return td_lambda_targets(reward, terminated, values, batch.packing, self.config.gamma, self.config.td_lambda)
