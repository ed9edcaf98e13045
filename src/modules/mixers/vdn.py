"""VDN (Sunehag et al. 2018) and independent learners."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config


class VDNMixer(nn.Module):
    """Q_tot = sum_i q_i."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return [S] from agent_qs [S, n]; the state [S, state_dim] is not used."""
        return agent_qs.sum(dim=-1)


class NoMixer(nn.Module):
    """No joint value: each agent learns alone, from its own reward where the environment gives one."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return agent_qs [S, n]; the state [S, state_dim] is not used."""
        return agent_qs
