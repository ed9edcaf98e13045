"""What agents read, and a first layer that reads it without one-hots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config


@dataclass(frozen=True)
class AgentInputs:
    """Rows of agents' inputs: packed steps (S) in learning, battle slots (B) in acting.

    Args:
        features: [S, n, obs_dim], flat observations (seen, reconstructed or full), in the agent's float type.
        last_action: [S, n] int64, -1 where the episode starts.
        guessed: [S, n, N] bool, nodes whose features are guesses; None where nothing is reconstructed.
    """

    features: Tensor
    last_action: Tensor
    guessed: Tensor | None = None

    @classmethod
    def blank(cls, n_rows: int, info: EnvInfo, like: Tensor) -> AgentInputs:
        """Return inputs of zeros with the float type and device of `like`."""
        features = like.new_zeros(n_rows, info.n_agents, info.obs_dim)
        return cls(features, torch.full((n_rows, info.n_agents), -1, device=like.device))


class InputLinear(nn.Linear):
    """`nn.Linear` over [features | one-hot of the last action | one-hot of the agent], computed by looking columns up.

    Args:
        n_features: width of the features. out_features: width of the result.
        config: `obs_last_action` and `obs_agent_id` say which one-hots there are. info: their sizes.
    """

    def __init__(self, n_features: int, out_features: int, config: Config, info: EnvInfo) -> None:
        self.widths = [
            n_features,
            info.n_actions if config.obs_last_action else 0,
            info.n_agents if config.obs_agent_id else 0,
        ]
        super().__init__(sum(self.widths), out_features)
        self.n_agents = info.n_agents

    def forward(self, features: Tensor, last_action: Tensor) -> Tensor:  # type: ignore[override]
        """Return [S, n, out] from features [S, n, d] and last_action [S, n] int64 (-1: none, a one-hot of zeros)."""
        of_features, of_actions, of_agents = self.weight.split(self.widths, dim=1)
        out = F.linear(features, of_features, self.bias)
        n_actions = self.widths[1]
        # One table for every pair of agent and last action; the last action column is "none".
        table = F.pad(of_actions.t(), (0, 0, 0, 1)).unsqueeze(0)
        if self.widths[2]:
            table = table + of_agents.t().unsqueeze(1)
        index = torch.where(last_action < 0, n_actions, last_action) if n_actions else torch.zeros_like(last_action)
        if len(table) > 1:
            index = index + torch.arange(self.n_agents, device=index.device) * (n_actions + 1)
        return out + F.embedding(index, table.flatten(0, 1))


def flat_features(inputs: AgentInputs, mark_guesses: bool, n_nodes: int) -> Tensor:
    """Return the features [S, n, d], followed by the guess marks [S, n, N] where the agent is told."""
    if not mark_guesses:
        return inputs.features
    return torch.cat([inputs.features, guess_marks(inputs, n_nodes)], dim=-1)


def guess_marks(inputs: AgentInputs, n_nodes: int) -> Tensor:
    """Return [S, n, N] in the type of the features: 1 where a node is a guess; zeros where nothing is reconstructed."""
    if inputs.guessed is None:
        return inputs.features.new_zeros(*inputs.features.shape[:-1], n_nodes)
    return inputs.guessed.to(inputs.features.dtype)
