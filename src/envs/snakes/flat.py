"""Flat observations of a snake ("26", "30", "35"), and the state for mixers, as kernels over boards.

Positions are absolute: row, column. Differences (dx to the right, dy down) and distances are those of the torus.
Codes: 0 empty, 1 bean, 2 to 4 own team, 5 to 7 the other team (for side b the teams' codes are exchanged, so that both
sides see the game alike). Beans are listed oldest first.

"26", as the public baseline:
     0- 1  own head               6-15  five beans
     2- 5  codes up, down, left,  16-25  the five other heads, in order of their codes
           right of it
"30":
     0- 5  as "26"                14-23  five beans
     6-11  two nearest beans,     24-25  zero
           (dx, dy, distance)     26-29  heads of the two nearest opponents
    12-13  threats of the two nearest opponents: length / 3 / (distance + 1)
"35":
     0-15  as "26"                   22  own length / 20
    16-21  two nearest beans,     23-32  the five other heads, in order of their codes
           (dx, dy, distance)     33-34  threats of the two nearest opponents

Normalised: rows / 10, columns / 20, codes / 7, dx / 10, dy / 5, distances / 11.18 (the longest); others unchanged.

State, 66: for each snake, own team first, row, column, direction one-hot (4), length / 20, tail row, tail column; rows
and columns of the beans, ordered by slot; difference of the teams' lengths / 20; steps / 200. Rows and columns are
normalised.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    COL,
    EPISODE_LIMIT,
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
    distance,
    down,
    function,
    kernel,
    right,
    seat,
)

LONG = 20.0  # lengths are divided by this
STATE_DIM = N_SNAKES * 9 + 12
# Code of a cell as team 0 and team 1 see it.
AS_SEEN = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 5, 6, 7, 2, 3, 4]], np.uint8)
_PLACE, _WAY = (HEIGHT, WIDTH), (WIDTH / 2, HEIGHT / 2, float(np.hypot(WIDTH / 2, HEIGHT / 2)))
_HEAD = (*_PLACE, 7, 7, 7, 7)
SCALES: dict[str, np.ndarray] = {
    "26": np.array([*_HEAD, *_PLACE * 5, *_PLACE * 5], np.float32),
    "30": np.array([*_HEAD, *_WAY * 2, 1, 1, *_PLACE * 5, 1, 1, *_PLACE * 2], np.float32),
    "35": np.array([*_HEAD, *_PLACE * 5, *_WAY * 2, 1, *_PLACE * 5, 1, 1], np.float32),
}
TALL, WIDE, ONE = np.float32(HEIGHT), np.float32(WIDTH), np.float32(1)


@function
def place(cell: int, out: Array, at: int) -> None:
    """Write row and column of a cell."""
    out[at], out[at + 1] = np.float32(ROW[cell]), np.float32(COL[cell])


@function
def two_nearest(own: int, cells: Array, first: int, last: int) -> tuple[int, int]:
    """Return the numbers of the two cells, from `first` to before `last`, that are nearest to the own head."""
    one, two = first, first + 1
    if distance(own, cells[two]) < distance(own, cells[one]):
        one, two = two, one
    for n in range(first + 2, last):
        if distance(own, cells[n]) < distance(own, cells[one]):
            one, two = n, one
        elif distance(own, cells[n]) < distance(own, cells[two]):
            two = n
    return one, two


@function
def way(own: int, cell: int, out: Array, at: int) -> None:
    """Write dx, dy and distance to a cell."""
    out[at], out[at + 1] = np.float32(right(own, cell)), np.float32(down(own, cell))
    out[at + 2] = distance(own, cell)


@function
def threat(g: Board, b: int, own: int, snake: int) -> np.float32:
    """Return the threat of a snake: length / 3 / (distance + 1)."""
    return np.float32(g.lengths[b, snake] / 3 / np.float64(distance(own, g.heads[b, snake]) + ONE))


@function
def show_near(g: Board, b: int, own: int, first: int, ways: int, threats: int, heads: int, out: Array) -> None:
    """Write the ways to the two nearest beans, and threats and, unless at 0, heads of the two nearest opponents.

    first: number of the first opponent. ways, threats, heads: where these are written.
    """
    near = two_nearest(own, g.beans[b], 0, N_BEANS)
    snakes = two_nearest(own, g.heads[b], first, first + N_TEAM)
    for n in range(2):
        way(own, g.beans[b, near[n]], out, ways + 3 * n)
        out[threats + n] = threat(g, b, own, snakes[n])
        if heads:
            place(g.heads[b, snakes[n]], out, heads + 2 * n)


@function
def show_all(g: Board, b: int, team: int, i: int, beans: int, heads: int, out: Array) -> None:
    """Write all beans and, unless at 0, the five other heads. beans, heads: where these are written."""
    for n in range(N_BEANS):
        place(g.beans[b, n], out, beans + 2 * n)
        if heads:
            place(g.heads[b, seat(team, n + (n >= i))], out, heads + 2 * n)


@kernel
def flat(g: Board, team: Array, number: int, scale: Array, out: Array) -> None:
    """Write the observation of that number, 26, 30 or 35, divided by `scale` [D], into `out` [B, 3, D]."""
    for b in range(len(team)):
        opponents = N_TEAM - N_TEAM * team[b]
        for i in range(N_TEAM):
            seen, me = out[b, i], seat(team[b], i)
            own = g.heads[b, me]
            place(own, seen, 0)
            for a in range(N_ACTIONS):
                seen[2 + a] = np.float32(AS_SEEN[team[b], g.codes[b, NEXT_CELL[own, a]]])
            beans, heads = (14, 0) if number == 30 else (6, 16 if number == 26 else 23)
            show_all(g, b, team[b], i, beans, heads, seen)
            if number != 26:
                ways, threats, their_heads = (6, 12, 26) if number == 30 else (16, 33, 0)
                show_near(g, b, own, opponents, ways, threats, their_heads, seen)
                if number == 30:
                    seen[24], seen[25] = 0, 0
                else:
                    seen[22] = np.float32(g.lengths[b, me] / LONG)
            for n in range(len(scale)):
                seen[n] /= scale[n]


@kernel
def state(g: Board, team: Array, out: Array) -> None:
    """Write the state with `team` [B] first into `out` [B, 66]."""
    for b in range(len(team)):
        seen, lead = out[b], 0
        for n in range(N_SNAKES):
            snake, at = seat(team[b], n), 9 * n
            head, tail, length = g.heads[b, snake], g.tails[b, snake], g.lengths[b, snake]
            seen[at], seen[at + 1] = np.float32(ROW[head]) / TALL, np.float32(COL[head]) / WIDE
            for a in range(N_ACTIONS):
                seen[at + 2 + a] = np.float32(g.directions[b, snake] == a)
            seen[at + 6] = np.float32(length / LONG)
            seen[at + 7], seen[at + 8] = np.float32(ROW[tail]) / TALL, np.float32(COL[tail]) / WIDE
            lead += length if n < N_TEAM else -length
        for n in range(N_BEANS):
            cell, at = g.beans[b, n], 9 * N_SNAKES + 2 * g.bean_slots[b, n]
            seen[at], seen[at + 1] = np.float32(ROW[cell]) / TALL, np.float32(COL[cell]) / WIDE
        seen[STATE_DIM - 2] = np.float32(lead / LONG)
        seen[STATE_DIM - 1] = np.float32(g.steps[b] / EPISODE_LIMIT)
