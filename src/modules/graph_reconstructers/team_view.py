"""What agents see who tell one another: each observation, completed by what any living ally sees (`use_team_obs`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.graphs import GraphTables


class TeamView:
    """Completes observations. Features are selected, never computed, so acting and learning have the same bits.

    A unit is known to the team if a living agent sees it; each living agent sees itself. An agent receives a unit that
    it does not see as `full_obs` shows it, relative to itself. Dead agents receive nothing.

    Args:
        layout: of the observations, whose allies are the other agents in their order. n_agents: n. device: of all.
    """

    def __init__(self, layout: EntityLayout, n_agents: int, device: torch.device) -> None:
        self._tables = GraphTables(layout, device)
        agent, ally = np.arange(n_agents)[:, None], np.arange(layout.n_allies)[None]
        enemies = np.broadcast_to(layout.n_allies + 1 + np.arange(layout.n_enemies), (n_agents, layout.n_enemies))
        unit = np.concatenate([agent, ally + (ally >= agent), enemies], 1)  # of each node [n, N]
        node = unit.argsort(axis=1) + np.arange(n_agents)[:, None] * layout.n_nodes
        self._unit = torch.from_numpy(unit).to(device)
        self._node = torch.from_numpy(np.ascontiguousarray(node.T)).to(device)  # of each unit in each agent's graph

    def __call__(self, obs: Tensor, full: Tensor) -> Tensor:
        """Return the completed observations [S, n, obs_dim] of `obs` and `full_obs`, in the same type."""
        seen = self._tables.sight(obs)[0]
        known = seen.flatten(1)[:, self._node].any(-1)
        shared = known[:, self._unit] & seen[..., :1]
        of_features = self._tables.of_nodes
        return torch.where(of_features(seen), obs, torch.where(of_features(shared), full, 0))
