"""A map's constants and a battle's working memory, as a few arrays with named rows.

A kernel takes few arguments: each one costs a quarter of a microsecond per call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.backend import Terrain
from omagd.envs.battle.maps import MapSpec, ground_grid, lanes
from omagd.envs.battle.units import LOOPS_PER_SECOND, ZERG_REGEN, UnitSpec, hit_damage
from omagd.envs.battle.units import UNITS as UNIT_TYPES

# The state of a battle.
FLOATS = ("x", "y", "health", "shield", "energy", "timer", "quiet", "goal_x", "goal_y")
INTS = ("order", "target", "alive")

WIDTH = 136  # numbers in a row of working memory: 127 units at most, and a block more
BLOCK = 8  # numbers that a processor computes at once; loops over units run to the end of a block

# Rows of the state arrays and of the working memory: first the state, in the order of FLOATS and INTS.
X, Y, HEALTH, SHIELD, ENERGY, TIMER, QUIET, GOAL_X, GOAL_Y = range(len(FLOATS))
(
    PLACE_X, PLACE_Y, LOSS, HIT,  # where units stand when distances are measured, and what they suffer
    TO_X, TO_Y, TO_REACH, FOE_REACH,  # of the target and of the nearest foe
    GO_X, GO_Y, SLACK, MOST, NEXT_X, NEXT_Y, WANT_X, WANT_Y, PUSHED_X, PUSHED_Y,  # see `movement`
    NEAR_X, NEAR_Y, NEAR_RADIUS, NEAR_LAYER, PUSH_X, PUSH_Y,  # over the living units only: allies, then enemies
    N_FLOATS,
) = range(len(FLOATS), len(FLOATS) + 25)  # fmt: skip
ORDER, TARGET, ALIVE = range(len(INTS))
(
    AIMING, IN_REACH, READY, GOING, EXPLODED, BLAST, FOE, FOE_KEY,
    UNIT, NEAREST, SHOOTER,  # one after the other: living units, and units that fire
    N_INTS,
) = range(len(INTS), len(INTS) + 12)  # fmt: skip

# Rows of `Tables.unit`.
COLUMNS = (
    "radius", "step", "pace", "cooldown", "health_max", "shield_max", "energy_max", "energy_regen", "hp_regen",
    "splash_line", "splash_radius", "heal", "heal_cost", "low", "high", "free_below", "can_move", "offset_x",
    "offset_y", "far", "layer", "free", "held",
)  # fmt: skip
(
    RADIUS, STEP, PACE, COOLDOWN, HEALTH_MAX, SHIELD_MAX, ENERGY_MAX, ENERGY_REGEN, HP_REGEN, SPLASH_LINE,
    SPLASH_RADIUS, HEAL, HEAL_COST, LOW, HIGH, FREE_BELOW, CAN_MOVE, OFFSET_X, OFFSET_Y, FAR,
    LAYER, FREE, HELD,
) = range(len(COLUMNS))  # fmt: skip
EXPLODES, N_MARKS = range(2)  # rows of `Tables.mark`
REACH, SHIELD_HIT, HEALTH_HIT = range(3)  # of `Tables.pair`
CAN_HIT, HEALABLE = range(2)  # of `Tables.able`
# Entries of `Tables.fact`. LANES: units up to the end of a block; REST: a block less one.
AGENTS, UNITS, SHIELDS, REGENERATES, SPLASHES, HOLDS_BACK, ALL_HIT, WALLED, LANES, REST = range(10)
SIGHT, MIDDLE, LANE_LOW, LANE_HIGH, LEFT_FACE, RIGHT_FACE = range(6)  # entries of `Tables.length`


Array = np.ndarray


class State(NamedTuple):
    """All battles. B battles, L units up to the end of a block.

    Attributes:
        floats, ints: [B, 9, L] float32 and [B, 3, L] int32, the rows `FLOATS` and `INTS`: timer, loops until the weapon
            is ready, at most one substep below zero; quiet, loops since the last damage; goal_x, goal_y, where MOVE and
            the enemy's advance lead; order, an `Order`; target, a unit or -1; alive, 0 or 1.
        cooldown: [B, L] float32, game loops. alive: [B, L] bool.
    """

    floats: Array
    ints: Array
    cooldown: Array
    alive: Array


class Orders(NamedTuple):
    """Orders to the allies, as `BattleBackend.advance`: order, target [B, N] int64, dest [B, N, 2] float32."""

    order: Array
    target: Array
    dest: Array


class Episodes(NamedTuple):
    """The episodes of all battles. B battles, N agents, U units, A actions.

    Attributes:
        points: [B, U] float64, health with shield before the next step. living: [B, U] bool, not counted as dead.
        scale: [B] float64, by which rewards are divided. scaled: [B] bool, it is set.
        steps: [B] int64. ended: [B] bool. last_action: [B, N, A] float32, one-hot.
    """

    points: Array
    living: Array
    scale: Array
    scaled: Array
    steps: Array
    ended: Array
    last_action: Array


class Tables(NamedTuple):
    """Constants of a map. U units, N agents.

    Attributes:
        unit: [23, WIDTH] float32, `COLUMNS`, zero beyond U. mark: [1, U] bool. pair: [3, U, U] float32. able:
            [2, U, U] bool. fact: [10] int64. length: [6] float32, cells. grid: [map_x, map_y] bool, ground on which
            units stand.
        healers, bombs: indices of units, int64; bombs are the enemy's exploding units.
    """

    unit: Array
    mark: Array
    pair: Array
    able: Array
    fact: Array
    length: Array
    grid: Array
    healers: Array
    bombs: Array


class Roster:
    """Constants of a map's units: columns [U, 1] and pair tables [U, U] (attacker, target), float32.

    Attributes:
        step: cells per loop. pace: the same when walking to a place, where the enemy keeps together.
        reach: centre distance at which the weapon (of healers: the beam) reaches; -1 where it cannot hit.
        layer: [U] bool, the units that do not collide with the first one.
        shield_hit, health_hit: damage of one shot before and after armour.
        vanguard: indices of the enemy's exploding units; rearguard: [U, 1] bool, the other enemies.
        healable: [U, U] bool.
    """

    def __init__(self, spec: MapSpec) -> None:
        units = [UNIT_TYPES[i] for i in spec.unit_ids()]
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
        enemy = np.arange(self.total)[:, None] >= self.n
        self.vanguard = np.flatnonzero(self.explodes & enemy[:, 0])
        self.rearguard = enemy & ~self.explodes[:, None]
        self.has_vanguard = self.vanguard.size > 0 and bool(self.rearguard.any())
        self._pair_tables(units, enemy != enemy.T)

    def _pair_tables(self, units: list[UnitSpec], foe: np.ndarray) -> None:
        radius, air = self.radius[:, 0], np.array([u.air for u in units])
        both = radius[:, None] + radius[None, :]
        hits = np.array([[hit_damage(a, t) for t in units] for a in units], dtype=np.float32)
        self.shield_hit, self.health_hit = hits[..., 0].copy(), hits[..., 1].copy()
        self.can_hit = foe & (self.shield_hit > 0)
        weapon = np.array([u.heal_range if u.is_healer else u.range for u in units], dtype=np.float32)
        healer, organic = self.heal > 0, np.array(["biological" in u.attributes for u in units])
        self.healable = healer[:, None] & organic[None, :] & ~foe
        self.reach = np.where(self.can_hit | self.healable, weapon[:, None] + both, -1).astype(np.float32)
        self.layer = air != air[0]
        self.healers = [int(i) for i in np.flatnonzero(healer)]
        self.has_shields = bool((self.shield_max > 0).any())
        self.has_regen = bool((self.hp_regen > 0).any())
        self.has_splash = bool((self.splash_line + self.splash_radius > 0).any())
        self.all_hit = bool((self.can_hit | ~foe).all())

    @staticmethod
    def _column(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float32)[:, None]


APART, FAR_AWAY = np.float32(1.0e-3), np.float32(1.0e4)
HOLD_BACK = np.float32(0.5)  # speed factor of enemies behind their exploding units
SWING = np.float32(6.0)  # loops that a chasing unit stands still after a shot; a MOVE order interrupts it


def make_tables(spec: MapSpec, roster: Roster, terrain: Terrain, sight: float) -> Tables:
    """Return the constants of a map. sight: cells at which the enemy looks for targets."""
    number = np.arange(roster.total, dtype=np.float32)
    low, _, high, _ = terrain.playable  # a square
    inset = np.minimum(roster.radius, 0.5 * (high - low)).astype(np.float32)
    columns = {
        **vars(roster),
        "low": np.float32(low) + inset,
        "high": np.float32(high) - inset,
        "free_below": np.where(roster.armed, roster.cooldown - SWING, np.float32(0)),
        "can_move": (roster.step > 0).astype(np.float32),
        # A tiny offset per unit gives units at the same position a direction to separate in.
        "offset_x": APART * number,
        "offset_y": APART * ((number * 7) % 11),
        "far": FAR_AWAY + 100 * number,
        "free": roster.walks_cliffs & (spec.wall is not None and spec.wall.cliff),
        "held": np.where(roster.rearguard, HOLD_BACK, np.float32(1)),
    }
    unit = np.zeros((len(COLUMNS), WIDTH), np.float32)
    for name, column in zip(COLUMNS, unit, strict=True):
        column[: roster.total] = columns[name].ravel()
    pair = np.stack([roster.reach, roster.shield_hit, roster.health_hit]).astype(np.float32)
    fact = [
        roster.n, roster.total, roster.has_shields, roster.has_regen, roster.has_splash, roster.has_vanguard,
        roster.all_hit, spec.wall is not None,
        -(-roster.total // BLOCK) * BLOCK, BLOCK - 1,
    ]  # fmt: skip
    way = lanes(spec.wall) if spec.wall is not None else (0.0,) * 5
    able = np.stack([roster.can_hit, roster.healable])
    return Tables(
        unit, roster.explodes[None].copy(), pair, able,
        np.array(fact, np.int64), np.array([sight, *way], np.float32), ground_grid(spec, terrain).copy(),
        np.array(roster.healers, np.int64), roster.vanguard.astype(np.int64),
    )  # fmt: skip


def working_memory(units: int, rows: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the working memory of `rows` battles that are played at the same time: floats and ints [rows, .., U + 8].

    What lies beyond a map's units stays that of dead units.
    """
    width = units + BLOCK
    return np.zeros((rows, N_FLOATS, width), np.float32), np.zeros((rows, N_INTS, width), np.int32)


def shared_memory() -> np.ndarray:
    """Return working memory [.., WIDTH] for battles that are played one after the other, with room for `unit`."""
    return np.zeros((N_FLOATS + N_INTS + len(COLUMNS), WIDTH), np.float32)


def one_by_one(t: Tables) -> Tables:
    """Return the constants of a map for a processor that computes one number at a time: no blocks."""
    fact = t.fact.copy()
    fact[LANES], fact[REST] = fact[UNITS], 0
    return t._replace(fact=fact)
