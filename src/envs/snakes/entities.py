"""What one snake sees as entities, for graph agents: moves, opponents and beans, mates, oneself.

    move (4)           whether the cell up, down, left, right of the own head is free of snakes
    enemies (8 x 12)   three opponents in index order, then five beans, each at its own number while it lies there:
                       visible, distance, dx (right), dy (up), length / 20, direction one-hot (4), dx and dy of the
                       tail, whether it is a bean (whose length, direction and tail are zero)
    allies (2 x 11)    the other two in index order: as above without the last
    own (16)           length / 20, direction one-hot (4), dx and dy of the tail, steps / 200, and which of the eight
                       cells two steps away hold a snake (numbered row by row)

Differences and distances go the shorter way around the torus, are measured from the own head, and are divided by the
sight (by 10 without a limit). An entity whose head is farther away than the sight is a block of zeros.
"""

from __future__ import annotations

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.envs.snakes.board import (
    DOWN,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    N_BEANS,
    N_TEAM,
    NEXT_CELL,
    RIGHT,
    TORUS_DISTANCE,
    TORUS_STEPS,
    Board,
    between,
)
from omagd.envs.snakes.features import LONG, OTHERS

UNIT_DIM, OWN_DIM, MOVE_DIM = 12, 16, 4
_EVERYTHING = 10.0
_TWO_AWAY = np.stack([np.flatnonzero(row == 2) for row in TORUS_STEPS])


def entity_layout(sight: float | None) -> EntityLayout:
    """Return how the observation is laid out. Opponents and beans are "enemies": whatever is not of one's own team."""
    return EntityLayout(
        MOVE_DIM, N_TEAM + N_BEANS, UNIT_DIM, N_TEAM - 1, UNIT_DIM - 1, OWN_DIM, sight=sight or _EVERYTHING
    )


def entity_features(
    sight: float | None, board: Board, team: np.ndarray, full: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return what the snakes of `team` [B] see, [B, 3, obs_dim] float32, and with `full` the same without the limit."""
    b, scale = len(board), sight or _EVERYTHING
    heads = board.own_first(board.heads, team)
    own = heads[:, :N_TEAM]
    lengths, tails = board.own_first(board.lengths, team) / LONG, board.own_first(board.tails, team)
    facing = np.eye(4, dtype=np.float32)[board.own_first(board.directions, team)]
    snakes = np.zeros((b, N_TEAM, 5, UNIT_DIM), np.float32)
    distance = _relative(snakes, own, heads[:, OTHERS], scale)
    snakes[..., 4] = lengths[:, OTHERS]
    snakes[..., 5:9] = facing[:, OTHERS]
    snakes[..., 9:11] = _way(own, tails[:, OTHERS], scale)
    beans = np.zeros((b, N_TEAM, N_BEANS, UNIT_DIM), np.float32)
    to_beans = _relative(beans, own, np.broadcast_to(board.beans_by_slot()[:, None], (b, N_TEAM, N_BEANS)), scale)
    beans[..., 11] = 1
    free = board.codes_at(NEXT_CELL[own]) < FIRST_SNAKE
    mine = np.empty((b, N_TEAM, OWN_DIM), np.float32)
    mine[..., 0], mine[..., 1:5] = lengths[:, :N_TEAM], facing[:, :N_TEAM]
    mine[..., 5:7] = _way(own, tails[:, :N_TEAM, None], scale)[:, :, 0]
    mine[..., 7] = board.steps[:, None] / EPISODE_LIMIT
    mine[..., 8:] = board.codes_at(_TWO_AWAY[own]) >= FIRST_SNAKE
    everything = _join(free, snakes, beans, mine)
    if sight is None:
        return everything, everything.copy() if full else None
    snakes[distance > sight] = 0
    beans[to_beans > sight] = 0
    return _join(free, snakes, beans, mine), everything if full else None


def _relative(out: np.ndarray, own: np.ndarray, cells: np.ndarray, scale: float) -> np.ndarray:
    """Write visible, distance, dx, dy of `cells` [B, 3, m] into `out` [B, 3, m, D]; return the distances in cells."""
    distance = between(TORUS_DISTANCE, own[:, :, None], cells)
    out[..., 0] = 1
    out[..., 1] = distance / scale
    out[..., 2:4] = _way(own, cells, scale)
    return distance


def _way(own: np.ndarray, cells: np.ndarray, scale: float) -> np.ndarray:
    """Return (right, up) / scale from the own heads [B, 3] to `cells` [B, 3, m], [B, 3, m, 2] float32."""
    start = own[:, :, None]
    right, down = between(RIGHT, start, cells), between(DOWN, start, cells)
    return np.stack([right / np.float32(scale), -down / np.float32(scale)], -1)


def _join(free: np.ndarray, snakes: np.ndarray, beans: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return the parts in the layout's order; `snakes` [B, 3, 5, D] has the two mates first."""
    lead = free.shape[:2]
    mates, opponents = snakes[:, :, : N_TEAM - 1, :-1], snakes[:, :, N_TEAM - 1 :]
    parts = [free, *(part.reshape(*lead, -1) for part in (opponents, beans, mates)), mine]
    return np.concatenate(parts, 2, dtype=np.float32)
