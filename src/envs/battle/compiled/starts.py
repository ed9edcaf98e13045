"""Where battles begin: facing formations, SMACv2's random starts, or an enemy that may come from any side.

Everything follows from a battle's seed alone: number k of its SplitMix64 stream, whatever else is drawn. Sums, products
and table look-ups only, in float32.
Source of `mixed`: oxwhirl/smacv2, distributions.py (`surrounded`, `reflect_position`, `surrounded_and_reflect`).
`sc2_v2` draws from the same distributions, with these constants; the game keeps its units apart and on the map.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import numpy as np

from omagd.envs.battle.args import BUFFER, MOST_GROUPS, OFFSET, REFLECTED_SHARE
from omagd.envs.battle.compiled import function, kernel
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.combat import ATTACK, STOP, ZERO
from omagd.envs.battle.compiled.tables import Array, State, Tables
from omagd.envs.battle.maps import BORDER, FORMATION, HIDDEN, MIXED, SIZE, MapSpec
from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.utils.seeding import GOLDEN, splitmix64

WIDTH, ENEMY_WIDTH = 1.6, 0.6  # formations: units per line over number of lines; ranged enemies come in columns
MOST_LINES = 6
HALF = np.float32(0.5)
JITTER = 0.6  # start positions differ from the formation by at most this much along each axis

HIDDEN_APART = 12.0  # cells between the middle of the map and the hidden enemy's formation
N_ANGLES = 1024

# Numbers of a battle beyond the first 2 U, which shift each unit along x and y.
ANGLE = 0  # of a hidden enemy
REFLECTS, GROUPS, ORDER, NEAR, MEMBER = 0, 1, 2, 3, 3 + MOST_GROUPS  # of `mixed`; NEAR: by group, MEMBER: by enemy
# Entries of `Starts.ground`.
MIDDLE, LOW, HIGH, WEST, EAST, HEIGHT, INNER, OUTER, SHARE, APART, START_X, START_Y = range(12)


class Starts(NamedTuple):
    """How battles of a map begin. U units; arrays float32, cells.

    Attributes:
        place: [2, U], places of the facing formations. offset: [2, U], of each unit from its formation's centre.
        lattice: [2, U], places around the centre of a group, the nearest first.
        directions: [2, N_ANGLES], unit vectors. orders: [24, 4] int64, the orders of the four corners.
        ground: [12]: middle of the map; least and greatest coordinate; width of the west, of the east, and height, over
            which mirrored teams are spread; least and greatest distance of a group from the middle along each axis;
            share of mirrored battles; distance of a hidden enemy; the allies' start.
        full: [3, U], health, shield, energy. kind: [U] int64, allies of one kind are sorted. how: [2] int64, the place
            in `STARTS`, and whether enemies stay where they are.
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


