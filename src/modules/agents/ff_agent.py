"""The agent without memory of PyMARL's variants: layers over what one sees now."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import Agent
from omagd.modules.agents.inputs import AgentInputs, InputLinear, flat_features
from omagd.modules.linear import FastLinear
from omagd.utils.packing import Packing


class Trunk(nn.Module):
    """Linear, ReLU, linear, ReLU, linear, weights shared by the agents.

    Args:
        n_features, n_out: per agent. config: `rnn_hidden_dim` is the width (H); also the one-hots of `InputLinear`.
        info: sizes. talks: a bidirectional LSTM over the agents in their order (H to 2 H) in place of the second layer.
    """

    def __init__(self, n_features: int, n_out: int, config: Config, info: EnvInfo, talks: bool = False) -> None:
        super().__init__()
        hidden, bf16 = config.rnn_hidden_dim, config.precision == "bf16"
        self.fc1 = InputLinear(n_features, hidden, config, info)
        self.talk = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True) if talks else None
        self.fc2 = None if talks else FastLinear(hidden, hidden, bf16=bf16)
        self.fc3 = FastLinear(2 * hidden if talks else hidden, n_out, bf16=bf16)

    def forward(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return [S, n, n_out] from features [S, n, n_features] and last_action [S, n]."""
        hidden = self.fc1.relu(features, last_action)
        if self.talk is not None:
            hidden = self.talk(hidden)[0]
        elif self.fc2 is not None:
            hidden = self.fc2(hidden).relu()
        return self.fc3(hidden)


class FFAgent(Agent):
    """A number for each action from one agent's observation alone: its value, or its logit."""

    def __init__(self, config: Config, info: EnvInfo, talks: bool = False) -> None:
        super().__init__()
        self.n_agents = info.n_agents
        self.mark_guesses = config.mark_guesses
        self.n_nodes = info.layout.n_nodes if config.mark_guesses and info.layout is not None else 0
        self.trunk = Trunk(info.obs_dim + self.n_nodes, info.n_actions, config, info, talks)

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return no memory, [B, n, 0]."""
        return self.trunk.fc3.weight.new_zeros(n_slots, self.n_agents, 0)

    def forward(self, inputs: AgentInputs, packing: Packing | None = None) -> Tensor:
        """Return [S, n, A] of all rows; their order says nothing to an agent without memory."""
        return self.trunk(flat_features(inputs, self.mark_guesses, self.n_nodes), inputs.last_action)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return [B, n, A] of one tick and no memory."""
        return self(inputs), hidden

    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return copies of weight [out, in] and bias [out] of each layer, with ReLU between them.

        Errors: ValueError where agents read more than their observation, or talk.
        """
        trunk = self.trunk
        if trunk.fc2 is None or trunk.fc1.looks_up:
            raise ValueError("this agent is more than layers over an observation")
        parts = (trunk.fc1, trunk.fc2, trunk.fc3)
        return [(_array(part.weight), _array(part.bias)) for part in parts]


def _array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().cpu().float().numpy().copy()
