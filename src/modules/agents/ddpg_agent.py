"""Actors and critics of DDPG: without memory, alone or in talk with the team."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.ff_agent import FFAgent, Trunk
from omagd.modules.agents.inputs import AgentInputs


class DDPGCritic(nn.Module):
    """The value of each agent's own observation and action."""

    def __init__(self, config: Config, info: EnvInfo, talks: bool) -> None:
        super().__init__()
        self.trunk = Trunk(info.obs_dim + info.n_actions, 1, config, info, talks)

    def forward(self, inputs: AgentInputs, actions: Tensor) -> Tensor:
        """Return [S, n] from what agents read and vectors over their actions [S, n, A]."""
        features = torch.cat([inputs.features, actions], dim=-1)
        return self.trunk(features, inputs.last_action).squeeze(-1)


class DDPGAgent(FFAgent):
    """Logits of all actions from one agent's observation alone."""

    samples: ClassVar[bool] = True

    @classmethod
    def new_critic(cls, config: Config, info: EnvInfo) -> DDPGCritic:
        """Return the critic that goes with this agent."""
        return DDPGCritic(config, info, cls.talks)


class BiCNetAgent(DDPGAgent):
    """Logits of all actions from what the team sees: the agents talk by a bidirectional LSTM over their order."""

    talks: ClassVar[bool] = True
