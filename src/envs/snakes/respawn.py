"""Where a dead snake returns, on many boards at once.

As in the public engine: cells are scanned row by row, and from the first empty one whose empty surroundings hold three
cells a breadth-first search (right, down, up, left) takes three. They form the snake in the order found, but a corner
gets its bend in the middle. A cell between two found ones in a straight line stays the head, with a body on both sides.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import COL, EMPTY, NEXT_CELL, ROW

_SEARCH = NEXT_CELL[:, [3, 1, 0, 2]]


def respawn(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where one snake returns on each of k boards with `codes` [k, 200].

    Returns cells [k, 3] head first, directions [k], found [k] bool; where nothing was found the others say nothing.
    """
    free = codes == EMPTY
    cells, found = np.zeros((len(codes), 3), np.int64), np.zeros(len(codes), bool)
    scan, left = free.copy(), np.arange(len(codes))
    while len(left):
        start = scan[left].argmax(1)
        scan[left, start] = False
        cells[left], found[left] = _search(free[left], start)
        left = left[~found[left]]
        left = left[scan[left].any(1)]
    return cells, _facing(cells), found


def _search(free: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return three cells around `start` [k], head first, [k, 3], and whether there are three, [k]."""
    rows = np.arange(len(start))
    around = _SEARCH[start]
    empty = free[rows[:, None], around] & free[rows, start][:, None]
    first = around[rows, empty.argmax(1)]
    empty[rows, empty.argmax(1)] = False
    beside = empty.any(1)
    second = around[rows, empty.argmax(1)]
    beyond = _SEARCH[first]
    open_beyond = free[rows[:, None], beyond] & (beyond != start[:, None])
    third = np.where(beside, second, beyond[rows, open_beyond.argmax(1)])
    has_first = free[rows, start] & free[rows, first]
    corner = beside & ((ROW[first] == ROW[start]) != (ROW[third] == ROW[start]))
    head, neck = np.where(corner, first, start), np.where(corner, start, first)
    return np.stack([head, neck, third], 1), has_first & (beside | open_beyond.any(1))


def _facing(cells: np.ndarray) -> np.ndarray:
    """Return the directions [k] of snakes of `cells` [k, 3], by numbers alone: an edge in between turns them around."""
    head, neck = cells[:, 0], cells[:, 1]
    vertical = np.where(ROW[head] > ROW[neck], 1, 0)
    return np.where(ROW[head] == ROW[neck], np.where(COL[head] > COL[neck], 3, 2), vertical)
