"""Where each feature of each node stands in a flat observation: `graphs.py` by tables, for one look-up per tick.

Shapes: N nodes, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes


class Columns:
    """Tables of a layout.

    Args:
        layout: of the observations. device: of the tables.
    """

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        # What each place of the nodes reads, in an observation whose features are their own numbers from 2 on;
        # 0 and 1 are left as they are: padding, and the agent's own mark of being visible.
        numbered = torch.arange(2, layout.obs_dim + 2, dtype=torch.float64)
        source = obs_to_nodes(numbered, layout).long().flatten()
        self._n_nodes = layout.n_nodes
        self._source, self._constants = source.to(device), torch.tensor([0.0, 1.0], device=device)
        place = torch.zeros(layout.obs_dim + 2, dtype=torch.int64)
        place[source] = torch.arange(len(source))
        self._place = place[2:].to(device)
        self._node = self._place // layout.node_dim
        # Rows beyond the nodes make the product a fast one.
        member = torch.zeros((-(-layout.n_nodes // 16) * 16, layout.obs_dim), device=device)
        member[self._node, torch.arange(layout.obs_dim)] = 1.0
        member[0] = 1.0  # the agent itself is seen by every living observer
        self._member = member

    def nodes(self, obs: Tensor) -> Tensor:
        """Return what `obs_to_nodes` does: [..., N, D] of observations [..., obs_dim]."""
        constants = self._constants.to(obs.dtype).expand(*obs.shape[:-1], 2)
        nodes = torch.cat([constants, obs], dim=-1).index_select(-1, self._source)
        return nodes.unflatten(-1, (self._n_nodes, -1))

    def obs(self, nodes: Tensor) -> Tensor:
        """Return what `nodes_to_obs` does: [..., obs_dim] of nodes [..., N, D]."""
        return nodes.flatten(-2).index_select(-1, self._place)

    def of_nodes(self, marks: Tensor) -> Tensor:
        """Return each feature's mark [..., obs_dim] of marks on nodes [..., N]."""
        return marks.index_select(-1, self._node)

    def sight(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return which nodes are seen and which are missing, [..., N] bool each; dead observers have neither."""
        seen = F.linear(obs.abs().to(self._member.dtype), self._member)[..., : self._n_nodes] > 0
        return seen, seen[..., :1] & ~seen
