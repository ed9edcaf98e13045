"""From an agent's flat observation to the nodes of its graph, and back without loss.

Node order: self, allies, enemies. A node is [visible | attackable, dist, relx, rely, ...] as the environment gives it,
zero-padded on the right to D; the agent itself is [1, 0, 0, 0, move features, own features].
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout

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
