"""Distances between each agent and all other units, computed once per tick for masks, observations and scripts.

Shapes: B slots, n agents, m enemies. Blocks over allies leave the agent itself out: [B, n, n - 1], ascending order.
Double precision, as the published single-battle code computes: its results are then equal after rounding to float32.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Units


class Geometry:
    """Relative positions, distances and "both alive" of all pairs (agent, other unit).

    Attributes:
        others: [n, n - 1] int, the allies of each agent, ascending.
        ally_dx, ally_dy, ally_dist: [B, n, n - 1] float64. ally_pair: [B, n, n - 1] bool, both are alive.
        enemy_dx, enemy_dy, enemy_dist, enemy_pair: [B, n, m] likewise.
    """

    def __init__(self, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._n = n_agents
        self.others = np.array(
            [[j for j in range(n_agents) if j != i] for i in range(n_agents)], dtype=np.int64
        ).reshape(n_agents, n_agents - 1)
        self._rows = np.arange(n_agents)[:, None]
        ally, enemy = (n_slots, n_agents, n_agents - 1), (n_slots, n_agents, n_enemies)
        self.ally_dx, self.ally_dy, self.ally_dist = (np.zeros(ally) for _ in range(3))
        self.enemy_dx, self.enemy_dy, self.enemy_dist = (np.zeros(enemy) for _ in range(3))
        self.ally_pair, self.enemy_pair = np.zeros(ally, bool), np.zeros(enemy, bool)
        self._scratch_ally, self._scratch_enemy = np.zeros(ally), np.zeros(enemy)

    def refresh(self, units: Units) -> None:
        """Recompute everything from the units' present positions."""
        n = self._n
        x, y = units.x.astype(np.float64, order="C"), units.y.astype(np.float64, order="C")
        own_x, own_y, own_alive = x[:, :n, None], y[:, :n, None], units.alive[:, :n, None]
        np.subtract(x[:, None, n:], own_x, out=self.enemy_dx)
        np.subtract(y[:, None, n:], own_y, out=self.enemy_dy)
        np.logical_and(units.alive[:, None, n:], own_alive, out=self.enemy_pair)
        np.subtract(x.take(self.others, axis=1), own_x, out=self.ally_dx)
        np.subtract(y.take(self.others, axis=1), own_y, out=self.ally_dy)
        np.logical_and(units.alive.take(self.others, axis=1), own_alive, out=self.ally_pair)
        _length(self.enemy_dx, self.enemy_dy, self._scratch_enemy, self.enemy_dist)
        _length(self.ally_dx, self.ally_dy, self._scratch_ally, self.ally_dist)

    def with_self(self, block: np.ndarray) -> np.ndarray:
        """Return an ally block [B, n, n - 1] as [B, n, n] with zeros on the diagonal."""
        square = np.zeros((*block.shape[:2], self._n), block.dtype)
        square[:, self._rows, self.others] = block
        return square


def _length(dx: np.ndarray, dy: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    np.multiply(dx, dx, out=out)
    np.multiply(dy, dy, out=scratch)
    np.add(out, scratch, out=out)
    np.sqrt(out, out=out)
