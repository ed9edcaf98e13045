"""Start positions and fresh battles as a kernel; compare `omagd.envs.battle.starts` and `Simulator.reset`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle import starts
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.combat import ATTACK, STOP, ZERO
from omagd.envs.battle.compiled.compiling import function, kernel
from omagd.envs.battle.compiled.tables import Array, State, Tables
from omagd.envs.battle.maps import FORMATION, HIDDEN, MIXED, MapSpec
from omagd.envs.battle.physics import SIZE
from omagd.envs.battle.roster import Roster
from omagd.utils.seeding import GOLDEN, splitmix64

STEP, BITS = np.uint64(GOLDEN), np.uint64(40)
mix = function(splitmix64)
SPREAD, HALF, UNIT = np.float32(2 * starts.JITTER), starts.HALF, np.float32(2.0**-24)
ONE, EDGE, ANGLES, MOST = np.float32(1), np.float32(SIZE), np.float32(starts.N_ANGLES), np.float32(starts.MOST_GROUPS)
HEALTH, SHIELD, ENERGY = range(3)  # rows of `Starts.full`
STARTS = (FORMATION, MIXED, HIDDEN)
RANDOM, TURNED = STARTS.index(MIXED), STARTS.index(HIDDEN)
COUNT_BITS = 8  # of the number of a group's members


class Starts(NamedTuple):
    """How battles begin: `starts.Plan`, and full: [3, U] float32, health, shield, energy. kind: [U] int64, allies of
    one kind are sorted. how: [2] int64, the place in `STARTS`, and whether enemies stay where they are.
    """

    place: Array
    offset: Array
    lattice: Array
    directions: Array
    orders: Array
    ground: Array
    full: Array
    kind: Array
    how: Array


def make_starts(spec: MapSpec, roster: Roster) -> Starts:
    """Return how battles of a map begin."""
    full = np.stack([column.ravel() for column in (roster.health_max, roster.shield_max, roster.energy)])
    names = (*spec.allies, *spec.enemies)
    kind = np.array([names.index(name) for name in names], np.int64)
    how = np.array([STARTS.index(spec.start), spec.enemy_waits], np.int64)
    return Starts(*starts.make_plan(spec), full.astype(np.float32), kind, how)


@function
def drawn(seed: int, number: int) -> np.float32:
    """Return the `number`-th number of the battle with this seed, float32 in [0, 1)."""
    z = mix(mix(np.uint64(seed) + STEP) + STEP * np.uint64(number + 1))
    return np.float32(z >> BITS) * UNIT


@function
def jitter(seed: int, number: int) -> np.float32:
    """Return the `number`-th offset from the formation of the battle with this seed, float32 cells."""
    return SPREAD * (drawn(seed, number) - HALF)


@function
def stand_in_formation(begin: Starts, seed: int, total: int, x: Array, y: Array) -> None:
    """Place both formations."""
    for i in range(total):
        x[i], y[i] = begin.place[0, i] + jitter(seed, i), begin.place[1, i] + jitter(seed, total + i)


@function
def stand_in_the_middle(begin: Starts, seed: int, n: int, total: int, x: Array, y: Array) -> None:
    """Place the allies' formation in the middle."""
    for i in range(n):
        x[i] = begin.ground[starts.MIDDLE] + begin.offset[0, i] + jitter(seed, i)
        y[i] = begin.ground[starts.MIDDLE] + begin.offset[1, i] + jitter(seed, total + i)


@function
def hide(begin: Starts, seed: int, n: int, total: int, dx: np.float32, dy: np.float32, x: Array, y: Array) -> None:
    """Place the allies' formation in the middle and the enemy's in the direction (dx, dy)."""
    ground, offset = begin.ground, begin.offset
    stand_in_the_middle(begin, seed, n, total, x, y)
    for i in range(n, total):
        turned_x = offset[0, i] * dx - offset[1, i] * dy
        turned_y = offset[0, i] * dy + offset[1, i] * dx
        x[i] = ground[starts.MIDDLE] + ground[starts.APART] * dx + turned_x + jitter(seed, i)
        y[i] = ground[starts.MIDDLE] + ground[starts.APART] * dy + turned_y + jitter(seed, total + i)
    for i in range(total):
        x[i] = min(max(x[i], ground[starts.LOW]), ground[starts.HIGH])
        y[i] = min(max(y[i], ground[starts.LOW]), ground[starts.HIGH])


@function
def reflect(begin: Starts, seed: int, n: int, total: int, x: Array, y: Array) -> tuple[np.float32, np.float32]:
    """Place allies in the west, enemies mirrored, and further enemies in the east; return the allies' mean."""
    ground, sum_x, sum_y = begin.ground, ZERO, ZERO
    for i in range(n):
        x[i] = ground[starts.LOW] + drawn(seed, i) * ground[starts.WEST]
        y[i] = ground[starts.LOW] + drawn(seed, total + i) * ground[starts.HEIGHT]
        sum_x, sum_y = sum_x + x[i], sum_y + y[i]
    for i in range(n, total):
        if i < 2 * n:
            x[i], y[i] = EDGE - x[i - n], y[i - n]
        else:
            x[i] = ground[starts.MIDDLE] + drawn(seed, i) * ground[starts.EAST]
            y[i] = ground[starts.LOW] + drawn(seed, total + i) * ground[starts.HEIGHT]
    return sum_x / np.float32(n), sum_y / np.float32(n)


