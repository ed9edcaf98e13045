"""From an agent's flat observation to the nodes of its graph, and back without loss.

Node order: self, allies, enemies. A node is [visible | attackable, dist, relx, rely, ...] as the environment gives it,
zero-padded on the right to D; the agent itself is [1, 0, 0, 0, move features, own features].
Shapes: N nodes of a graph, D features of a node.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omagd.config.env_info import EntityLayout

SELF_HEAD = 4  # visible, dist, relx, rely
NO_UNIT = -1


def obs_to_nodes(obs: Tensor, layout: EntityLayout) -> Tensor:
    """Return the nodes [..., N, D] of observations [..., obs_dim], in the same type.

    Errors: ValueError for another number of features than the layout has.
    """
    if obs.shape[-1] != layout.obs_dim:
        raise ValueError(f"an observation of {obs.shape[-1]} features for a layout of {layout.obs_dim}")
    enemies_dim, allies_dim = layout.n_enemies * layout.enemy_dim, layout.n_allies * layout.ally_dim
    move, enemies, allies, own = obs.split([layout.move_dim, enemies_dim, allies_dim, layout.own_dim], dim=-1)
    nodes = obs.new_zeros((*obs.shape[:-1], layout.n_nodes, layout.node_dim))
    first_enemy = 1 + layout.n_allies
    nodes[..., 0, 0] = 1.0
    nodes[..., 0, SELF_HEAD : SELF_HEAD + layout.move_dim] = move
    nodes[..., 0, SELF_HEAD + layout.move_dim : SELF_HEAD + layout.move_dim + layout.own_dim] = own
    allies = allies.unflatten(-1, (layout.n_allies, layout.ally_dim))
    nodes[..., 1:first_enemy, : layout.ally_dim] = allies
    nodes[..., first_enemy:, : layout.enemy_dim] = enemies.unflatten(-1, (layout.n_enemies, layout.enemy_dim))
    return nodes


def alive(obs: Tensor) -> Tensor:
    """Return whether the observer lives, [...] bool: a dead one sees nothing, not even itself."""
    return (obs != 0).any(-1)


def feature_mask(layout: EntityLayout) -> Tensor:
    """Return which features of each node come from the observation (no padding, no fixed head), [N, D] bool."""
    # Padding and fixed heads are no news; errors over them would look small.
    mask = obs_to_nodes(torch.ones(layout.obs_dim), layout).bool()
    mask[0, 0] = False
    return mask


def units_of_nodes(layout: EntityLayout, n_agents: int) -> np.ndarray:
    """Return the unit that each node of each agent's graph is, [n, N] int64; -1 for agents that a map does not have.

    Units: the agents, then what actions aim at, as in `omagd.envs.frames`.
    """
    agent, ally = np.arange(n_agents)[:, None], np.arange(layout.n_allies)[None]
    others = ally + (ally >= agent)
    others = np.where(others < n_agents, others, NO_UNIT)
    enemies = np.broadcast_to(n_agents + np.arange(layout.n_enemies), (n_agents, layout.n_enemies))
    return np.concatenate([agent, others, enemies], 1)


class GraphTables:
    """Conversions between observations and nodes as table look-ups, and the rule for what is seen."""

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        # Convert an observation whose features are numbered from 2 on: each place of the nodes then names the feature
        # that it reads. 0 and 1 are constants: the padding, and the agent's own "visible".
        numbered = torch.arange(2, layout.obs_dim + 2, dtype=torch.float64)
        source = obs_to_nodes(numbered, layout).long().flatten()
        self._n_nodes = layout.n_nodes
        self._source, self._constants = source.to(device), torch.tensor([0.0, 1.0], device=device)
        place = torch.zeros(layout.obs_dim + 2, dtype=torch.int64)
        place[source] = torch.arange(len(source))
        self._place = place[2:].to(device)
        self._node = self._place // layout.node_dim
        # member[i, f]: feature f belongs to node i. Rows are padded to a multiple of 16, which multiplies faster.
        member = torch.zeros((-(-layout.n_nodes // 16) * 16, layout.obs_dim), device=device)
        member[self._node, torch.arange(layout.obs_dim)] = 1.0
        member[0] = 1.0  # any feature at all shows that the observer lives, and then it sees itself
        self._member = member

    def nodes(self, obs: Tensor) -> Tensor:
        """Return `obs_to_nodes`: [..., N, D] of observations [..., obs_dim]."""
        constants = self._constants.to(obs.dtype).expand(*obs.shape[:-1], 2)
        nodes = torch.cat([constants, obs], dim=-1).index_select(-1, self._source)
        return nodes.unflatten(-1, (self._n_nodes, -1))

    def obs(self, nodes: Tensor) -> Tensor:
        """Return the observations [..., obs_dim] of nodes [..., N, D]: the exact inverse of `nodes`."""
        return nodes.flatten(-2).index_select(-1, self._place)

    def of_nodes(self, marks: Tensor) -> Tensor:
        """Return for each feature the mark of its node: [..., obs_dim] of marks [..., N]."""
        return marks.index_select(-1, self._node)

    def sight(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return which nodes are seen and which are missing, [..., N] bool each; dead observers have neither."""
        # Environments write zeros for what is out of sight, and for the dead: one cannot tell them apart.
        # Sums of absolute values by node in one product. NaN is not 0 either: a loss must show it, not pass over it.
        seen = F.linear(obs.abs().to(self._member.dtype), self._member)[..., : self._n_nodes] != 0
        return seen, seen[..., :1] & ~seen


class TeamView:
    """Completes observations. Features are selected, never computed, so acting and learning have the same bits.

    A unit is known to the team if a living agent sees it; each living agent sees itself. An agent receives a unit that
    it does not see as `full_obs` shows it, relative to itself. Dead agents receive nothing.

    Args:
        layout: of the observations, whose allies are the other agents in their order. n_agents: n. device: of all.
    """

    def __init__(self, layout: EntityLayout, n_agents: int, device: torch.device) -> None:
        self._tables = GraphTables(layout, device)
        unit = units_of_nodes(layout, n_agents)
        node = unit.argsort(axis=1) + np.arange(n_agents)[:, None] * layout.n_nodes
        self._unit = torch.from_numpy(unit).to(device)
        self._node = torch.from_numpy(np.ascontiguousarray(node.T)).to(device)  # of each unit in each agent's graph

    def __call__(self, obs: Tensor, full: Tensor) -> Tensor:
        """Return the completed observations [S, n, obs_dim] of `obs` and `full_obs`, in the same type."""
        seen = self._tables.sight(obs)[0]
        # A unit that any living agent sees is known to all; places in graphs become numbers of units.
        known = seen.flatten(1)[:, self._node].any(-1)
        shared = known[:, self._unit] & seen[..., :1]
        of_features = self._tables.of_nodes
        return torch.where(of_features(seen), obs, torch.where(of_features(shared), full, 0))