def formation(
    names: tuple[str, ...], centres: tuple[tuple[float, float], ...], spacing: float, facing: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return block centres and offsets from them, each [2, units]: lines facing the enemy, short ranges in front.

    Args:
        centres: of the blocks; units are assigned to blocks round-robin.
        facing: +1 if the enemy is to the right, -1 if to the left. Exploding units stand in front.
    """
    types = [UNITS[UNIT_ID[name]] for name in names]
    by_range = sorted(range(len(names)), key=lambda i: (not types[i].explodes, types[i].range, i))
    centre, offset = np.zeros((2, 2, len(names)), dtype=np.float32)
    width = ENEMY_WIDTH if facing < 0 and max(unit.range for unit in types) > 1 else WIDTH
    for c, place in enumerate(centres):
        block = by_range[c :: len(centres)]
        per_line = int(np.ceil(max(np.sqrt(width * len(block)), len(block) / MOST_LINES)))
        lines = int(np.ceil(len(block) / per_line))
        centre[:, block] = np.array(place, dtype=np.float32)[:, None]
        for number, unit in enumerate(block):
            line, file = divmod(number, per_line)
            in_line = min(per_line, len(block) - line * per_line)
            offset[0, unit] = facing * spacing * ((lines - 1) / 2 - line)
            offset[1, unit] = spacing * (file - (in_line - 1) / 2)
    return centre, offset


def make_starts(spec: MapSpec) -> Starts:
    """Return how battles of a map begin."""
    units = [UNITS[i] for i in spec.unit_ids()]
    ours = formation(spec.allies, spec.ally_start, spec.spacing, 1)
    theirs = formation(spec.enemies, spec.enemy_start, spec.enemy_spacing or spec.spacing, -1)
    place, offset = (np.concatenate(parts, axis=1) for parts in ((sum(ours), sum(theirs)), (ours[1], theirs[1])))
    lattice = _lattice(place.shape[1], spec.enemy_spacing or spec.spacing)
    angle = np.arange(N_ANGLES) * (2 * np.pi / N_ANGLES)
    low = BORDER + max(unit.radius for unit in units)
    middle, high = SIZE / 2, SIZE - low
    # Groups are on the ground with all their members, and no nearer than the teams' extents if those are large.
    extent = [float(np.hypot(*places).max()) for places in (ours[1], lattice[:, : spec.n_enemies])]
    inner, outer = max(OFFSET, sum(extent) / 2**0.5), high - extent[1] - JITTER - middle
    west, east = middle - BUFFER - low, high - middle
    ground = [
        middle, low, high, west, east, high - low, inner, outer, REFLECTED_SHARE, HIDDEN_APART, *spec.ally_start[0],
    ]  # fmt: skip
    full = [[u.health for u in units], [u.shield for u in units], [u.energy for u in units]]
    names = (*spec.allies, *spec.enemies)
    kind = np.array([names.index(name) for name in names], np.int64)
    return Starts(
        place, offset, lattice, np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32),
        np.array(list(permutations(range(MOST_GROUPS)))), np.array(ground, np.float32), np.array(full, np.float32),
        kind, np.array([STARTS.index(spec.start), spec.enemy_waits], np.int64),
    )  # fmt: skip


def _lattice(count: int, spacing: float) -> np.ndarray:
    """Return [2, count] float32, the points of a square lattice that are nearest to its origin."""
    most = int(np.ceil(count**0.5))
    points = [(x, y) for x in range(-most, most + 1) for y in range(-most, most + 1)]
    nearest = sorted(points, key=lambda point: (point[0] ** 2 + point[1] ** 2, point))[:count]
    return (np.array(nearest, np.float32) * np.float32(spacing)).T.copy()


STEP, BITS = np.uint64(GOLDEN), np.uint64(40)
mix = function(splitmix64)
SPREAD, UNIT = np.float32(2 * JITTER), np.float32(2.0**-24)
ONE, EDGE, ANGLES, MOST = np.float32(1), np.float32(SIZE), np.float32(N_ANGLES), np.float32(MOST_GROUPS)
HEALTH, SHIELD, ENERGY = range(3)  # rows of `Starts.full`
STARTS = (FORMATION, MIXED, HIDDEN)
RANDOM, TURNED = STARTS.index(MIXED), STARTS.index(HIDDEN)
COUNT_BITS = 8  # of the number of a group's members


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
def stand_in_the_middle(begin: Starts, seed: int, n: int, total: int, x: Array, y: Array) -> None:
    """Place the allies' formation in the middle."""
    for i in range(n):
        x[i] = begin.ground[MIDDLE] + begin.offset[0, i] + jitter(seed, i)
        y[i] = begin.ground[MIDDLE] + begin.offset[1, i] + jitter(seed, total + i)


@function
def hide(begin: Starts, seed: int, n: int, total: int, dx: np.float32, dy: np.float32, x: Array, y: Array) -> None:
    """Place the allies' formation in the middle and the enemy's in the direction (dx, dy)."""
    ground, offset = begin.ground, begin.offset
    stand_in_the_middle(begin, seed, n, total, x, y)
    for i in range(n, total):
        turned_x = offset[0, i] * dx - offset[1, i] * dy
        turned_y = offset[0, i] * dy + offset[1, i] * dx
        x[i] = ground[MIDDLE] + ground[APART] * dx + turned_x + jitter(seed, i)
        y[i] = ground[MIDDLE] + ground[APART] * dy + turned_y + jitter(seed, total + i)
    for i in range(total):
        x[i] = min(max(x[i], ground[LOW]), ground[HIGH])
        y[i] = min(max(y[i], ground[LOW]), ground[HIGH])


@function
def reflect(begin: Starts, seed: int, n: int, total: int, x: Array, y: Array) -> tuple[np.float32, np.float32]:
    """Place allies in the west, enemies mirrored, and further enemies in the east; return the allies' mean."""
    ground, sum_x, sum_y = begin.ground, ZERO, ZERO
    for i in range(n):
        x[i] = ground[LOW] + drawn(seed, i) * ground[WEST]
        y[i] = ground[LOW] + drawn(seed, total + i) * ground[HEIGHT]
        sum_x, sum_y = sum_x + x[i], sum_y + y[i]
    for i in range(n, total):
        if i < 2 * n:
            x[i], y[i] = EDGE - x[i - n], y[i - n]
        else:
            x[i] = ground[MIDDLE] + drawn(seed, i) * ground[EAST]
            y[i] = ground[LOW] + drawn(seed, total + i) * ground[HEIGHT]
    return sum_x / np.float32(n), sum_y / np.float32(n)


@function
def surround(begin: Starts, seed: int, n: int, total: int, x: Array, y: Array) -> None:
    """Place the allies' formation in the middle and enemies in one to four groups, each on its own diagonal."""
    ground, more = begin.ground, 2 * total
    groups = np.float32(1 + int(drawn(seed, more + GROUPS) * MOST))
    order = int(drawn(seed, more + ORDER) * np.float32(len(begin.orders)))
    stand_in_the_middle(begin, seed, n, total, x, y)
    counts = 0  # of members, by group
    for i in range(n, total):
        group = int(drawn(seed, more + MEMBER + i - n) * groups)
        number = (counts >> (COUNT_BITS * group)) & ((1 << COUNT_BITS) - 1)
        counts += 1 << (COUNT_BITS * group)
        corner = begin.orders[order, group]
        near = drawn(seed, more + NEAR + group)
        far = ground[OUTER] + near * (ground[INNER] - ground[OUTER])
        side_x, side_y = np.float32(2 * (corner & 1) - 1), np.float32(2 * (corner >> 1) - 1)
        x[i] = ground[MIDDLE] + side_x * far + begin.lattice[0, number] + jitter(seed, i)
        y[i] = ground[MIDDLE] + side_y * far + begin.lattice[1, number] + jitter(seed, total + i)


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
    middle_x, middle_y, dx, dy = ground[MIDDLE], ground[MIDDLE], ONE, ZERO
    if start == TURNED:
        angle = int(drawn(seed, 2 * total + ANGLE) * ANGLES)
        dx, dy = begin.directions[0, angle], begin.directions[1, angle]
        hide(begin, seed, n, total, dx, dy, x, y)
    elif start == RANDOM:
        if drawn(seed, 2 * total + REFLECTS) < ground[SHARE]:
            middle_x, middle_y = reflect(begin, seed, n, total, x, y)
        else:
            surround(begin, seed, n, total, x, y)
    else:
        for i in range(total):
            x[i], y[i] = begin.place[0, i] + jitter(seed, i), begin.place[1, i] + jitter(seed, total + i)
        middle_x, middle_y = ground[START_X], ground[START_Y]
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
