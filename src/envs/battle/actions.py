"""SMAC's actions: distances, which actions are available, and the order that each one gives.

Actions: 0 no-op (dead agents only), 1 stop, 2 to 5 move north, south, east, west, 6 + i attack enemy i (a medivac on
the MMM maps: heal ally i). Source: oxwhirl/smac, starcraft2.py, `get_avail_agent_actions` and `get_agent_action`.
Shapes: B slots, n agents, m enemies, U = n + m units, A = 6 + m actions.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.args import N_NORMAL_ACTIONS, BattleArgs
from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.maps import HEALING, MapSpec

STOP, NORTH, SOUTH, EAST, WEST = 1, 2, 3, 4, 5
SHOOT_RANGE = 6.0

# Direction of the moves north, south, east, west.
MOVE_X = np.array([0.0, 0.0, 1.0, -1.0])
MOVE_Y = np.array([1.0, -1.0, 0.0, 0.0])


def reach_of(sight_range: float) -> float:
    """Return the greatest distance at which agents attack and heal: `SHOOT_RANGE`, or where sight just ends."""
    return SHOOT_RANGE if sight_range > SHOOT_RANGE else float(np.nextafter(sight_range, 0))


class Geometry:
    """Relative positions, distances and "both alive" of all pairs (agent, unit), computed once per step.

    Double precision, as in SMAC (`distance` in starcraft2.py): rounded to float32, the results are equal.

    Attributes:
        xy: [2, B, U] float64, positions of the units.
        place: [3, B, n, U] float64, distance, dx and dy from each agent to each unit, itself included.
        pair: [B, n, U] bool, both are alive.
        enemy_dx, enemy_dy, enemy_dist, enemy_pair: [B, n, m], the same for enemies only.
    """

    def __init__(self, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._n = n_agents
        pairs = (n_slots, n_agents, n_agents + n_enemies)
        self.xy = np.zeros((2, n_slots, n_agents + n_enemies))
        self.place, self.pair = np.zeros((3, *pairs)), np.zeros(pairs, bool)
        self.enemy_dist, self.enemy_dx, self.enemy_dy = self.place[..., n_agents:]
        self.enemy_pair = self.pair[..., n_agents:]

    def refresh(self, units: Units) -> None:
        """Recompute everything from the current positions."""
        distance, dx, dy = self.place
        self.xy[0], self.xy[1] = units.x, units.y
        np.subtract(self.xy[:, :, None], self.xy[:, :, : self._n, None], out=self.place[1:])
        np.sqrt(dx * dx + dy * dy, out=distance)
        np.logical_and(units.alive[:, None], units.alive[:, : self._n, None], out=self.pair)


class GridLookup:
    """A map layer that is read at integer cells and has a constant value outside of the map.

    Args:
        grid: [map_x, map_y]. outside: value outside of the map.
    """

    def __init__(self, grid: np.ndarray, outside: float) -> None:
        self._grid = np.pad(grid, 1, constant_values=outside)

    def read(self, cells: np.ndarray) -> np.ndarray:
        """Return the values at `cells` [2, ...] int64."""
        x, y = (np.clip(cell + 1, 0, size - 1) for cell, size in zip(cells, self._grid.shape, strict=True))
        return self._grid[x, y]


class ActionRules:
    """Action masks of one map, and the translation of actions into orders."""

    def __init__(self, spec: MapSpec, args: BattleArgs, terrain: Terrain) -> None:
        self._n, self._m, self._heals = spec.n_agents, spec.n_enemies, spec.map_type in HEALING
        self._reach = reach_of(spec.sight_range)
        n_agents, variant, move_amount = spec.n_agents, args.variant, args.move_amount
        self._first = first = variant.n_normal_actions
        self._pathing = GridLookup(terrain.pathing, False)
        self._probe = (np.stack((MOVE_X, MOVE_Y)) * move_amount / 2)[:, :, None, None]
        n_actions = variant.n_actions(spec)
        self._step_x, self._step_y = np.zeros(n_actions), np.zeros(n_actions)  # SMAC adds in double precision
        self._step_x[NORTH : WEST + 1] = MOVE_X * move_amount
        self._step_y[NORTH : WEST + 1] = MOVE_Y * move_amount
        self._order = np.full(n_actions, int(Order.ATTACK), np.int64)
        self._order[:first] = [Order.NONE, Order.STOP, *([Order.MOVE] * 4), *([Order.NONE] * variant.n_turns)]
        self._target = np.maximum(np.arange(n_actions) - first, 0)
        self._target[first:] += n_agents

    def fill_mask(
        self, units: Units, medivac: np.ndarray, geometry: Geometry, out: np.ndarray, near: np.ndarray | None = None
    ) -> None:
        """Write the available actions into `out` [B, n, A] bool.

        Dead agents: no-op only. Living agents: stop, moves onto walkable ground, attacks on living enemies in reach;
        healers instead heal living allies in reach that are not healers.

        Args:
            medivac: [B, U] bool. near: [B, n, U] bool, units in reach of each agent; default: distance at most
                `SHOOT_RANGE` for every unit type, as `unit_shoot_range` in SMAC, and in sight. SMACv2, whose agents
                may see less than they reach, has the same rule.
        """
        n, first = self._n, self._first
        alive = units.alive[:, :n, None]
        if near is None:
            near = geometry.place[0] <= self._reach
        out[..., :1], out[..., STOP:NORTH], out[..., N_NORMAL_ACTIONS:first] = ~alive, alive, alive
        # As SMAC's `can_move`, which tests half a move ahead and truncates to integers.
        walkable = self._pathing.read((geometry.xy[:, None, :, :n] + self._probe).astype(np.int64))
        out[..., NORTH : WEST + 1] = np.moveaxis(walkable, 0, -1) & alive
        out[..., first : first + self._m] = near[..., n:] & geometry.enemy_pair
        if self._heals:
            in_reach = out[..., first:]
            in_reach[..., self._m :] = False
            healer = medivac[:, :n]
            patient = geometry.pair[..., :n] & near[..., :n]
            patient &= ~healer[:, None, :]  # this excludes the healer itself, too
            in_reach &= ~healer[..., None]
            in_reach[..., :n] |= patient & healer[..., None]

    def orders(
        self, actions: np.ndarray, units: Units, medivac: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Translate `actions` [B, n] into (order [B, n], target [B, n], dest [B, n, 2]); see `BattleBackend`."""
        n = self._n
        order, target = self._order.take(actions), self._target.take(actions)
        if self._heals:
            heals = (actions >= self._first) & medivac[:, :n]
            order[heals] = int(Order.HEAL)
            target -= n * heals
        x, y = units.x[:, :n] + self._step_x.take(actions), units.y[:, :n] + self._step_y.take(actions)
        return order, target, np.stack((x, y), -1).astype(np.float32)
