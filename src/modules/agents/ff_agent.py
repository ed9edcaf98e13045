"""Agents without memory: the feed-forward agent, and actors and critics of DDPG.

DDPG: Lillicrap et al. 2016, arXiv:1509.02971. As in the published snakes baseline (docs/snakes.md), and unlike in
MADDPG, a `DDPGCritic` reads the observation and the action of its own agent only. BiCNet (Peng et al. 2017,
arXiv:1703.10069) lets agents communicate through a bidirectional LSTM over the agents in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import Agent, AgentInputs, InputLinear
from omagd.modules.graph_reconstructers import n_inferred
from omagd.modules.ops import FastLinear, is_only
from omagd.utils.packing import Packing


class Trunk(nn.Module):
    """Linear, ReLU, linear, ReLU, linear, weights shared by the agents.

    Args:
        n_features, n_out: per agent. config: `rnn_hidden_dim` is the width (H); also the one-hots of `InputLinear`.
        info: sizes. communicates: a bidirectional LSTM over the agents (H to 2 H) replaces the second layer.
    """

    def __init__(self, n_features: int, n_out: int, config: Config, info: EnvInfo, communicates: bool = False) -> None:
        super().__init__()
        hidden = config.rnn_hidden_dim
        self.fc1 = InputLinear(n_features, hidden, config, info)
        # BiCNet: each agent hears those before and after it, so the team decides together.
        self.talk = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True) if communicates else None
        self.fc2 = None if communicates else FastLinear(hidden, hidden)
        self.fc3 = FastLinear(2 * hidden if communicates else hidden, n_out)

    def forward(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return [S, n, n_out] from features [S, n, n_features] and last_action [S, n]."""
        hidden = self.fc1.relu(features, last_action)
        if self.talk is not None:
            hidden = self.talk(hidden)[0]
        elif self.fc2 is not None:
            hidden = self.fc2(hidden).relu()
        return self.fc3(hidden)


class FFAgent(Agent):
    """A number for each action from one agent's observation alone: its value, or its logit.

    Attributes:
        talks: whether agents communicate. samples: whether a frozen copy draws from the softmax of these numbers, as
            the agent does in training; else it takes the action with the largest.
    """

    talks: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    reads_inferences: ClassVar[bool] = True
    continuous: ClassVar[bool] = True

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.n_agents = info.n_agents
        self.n_inferred = n_inferred(config, info.layout)
        self.trunk = Trunk(info.obs_dim + self.n_inferred, self.n_outputs(info), config, info, self.talks)

    @staticmethod
    def n_outputs(info: EnvInfo) -> int:
        """Return the numbers per agent that the agent computes."""
        return info.n_actions

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return an empty hidden state, [B, n, 0]."""
        return self.trunk.fc3.weight.new_zeros(n_slots, self.n_agents, 0)

    def forward(self, inputs: AgentInputs, packing: Packing | None = None) -> Tensor:
        """Return [S, n, A] of all rows; `packing` does not matter to an agent without memory."""
        return self.trunk(inputs.read(self.n_inferred), inputs.last_action)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return [B, n, A] of one step and the empty hidden state."""
        return self(inputs), hidden

    @classmethod
    def frozen_needs(cls, config: Config) -> tuple[str, ...]:
        """Return what would have to change for `layers` to be the whole policy; empty if they are."""
        shown = ("use_full_obs", "use_team_obs", "use_graph_reconstruction")
        # A frozen copy is layers over the plain observation; what an agent reads beside it would be lost.
        more = ("obs_last_action", "obs_agent_id", *shown)
        silent = ("an agent that does not talk (agent=ddpg)",) if cls.talks else ()
        plain = all(getattr(cls, name) is getattr(FFAgent, name) for name in ("forward", "step"))
        own = () if plain else ("an agent without a forward of its own (agent=ff)",)
        alike = () if config.share_parameters else ("share_parameters=True",)
        return (*silent, *own, *alike, *(f"{key}=False" for key in more if getattr(config, key)))

    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return copies of weight [out, in] and bias [out] of each layer, with ReLU between them.

        Errors: ValueError where agents read more than their observation, or communicate.
        """
        trunk = self.trunk
        if trunk.fc2 is None or trunk.fc1.looks_up or not is_only(trunk, Trunk, InputLinear, FastLinear):
            raise ValueError("this agent is more than layers over an observation")
        layers = (trunk.fc1, trunk.fc2, trunk.fc3)
        weights = [[p.detach().cpu().float().numpy().copy() for p in (part.weight, part.bias)] for part in layers]
        return [(weight, bias) for weight, bias in weights]


class DDPGCritic(nn.Module):
    """Q(observation, action) of each agent, from its own observation and action."""

    def __init__(self, config: Config, info: EnvInfo, talks: bool) -> None:
        super().__init__()
        self.trunk = Trunk(info.obs_dim + info.action_dim, 1, config, info, talks)

    def forward(self, inputs: AgentInputs, actions: Tensor) -> Tensor:
        """Return [S, n] from the agents' inputs and action vectors [S, n, A] (probabilities, one-hots or numbers)."""
        # DDPG's critic reads actions as vectors, so that their gradient exists.
        features = torch.cat([inputs.features, actions], dim=-1)
        return self.trunk(features, inputs.last_action).squeeze(-1)


class JointCritic(nn.Module):
    """Q_i of each agent from the observations and the actions of all (MADDPG, Lowe et al. 2017, arXiv:1706.02275).

    Agent i's own observation and action come first; weights are shared.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.trunk = Trunk((info.n_agents + 1) * (info.obs_dim + info.action_dim), 1, config, info)

    def forward(self, inputs: AgentInputs, actions: Tensor, others: Tensor | None = None) -> Tensor:
        """Return [S, n]. actions: [S, n, A]. others: what the other agents do, [S, n, A]; None: `actions`."""
        n, features = actions.shape[1], inputs.features
        seen = features.flatten(1).unsqueeze(1).expand(-1, n, -1)
        # MADDPG, eq. 5: only agent i's action is its policy's, the others are those of the replay.
        own = torch.eye(n, dtype=torch.bool, device=actions.device).unsqueeze(-1)
        joint = torch.where(own, actions.unsqueeze(2), (actions if others is None else others).unsqueeze(1)).flatten(2)
        return self.trunk(torch.cat([features, actions, seen, joint], dim=-1), inputs.last_action).squeeze(-1)


class TwinCritics(nn.Module):
    """Two critics, of which targets take the smaller value (TD3, Fujimoto et al. 2018, arXiv:1802.09477)."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(make() for _ in range(2))

    def forward(self, *given: object) -> Tensor:
        """Return the values of both, [2, S, n]."""
        return torch.stack([critic(*given) for critic in self.each])


class DDPGAgent(FFAgent):
    """Logits of all actions from one agent's observation alone; of continuous actions tanh^-1 in half widths."""

    samples: ClassVar[bool] = True
    reads_inferences: ClassVar[bool] = False

    @staticmethod
    def n_outputs(info: EnvInfo) -> int:
        """Return the length of an action vector."""
        return info.action_dim

    @classmethod
    def new_critic(cls, config: Config, info: EnvInfo) -> DDPGCritic:
        """Return the critic that goes with this agent."""
        return DDPGCritic(config, info, cls.talks)


class BiCNetAgent(DDPGAgent):
    """Logits of all actions from what the whole team sees: agents communicate through the LSTM of `Trunk`."""

    talks: ClassVar[bool] = True
