"""The board as players see it, the compiler of the kernels, and their geometry between two cells of the torus.

Cells are numbered row by row, 0 to 199; row 0 is on top. Actions and directions: 0 up, 1 down, 2 left, 3 right; the
reverse of a is a ^ 1. Codes of cells: 0 empty, 1 bean, 2 to 7 snake 0 to 5. Snakes 0, 1, 2 are team 0.
Shapes: B boards, k of them; 6 snakes, 3 of each team; 5 beans.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from omagd.utils.compiling import Compiler, as_kernels_take

compiler = Compiler(Path(__file__).resolve().parent, "snakes", "5 to 10 s")
function, kernel = compiler.function, compiler.kernel
Array = np.ndarray

HEIGHT, WIDTH = 10, 20
N_CELLS = HEIGHT * WIDTH
N_SNAKES, N_TEAM, N_BEANS = 6, 3, 5
N_ACTIONS = 4
START_LENGTH = 3
EPISODE_LIMIT = 200
EMPTY, BEAN, FIRST_SNAKE = np.uint8(0), np.uint8(1), np.uint8(2)

ROW, COL = np.divmod(np.arange(N_CELLS), WIDTH)
STEPS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])


def shifted(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return the cell that is `rows` [m] down and `cols` [m] right of each cell on the torus, [200, m]."""
    return (ROW[:, None] + rows) % HEIGHT * WIDTH + (COL[:, None] + cols) % WIDTH


NEXT_CELL = shifted(*STEPS.T)  # [200, 4]: the cell that each action leads to
# Distance by the rows and columns between two cells on the torus, at most 5 and 10.
DISTANCE = np.hypot(np.arange(HEIGHT // 2 + 1, dtype=np.float32)[:, None], np.arange(WIDTH // 2 + 1, dtype=np.float32))


class Board(NamedTuple):
    """The public state of B boards, as kernels take it; its arrays belong to the engine, until its next call.

    Attributes:
        codes: [B, 200] uint8. heads, tails: [B, 6] cells. lengths: [B, 6]. directions: [B, 6], of the last moves.
        beans: [B, 5] cells, oldest first; -1 where a full board has no room. bean_slots: [B, 5], a number 0 to 4 that
            each of these beans keeps until it is eaten. All these int64.
        keys: [B] uint64, for random numbers. steps: [B] int64, played so far.
    """

    codes: Array
    heads: Array
    tails: Array
    lengths: Array
    directions: Array
    beans: Array
    bean_slots: Array
    keys: Array
    steps: Array

    def __len__(self) -> int:
        """Return B, not the number of fields."""
        return len(self.codes)

    def sides(self, team: np.ndarray) -> np.ndarray:
        """Return `team` [B] (0 or 1) for kernels. Errors: ValueError for another number of teams."""
        return as_kernels_take("teams", team, np.int64, (len(self),))

    def rows(self, which: np.ndarray) -> Board:
        """Return the boards with the numbers `which` [k]."""
        return Board(*(values[which] for values in self))


@function
def seat(team: int, place: int) -> int:
    """Return the snake at a place, 0 to 5, of the order "own team first"."""
    snake = 3 * team + place
    return snake if snake < N_SNAKES else snake - N_SNAKES


# A bean that found no room is -1: it is read as the last cell, seen from the cell before.


@function
def end_of(end: int) -> int:
    """Return the second of two cells, which may be a bean without a place."""
    return end if end >= 0 else N_CELLS - 1


@function
def start_of(start: int, end: int) -> int:
    """Return the first of two cells."""
    if end >= 0:
        return start
    return start - 1 if start > 0 else N_CELLS - 1


@function
def down(start: int, end: int) -> int:
    """Return the rows from one cell to another on the torus, -5 to 5."""
    gap = ROW[end_of(end)] - ROW[start_of(start, end)]
    if gap > HEIGHT // 2:
        return gap - HEIGHT
    return gap + HEIGHT if gap < -(HEIGHT // 2) else gap


@function
def right(start: int, end: int) -> int:
    """Return the columns from one cell to another on the torus, -10 to 10."""
    gap = COL[end_of(end)] - COL[start_of(start, end)]
    if gap > WIDTH // 2:
        return gap - WIDTH
    return gap + WIDTH if gap < -(WIDTH // 2) else gap


@function
def steps_between(start: int, end: int) -> int:
    """Return the steps from one cell to another on the torus."""
    return abs(down(start, end)) + abs(right(start, end))


@function
def distance(start: int, end: int) -> np.float32:
    """Return the distance of two cells on the torus."""
    return DISTANCE[abs(down(start, end)), abs(right(start, end))]


@function
def plain_square(start: int, end: int) -> int:
    """Return the squared distance of two cells on the plain board."""
    rows = ROW[end_of(end)] - ROW[start_of(start, end)]
    cols = COL[end_of(end)] - COL[start_of(start, end)]
    return rows * rows + cols * cols
