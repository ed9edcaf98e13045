"""SMAC's scripted policy of the allies (`heuristic_ai`, `heuristic_rest`), including its quirks.

Source: oxwhirl/smac, starcraft2.py, `get_agent_action_heuristic`. Each unit targets the nearest enemy until that is
dead, a medivac the nearest hurt ally until it is healed. The script orders attacks from any distance. With
`heuristic_rest`, a unit whose target is out of range moves by `move_amount` along the longer axis, even if the mask
forbids that move.
"""

from __future__ import annotations

import math

import numpy as np

from omagd.envs.battle.actions import EAST, NORTH, SOUTH, WEST
from omagd.envs.battle.args import N_NORMAL_ACTIONS, SmacArgs
from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.units import UNIT_ID

MEDIVAC = UNIT_ID["medivac"]
STEPS = {NORTH: (0.0, 1.0), SOUTH: (0.0, -1.0), EAST: (1.0, 0.0), WEST: (-1.0, 0.0)}


class Heuristic:
    """The script of one battle.

    Args:
        n_agents: n. args: `heuristic_rest` and `move_amount`. first_attack: action that attacks the first enemy.

    Attributes:
        actions: [n] int64, last actions, numbered like the agents' actions.
    """

    def __init__(self, n_agents: int, args: SmacArgs, first_attack: int = N_NORMAL_ACTIONS) -> None:
        self._first_attack = first_attack
        self._n, self._rest, self._amount = n_agents, args.heuristic_rest, args.move_amount
        self._targets: list[int | None] = []
        self.actions = np.zeros(n_agents, np.int64)
        self.begin()

    def begin(self) -> None:
        """Forget the targets of the last battle."""
        self._targets = [None] * self._n

    def orders(self, units: Units, terrain: Terrain, avail: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (order [1, n], target [1, n], dest [1, n, 2]) for the back-end. avail: [1, n, A] bool."""
        order = np.full((1, self._n), int(Order.NONE), np.int64)
        target = np.zeros((1, self._n), np.int64)
        dest = np.zeros((1, self._n, 2), np.float32)
        x0, y0, x1, y1 = terrain.playable
        farthest = math.hypot(x1 - x0, y1 - y0)
        for agent in range(self._n):
            self.actions[agent] = 0
            if not units.alive[0, agent]:
                continue
            heals = units.type_id[0, agent] == MEDIVAC
            unit = self._choose(units, agent, heals, farthest)
            if unit is None:
                continue
            action = self._first_attack + (unit if heals else unit - self._n)
            order[0, agent], target[0, agent] = (Order.HEAL if heals else Order.ATTACK), unit
            if self._rest and not avail[0, agent, action]:
                action = self._towards(units, agent, unit)
                dx, dy = STEPS[action]
                x, y = float(units.x[0, agent]), float(units.y[0, agent])
                order[0, agent], dest[0, agent] = Order.MOVE, (x + dx * self._amount, y + dy * self._amount)
            self.actions[agent] = action
        return order, target, dest

    def _choose(self, units: Units, agent: int, heals: bool, farthest: float) -> int | None:
        """Return the agent's target, None without one."""
        kept = self._targets[agent]
        if kept is None or not self._wanted(units, kept, heals):
            others = range(self._n) if heals else range(self._n, units.x.shape[1])
            targets = (unit for unit in others if not heals or units.type_id[0, unit] != MEDIVAC)
            wanted = [unit for unit in targets if self._wanted(units, unit, heals)]
            kept = min(wanted, key=lambda unit: math.hypot(*_offset(units, agent, unit)), default=None)
            if kept is not None and math.hypot(*_offset(units, agent, kept)) >= farthest:
                kept = None
            self._targets[agent] = kept
        return kept

    @staticmethod
    def _wanted(units: Units, unit: int, heals: bool) -> bool:
        hurt = units.health[0, unit] != units.health_max[0, unit]
        return bool(units.alive[0, unit] and (hurt or not heals))

    @staticmethod
    def _towards(units: Units, agent: int, unit: int) -> int:
        """Return the move along the longer axis."""
        dx, dy = _offset(units, agent, unit)
        if abs(dx) > abs(dy):
            return EAST if dx > 0 else WEST
        return NORTH if dy > 0 else SOUTH


def _offset(units: Units, agent: int, unit: int) -> tuple[float, float]:
    """Return (dx, dy) from an agent to a unit."""
    return float(units.x[0, unit]) - float(units.x[0, agent]), float(units.y[0, unit]) - float(units.y[0, agent])
