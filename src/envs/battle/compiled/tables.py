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
(
    RADIUS, STEP, PACE, COOLDOWN, HEALTH_MAX, SHIELD_MAX, ENERGY_MAX, ENERGY_REGEN, HP_REGEN, SPLASH_LINE,
    SPLASH_RADIUS, HEAL, HEAL_COST, LOW, HIGH, FREE_BELOW, CAN_MOVE, OFFSET_X, OFFSET_Y, FAR,
    LAYER, FREE, HELD, N_COLUMNS,
) = range(24)  # fmt: skip
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
        unit: [23, WIDTH] float32, rows RADIUS to HELD, zero beyond U. STEP, PACE: cells per loop, PACE on the way to a
            place, where the enemy keeps together. LAYER: 1 for units that do not collide with the first one.
        explodes: [U] bool. grid: [map_x, map_y] bool, ground on which units stand.
        pair: [3, U, U] float32 (attacker, target): centre distance at which the weapon (of healers: the beam) reaches,
            -1 where it cannot hit; damage of one shot before and after armour. able: [2, U, U] bool.
        fact: [10] int64. length: [6] float32, cells.
        healers, bombs: indices of units, int64; bombs are the enemy's exploding units.
    """

    unit: Array
    explodes: Array
    pair: Array
    able: Array
    fact: Array
    length: Array
    grid: Array
    healers: Array
    bombs: Array


APART, FAR_AWAY = np.float32(1.0e-3), np.float32(1.0e4)
HOLD_BACK = np.float32(0.5)  # speed factor of enemies behind their exploding units
SWING = np.float32(6.0)  # loops that a chasing unit stands still after a shot; a MOVE order interrupts it


def make_tables(spec: MapSpec, terrain: Terrain, sight: float) -> Tables:
    """Return the constants of a map. sight: cells at which the enemy looks for targets."""
    units, n = [UNIT_TYPES[i] for i in spec.unit_ids()], spec.n_agents
    enemy, explodes = np.arange(len(units)) >= n, np.array([u.explodes for u in units])
    behind, bombs = enemy & ~explodes, np.flatnonzero(enemy & explodes)
    foe = enemy[:, None] != enemy
    unit, (pair, able) = _unit_table(spec, units, terrain, behind), _pair_tables(units, foe)
    fact = [
        n, len(units), unit[SHIELD_MAX].any(), unit[HP_REGEN].any(), unit[[SPLASH_LINE, SPLASH_RADIUS]].any(),
        len(bombs) > 0 and behind.any(), (able[CAN_HIT] | ~foe).all(), spec.wall is not None,
        -(-len(units) // BLOCK) * BLOCK, BLOCK - 1,
    ]  # fmt: skip
    way = lanes(spec.wall) if spec.wall is not None else (0.0,) * 5
    return Tables(
        unit, explodes, pair, able, np.array(fact, np.int64), np.array([sight, *way], np.float32),
        ground_grid(spec, terrain).copy(), np.flatnonzero(unit[HEAL]), bombs,
    )  # fmt: skip


def _unit_table(spec: MapSpec, units: list[UnitSpec], terrain: Terrain, behind: np.ndarray) -> np.ndarray:
    """Return `Tables.unit`. behind: [U] bool, enemies that do not explode."""
    table, number = np.zeros((N_COLUMNS, WIDTH), np.float32), np.arange(len(units), dtype=np.float32)
    unit, n, (low, _, high, _) = table[:, : len(units)], spec.n_agents, terrain.playable  # a square
    unit[RADIUS] = [u.radius for u in units]
    unit[STEP] = [u.speed / LOOPS_PER_SECOND for u in units]
    unit[PACE], unit[PACE, n:] = unit[STEP], unit[STEP, n:].min()
    unit[COOLDOWN] = [u.cooldown * LOOPS_PER_SECOND for u in units]
    unit[HEALTH_MAX] = [u.health for u in units]
    unit[SHIELD_MAX] = [u.shield for u in units]
    unit[ENERGY_MAX] = [u.energy_max for u in units]
    unit[ENERGY_REGEN] = [u.energy_regen / LOOPS_PER_SECOND for u in units]
    unit[HP_REGEN] = [ZERG_REGEN / LOOPS_PER_SECOND * (u.race == "Z") for u in units]
    unit[SPLASH_LINE] = [u.splash_line for u in units]
    unit[SPLASH_RADIUS] = [u.splash_radius for u in units]
    unit[HEAL] = [u.heal / LOOPS_PER_SECOND for u in units]
    unit[HEAL_COST] = [u.heal_cost for u in units]
    inset = np.minimum(unit[RADIUS], np.float32(0.5 * (high - low)))
    unit[LOW], unit[HIGH] = np.float32(low) + inset, np.float32(high) - inset
    unit[FREE_BELOW] = np.where(unit[COOLDOWN] > 0, unit[COOLDOWN] - SWING, 0)
    unit[CAN_MOVE] = unit[STEP] > 0
    # A tiny offset per unit gives units at the same position a direction to separate in. All differ, and by less than
    # `movement.STOP_SHORT`: a unit that has come so far into its reach must be able to fire.
    unit[OFFSET_X], unit[OFFSET_Y] = APART * (number % 50), APART * ((number * 7) % 11)
    unit[FAR] = FAR_AWAY + 100 * number
    unit[LAYER] = [u.air != units[0].air for u in units]
    unit[FREE] = [spec.wall is not None and spec.wall.cliff and (u.walks_cliffs or u.air) for u in units]
    unit[HELD] = np.where(behind, HOLD_BACK, 1)
    return table


def _pair_tables(units: list[UnitSpec], foe: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `Tables.pair` and `Tables.able`. foe: [U, U] bool."""
    radius = np.array([u.radius for u in units], np.float32)
    hits = np.array([[hit_damage(a, t) for t in units] for a in units], np.float32)
    weapon = np.array([u.heal_range if u.is_healer else u.range for u in units], np.float32)
    can_hit = foe & (hits[..., 0] > 0)
    healable = np.array([[a.is_healer and "biological" in t.attributes for t in units] for a in units]) & ~foe
    reach = np.where(can_hit | healable, weapon[:, None] + (radius[:, None] + radius), np.float32(-1))
    return np.stack([reach, hits[..., 0], hits[..., 1]]), np.stack([can_hit, healable])


def working_memory(units: int, rows: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the working memory of `rows` battles that are played at the same time: floats and ints [rows, .., U + 8].

    What lies beyond a map's units stays that of dead units.
    """
    width = units + BLOCK
    return np.zeros((rows, N_FLOATS, width), np.float32), np.zeros((rows, N_INTS, width), np.int32)


def shared_memory() -> np.ndarray:
    """Return working memory [.., WIDTH] for battles that are played one after the other, with room for `unit`."""
    return np.zeros((N_FLOATS + N_INTS + N_COLUMNS, WIDTH), np.float32)


def one_by_one(t: Tables) -> Tables:
    """Return the constants of a map for a processor that computes one number at a time: no blocks."""
    fact = t.fact.copy()
    fact[LANES], fact[REST] = fact[UNITS], 0
    return t._replace(fact=fact)
