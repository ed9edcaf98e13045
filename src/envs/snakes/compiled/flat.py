"""The observations "26", "30" and "35" and the state as kernels over boards; compare `omagd.envs.snakes.features`."""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import EPISODE_LIMIT
from omagd.envs.snakes.compiled import tables
from omagd.envs.snakes.compiled.compiling import function, kernel
from omagd.envs.snakes.compiled.tables import COL, NEXT_CELL, ROW, Array, Boards, distance, down, right, seat
from omagd.envs.snakes.features import AS_SEEN, LONG, STATE_DIM

N_BEANS, N_SNAKES, N_TEAM, N_ACTIONS = tables.N_BEANS, tables.N_SNAKES, tables.N_TEAM, tables.N_ACTIONS
HEIGHT, WIDTH = np.float32(tables.HEIGHT), np.float32(tables.WIDTH)
ONE = np.float32(1)


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
def threat(g: Boards, b: int, own: int, snake: int) -> np.float32:
    """Return the threat of a snake: length / 3 / (distance + 1)."""
    return np.float32(g.lengths[b, snake] / 3 / np.float64(distance(own, g.heads[b, snake]) + ONE))


@function
def show_near(g: Boards, b: int, own: int, first: int, ways: int, threats: int, heads: int, out: Array) -> None:
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
def show_all(g: Boards, b: int, team: int, i: int, beans: int, heads: int, out: Array) -> None:
    """Write all beans and, unless at 0, the five other heads. beans, heads: where these are written."""
    for n in range(N_BEANS):
        place(g.beans[b, n], out, beans + 2 * n)
        if heads:
            place(g.heads[b, seat(team, n + (n >= i))], out, heads + 2 * n)


@kernel
def flat(g: Boards, team: Array, number: int, scale: Array, out: Array) -> None:
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
def state(g: Boards, team: Array, out: Array) -> None:
    """Write the state with `team` [B] first into `out` [B, 66]."""
    for b in range(len(team)):
        seen, lead = out[b], 0
        for n in range(N_SNAKES):
            snake, at = seat(team[b], n), 9 * n
            head, tail, length = g.heads[b, snake], g.tails[b, snake], g.lengths[b, snake]
            seen[at], seen[at + 1] = np.float32(ROW[head]) / HEIGHT, np.float32(COL[head]) / WIDTH
            for a in range(N_ACTIONS):
                seen[at + 2 + a] = np.float32(g.directions[b, snake] == a)
            seen[at + 6] = np.float32(length / LONG)
            seen[at + 7], seen[at + 8] = np.float32(ROW[tail]) / HEIGHT, np.float32(COL[tail]) / WIDTH
            lead += length if n < N_TEAM else -length
        for n in range(N_BEANS):
            cell, at = g.beans[b, n], 9 * N_SNAKES + 2 * g.bean_slots[b, n]
            seen[at], seen[at + 1] = np.float32(ROW[cell]) / HEIGHT, np.float32(COL[cell]) / WIDTH
        seen[STATE_DIM - 2] = np.float32(lead / LONG)
        seen[STATE_DIM - 1] = np.float32(g.steps[b] / EPISODE_LIMIT)
