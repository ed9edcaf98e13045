"""An agent that talks: each listener attends to what its team has said (TarMAC).

Source: Das et al. 2019, arXiv:1810.11187. Acting needs a channel between the agents. Shapes: as in `agent.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import RNNAgent
from omagd.modules.ops import FastLinear, PackedGRU, autocast_bf16
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing


class TarMACArgs(BaseModel):
    """`agent_args` of `tarmac`; the defaults are the paper's sizes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    key_dim: int = Field(default=16, ge=1)  # numbers of a signature, and of a query
    value_dim: int = Field(default=32, ge=1)  # numbers of a message


class TalkingGRU(PackedGRU):
    """A GRU that reads x_i and what agent i hears, c_i, from the states h_j that all agents have after the last step.

    With a query q, a signature k and a value v of each agent, linear in its h, and d = `key_dim`:

        a_ij = softmax_j(q_i^T k_j / sqrt(d)),    c_i = sum_j a_ij v_j          (TarMAC, eq. 1 and 2)
    """

    def __init__(self, input_dim: int, hidden_dim: int, args: TarMACArgs) -> None:
        super().__init__(input_dim + args.value_dim, hidden_dim)
        self.widths = [args.key_dim, args.key_dim, args.value_dim]
        self.say = FastLinear(hidden_dim, sum(self.widths))

    def forward(self, x: Tensor, packing: Packing, start: Tensor | None = None) -> Tensor:
        """Return the hidden state after each row, [S, n, H], from x [S, n, input_dim]; `start` as in `PackedGRU`."""
        hidden = self.weight_hh.new_zeros(packing.n_episodes, x.shape[1], self.hidden_dim) if start is None else start
        states = []
        for of_step in x.split(packing.batch_sizes):
            # Messages of one step are inputs of the next one, so no kernel can take all steps at once.
            hidden = self.step(of_step, hidden[: len(of_step)])
            states.append(hidden)
        return torch.cat(states)

    def step(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the next hidden state [B, n, H] from x [B, n, input_dim] and hidden [B, n, H]."""
        with autocast_bf16(x.device, False):  # as the plain GRU
            # At the first step h is 0: all say the same, so nobody hears anything of the others.
            query, key, value = self.say(hidden).split(self.widths, dim=-1)
            heard = F.scaled_dot_product_attention(query, key, value)
            return super().step(torch.cat([x.to(hidden.dtype), heard], dim=-1), hidden)


class TarMACAgent(RNNAgent):
    """`RNNAgent` whose GRU also reads what the other agents say, `TalkingGRU`; weights are shared by all agents."""

    args_model: ClassVar[type[BaseModel]] = TarMACArgs

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        if not config.share_parameters:
            raise UserError("share_parameters=False: agent=tarmac talks within one network. Use share_parameters=True")
        args = TarMACArgs.model_validate(config.agent_args)
        self.rnn = TalkingGRU(config.rnn_hidden_dim, config.rnn_hidden_dim, args)
