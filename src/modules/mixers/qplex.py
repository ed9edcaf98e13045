"""QPLEX: a mixer of the values of all actions that can represent every value whose greedy actions are the agents'."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.mixers.mixer import MixerInputs

POSITIVE = 1e-10  # keeps weights above zero, as the proof of IGM requires


class HeadsArgs(BaseModel):
    """`mixer_args` of mixers with attention."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    n_heads: int = Field(default=4, ge=1, le=64)  # attention heads


class QPLEXMixer(nn.Module):
    """Q_tot(s, a) = sum_i V_i(s) + lambda_i(s, a) A_i(s, a_i), with lambda_i > 0 and A_i <= 0.

    QPLEX (Wang et al. 2021, arXiv:2008.01062). A_i is 0 for each agent's greedy action and negative for others, so the
    greedy joint action consists of the agents' greedy actions (IGM), and yet lambda may depend on all actions.
    """

    args_model = HeadsArgs
    reads_all_values = True  # forward gets MixerInputs

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.heads = HeadsArgs.model_validate(config.mixer_args).n_heads
        self.n_agents, self.n_actions = info.n_agents, info.n_actions
        state, n, heads = info.state_dim, info.n_agents, self.heads

        def network(n_inputs: int, n_outputs: int) -> nn.Sequential:
            hidden = config.hypernet_embed
            return nn.Sequential(nn.Linear(n_inputs, hidden), nn.ReLU(), nn.Linear(hidden, n_outputs))

        self.weight, self.bias = network(state, n), network(state, n)
        self.key, self.agent = network(state, heads), network(state, heads * n)
        self.action = network(state + n * info.n_actions, heads * n)

    def forward(self, inputs: MixerInputs) -> Tensor:
        """Return the joint value [S]."""
        state, taken = inputs.state, inputs.taken
        # Transformation (eq. 8): Q_i(s) = w_i q_i + b_i with w_i > 0, which keeps each agent's greedy action.
        weight = self.weight(state).abs() + POSITIVE
        advantage = weight * (taken - inputs.greedy)
        # Importance (eq. 10): lambda_i = sum_k key_k(s) agent_ik(s) action_ik(s, a) over heads k, all factors positive.
        one_hot = F.one_hot(inputs.actions, self.n_actions).flatten(1).to(state.dtype)
        shape = len(state), self.heads, self.n_agents
        key = self.key(state).abs().unsqueeze(-1) + POSITIVE
        agent = self.agent(state).sigmoid().view(shape)
        action = self.action(torch.cat([state, one_hot], dim=-1)).sigmoid().view(shape)
        importance = (key * agent * action).sum(dim=1) + POSITIVE
        # V_i + lambda_i A_i = Q_i + (lambda_i - 1) A_i. As in the authors' code this A_i gets no gradient: the agents
        # learn from the plain sum, and the second term trains lambda alone.
        return (weight * taken + self.bias(state) + (importance - 1) * advantage.detach()).sum(dim=-1)
