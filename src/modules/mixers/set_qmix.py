"""QMIX's mixer over a set of units, for maps of any size."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.ops import FastLinear
from omagd.modules.units import UnitEncoder


class SetQMixer(nn.Module):
    """Q_tot = |w2(g)|^T elu(sum_i |W1(e_i, g)|^T q_i + b1(g)) + b2(g), over the living agents i.

    As in QMIX (Rashid et al. 2018), absolute weights make Q_tot monotonic in every q_i; the weights of agent i come
    from the embedding e_i of its unit and from that of the whole state, g, instead of its place in the state. Dead and
    absent agents do not count. So its size does not depend on the map, and the order of the agents does not matter.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        embed, hyper = config.mixing_embed_dim, config.hypernet_embed
        self.embed_dim = embed
        self.units = UnitEncoder(config, info, hyper, f"mixer={config.mixer}")
        self.weight1_unit = FastLinear(hyper, embed)
        self.whole = FastLinear(hyper, 3 * embed)  # [part of W1 | b1 | w2]
        self.bias2 = nn.Sequential(FastLinear(hyper, embed), nn.ReLU(), nn.Linear(embed, 1))

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        whole, allies, there = self.units(state)
        for_w1, b1, for_w2 = self.whole(whole).chunk(3, dim=-1)
        # QMIX, eq. 5, for any number of agents: absolute weights, one row for each agent's unit.
        w1 = (self.weight1_unit(allies) + for_w1.unsqueeze(1)).abs()
        # A sum over agents whose weights are functions of their units: any number of them, in any order.
        hidden = F.elu((w1 * (agent_qs.unsqueeze(-1) * there)).sum(dim=1) + b1)
        joint: Tensor = (hidden * for_w2.abs()).sum(dim=-1) + self.bias2(whole).squeeze(-1)
        return joint
