"""The playing field out of the game's images, as SMAC reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.envs.battle.backend import Terrain


def read_terrain(facts: Any) -> Terrain:
    """Return the field that a ResponseGameInfo describes. Errors: ValueError for an image of another size."""
    raw = facts.start_raw
    size = (raw.map_size.x, raw.map_size.y)
    low, high = raw.playable_area.p0, raw.playable_area.p1
    return Terrain(
        map_x=size[0],
        map_y=size[1],
        playable=(low.x, low.y, high.x, high.y),
        pathing=_pathing(raw.pathing_grid, size),
        height=(_upright(raw.terrain_height.data, size) / 255).astype(np.float32),
    )


def _pathing(image: Any, size: tuple[int, int]) -> np.ndarray:
    """Return [x, y] bool. One bit a cell since 4.8 or so: 1 can be walked; before it was a byte a cell: 0 can."""
    if image.bits_per_pixel == 1:
        bits = np.unpackbits(np.frombuffer(image.data, np.uint8))
        return np.ascontiguousarray(bits.reshape(size).T.astype(bool))
    return _upright(image.data, size) == 0


def _upright(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """Return [x, y] uint8 of an image whose first row is the highest y."""
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(size).T[:, ::-1])
