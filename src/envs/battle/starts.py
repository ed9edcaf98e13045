"""Where battles begin: facing formations, SMACv2's random starts, or an enemy that may come from any side.

Everything follows from a battle's seed alone: number k of its SplitMix64 stream, whatever else is drawn. Sums, products
and table look-ups only, in float32, so that kernels compute the same bits.
Source of `mixed`: oxwhirl/smacv2, distributions.py (`surrounded`, `reflect_position`, `surrounded_and_reflect`).
`sc2_v2` draws from the same distributions, with these constants; the game keeps its units apart and on the map.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from omagd.envs.battle.maps import HIDDEN, MIXED, MapSpec
from omagd.envs.battle.physics import BORDER, SIZE
from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.utils.seeding import GOLDEN, splitmix64

WIDTH, ENEMY_WIDTH = 1.6, 0.6  # formations: units per line over number of lines; ranged enemies come in columns
MOST_LINES = 6
HALF = np.float32(0.5)
HALF = np.float32(0.5)
JITTER = 0.6  # start positions differ from the formation by at most this much along each axis

# SMACv2's random starts.
REFLECTED_SHARE = 0.5  # of the battles; the others are surrounded
MOST_GROUPS = 4  # of enemies, each on its own diagonal
OFFSET = 2.0  # distance of the diagonals from the centre: enemies do not appear on top of allies
BUFFER = 1.0  # between the middle of the field and the allies

HIDDEN_APART = 12.0  # cells between the middle of the map and the hidden enemy's formation
N_ANGLES = 1024

# Numbers of a battle beyond the first 2 U, which shift each unit along x and y.
ANGLE = 0  # of a hidden enemy
REFLECTS, GROUPS, ORDER, NEAR, MEMBER = 0, 1, 2, 3, 3 + MOST_GROUPS  # of `mixed`; NEAR: by group, MEMBER: by enemy
# Entries of `Plan.ground`.
MIDDLE, LOW, HIGH, WEST, EAST, HEIGHT, INNER, OUTER, SHARE, APART, START_X, START_Y = range(12)


class Plan(NamedTuple):
    """How battles of a map begin. U units; arrays float32, cells.

    Attributes:
        place: [2, U], places of the facing formations. offset: [2, U], of each unit from its formation's centre.
        lattice: [2, U], places around the centre of a group, the nearest first.
        directions: [2, N_ANGLES], unit vectors. orders: [24, 4] int64, the orders of the four corners.
        ground: [12]: middle of the map; least and greatest coordinate; width of the west, of the east, and height, over
            which mirrored teams are spread; least and greatest distance of a group from the middle along each axis;
            share of mirrored battles; distance of a hidden enemy; the allies' start.
    """

    place: np.ndarray
    offset: np.ndarray
    lattice: np.ndarray
    directions: np.ndarray
    orders: np.ndarray
    ground: np.ndarray


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


def seeded_uniform(seeds: np.ndarray, count: int) -> np.ndarray:
    """Return [count, B] float32 in [0, 1), column b a function of `seeds[b]` alone (SplitMix64)."""
    step = np.uint64(GOLDEN)
    z = splitmix64(seeds.astype(np.uint64) + step)[None, :] + step * np.arange(1, count + 1, dtype=np.uint64)[:, None]
    return (splitmix64(z) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@lru_cache(maxsize=64)
def make_plan(spec: MapSpec) -> Plan:
    """Return how battles of a map begin."""
    ours, theirs = formation(spec.allies, spec.ally_start, spec.spacing, 1), _enemy_formation(spec)
    place, offset = (np.concatenate(parts, axis=1) for parts in ((sum(ours), sum(theirs)), (ours[1], theirs[1])))
    lattice = _lattice(place.shape[1], spec.enemy_spacing or spec.spacing)
    angle = np.arange(N_ANGLES) * (2 * np.pi / N_ANGLES)
    low = BORDER + max(UNITS[i].radius for i in spec.unit_ids())
    middle, high = SIZE / 2, SIZE - low
    # Groups are on the ground with all their members, and no nearer than the teams' extents if those are large.
    extent = [float(np.hypot(*places).max()) for places in (ours[1], lattice[:, : spec.n_enemies])]
    inner, outer = max(OFFSET, sum(extent) / 2**0.5), high - extent[1] - JITTER - middle
    west, east = middle - BUFFER - low, high - middle
    ground = [
        middle, low, high, west, east, high - low, inner, outer, REFLECTED_SHARE, HIDDEN_APART, *spec.ally_start[0],
    ]  # fmt: skip
    return Plan(
        place, offset, lattice, np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32),
        np.array(list(permutations(range(MOST_GROUPS)))), np.array(ground, np.float32),
    )  # fmt: skip


def _enemy_formation(spec: MapSpec) -> tuple[np.ndarray, np.ndarray]:
    return formation(spec.enemies, spec.enemy_start, spec.enemy_spacing or spec.spacing, -1)


def _lattice(count: int, spacing: float) -> np.ndarray:
    """Return [2, count] float32, the points of a square lattice that are nearest to its origin."""
    most = int(np.ceil(count**0.5))
    points = [(x, y) for x in range(-most, most + 1) for y in range(-most, most + 1)]
    nearest = sorted(points, key=lambda point: (point[0] ** 2 + point[1] ** 2, point))[:count]
    return (np.array(nearest, np.float32) * np.float32(spacing)).T.copy()


def start_positions(spec: MapSpec, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return start positions and the places that units advance to, both [2, U, B] float32.

    Allies are sorted by (type, x, y). Enemies advance to the allies' start: to the middle of its formation, or of all
    allies, keeping their own formation.
    """
    plan, n, total = make_plan(spec), spec.n_agents, spec.n_agents + spec.n_enemies
    more = {MIXED: MEMBER + spec.n_enemies, HIDDEN: 1}.get(spec.start, 0)
    draws = seeded_uniform(seeds, 2 * total + more)
    noise, draws = draws[: 2 * total].reshape(2, total, -1), draws[2 * total :]
    shift = np.float32(2 * JITTER) * (noise - HALF)
    ahead = np.array([1, 0], np.float32)[:, None]  # from the allies to the enemies
    if spec.start == MIXED:
        position, centre = _mixed(plan, n, noise, shift, draws)
    elif spec.start == HIDDEN:
        ahead = plan.directions[:, (draws[ANGLE] * np.float32(N_ANGLES)).astype(np.int64)]
        position, centre = _hidden(plan, n, shift, ahead), plan.ground[MIDDLE]
    else:
        position, centre = plan.place[:, :, None] + shift, plan.ground[START_X:, None]
    _sort_allies(spec, position)
    goals = np.zeros_like(position)
    goals += np.broadcast_to(centre, (2, len(seeds)))[:, None]
    goals[:, n:] += _turned(plan.offset[:, n:], ahead)
    return position, goals


