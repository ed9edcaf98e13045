"""What one snake sees as eleven planes of 10 x 20 cells, for networks that convolve.

    0  beans                    5- 7  mates: head, body, tail
    1  own head                 8-10  opponents: head, body, tail
    2  own body    3 own tail   4  share of the game that is left, everywhere

A body is every cell of a snake, head and tail included. Values are 0 or 1, but for plane 4.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    COL,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    HEIGHT,
    N_CELLS,
    N_SNAKES,
    N_TEAM,
    ROW,
    WIDTH,
    Board,
)
from omagd.envs.snakes.features import AS_SEEN

N_PLANES = 11
PLANES_DIM = N_PLANES * N_CELLS
_MIDDLE = (5, 10)


def _windows() -> np.ndarray:
    """Return [200, 200] the cells in the order in which they stand when the first index's cell is in the middle."""
    rows = (ROW[None, :] + ROW[:, None] - _MIDDLE[0]) % HEIGHT
    return rows * WIDTH + (COL[None, :] + COL[:, None] - _MIDDLE[1]) % WIDTH


_WINDOWS = _windows()


def plane_features(centred: bool, board: Board, team: np.ndarray) -> np.ndarray:
    """Return the planes of the snakes of `team` [B], [B, 3, 2200] float32, plane after plane."""
    b = len(board)
    codes = AS_SEEN[team[:, None], board.codes]
    heads, tails = _marks(board.heads, codes, board.lengths), _marks(board.tails, codes, board.lengths)
    planes = np.zeros((b, N_TEAM, N_PLANES, N_CELLS), np.float32)
    own = board.of_team(board.heads, team)
    for i in range(N_TEAM):
        where = _WINDOWS[own[:, i]] if centred else np.broadcast_to(np.arange(N_CELLS), (b, N_CELLS))
        seen = [np.take_along_axis(each, where, 1) for each in (heads, codes, tails)]
        planes[:, i, 0] = seen[1] == 1
        for first, values in zip((1, 2, 3), seen, strict=True):
            is_own = values == FIRST_SNAKE + i
            planes[:, i, first] = is_own
            planes[:, i, first + 4] = (values >= FIRST_SNAKE) & (values < FIRST_SNAKE + N_TEAM) & ~is_own
            planes[:, i, first + 7] = values >= FIRST_SNAKE + N_TEAM
    planes[:, :, 4] = (1 - board.steps / EPISODE_LIMIT)[:, None, None]
    return planes.reshape(b, N_TEAM, PLANES_DIM)


def _marks(cells: np.ndarray, codes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [B, 200] the `codes` at the `cells` [B, 6] of living snakes, 0 elsewhere."""
    marks = np.zeros_like(codes)
    boards, snakes = np.nonzero(lengths[:, :N_SNAKES] > 0)
    at = cells[boards, snakes]
    marks[boards, at] = codes[boards, at]
    return marks
