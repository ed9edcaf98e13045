"""The simulator's ground: terrain of a map, starting formations, and the way round a wall.

Inside the simulator arrays are [U, B] (units first), so that a step over units is a step over whole rows of slots.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Terrain
from omagd.envs.battle.maps import MapSpec, Wall
from omagd.envs.battle.units import UNIT_ID, UNITS

FLAT_HEIGHT, HIGH_GROUND = 0.4, 0.9
WIDTH, ENEMY_WIDTH = 1.6, 0.6  # formations: units per line over number of lines; enemies with guns come in columns
MOST_LINES = 6
HALF = np.float32(0.5)
JITTER = 0.6  # start positions differ from the formation by at most this much along each axis
LANE_MARGIN = 0.4  # distance kept from the sides of an opening


def build_terrain(spec: MapSpec) -> Terrain:
    """Return the terrain of a map: an open field with a border, divided by the map's wall if it has one."""
    size, low = spec.size, int(spec.border)
    pathing = np.zeros((size, size), dtype=bool)
    pathing[low : size - low, low : size - low] = True
    height = np.full((size, size), FLAT_HEIGHT, dtype=np.float32)
    if spec.wall is not None:
        if spec.wall.cliff:
            _raise_plateau(height, spec.wall)
        else:
            pathing &= ~_wall_cells(spec.wall, size)
    return Terrain(size, size, (low, low, size - low, size - low), pathing, height)


def ground_grid(spec: MapSpec, terrain: Terrain) -> np.ndarray:
    """Return [map_x, map_y] bool: where units that cannot walk cliffs may stand."""
    if spec.wall is None:
        return terrain.pathing
    return terrain.pathing & ~_wall_cells(spec.wall, spec.size)


def _wall_cells(wall: Wall, size: int) -> np.ndarray:
    cell = np.arange(size)
    across = (cell >= wall.x0) & (cell < wall.x1)
    closed = (cell < wall.gap_y0) | (cell >= wall.gap_y1)
    return across[:, None] & closed[None, :]


def _raise_plateau(height: np.ndarray, wall: Wall) -> None:
    """Make everything left of a cliff high ground, with a ramp in the opening."""
    height[: int(wall.x1)] = HIGH_GROUND
    ramp = np.linspace(HIGH_GROUND, FLAT_HEIGHT, int(wall.x1 - wall.x0) + 2, dtype=np.float32)[1:-1]
    height[int(wall.x0) : int(wall.x1), int(wall.gap_y0) : int(wall.gap_y1)] = ramp[:, None]


def formation(
    names: tuple[str, ...], centres: tuple[tuple[float, float], ...], spacing: float, facing: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return [2, units] block centres and offsets from them: lines across the way, short ranges in front.

    Args:
        centres: one block each; units are dealt out to the blocks in turn.
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
    """Return [count, B] float32 in [0, 1), column b a function of `seeds[b]` alone (SplitMix64, Steele et al. 2014)."""
    step = np.uint64(0x9E3779B97F4A7C15)
    z = _mix(seeds.astype(np.uint64) + step)[None, :] + step * np.arange(1, count + 1, dtype=np.uint64)[:, None]
    return (_mix(z) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def start_positions(spec: MapSpec, seeds: np.ndarray) -> np.ndarray:
    """Return [2, U, B] start positions: the formations, jittered by the seeds, allies sorted by (type, x, y)."""
    n, total = spec.n_agents, spec.n_agents + spec.n_enemies
    allies = sum(formation(spec.allies, spec.ally_start, spec.spacing, 1))
    enemies = sum(formation(spec.enemies, spec.enemy_start, spec.enemy_spacing or spec.spacing, -1))
    noise = seeded_uniform(seeds, 2 * total).reshape(2, total, -1)
    position = np.concatenate([allies, enemies], axis=1)[:, :, None] + np.float32(2 * JITTER) * (noise - HALF)
    for name in dict.fromkeys(spec.allies):
        rows = [i for i in range(n) if spec.allies[i] == name]
        x, y = position[0, rows], position[1, rows]
        rank = np.lexsort((y, x), axis=0)
        position[0, rows] = np.take_along_axis(x, rank, axis=0)
        position[1, rows] = np.take_along_axis(y, rank, axis=0)
    return position


def advance_goals(spec: MapSpec) -> np.ndarray:
    """Return [2, U] whither the enemy advances: its formation, moved to the allies' start (allies: unused)."""
    goal = np.array(spec.ally_start[0], dtype=np.float32)[:, None]
    _, offset = formation(spec.enemies, spec.enemy_start, spec.enemy_spacing or spec.spacing, -1)
    return np.concatenate([np.broadcast_to(goal, (2, spec.n_agents)), goal + offset], axis=1)


def detour(wall: Wall, x: np.ndarray, y: np.ndarray, gx: np.ndarray, gy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the next point [U, B] on the way to (gx, gy): the wall's opening if the wall lies between."""
    middle = np.float32(0.5 * (wall.x0 + wall.x1))
    low, high = np.float32(wall.gap_y0 + LANE_MARGIN), np.float32(wall.gap_y1 - LANE_MARGIN)
    left_face, right_face = np.float32(wall.x0 - LANE_MARGIN), np.float32(wall.x1 + LANE_MARGIN)
    from_left = x < middle
    crossing = from_left != (gx < middle)
    lane = np.clip(y, low, high)
    in_lane = lane == y
    near_face, far_face = np.where(from_left, left_face, right_face), np.where(from_left, right_face, left_face)
    inside = (x > left_face) & (x < right_face)
    leaving = inside & in_lane & ((gy < low) | (gy > high)) & ~crossing
    way_x = np.where(in_lane, far_face, near_face)
    out_x = np.where(crossing, way_x, np.where(leaving, near_face, gx))
    return out_x, np.where(crossing, lane, np.where(leaving, y, gy))
