"""Qatten: a monotonic mixer that weighs agents by attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.mixers.qplex import HeadsArgs


class QattenMixer(nn.Module):
    """Q_tot = c(s) + sum_h w_h(s) sum_i lambda_hi(s) q_i, where lambda_h is a softmax over agents i.

    Qatten (Yang et al. 2020, arXiv:2002.03939, eq. 10 to 13). In head h the state asks, and each agent's unit answers:
    lambda_hi is the softmax of query_h(s) . key_h(u_i) / sqrt(d). Without units in the state, u_i names the agent.
    """

    args_model = HeadsArgs

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.heads = heads = HeadsArgs.model_validate(config.mixer_args).n_heads
        self.n_agents, self.width = info.n_agents, config.mixing_embed_dim
        self.unit_dim = 0 if info.state_layout is None else info.state_layout.ally_dim

        def network(n_outputs: int) -> nn.Sequential:
            hidden = config.hypernet_embed
            return nn.Sequential(nn.Linear(info.state_dim, hidden), nn.ReLU(), nn.Linear(hidden, n_outputs))

        self.query, self.weight, self.bias = network(heads * self.width), network(heads), network(1)
        self.key = nn.Linear(self.unit_dim or info.n_agents, heads * self.width, bias=False)

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        units = torch.eye(self.n_agents, dtype=state.dtype, device=state.device)
        if self.unit_dim:  # allies come first in a state of units
            units = state[:, : self.n_agents * self.unit_dim].unflatten(-1, (self.n_agents, self.unit_dim))
        keys = self.key(units).unflatten(-1, (self.heads, self.width))  # [S, n, heads, width]
        queries = self.query(state).unflatten(-1, (self.heads, self.width)).unsqueeze(1)
        # Weights of a softmax and the absolute w_h are not negative: Q_tot never falls when a q_i rises.
        share = ((queries * keys).sum(dim=-1) / self.width**0.5).softmax(dim=1)  # [S, n, heads]
        heads = (share * agent_qs.unsqueeze(-1)).sum(dim=1)
        joint: Tensor = (self.weight(state).abs() * heads).sum(dim=-1) + self.bias(state).squeeze(-1)
        return joint
