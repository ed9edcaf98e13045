"""Arrays of all boards as kernels take them, small tables, and the torus's geometry between two cells."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.snakes import board
from omagd.envs.snakes.board import Board
from omagd.envs.snakes.compiled.compiling import function

Array = np.ndarray
HEIGHT, WIDTH, N_CELLS, N_TEAM = board.HEIGHT, board.WIDTH, board.N_CELLS, board.N_TEAM
N_SNAKES, N_BEANS, N_ACTIONS = board.N_SNAKES, board.N_BEANS, board.N_ACTIONS
FIRST_SNAKE, EMPTY, BEAN = np.uint8(board.FIRST_SNAKE), np.uint8(board.EMPTY), np.uint8(board.BEAN)
ROW, COL, NEXT_CELL = board.ROW, board.COL, board.NEXT_CELL
# Distance by rows and columns between two cells, at most 5 and 10, as the reference's table has it.
DISTANCE = np.ascontiguousarray(board.TORUS_DISTANCE[0].reshape(HEIGHT, WIDTH)[: HEIGHT // 2 + 1, : WIDTH // 2 + 1])


class Boards(NamedTuple):
    """The arrays of a `Board`, in its order. B boards.

    Attributes:
        codes: [B, 200] uint8. heads, tails, lengths, directions: [B, 6] int64. beans, bean_slots: [B, 5] int64.
        keys: [B] uint64. steps: [B] int64.
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


def arrays_of(these: Board) -> Boards:
    """Return the arrays of a board."""
    return Boards(
        these.codes, these.heads, these.tails, these.lengths, these.directions,
        these.beans, these.bean_slots, these.keys, these.steps,
    )  # fmt: skip


@function
def seat(team: int, place: int) -> int:
    """Return the snake at a place, 0 to 5, of the order "own team first"."""
    snake = 3 * team + place
    return snake if snake < N_SNAKES else snake - N_SNAKES


# A bean that found no room is -1. NumPy reads it as the last cell; in a table of two cells, of the row before.


@function
def end_of(end: int) -> int:
    """Return the second of two cells as the reference's table of pairs reads it."""
    return end if end >= 0 else N_CELLS - 1


@function
def start_of(start: int, end: int) -> int:
    """Return the first of two cells as the reference's table of pairs reads it."""
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
