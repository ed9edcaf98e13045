"""A critic of the state for any number of units."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.kernels.linear import FastLinear
from omagd.modules.units import UnitEncoder


class SetCritic(nn.Module):
    """V(s) of the units in the state: their order does not matter, and its size does not depend on the map.

    Args:
        config, info: the run and its environment. width: of the embeddings and of the hidden layer.
    """

    def __init__(self, config: Config, info: EnvInfo, width: int) -> None:
        super().__init__()
        self.units = UnitEncoder(config, info, width, "learner_args.critic=set")
        self.hidden = FastLinear(width, width, bf16=config.precision == "bf16")
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: AgentInputs, state: Tensor) -> Tensor:
        """Return [S] from the state [S, state_dim]; the agents' inputs are not used."""
        value: Tensor = self.head(self.hidden(self.units(state)[0]).relu())
        return value.squeeze(-1)
