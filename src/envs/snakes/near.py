"""The observation "near" of a snake as a kernel over boards.

174 columns, the nearest first; dx to the right and dy up, both / 10; steps = |dx| + |dy|, / 10; lengths / 20:
     0- 3  neighbour cells (up, down, left, right) free of snakes
     4- 7  a mate could move there     8- 11  length of the longest opponent that could move there, else 0
    12- 71  five beans, 12 each: up, down, left, right of the head; dx, dy, steps; for mates and then opponents, by how
            many steps the nearest is farther away, and the sign of that; the smaller of both
    72-116  two mates, then three opponents, 9 each: dx, dy, steps, length, direction one-hot, steps to its nearest bean
   117-125  own length, direction one-hot, dx and dy of the tail; difference of the teams' lengths / 20; step / 200
   126-173  snakes in the 7 × 7 cells around the head, row by row without the head's
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    COL,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    HEIGHT,
    N_ACTIONS,
    N_BEANS,
    N_SNAKES,
    N_TEAM,
    NEXT_CELL,
    ROW,
    WIDTH,
    Array,
    Board,
    down,
    end_of,
    function,
    kernel,
    right,
    seat,
    steps_between,
)
from omagd.envs.snakes.flat import LONG

NEAR_DIM, SCALE, REACH = 174, 10, 3
ZERO, ONE = np.float32(0), np.float32(1)
# First cells of the rows, and columns, from REACH before to REACH after each one, on the torus.
ROWS_AROUND = (np.arange(-REACH, HEIGHT + REACH) % HEIGHT * WIDTH).astype(np.int64)
COLS_AROUND = (np.arange(-REACH, WIDTH + REACH) % WIDTH).astype(np.int64)
TENTHS = (np.arange(-32, 33) / SCALE).astype(np.float32)  # -3.2 to 3.2, looked up with + 32
OFFSET = 32


@function
def tenth(n: int) -> np.float32:
    """Return n / 10."""
    return TENTHS[n + OFFSET]


@function
def sign(n: int) -> np.float32:
    """Return the sign of n."""
    return np.float32((n > 0) - (n < 0))


@function
def sort_by(key: Array, order: Array, first: int, last: int) -> None:
    """Write the numbers from `first` to before `last` into that part of `order`, those with the smallest key first."""
    for i in range(first, last):
        place = i
        while place > first and key[order[place - 1]] > key[i]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i


@function
def look_around(codes: Array, own: int, out: Array) -> None:
    """Write which neighbour cells are free, and where snakes are on the cells around."""
    row, col, n = ROW[own], COL[own], 126
    for r in range(2 * REACH + 1):
        for c in range(2 * REACH + 1):
            if r != REACH or c != REACH:
                out[n] = np.float32(codes[ROWS_AROUND[row + r] + COLS_AROUND[col + c]] >= FIRST_SNAKE)
                n += 1
    for a in range(N_ACTIONS):
        out[a] = np.float32(codes[NEXT_CELL[own, a]] < FIRST_SNAKE)
        out[4 + a], out[8 + a] = ZERO, ZERO


@function
def show_beans(g: Board, b: int, own: int, i: int, steps: Array, order: Array, out: Array) -> None:
    """Write the beans, nearest first, for the snake at place `i`; steps: [6, 5] from all heads, own team first."""
    mine, one, two = steps[i], steps[1 if i == 0 else 0], steps[1 if i == 2 else 2]
    sort_by(mine, order, 0, N_BEANS)
    for rank in range(N_BEANS):
        bean, at = order[rank], 12 + 12 * rank
        cell = end_of(g.beans[b, bean])
        dx, dy = right(own, cell), -down(own, cell)
        mates = min(one[bean], two[bean]) - mine[bean]
        opponents = min(steps[3, bean], steps[4, bean], steps[5, bean]) - mine[bean]
        out[at], out[at + 1] = np.float32(dy > 0), np.float32(dy < 0)
        out[at + 2], out[at + 3] = np.float32(dx < 0), np.float32(dx > 0)
        out[at + 4], out[at + 5], out[at + 6] = tenth(dx), tenth(dy), tenth(mine[bean])
        out[at + 7], out[at + 8] = tenth(mates), sign(mates)
        out[at + 9], out[at + 10] = tenth(opponents), sign(opponents)
        out[at + 11] = tenth(min(mates, opponents))


@function
def face(direction: int, out: Array, at: int) -> None:
    """Write a direction as one-hot."""
    for a in range(N_ACTIONS):
        out[at + a] = ONE if a == direction else ZERO


@function
def may_meet(own: int, other: int, value: np.float32, out: Array, at: int) -> None:
    """Raise to `value` the entries of the actions that lead to a neighbour of another head."""
    for a in range(N_ACTIONS):
        if steps_between(NEXT_CELL[own, a], other) == 1:
            out[at + a] = max(out[at + a], value)


@function
def nearest(steps: Array, place: int) -> int:
    """Return the steps from the head at a place to its nearest bean; steps: [6, 5]."""
    least = steps[place, 0]
    for bean in range(1, N_BEANS):
        least = min(least, steps[place, bean])
    return least


@function
def show_snakes(
    g: Board, b: int, team: int, own: int, i: int, steps: Array, far: Array, order: Array, out: Array
) -> None:
    """Write two mates and three opponents, nearest first, and where they could move; far, order: working memory."""
    for n in range(N_SNAKES - 1):
        snake = seat(team, n + (n >= i))
        far[n] = steps_between(own, g.heads[b, snake])
        if far[n] <= 2:
            length = np.float32(g.lengths[b, snake] / LONG)
            if n < N_TEAM - 1:
                may_meet(own, g.heads[b, snake], ONE, out, 4)
            else:
                may_meet(own, g.heads[b, snake], length, out, 8)
    sort_by(far, order, 0, N_TEAM - 1)
    sort_by(far, order, N_TEAM - 1, N_SNAKES - 1)
    for rank in range(N_SNAKES - 1):
        place, at = order[rank] + (order[rank] >= i), 72 + 9 * rank
        snake = seat(team, place)
        head = g.heads[b, snake]
        out[at], out[at + 1], out[at + 2] = tenth(right(own, head)), tenth(-down(own, head)), tenth(far[order[rank]])
        out[at + 3] = np.float32(g.lengths[b, snake] / LONG)
        face(g.directions[b, snake], out, at + 4)
        out[at + 8] = tenth(nearest(steps, place))


@kernel
def near(g: Board, team: Array, steps: Array, far: Array, order: Array, out: Array) -> None:
    """Write "near" of `team` [B] into `out` [B, 3, 174]; steps [6, 5], far [5], order [5]: working memory."""
    for b in range(len(team)):
        lead = 0
        for place in range(N_SNAKES):
            snake = seat(team[b], place)
            lead += g.lengths[b, snake] if place < N_TEAM else -g.lengths[b, snake]
            for bean in range(N_BEANS):
                steps[place, bean] = steps_between(g.heads[b, snake], end_of(g.beans[b, bean]))
        for i in range(N_TEAM):
            snake, seen = seat(team[b], i), out[b, i]
            own, tail = g.heads[b, snake], g.tails[b, snake]
            look_around(g.codes[b], own, seen)
            show_beans(g, b, own, i, steps, order, seen)
            show_snakes(g, b, team[b], own, i, steps, far, order, seen)
            seen[117] = np.float32(g.lengths[b, snake] / LONG)
            face(g.directions[b, snake], seen, 118)
            seen[122], seen[123] = tenth(right(own, tail)), tenth(-down(own, tail))
            seen[124], seen[125] = np.float32(lead / LONG), np.float32(g.steps[b] / EPISODE_LIMIT)