def _turned(offset: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Return offsets [2, m] from a formation's centre, turned from (1, 0) to `ahead` [2, B]: [2, m, B]."""
    x, y, dx, dy = offset[0, :, None], offset[1, :, None], ahead[0], ahead[1]
    return np.stack([x * dx - y * dy, x * dy + y * dx])


def _hidden(plan: Plan, n: int, shift: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Place the allies' formation in the middle and the enemy's on a circle around it, facing the middle.

    Units of large teams that would stand beyond the edge of the ground stand on it.
    """
    ground = plan.ground
    allies = ground[MIDDLE] + plan.offset[:, :n, None]
    enemies = (ground[MIDDLE] + ground[APART] * ahead)[:, None] + _turned(plan.offset[:, n:], ahead)
    position: np.ndarray = np.concatenate([np.broadcast_to(allies, (2, n, shift.shape[2])), enemies], axis=1) + shift
    return np.minimum(np.maximum(position, ground[LOW]), ground[HIGH])


def _mixed(
    plan: Plan, n: int, noise: np.ndarray, shift: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions [2, U, B] of which half are mirrored and half surrounded, and the allies' centres [2, B]."""
    mirrors = draws[REFLECTS] < plan.ground[SHARE]
    reflected, centre = _reflected(plan, n, noise)
    position = np.where(mirrors, reflected, _surrounded(plan, n, shift, draws))
    return position, np.where(mirrors, centre, plan.ground[MIDDLE])


def _reflected(plan: Plan, n: int, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place allies anywhere in the west, enemies mirrored, and further enemies anywhere in the east.

    Returns positions and the means of the allies.
    """
    ground, total = plan.ground, noise.shape[1]
    x, y = ground[LOW] + noise[0] * ground[WEST], ground[LOW] + noise[1] * ground[HEIGHT]
    twins = min(n, total - n)
    x[n : n + twins], y[n : n + twins] = np.float32(SIZE) - x[:twins], y[:twins]
    x[n + twins :] = ground[MIDDLE] + noise[0, n + twins :] * ground[EAST]
    centre = np.zeros((2, noise.shape[2]), np.float32)
    for i in range(n):  # one after the other, as kernels add
        centre += (x[i], y[i])
    return np.stack([x, y]), centre / np.float32(n)


def _surrounded(plan: Plan, n: int, shift: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Place the allies' formation in the middle and enemies in one to four groups, each on its own diagonal."""
    ground, slots = plan.ground, np.arange(draws.shape[1])
    m = shift.shape[1] - n
    groups = 1 + (draws[GROUPS] * np.float32(MOST_GROUPS)).astype(np.int64)
    group = (draws[MEMBER : MEMBER + m] * groups.astype(np.float32)).astype(np.int64)
    order = plan.orders[(draws[ORDER] * np.float32(len(plan.orders))).astype(np.int64)]
    corner = order[slots, group]
    far = ground[OUTER] + draws[NEAR + group, slots] * (ground[INNER] - ground[OUTER])
    sides = np.stack([2 * (corner & 1) - 1, 2 * (corner >> 1) - 1]).astype(np.float32)
    number = np.array([(group[:i] == group[i]).sum(axis=0) for i in range(m)])  # among the members of the group
    enemies = (ground[MIDDLE] + sides * far) + plan.lattice[:, number]
    allies = np.broadcast_to(ground[MIDDLE] + plan.offset[:, :n, None], (2, n, len(slots)))
    placed: np.ndarray = np.concatenate([allies, enemies], axis=1) + shift
    return placed


def _sort_allies(spec: MapSpec, position: np.ndarray) -> None:
    """Sort the places [2, U, B] of allies of the same type by (x, y)."""
    for name in dict.fromkeys(spec.allies):
        rows = [i for i in range(spec.n_agents) if spec.allies[i] == name]
        x, y = position[0, rows], position[1, rows]
        rank = np.lexsort((y, x), axis=0)
        position[0, rows] = np.take_along_axis(x, rank, axis=0)
        position[1, rows] = np.take_along_axis(y, rank, axis=0)
