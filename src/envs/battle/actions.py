"""SMAC's actions: which are available, and what a chosen one orders.

Actions: 0 no-op (the dead only), 1 stop, 2 to 5 move north, south, east, west, 6 + i attack enemy i (a medivac on
the MMM maps: heal ally i). Shapes: B slots, n agents, m enemies, U = n + m units, A = 6 + m actions.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.geometry import Geometry

N_NORMAL_ACTIONS = 6
STOP, NORTH, SOUTH, EAST, WEST = 1, 2, 3, 4, 5
SHOOT_RANGE = 6.0

# Direction of the moves north, south, east, west.
MOVE_X = np.array([0.0, 0.0, 1.0, -1.0])
MOVE_Y = np.array([1.0, -1.0, 0.0, 0.0])


class GridLookup:
    """A map layer with a border of constant value, read at whole-numbered cells.

    Args:
        grid: [map_x, map_y]. outside: the value beyond the map.
    """

    def __init__(self, grid: np.ndarray, outside: float) -> None:
        self._top_x, self._top_y = grid.shape[0] + 1, grid.shape[1] + 1
        self._flat = np.ascontiguousarray(np.pad(grid, 1, constant_values=outside)).reshape(-1)

    def read(self, ix: np.ndarray, iy: np.ndarray) -> np.ndarray:
        """Return the values at the cells (ix, iy), arrays of int64 of one shape."""
        column = np.clip(ix + 1, 0, self._top_x)
        row = np.clip(iy + 1, 0, self._top_y)
        return self._flat.take(column * (self._top_y + 1) + row)


class ActionRules:
    """Availability and meaning of actions on one map.

    Args:
        n_slots, n_agents, n_enemies: sizes. terrain: for the move masks. move_amount: cells.
        heals: whether this map's medivacs heal (map type MMM).
    """

    def __init__(
        self, n_slots: int, n_agents: int, n_enemies: int, terrain: Terrain, move_amount: float, heals: bool
    ) -> None:
        self._n, self._heals = n_agents, heals
        self._pathing = GridLookup(terrain.pathing, False)
        self._probe_x = (MOVE_X * move_amount / 2)[:, None, None]
        self._probe_y = (MOVE_Y * move_amount / 2)[:, None, None]
        n_actions = N_NORMAL_ACTIONS + n_enemies
        self._step_x = np.zeros(n_actions, np.float32)
        self._step_y = np.zeros(n_actions, np.float32)
        self._step_x[NORTH : WEST + 1] = MOVE_X * move_amount
        self._step_y[NORTH : WEST + 1] = MOVE_Y * move_amount
        self._order = np.full(n_actions, int(Order.ATTACK), np.int64)
        self._order[:N_NORMAL_ACTIONS] = [Order.NONE, Order.STOP, *([Order.MOVE] * 4)]
        self._dest = np.zeros((n_slots, n_agents, 2), np.float32)

    def fill_mask(self, units: Units, medivac: np.ndarray, geometry: Geometry, out: np.ndarray) -> None:
        """Write the available actions into `out` [B, n, A] bool. `medivac` is [B, U] bool."""
        n = self._n
        alive = units.alive[:, :n]
        np.logical_not(alive, out=out[..., 0])
        out[..., STOP] = alive
        out[..., NORTH : WEST + 1] = self._can_move(units).transpose(1, 2, 0)
        out[..., NORTH : WEST + 1] &= alive[..., None]
        in_reach = out[..., N_NORMAL_ACTIONS:]
        np.logical_and(geometry.enemy_dist <= SHOOT_RANGE, geometry.enemy_pair, out=in_reach)
        if self._heals:
            healer = medivac[:, :n]
            patient = geometry.with_self(geometry.ally_pair & (geometry.ally_dist <= SHOOT_RANGE))
            patient &= ~healer[:, None, :]
            in_reach &= ~healer[..., None]
            in_reach[..., :n] |= patient & healer[..., None]

    def _can_move(self, units: Units) -> np.ndarray:
        """Return [4, B, n] bool: the cell half a move ahead, cut to whole numbers, is on the map and can be walked."""
        x = units.x[:, : self._n].astype(np.float64)
        y = units.y[:, : self._n].astype(np.float64)
        return self._pathing.read((x + self._probe_x).astype(np.int64), (y + self._probe_y).astype(np.int64))

    def orders(
        self, actions: np.ndarray, units: Units, medivac: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Translate `actions` [B, n] into (order [B, n], target [B, n], dest [B, n, 2]) for the back-end."""
        n = self._n
        order = self._order.take(actions)
        target = np.maximum(actions - N_NORMAL_ACTIONS, 0)
        aimed = actions >= N_NORMAL_ACTIONS
        if self._heals:
            heals = aimed & medivac[:, :n]
            order[heals] = int(Order.HEAL)
            target += n * (aimed & ~heals)
        else:
            target += n * aimed
        np.add(units.x[:, :n], self._step_x.take(actions), out=self._dest[..., 0])
        np.add(units.y[:, :n], self._step_y.take(actions), out=self._dest[..., 1])
        return order, target, self._dest
