"""A network of its own for each agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import Agent, AgentInputs, Remembers
from omagd.utils.packing import Packing


def alone(config: Config, info: EnvInfo) -> tuple[Config, EnvInfo]:
    """Return the configuration and the facts for the network of one agent, which needs no agent number."""
    return config.model_copy(update={"obs_agent_id": False}), replace(info, n_agents=1)


class SeparateAgents(Agent):
    """n networks of one class, one for each agent (`share_parameters=False`)."""

    def __init__(self, make: Callable[[Config, EnvInfo], Agent], config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.each = nn.ModuleList(make(*alone(config, info)) for _ in range(info.n_agents))
        for i, agent in enumerate(self._agents()):
            agent.number = i

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return the hidden state at the start of episodes, [B, n, H] zeros."""
        return torch.cat([agent.init_hidden(n_slots) for agent in self._agents()], dim=1)

    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes."""
        return torch.cat([agent(inputs.agent(i), packing) for i, agent in enumerate(self._agents())], dim=1)

    def unroll(self, inputs: AgentInputs, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return the values [S, n, A], and the hidden state after each row, [S, n, H]."""
        each = enumerate(cast(list[Remembers], self._agents()))
        values, hidden = zip(*(agent.unroll(inputs.agent(i), packing) for i, agent in each), strict=True)
        return torch.cat(values, dim=1), torch.cat(hidden, dim=1)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one step and the new hidden state [B, n, H]."""
        each = enumerate(self._agents())
        steps = [agent.step(inputs.agent(i), hidden[:, i : i + 1]) for i, agent in each]
        values, after = zip(*steps, strict=True)
        return torch.cat(values, dim=1), torch.cat(after, dim=1)

    def _agents(self) -> list[Agent]:
        return [agent for agent in self.each if isinstance(agent, Agent)]
