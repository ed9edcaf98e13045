"""What is near first ("near"): a flat observation from one's own head, for agents without memory.

     0-  3  whether the cell up, down, left, right of the own head is free of snakes
     4-  7  whether a mate's head can step there too
     8- 11  length / 20 of the longest opponent whose head can step there too, 0 where none can
    12- 71  five beans, nearest first: is it up, down, left, right; dx (right), dy (up), steps; by how many steps the
            nearest mate, the nearest opponent is farther from it; by how many steps the nearest of all others is
    72- 89  the two mates, nearest first: dx, dy, steps, length / 20, direction one-hot (4), steps to their own bean
    90-116  the three opponents, nearest first, likewise
   117-125  oneself: length / 20, direction one-hot (4), dx and dy of the tail, lead of the team / 20, steps / 200
   126-173  which of the other cells of the 7 x 7 around the own head hold a snake, row by row

Differences and steps go the shorter way around the torus and are divided by 10. "Their own bean" is the nearest one.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    COL,
    DOWN,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    HEIGHT,
    N_CELLS,
    N_TEAM,
    NEXT_CELL,
    RIGHT,
    ROW,
    TORUS_STEPS,
    WIDTH,
    Board,
    between,
)
from omagd.envs.snakes.features import LONG, OTHERS

NEAR_DIM = 174
_SCALE = np.float32(10)
_REACH = 3


def _windows() -> np.ndarray:
    """Return [200, 48] the cells around each, row by row, without itself."""
    around = [(r, c) for r in range(-_REACH, _REACH + 1) for c in range(-_REACH, _REACH + 1) if (r, c) != (0, 0)]
    rows, cols = np.array(around).T
    return (ROW[:, None] + rows) % HEIGHT * WIDTH + (COL[:, None] + cols) % WIDTH


_WINDOW = _windows()
# Of the pair (cell, cell): is the second up, down, left, right of the first; dx, dy, steps as they are seen.
_WAY = np.stack([DOWN < 0, DOWN > 0, RIGHT < 0, RIGHT > 0, RIGHT / 10, -DOWN / 10, TORUS_STEPS / 10], -1)
_WAY = _WAY.reshape(N_CELLS * N_CELLS, 7).astype(np.float32)
_FACING = np.eye(4, dtype=np.float32)


def near_features(board: Board, team: np.ndarray) -> np.ndarray:
    """Return what the snakes of `team` [B] see, [B, 3, 174] float32."""
    b = len(board)
    heads, lengths = board.own_first(board.heads, team), board.own_first(board.lengths, team)
    directions, tails = board.own_first(board.directions, team), board.own_first(board.tails, team)
    own = heads[:, :N_TEAM]
    out = np.empty((b, N_TEAM, NEAR_DIM), np.float32)
    cells = NEXT_CELL[own]
    out[..., 0:4] = board.codes_at(cells) < FIRST_SNAKE
    others = heads[:, OTHERS]  # [B, 3, 5], mates first
    can_step = between(TORUS_STEPS, cells[..., None], others[:, :, None]) == 1  # [B, 3, 4, 5]
    out[..., 4:8] = can_step[..., : N_TEAM - 1].any(-1)
    theirs = (lengths[:, None, N_TEAM:] / LONG).astype(np.float32)
    out[..., 8:12] = (can_step[..., N_TEAM - 1 :] * theirs[:, :, None]).max(-1)
    to_beans = between(TORUS_STEPS, heads[:, :, None], board.beans[:, None])  # [B, 6, 5]
    out[..., 12:72] = _beans(board.beans, own, to_beans).reshape(b, N_TEAM, -1)
    hungry = to_beans.min(2)
    snakes = np.empty((b, N_TEAM, 5, 9), np.float32)
    snakes[..., 0:3] = _WAY[own[:, :, None] * N_CELLS + others][..., 4:]
    snakes[..., 3] = lengths[:, OTHERS] / LONG
    snakes[..., 4:8] = _FACING[directions[:, OTHERS]]
    snakes[..., 8] = hungry[:, OTHERS] / _SCALE
    for start, part in ((72, snakes[:, :, : N_TEAM - 1]), (90, snakes[:, :, N_TEAM - 1 :])):
        order = part[..., 2].argsort(2, kind="stable")
        sorted_ = np.take_along_axis(part, order[..., None], 2).reshape(b, N_TEAM, -1)
        out[..., start : start + sorted_.shape[2]] = sorted_
    out[..., 117] = lengths[:, :N_TEAM] / LONG
    out[..., 118:122] = _FACING[directions[:, :N_TEAM]]
    out[..., 122:124] = _WAY[own * N_CELLS + tails[:, :N_TEAM]][..., 4:6]
    out[..., 124] = ((lengths[:, :N_TEAM].sum(1) - lengths[:, N_TEAM:].sum(1)) / LONG)[:, None]
    out[..., 125] = (board.steps / EPISODE_LIMIT)[:, None]
    out[..., 126:] = board.codes_at(_WINDOW[own]) >= FIRST_SNAKE
    return out


def _beans(beans: np.ndarray, own: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return [B, 3, 5, 12] what is seen of the beans [B, 5] from own heads [B, 3]; steps: [B, 6, 5], own team first."""
    mine = steps[:, :N_TEAM]
    order = mine.argsort(2, kind="stable")
    seen = np.empty((*own.shape, beans.shape[1], 12), np.float32)
    ends = np.take_along_axis(np.broadcast_to(beans[:, None], mine.shape), order, 2)
    seen[..., :7] = _WAY[own[:, :, None] * N_CELLS + ends]
    mates = steps[:, OTHERS[:, : N_TEAM - 1]].min(2)
    opponents = np.broadcast_to(steps[:, None, N_TEAM:], (*mine.shape[:2], N_TEAM, mine.shape[2])).min(2)
    for place, gap in ((7, mates - mine), (9, opponents - mine)):
        gap = np.take_along_axis(gap, order, 2)
        seen[..., place] = gap / _SCALE
        seen[..., place + 1] = np.sign(gap)
    seen[..., 11] = np.minimum(seen[..., 7], seen[..., 9])
    return seen
