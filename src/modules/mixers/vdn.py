"""VDN (Sunehag et al. 2018): the sum."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config


class VDNMixer(nn.Module):
    """Joint value = sum of the agents' values."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return [S] from agent_qs [S, n]; the state [S, state_dim] is not read."""
        return agent_qs.sum(dim=-1)


class NoMixer(nn.Module):
    """Leaves the values as they are; each learns from its agent's own reward where that is told, else the team's."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return [S, n] from agent_qs [S, n]; the state [S, state_dim] is not read."""
        return agent_qs
