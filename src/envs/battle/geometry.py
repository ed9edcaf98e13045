"""Distances between each agent and all units, computed once per tick for masks, observations and scripts.

Shapes: B slots, n agents, m enemies, U = n + m units. Blocks over allies leave the agent itself out: [B, n, n - 1],
ascending order. Double precision, as the published single-battle code computes: its results are then equal after
rounding to float32.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Units


class Geometry:
    """Relative positions, distances and "both alive" of all pairs (agent, unit).

    Attributes:
        xy: [2, B, U] float64, where the units are.
        place: [3, B, n, U] float64, distance, x and y of each unit as seen from each agent, the agent itself included.
        pair: [B, n, U] bool, both are alive.
        others: [n, n - 1] int, the allies of each agent, ascending.
        enemy_dx, enemy_dy, enemy_dist, enemy_pair: [B, n, m], the part of all that about enemies.
    """

    def __init__(self, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._n = n_agents
        self.others = np.array(
            [[j for j in range(n_agents) if j != i] for i in range(n_agents)], dtype=np.int64
        ).reshape(n_agents, n_agents - 1)
        self._rows = np.arange(n_agents)[:, None]
        pairs = (n_slots, n_agents, n_agents + n_enemies)
        self.xy = np.zeros((2, n_slots, n_agents + n_enemies))
        self.place, self.pair = np.zeros((3, *pairs)), np.zeros(pairs, bool)
        squares = np.zeros((2, *pairs))
        # Views that never change, made once: a tick is many small operations.
        self._toward, self._squares = self.place[1:], (squares, squares[0], squares[1], self.place[0])
        self._all, self._own = self.xy[:, :, None], self.xy[:, :, :n_agents, None]
        self.enemy_dist, self.enemy_dx, self.enemy_dy = self.place[..., n_agents:]
        self.enemy_pair = self.pair[..., n_agents:]

    def refresh(self, units: Units) -> None:
        """Recompute everything from the units' present positions."""
        xy, toward, alive = self.xy, self._toward, units.alive
        both, dx2, dy2, dist = self._squares
        xy[0], xy[1] = units.x, units.y
        np.subtract(self._all, self._own, out=toward)
        np.logical_and(alive[:, None], alive[:, : self._n, None], out=self.pair)
        np.multiply(toward, toward, out=both)
        np.add(dx2, dy2, out=dx2)
        np.sqrt(dx2, out=dist)

    @property
    def ally_dist(self) -> np.ndarray:
        """[B, n, n - 1] float64."""
        return self._of_others(self.place[0])

    @property
    def ally_dx(self) -> np.ndarray:
        """[B, n, n - 1] float64."""
        return self._of_others(self.place[1])

    @property
    def ally_dy(self) -> np.ndarray:
        """[B, n, n - 1] float64."""
        return self._of_others(self.place[2])

    @property
    def ally_pair(self) -> np.ndarray:
        """[B, n, n - 1] bool, both are alive."""
        return self._of_others(self.pair)

    def _of_others(self, block: np.ndarray) -> np.ndarray:
        return block[:, self._rows, self.others]

    def with_self(self, block: np.ndarray) -> np.ndarray:
        """Return an ally block [B, n, n - 1] as [B, n, n] with zeros on the diagonal."""
        square = np.zeros((*block.shape[:2], self._n), block.dtype)
        square[:, self._rows, self.others] = block
        return square
