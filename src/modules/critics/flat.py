"""Critics that read flat vectors: the state, or what each agent sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear
from omagd.modules.agents.separate import alone
from omagd.modules.kernels.linear import FastLinear


class StateCritic(nn.Module):
    """V(s): one value of the state for the whole team (MAPPO, Yu et al. 2022, arXiv:2103.01955).

    Args:
        config, info: the run and its environment. width: of both hidden layers.
    """

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        bf16 = config.precision == "bf16"
        self.fc1 = FastLinear(info.state_dim, width, bf16=bf16)
        self.fc2 = FastLinear(width, width, bf16=bf16)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S] from the state [S, state_dim]; the agents' inputs are not used."""
        value: Tensor = self.head(self.fc2(self.fc1(state).relu()).relu())
        return value.squeeze(-1)


class ObservationCritic(nn.Module):
    """V(o_i): a value for each agent from its own inputs (independent PPO, de Witt et al. 2020, arXiv:2011.09533).

    It has no memory.

    Args:
        config, info: the run and its environment. width: of both hidden layers.
    """

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        bf16 = config.precision == "bf16"
        self.n_marks = info.layout.n_nodes if config.mark_guesses and info.layout is not None else 0
        self.fc1 = InputLinear(info.obs_dim + self.n_marks, width, config, info)
        self.fc2 = FastLinear(width, width, bf16=bf16)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs; the state [S, state_dim] is not used."""
        value: Tensor = self.head(self.fc2(self.fc1.relu(inputs.flat(self.n_marks), inputs.last_action)).relu())
        return value.squeeze(-1)


class AgentStateCritic(nn.Module):
    """V(s, o_i): a value for each agent from the state and its own inputs (MAPPO, agent-specific global state).

    Args:
        config, info: the run and its environment. width: of both hidden layers.
    """

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        bf16 = config.precision == "bf16"
        self.n_marks = info.layout.n_nodes if config.mark_guesses and info.layout is not None else 0
        self.of_inputs = InputLinear(info.obs_dim + self.n_marks, width, config, info)
        self.of_state = FastLinear(info.state_dim, width, bias=False, bf16=bf16)
        self.fc2 = FastLinear(width, width, bf16=bf16)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs and the state [S, state_dim], the product with which agents share."""
        first = self.of_inputs(inputs.flat(self.n_marks), inputs.last_action) + self.of_state(state).unsqueeze(1)
        value: Tensor = self.head(self.fc2(first.relu()).relu())
        return value.squeeze(-1)


class SeparateObservationCritics(nn.Module):
    """An `ObservationCritic` for each agent (`share_parameters=False`)."""

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(ObservationCritic(*alone(config, info), width) for _ in range(info.n_agents))

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs; the state [S, state_dim] is not used."""
        return torch.cat([critic(inputs.agent(i), state) for i, critic in enumerate(self.each)], dim=1)


def observation_critic(config: Config, info: EnvInfo, width: int) -> nn.Module:
    """Return the critic of `learner_args.critic=observation`, shared by the agents or not (`share_parameters`)."""
    kind = ObservationCritic if config.share_parameters else SeparateObservationCritics
    return kind(config, info, width)
