"""Critics of the state, or of what each agent sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear
from omagd.modules.agents.separate import alone
from omagd.modules.graph_reconstructers import n_inferred
from omagd.modules.ops import FastLinear
from omagd.modules.units import UnitEncoder


class Critic(Protocol):
    """A module that values a moment; it, or the function that makes it, is called as `cls(config, info, width)`."""

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None: ...

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S], or [S, n] from the agents' inputs and the state [S, state_dim]."""


class FlatCritic(nn.Module):
    """Base of critics with two hidden layers. Subclasses make the first one, then call `add_rest`."""

    def add_rest(self, width: int, values: int = 1) -> None:
        """Make the second layer and the head, behind `width` hidden units."""
        self.fc2 = FastLinear(width, width)
        self.head = nn.Linear(width, values)

    def rest(self, hidden: Tensor) -> Tensor:
        """Return values [...], of several heads [..., n], from the first layer's activations [..., width]."""
        value: Tensor = self.head(self.fc2(hidden).relu())
        return value.squeeze(-1)


class StateCritic(FlatCritic):
    """V(s): one value of the state for the whole team (MAPPO, Yu et al. 2022, arXiv:2103.01955).

    With `env_args.common_reward=False` each agent has a value of its own, V_i(s).
    """

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.fc1 = FastLinear(info.state_dim, width)
        self.add_rest(width, info.n_agents if info.learns_own_rewards(config.env_args) else 1)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S], or [S, n], from the state [S, state_dim]; the agents' inputs are not used."""
        return self.rest(self.fc1(state).relu())


class ObservationCritic(FlatCritic):
    """V(o_i): a value for each agent from its own inputs (independent PPO, de Witt et al. 2020, arXiv:2011.09533).

    It has no memory.
    """

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.n_inferred = n_inferred(config, info.layout)
        self.fc1 = InputLinear(info.obs_dim + self.n_inferred, width, config, info)
        self.add_rest(width)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs; the state [S, state_dim] is not used."""
        return self.rest(self.fc1.relu(inputs.read(self.n_inferred), inputs.last_action))


class AgentStateCritic(FlatCritic):
    """V(s, o_i): a value for each agent from the state and its own inputs (MAPPO, agent-specific global state)."""

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.n_inferred = n_inferred(config, info.layout)
        self.of_inputs = InputLinear(info.obs_dim + self.n_inferred, width, config, info)
        # W [s | x_i] = W_s s + W_x x_i: the product with the state is made once for the team.
        self.of_state = FastLinear(info.state_dim, width, bias=False)
        self.add_rest(width)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs and the state [S, state_dim], the product with which agents share."""
        first = self.of_inputs(inputs.read(self.n_inferred), inputs.last_action) + self.of_state(state).unsqueeze(1)
        return self.rest(first.relu())


class SetCritic(nn.Module):
    """V(s) of the units in the state: their order does not matter, and its size does not depend on the map."""

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.units = UnitEncoder(config, info, width, "learner_args.critic=set")
        self.hidden = FastLinear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S] from the state [S, state_dim]; the agents' inputs are not used."""
        # A function of the whole alone, which no order of units changes (Zaheer et al. 2017).
        value: Tensor = self.head(self.hidden(self.units(state)[0]).relu())
        return value.squeeze(-1)


Kind = Callable[[Config, EnvInfo, int], nn.Module]


class SeparateCritics(nn.Module):
    """A critic of its own for each agent (`share_parameters=False`)."""

    def __init__(self, kind: Kind, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(kind(*alone(config, info), width) for _ in range(info.n_agents))

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs and the state [S, state_dim]."""
        return torch.cat([critic(inputs.agent(i), state) for i, critic in enumerate(self.each)], dim=1)


def observation_critic(config: Config, info: EnvInfo, width: int) -> nn.Module:
    """Return the critic of `learner_args.critic=observation`, shared by the agents or not (`share_parameters`)."""
    return _of_agents(ObservationCritic, config, info, width)


def agent_state_critic(config: Config, info: EnvInfo, width: int) -> nn.Module:
    """Return the critic of `learner_args.critic=agent_state`, shared by the agents or not (`share_parameters`)."""
    return _of_agents(AgentStateCritic, config, info, width)


def _of_agents(kind: Kind, config: Config, info: EnvInfo, width: int) -> nn.Module:
    # Agents that share nothing would still teach one another through a critic that they share.
    return kind(config, info, width) if config.share_parameters else SeparateCritics(kind, config, info, width)
