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
