"""QMIX (Rashid et al. 2018): a monotonic mixing network whose weights are functions of the state."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.kernels.compiled_mixing import CompiledMix
from omagd.modules.kernels.compiling import kernels_for
from omagd.modules.kernels.forms import is_only
from omagd.modules.kernels.linear import PADDING, FastLinear


class QMixer(nn.Module):
    """Q_tot = |w2(s)|^T elu(|W1(s)|^T q + b1(s)) + b2(s), with hypernetworks W1, b1, w2, b2 of the state.

    Absolute weights and a monotonic activation give dQ_tot / dq_i >= 0, so each agent's greedy action is part of the
    greedy joint action. W1, w2 and b2 are networks of two layers; all first layers read the same state and are one
    matrix, `first`: [W1 | w2 | b1 | b2].
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        embed, hyper = config.mixing_embed_dim, config.hypernet_embed
        bf16 = config.precision == "bf16"
        self.n_agents = info.n_agents
        self.embed_dim = embed
        self.widths = [hyper, hyper, embed, embed]
        self.first = FastLinear(info.state_dim, sum(self.widths), bf16=bf16)
        self.weight1 = FastLinear(hyper, info.n_agents * embed, bf16=bf16)
        self.weight2 = FastLinear(hyper, embed, bf16=bf16)
        self.bias2 = nn.Linear(embed, 1)

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        kernels = kernels_for(state, state.shape[0] * self.first.out_features)
        if kernels is not None and is_only(self, QMixer, FastLinear, nn.Linear):
            layers = (self.first, self.weight1, self.weight2, self.bias2)
            weights = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
            bf16 = self.first.bf16 and len(state) >= PADDING
            joint: Tensor = CompiledMix.apply(kernels, bf16, agent_qs, state, *weights)  # type: ignore[no-untyped-call]
            return joint
        for_w1, for_w2, b1, for_b2 = self.first(state).split(self.widths, dim=-1)
        w1 = self.weight1(F.relu(for_w1)).abs().view(-1, self.n_agents, self.embed_dim)
        w2 = self.weight2(F.relu(for_w2)).abs()
        b2 = self.bias2(F.relu(for_b2)).squeeze(-1)
        hidden = F.elu((w1 * agent_qs.unsqueeze(-1)).sum(dim=1) + b1)
        return (hidden * w2).sum(dim=-1) + b2
