"""The simulator's constants of a map's units, and its state arrays.

Inside the simulator, arrays are [U, B]: U units (n allies, then m enemies), B slots.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.units import LOOPS_PER_SECOND, UNITS, ZERG_REGEN, UnitSpec, hit_damage

FLOATS = ("x", "y", "health", "shield", "energy", "timer", "quiet", "goal_x", "goal_y")
INTS = ("order", "target", "alive")


class Roster:
    """Constants of a map's units: columns [U, 1] and pair tables [U, U] (attacker, target), float32.

    Attributes:
        step: cells per loop. pace: the same when walking to a place, where the enemy keeps together.
        reach: centre distance at which the weapon (of healers: the beam) reaches; -1 where it cannot hit.
        touch: centre distance below which two units push each other apart; -1 for pairs that do not collide.
        shield_hit, health_hit: damage of one shot before and after armour.
        vanguard: indices of the enemy's exploding units; rearguard: [U, 1] bool, the other enemies.
        foe: [U, U] bool, on different sides. healable: [U, U] bool.
    """

    def __init__(self, spec: MapSpec) -> None:
        units = [UNITS[i] for i in spec.unit_ids()]
        self.n, self.m, self.total = spec.n_agents, spec.n_enemies, len(units)
        self.type_id = np.array(spec.unit_ids(), dtype=np.int16)[:, None]
        self.radius = self._column([u.radius for u in units])
        self.step = self._column([u.speed / LOOPS_PER_SECOND for u in units])
        self.pace = self.step.copy()
        self.pace[self.n :] = np.minimum(self.step[self.n :], self.step[self.n :].min())
        self.cooldown = self._column([u.cooldown * LOOPS_PER_SECOND for u in units])
        self.health_max = self._column([u.health for u in units])
        self.shield_max = self._column([u.shield for u in units])
        self.energy = self._column([u.energy for u in units])
        self.energy_max = self._column([u.energy_max for u in units])
        self.energy_regen = self._column([u.energy_regen / LOOPS_PER_SECOND for u in units])
        self.hp_regen = self._column([ZERG_REGEN / LOOPS_PER_SECOND if u.race == "Z" else 0.0 for u in units])
        self.walks_cliffs = np.array([[u.walks_cliffs or u.air] for u in units])
        self.explodes = np.array([u.explodes for u in units])
        self.splash_line = np.array([u.splash_line for u in units], dtype=np.float32)
        self.splash_radius = np.array([u.splash_radius for u in units], dtype=np.float32)
        self.heal = np.array([u.heal / LOOPS_PER_SECOND for u in units], dtype=np.float32)
        self.heal_cost = np.array([u.heal_cost for u in units], dtype=np.float32)
        self.armed = self.cooldown > 0
        self.enemy = np.arange(self.total)[:, None] >= self.n
        self.vanguard = np.flatnonzero(self.explodes & self.enemy[:, 0])
        self.rearguard = self.enemy & ~self.explodes[:, None]
        self.has_vanguard = self.vanguard.size > 0 and bool(self.rearguard.any())
        self.foe = self.enemy != self.enemy.T
        self._row = np.arange(self.total)[:, None] * self.total
        self._pair_tables(units)

    def _pair_tables(self, units: list[UnitSpec]) -> None:
        radius, air = self.radius[:, 0], np.array([u.air for u in units])
        both = radius[:, None] + radius[None, :]
        hits = np.array([[hit_damage(a, t) for t in units] for a in units], dtype=np.float32)
        self.shield_hit, self.health_hit = hits[..., 0].copy(), hits[..., 1].copy()
        self.can_hit = self.foe & (self.shield_hit > 0)
        weapon = np.array([u.heal_range if u.is_healer else u.range for u in units], dtype=np.float32)
        healer, organic = self.heal > 0, np.array(["biological" in u.attributes for u in units])
        self.healable = healer[:, None] & organic[None, :] & ~self.foe
        self.reach = np.where(self.can_hit | self.healable, weapon[:, None] + both, -1).astype(np.float32)
        meet = (air[:, None] == air[None, :]) & ~np.eye(self.total, dtype=bool)
        self.touch = np.where(meet, both, -1).astype(np.float32)
        self.healers = [int(i) for i in np.flatnonzero(healer)]
        self.has_shields = bool((self.shield_max > 0).any())
        self.has_regen = bool((self.hp_regen > 0).any())
        self.has_splash = bool((self.splash_line + self.splash_radius > 0).any())
        self.all_hit = bool((self.can_hit | ~self.foe).all())

    def reach_of(self, target: np.ndarray) -> np.ndarray:
        """Return [U, B], the centre distance at which each unit's weapon reaches its target."""
        return self.reach.ravel()[self._row + np.maximum(target, 0)]

    @staticmethod
    def _column(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float32)[:, None]


class Battle:
    """State of B battles: float32 and int32 arrays [U, B], in one block each, so that slots are copied together.

    Attributes:
        timer: loops until the weapon is ready; at most one substep below zero. quiet: loops since the last damage.
        goal_x, goal_y: destination of MOVE and of the enemy's advance. order: `Order`. target: unit index or -1.
        alive: 0 or 1.
    """

    def __init__(self, floats: np.ndarray, ints: np.ndarray) -> None:
        self.floats, self.ints = floats, ints
        self.x, self.y, self.health, self.shield, self.energy, self.timer, self.quiet, self.goal_x, self.goal_y = floats
        self.order, self.target, self.alive = ints
        self.slots = slot_row(floats.shape[2])

    @classmethod
    def empty(cls, units: int, slots: int) -> Battle:
        """Return battles without living units."""
        battle = cls(np.zeros((len(FLOATS), units, slots), np.float32), np.zeros((len(INTS), units, slots), np.int32))
        battle.target.fill(-1)
        return battle

    def take(self, slots: np.ndarray) -> Battle:
        """Return a copy of some slots."""
        return Battle(self.floats.take(slots, axis=2), self.ints.take(slots, axis=2))

    def put(self, slots: np.ndarray, part: Battle) -> None:
        """Write a copy made by `take` back."""
        self.floats[:, :, slots] = part.floats
        self.ints[:, :, slots] = part.ints

    def of_target(self, values: np.ndarray) -> np.ndarray:
        """Return `values` [U, B] of each unit's target; those of unit 0 where there is none."""
        return values.ravel()[self.target_flat()]

    def target_flat(self) -> np.ndarray:
        """Return [U, B], indices of the targets in a flattened [U, B] array."""
        return np.maximum(self.target, 0) * self.slots.size + self.slots


@lru_cache(maxsize=256)
def slot_row(slots: int) -> np.ndarray:
    """Return [B] slot numbers."""
    return np.arange(slots)
