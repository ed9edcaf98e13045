"""A map's constants and a battle's working memory, as a few arrays with named rows.

A kernel takes few arguments: each one costs a quarter of a microsecond per call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.physics import APART, FAR_AWAY, HOLD_BACK, Movement
from omagd.envs.battle.roster import FLOATS, INTS, Roster

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
        floats, ints: [B, 9, L] float32 and [B, 3, L] int32, the rows of `Battle`. cooldown: [B, L] float32, game loops.
        alive: [B, L] bool.
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


def make_tables(roster: Roster, movement: Movement, sight: float) -> Tables:
    """Return the constants of a map. sight: cells at which the enemy looks for targets."""
    number = np.arange(roster.total, dtype=np.float32)
    offsets = {"offset_x": APART * number, "offset_y": APART * ((number * 7) % 11), "far": FAR_AWAY + 100 * number}
    more = {
        "layer": roster.touch[0] < 0,  # the units that do not collide with the first one
        "free": movement.free,
        "held": np.where(roster.rearguard, HOLD_BACK, np.float32(1)),
    }
    more["layer"][0] = False
    columns = {**vars(roster), **movement.columns(), **offsets, **more}
    unit = np.zeros((len(COLUMNS), WIDTH), np.float32)
    for name, column in zip(COLUMNS, unit, strict=True):
        column[: roster.total] = columns[name].ravel()
    pair = np.stack([roster.reach, roster.shield_hit, roster.health_hit]).astype(np.float32)
    fact = [
        roster.n, roster.total, roster.has_shields, roster.has_regen, roster.has_splash, roster.has_vanguard,
        roster.all_hit, movement.wall is not None,
        -(-roster.total // BLOCK) * BLOCK, BLOCK - 1,
    ]  # fmt: skip
    able = np.stack([roster.can_hit, roster.healable])
    return Tables(
        unit, roster.explodes[None].copy(), pair, able,
        np.array(fact, np.int64), np.array([sight, *movement.lanes()], np.float32), movement.grid.copy(),
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
