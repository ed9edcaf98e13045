"""A second form of the belief head: what it says is read at the next step, `belief_loss=features mac=fed_back`.

    x_t = relu(W_1 o_t + V sg[p(h_{t-1}), z(h_{t-1})]),   h_t = GRU(x_t, h_{t-1})

with the head's probabilities p of living and standardised features z of all units, and sg: no gradient. So the head
learns by its own loss alone, and the agent learns what to make of it. Shapes: as in omagd's agents; U other units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.modules.agents.agent import AgentInputs, RNNAgent
from omagd.modules.ops import FastLinear
from omagd.utils.packing import Packing


class _Shared:
    """One head for trained, acting and target agents: copies of an agent hold the same one."""

    head: Any

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class FedBackAgent(RNNAgent):
    """`rnn` that reads what the belief head says from its last hidden state."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        layout = info.layout_for("agent=fed_back", config.env)
        width = max(layout.ally_dim, layout.enemy_dim)
        self.told = FastLinear((layout.n_nodes - 1) * (1 + width), config.rnn_hidden_dim)
        self.shared = _Shared()

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the part of x [S, n, H] that the observations give, before the ReLU."""
        return (self.fc1(inputs.read(self.n_inferred), inputs.last_action),)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one step and the new hidden state [B, n, H]."""
        hidden = self._next(self.encode(inputs)[0], hidden)
        return self.values(hidden), hidden

    def _next(self, seen: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            lives, features = self.shared.head(hidden)
            told = torch.cat([torch.sigmoid(lives), features.flatten(-2)], -1).to(seen)
        return self.rnn.step(F.relu(seen + self.told(told)), hidden)

    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes."""
        return self.unroll(inputs, packing)[0]

    def unroll(self, inputs: AgentInputs, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return the values, and the hidden state after each row, [S, n, H]."""
        (seen,) = self.encode(inputs)
        hidden, states = self.init_hidden(packing.n_episodes), []
        for rows in seen.split(list(packing.batch_sizes)):
            hidden = self._next(rows, hidden[: len(rows)])  # episodes that go on are the first rows
            states.append(hidden)
        return self.values(torch.cat(states)), torch.cat(states)


class FedBackMAC(BasicMAC):
    """Gives the head, which is made after it, to its agents."""

    @property
    def head(self) -> Any:
        """Trained with the agent."""
        return getattr(self, "_head", None)

    @head.setter
    def head(self, head: Any) -> None:
        self._head = head
        for agent in (self.agent, self._actor):
            shared: Any = agent.shared
            shared.head = head