@function
def surround(begin: Starts, seed: int, n: int, total: int, x: Array, y: Array) -> None:
    """Place the allies' formation in the middle and enemies in one to four groups, each on its own diagonal."""
    ground, more = begin.ground, 2 * total
    groups = np.float32(1 + int(drawn(seed, more + starts.GROUPS) * MOST))
    order = int(drawn(seed, more + starts.ORDER) * np.float32(len(begin.orders)))
    stand_in_the_middle(begin, seed, n, total, x, y)
    counts = 0  # of members, by group
    for i in range(n, total):
        group = int(drawn(seed, more + starts.MEMBER + i - n) * groups)
        number = (counts >> (COUNT_BITS * group)) & ((1 << COUNT_BITS) - 1)
        counts += 1 << (COUNT_BITS * group)
        corner = begin.orders[order, group]
        near = drawn(seed, more + starts.NEAR + group)
        far = ground[starts.OUTER] + near * (ground[starts.INNER] - ground[starts.OUTER])
        side_x, side_y = np.float32(2 * (corner & 1) - 1), np.float32(2 * (corner >> 1) - 1)
        x[i] = ground[starts.MIDDLE] + side_x * far + begin.lattice[0, number] + jitter(seed, i)
        y[i] = ground[starts.MIDDLE] + side_y * far + begin.lattice[1, number] + jitter(seed, total + i)


@function
def sort_allies(t: Tables, begin: Starts, x: Array, y: Array) -> None:
    """Sort the places of allies of the same kind by (x, y)."""
    n = t.fact[row.AGENTS]
    for i in range(n):
        for j in range(i + 1, n):
            if begin.kind[i] == begin.kind[j] and (x[j] < x[i] or (x[j] == x[i] and y[j] < y[i])):
                x[i], x[j] = x[j], x[i]
                y[i], y[j] = y[j], y[i]


@function
def place_units(begin: Starts, seed: int, n: int, total: int, s: Array) -> None:
    """Write where units stand, and where they advance to."""
    ground, offset, x, y, start = begin.ground, begin.offset, s[row.X], s[row.Y], begin.how[0]
    middle_x, middle_y, dx, dy = ground[starts.MIDDLE], ground[starts.MIDDLE], ONE, ZERO
    if start == TURNED:
        angle = int(drawn(seed, 2 * total + starts.ANGLE) * ANGLES)
        dx, dy = begin.directions[0, angle], begin.directions[1, angle]
        hide(begin, seed, n, total, dx, dy, x, y)
    elif start == RANDOM:
        if drawn(seed, 2 * total + starts.REFLECTS) < ground[starts.SHARE]:
            middle_x, middle_y = reflect(begin, seed, n, total, x, y)
        else:
            surround(begin, seed, n, total, x, y)
    else:
        stand_in_formation(begin, seed, total, x, y)
        middle_x, middle_y = ground[starts.START_X], ground[starts.START_Y]
    for i in range(n):
        s[row.GOAL_X, i], s[row.GOAL_Y, i] = middle_x, middle_y
    for i in range(n, total):
        s[row.GOAL_X, i] = middle_x + (offset[0, i] * dx - offset[1, i] * dy)
        s[row.GOAL_Y, i] = middle_y + (offset[0, i] * dy + offset[1, i] * dx)


@function
def reset_battle(t: Tables, begin: Starts, state: State, seed: int, b: int) -> None:
    """Start a new battle from `seed` in slot `b`."""
    n, total = t.fact[row.AGENTS], t.fact[row.UNITS]
    s, k = state.floats[b], state.ints[b]
    place_units(begin, seed, n, total, s)
    sort_allies(t, begin, s[row.X], s[row.Y])
    for i in range(total):
        if begin.how[1] and i >= n:
            s[row.GOAL_X, i], s[row.GOAL_Y, i] = s[row.X, i], s[row.Y, i]
        s[row.HEALTH, i], s[row.SHIELD, i] = begin.full[HEALTH, i], begin.full[SHIELD, i]
        s[row.ENERGY, i], s[row.TIMER, i], s[row.QUIET, i] = begin.full[ENERGY, i], ZERO, ZERO
        k[row.ORDER, i], k[row.TARGET, i], k[row.ALIVE, i] = STOP if i < n else ATTACK, -1, 1
        state.cooldown[b, i], state.alive[b, i] = ZERO, True


@kernel
def reset(t: Tables, begin: Starts, state: State, which: Array, seeds: Array) -> None:
    """Start new battles in the slots `which` [B] bool, slot b from `seeds[b]`."""
    for b in range(len(which)):
        if which[b]:
            reset_battle(t, begin, state, seeds[b], b)
