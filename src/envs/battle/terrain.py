"""The ground of the built-in simulator's maps: an open field with a border, and a wall on some."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Terrain
from omagd.envs.battle.maps import MapSpec, Wall

SIZE, BORDER = 32, 1  # cells; units cannot enter the border
FLAT_HEIGHT, HIGH_GROUND = 0.4, 0.9
LANE_MARGIN = 0.4  # distance kept from the sides of an opening


def build_terrain(spec: MapSpec) -> Terrain:
    """Return the terrain of a map: an open field with a border, divided by the map's wall if it has one."""
    low, high = BORDER, SIZE - BORDER
    pathing = np.zeros((SIZE, SIZE), dtype=bool)
    pathing[low:high, low:high] = True
    height = np.full((SIZE, SIZE), FLAT_HEIGHT, dtype=np.float32)
    if spec.wall is not None:
        if spec.wall.cliff:
            _raise_plateau(height, spec.wall)
        else:
            pathing &= ~_wall_cells(spec.wall)
    return Terrain(SIZE, SIZE, (low, low, high, high), pathing, height)


def ground_grid(spec: MapSpec, terrain: Terrain) -> np.ndarray:
    """Return [map_x, map_y] bool: where units that cannot walk cliffs may stand."""
    if spec.wall is None:
        return terrain.pathing
    return terrain.pathing & ~_wall_cells(spec.wall)


def _wall_cells(wall: Wall) -> np.ndarray:
    cell = np.arange(SIZE)
    across = (cell >= wall.x0) & (cell < wall.x1)
    closed = (cell < wall.gap_y0) | (cell >= wall.gap_y1)
    return across[:, None] & closed[None, :]


def _raise_plateau(height: np.ndarray, wall: Wall) -> None:
    """Raise everything left of a cliff, with a ramp in the opening."""
    height[: int(wall.x1)] = HIGH_GROUND
    ramp = np.linspace(HIGH_GROUND, FLAT_HEIGHT, int(wall.x1 - wall.x0) + 2, dtype=np.float32)[1:-1]
    height[int(wall.x0) : int(wall.x1), int(wall.gap_y0) : int(wall.gap_y1)] = ramp[:, None]


def lanes(wall: Wall) -> tuple[float, float, float, float, float]:
    """Return the middle of a wall, the lowest and highest y of the way through it, and its left and right face."""
    low, high = wall.gap_y0 + LANE_MARGIN, wall.gap_y1 - LANE_MARGIN
    return 0.5 * (wall.x0 + wall.x1), low, high, wall.x0 - LANE_MARGIN, wall.x1 + LANE_MARGIN
