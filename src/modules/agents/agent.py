"""What every agent can do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from omagd.modules.agents.inputs import AgentInputs
from omagd.utils.packing import Packing


class Agent(nn.Module, ABC):
    """Values of all actions from what agents see and remember; construction is `cls(config, info)`."""

    @abstractmethod
    def init_hidden(self, n_slots: int) -> Tensor:
        """Return the memory at the start of episodes, [B, n, H] zeros."""

    @abstractmethod
    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes, from inputs of S packed rows."""

    @abstractmethod
    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one tick and the new memory [B, n, H]."""
