"""A map's constants and a battle's working memory, as a few arrays with named rows.

A kernel takes few arguments: each one costs a quarter of a microsecond per call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.physics import APART, FAR_AWAY, Movement
from omagd.envs.battle.roster import FLOATS, INTS, Roster

# Rows of the state arrays and of the working memory: first the state, in the order of FLOATS and INTS.
X, Y, HEALTH, SHIELD, ENERGY, TIMER, QUIET, GOAL_X, GOAL_Y = range(len(FLOATS))
PLACE_X, PLACE_Y, NEXT_X, NEXT_Y, WANT_X, WANT_Y, LOSS, HIT = range(len(FLOATS), len(FLOATS) + 8)
# Rows over the living units only, one after the other: allies, then enemies.
NEAR_X, NEAR_Y, NEAR_RADIUS, PUSH_X, PUSH_Y = range(HIT + 1, HIT + 6)
N_FLOATS = PUSH_Y + 1
ORDER, TARGET, ALIVE = range(len(INTS))
AIMING, IN_REACH, EXPLODED, BLAST = range(len(INTS), len(INTS) + 4)
UNIT, NEAREST, TOUCHES = range(BLAST + 1, BLAST + 4)  # over the living units only
N_INTS = TOUCHES + 1

# Rows of `Tables.unit`.
COLUMNS = (
    "radius", "step", "pace", "cooldown", "health_max", "shield_max", "energy_max", "energy_regen", "hp_regen",
    "splash_line", "splash_radius", "heal", "heal_cost", "low", "high", "free_below", "can_move", "offset_x",
    "offset_y", "far",
)  # fmt: skip
(
    RADIUS, STEP, PACE, COOLDOWN, HEALTH_MAX, SHIELD_MAX, ENERGY_MAX, ENERGY_REGEN, HP_REGEN, SPLASH_LINE,
    SPLASH_RADIUS, HEAL, HEAL_COST, LOW, HIGH, FREE_BELOW, CAN_MOVE, OFFSET_X, OFFSET_Y, FAR,
) = range(len(COLUMNS))  # fmt: skip
ARMED, EXPLODES, REARGUARD, FREE = range(4)  # rows of `Tables.mark`
REACH, TOUCH, SHIELD_HIT, HEALTH_HIT = range(4)  # of `Tables.pair`
CAN_HIT, CAN_BE_HIT, HEALABLE = range(3)  # of `Tables.able`
AGENTS, UNITS, SHIELDS, REGENERATES, SPLASHES, HOLDS_BACK, ALL_HIT, WALLED = range(8)  # entries of `Tables.fact`
SIGHT, MIDDLE, LANE_LOW, LANE_HIGH, LEFT_FACE, RIGHT_FACE = range(6)  # entries of `Tables.length`


Array = np.ndarray


class State(NamedTuple):
    """All battles. B battles, U units.

    Attributes:
        floats, ints: [B, 9, U] float32 and [B, 3, U] int32, the rows of `Battle`. cooldown: [B, U] float32, game loops.
        alive: [B, U] bool.
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
        unit: [20, U] float32, `COLUMNS`. mark: [4, U] bool. pair: [4, U, U] float32. able: [3, U, U] bool.
        fact: [8] int64. length: [6] float32, cells. grid: [map_x, map_y] bool, ground on which units stand.
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
    columns = {**vars(roster), **movement.columns(), **offsets}
    unit = np.stack([np.broadcast_to(columns[name].ravel(), roster.total) for name in COLUMNS]).astype(np.float32)
    marks = roster.armed, roster.explodes, roster.rearguard, movement.free
    pair = np.stack([roster.reach, roster.touch, roster.shield_hit, roster.health_hit]).astype(np.float32)
    fact = [
        roster.n, roster.total, roster.has_shields, roster.has_regen, roster.has_splash, roster.has_vanguard,
        roster.all_hit, movement.wall is not None,
    ]  # fmt: skip
    able = np.stack([roster.can_hit, roster.can_hit.T, roster.healable])
    return Tables(
        unit, np.stack([mark.ravel() for mark in marks]), pair, able,
        np.array(fact, np.int64), np.array([sight, *movement.lanes()], np.float32), movement.grid.copy(),
        np.array(roster.healers, np.int64), roster.vanguard.astype(np.int64),
    )  # fmt: skip


def working_memory(units: int, rows: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the working memory of `rows` battles that are played at the same time: floats and ints [rows, .., U]."""
    return np.zeros((rows, N_FLOATS, units), np.float32), np.zeros((rows, N_INTS, units), np.int32)
