"""From an agent's flat observation to the nodes of its graph, and back without loss.

Node order: self, allies, enemies. A node is [visible | attackable, dist, relx, rely, ...] as the environment gives it,
zero-padded on the right to D; the agent itself is [1, 0, 0, 0, move features, own features].
"""

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, EntityLayout


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


ENUMERATED = 4  # up to so many tokens all assignments are tried


@cache
def _orders(m: int) -> Tensor:
    return torch.tensor(list(permutations(range(m))))


def cheapest(cost: Tensor) -> Tensor:
    """Return for each of G costs [G, m (prediction), m (target)] the target of each prediction, [G, m] int64.

    The sum of the chosen costs is the smallest possible.
    """
    m = cost.shape[1]
    if m <= ENUMERATED:
        orders = _orders(m).to(cost.device)
        rows = torch.arange(m, device=cost.device)
        totals = cost[:, rows, orders].sum(-1)
        return orders[totals.argmin(-1)]
    solved = [linear_sum_assignment(one)[1] for one in cost.detach().cpu().double().numpy()]
    return torch.stack([torch.from_numpy(columns) for columns in solved]).to(cost.device)


@torch.no_grad()
def match_types(log_p: Tensor, targets: Tensor, masked: Tensor, layout: EntityLayout) -> Tensor:
    """Return the index [M] (into the masked tokens) of the target that each prediction is compared with.

    log_p: [M, K + 1] of the masked tokens, frame by frame. targets: [M]. masked: [F, N] bool with M set.
    """
    matched = torch.arange(len(targets), device=targets.device)
    place = torch.full(masked.shape, -1, dtype=torch.int64, device=masked.device)
    place[masked] = matched
    types = torch.tensor(layout.node_types, device=masked.device)
    for kind in (ALLY, ENEMY):
        slots = place[:, types == kind]
        counts = (slots >= 0).sum(1)
        for m in range(2, int(counts.max()) + 1 if len(counts) else 0):
            group = slots[counts == m]
            if not len(group):
                continue
            tokens = group[group >= 0].view(-1, m)
            cost = -log_p[tokens[:, :, None], targets[tokens][:, None, :]]
            matched[tokens] = tokens.gather(1, cheapest(cost))
    return matched


Array = TypeVar("Array", Tensor, np.ndarray)

SELF_HEAD = 4  # visible, dist, relx, rely


def obs_to_nodes(obs: Array, layout: EntityLayout) -> Array:
    """Return the nodes [..., N, D] of observations [..., obs_dim] (Tensor or NumPy; same type and dtype out).

    Errors: ValueError for another number of features than the layout has.
    """
    if isinstance(obs, np.ndarray):
        return obs_to_nodes(torch.from_numpy(obs), layout).numpy()
    if obs.shape[-1] != layout.obs_dim:
        raise ValueError(f"an observation of {obs.shape[-1]} features for a layout of {layout.obs_dim}")
    move, enemies, allies, own = _split(obs, layout)
    nodes = obs.new_zeros((*obs.shape[:-1], layout.n_nodes, layout.node_dim))
    first_enemy = 1 + layout.n_allies
    nodes[..., 0, 0] = 1.0
    nodes[..., 0, SELF_HEAD : SELF_HEAD + layout.move_dim] = move
    nodes[..., 0, SELF_HEAD + layout.move_dim : SELF_HEAD + layout.move_dim + layout.own_dim] = own
    nodes[..., 1:first_enemy, : layout.ally_dim] = allies
    nodes[..., first_enemy:, : layout.enemy_dim] = enemies
    return nodes


def nodes_to_obs(nodes: Array, layout: EntityLayout) -> Array:
    """Return the observations [..., obs_dim] of nodes [..., N, D]: the exact inverse of `obs_to_nodes`."""
    if isinstance(nodes, np.ndarray):
        return nodes_to_obs(torch.from_numpy(nodes), layout).numpy()
    first_enemy, own = 1 + layout.n_allies, SELF_HEAD + layout.move_dim
    parts = (
        nodes[..., 0, SELF_HEAD:own],
        nodes[..., first_enemy:, : layout.enemy_dim].flatten(-2),
        nodes[..., 1:first_enemy, : layout.ally_dim].flatten(-2),
        nodes[..., 0, own : own + layout.own_dim],
    )
    return torch.cat(parts, dim=-1)


def unseen(nodes: Array) -> Array:
    """Return which nodes [..., N, D] show nothing, [..., N] bool; the agent itself is never unseen."""
    hidden = (nodes == 0).all(-1)
    hidden[..., 0] = False
    return hidden


def alive(obs: Array) -> Array:
    """Return whether the observer lives, [...] bool: a dead one sees nothing, itself included."""
    return (obs != 0).any(-1)


def feature_mask(layout: EntityLayout) -> Tensor:
    """Return which features of each node stand in the observation (no padding, no fixed head), [N, D] bool."""
    mask = torch.zeros((layout.n_nodes, layout.node_dim), dtype=torch.bool)
    first_enemy = 1 + layout.n_allies
    mask[0, SELF_HEAD : SELF_HEAD + layout.move_dim + layout.own_dim] = True
    mask[1:first_enemy, : layout.ally_dim] = True
    mask[first_enemy:, : layout.enemy_dim] = True
    return mask


def _split(obs: Tensor, layout: EntityLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return move [..., move], enemies [..., m, enemy_dim], allies [..., n - 1, ally_dim], own [..., own]."""
    sizes = [
        layout.move_dim,
        layout.n_enemies * layout.enemy_dim,
        layout.n_allies * layout.ally_dim,
        layout.own_dim,
    ]
    move, enemies, allies, own = obs.split(sizes, dim=-1)
    enemies = enemies.unflatten(-1, (layout.n_enemies, layout.enemy_dim))
    return move, enemies, allies.unflatten(-1, (layout.n_allies, layout.ally_dim)), own
