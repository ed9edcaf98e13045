"""QPLEX (Wang et al. 2021, "QPLEX: Duplex Dueling Multi-Agent Q-Learning") as a mixer with its own keys."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.mixers.mixer import MixerInputs

POSITIVE = 1e-10  # keeps weights above zero, as the proof of IGM requires


class QPLEXArgs(BaseModel):
    """Keys of `mixer_args`: number of attention heads, width of the networks' hidden layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    n_heads: int = Field(default=4, ge=1, le=64)
    hidden_dim: int = Field(default=64, ge=1, le=4096)


class QPLEXMixer(nn.Module):
    """Q_tot(s, a) = sum_i [V_i(s) + lambda_i(s, a) A_i(s, a_i)], with lambda_i > 0 and A_i <= 0.

    Transformation: V_i = w_i(s) max_a q_i + b_i(s) and A_i = w_i(s) (q_i - max_a q_i), with w_i > 0.
    Dueling mixing: lambda_i = sum_k key_k(s) agent_ik(s) action_ik(s, a) over attention heads k, with a positive key
    and sigmoids. A_i is 0 for each agent's greedy action and negative for others, so the greedy joint action consists
    of the agents' greedy actions (IGM), and yet lambda may depend on all actions.

    As in the paper, Q_tot = sum_i Q_i + sum_i (lambda_i - 1) A_i with Q_i = V_i + A_i, and no gradient passes through
    the advantages of the second sum: it trains lambda alone. Neither values nor results on StarCraft were compared with
    the authors' implementation.
    """

    args_model = QPLEXArgs
    reads_all_values = True  # forward gets MixerInputs

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.args = args = QPLEXArgs.model_validate(config.mixer_args)
        self.n_agents, self.n_actions, heads = info.n_agents, info.n_actions, args.n_heads

        def network(n_inputs: int, n_outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(n_inputs, args.hidden_dim), nn.ReLU(), nn.Linear(args.hidden_dim, n_outputs))

        self.weight, self.bias = network(info.state_dim, info.n_agents), network(info.state_dim, info.n_agents)
        self.key, self.agent = network(info.state_dim, heads), network(info.state_dim, heads * info.n_agents)
        self.action = network(info.state_dim + info.n_agents * info.n_actions, heads * info.n_agents)

    def forward(self, inputs: MixerInputs) -> Tensor:
        """Return the joint value [S]."""
        state, taken = inputs.state, inputs.taken
        weight = self.weight(state).abs() + POSITIVE
        advantage = weight * (taken - inputs.greedy)
        one_hot = F.one_hot(inputs.actions, self.n_actions).flatten(1).to(state.dtype)
        shape = len(state), self.args.n_heads, self.n_agents
        key = self.key(state).abs().unsqueeze(-1) + POSITIVE
        agent = self.agent(state).sigmoid().view(shape)
        action = self.action(torch.cat([state, one_hot], dim=-1)).sigmoid().view(shape)
        importance = (key * agent * action).sum(dim=1) + POSITIVE
        # (w_i q_i + b_i) + (lambda_i - 1) A_i = V_i + lambda_i A_i
        return (weight * taken + self.bias(state) + (importance - 1) * advantage.detach()).sum(dim=-1)
