"""The observation "entities" (for graph agents) as a kernel over boards.

"entities", 138: free neighbour cells (4); three opponents, then five beans, 12 each, and two mates, 11 each: visible,
distance, dx, dy (up), length, direction one-hot, tail dx, dy and, except for mates, is bean; own features, 16: length,
direction one-hot, tail dx, dy, step, snakes on the cells two steps away. Units beyond the sight are zero.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    EPISODE_LIMIT,
    FIRST_SNAKE,
    N_ACTIONS,
    N_BEANS,
    N_SNAKES,
    N_TEAM,
    NEXT_CELL,
    Array,
    Board,
    distance,
    down,
    function,
    kernel,
    right,
    seat,
    shifted,
)
from omagd.envs.snakes.flat import LONG

UNIT_DIM, OWN_DIM, MOVE_DIM = 12, 16, 4
_AWAY = np.array([(-2, 0), (-1, -1), (-1, 1), (0, -2), (0, 2), (1, -1), (1, 1), (2, 0)]).T
TWO_AWAY = np.sort(shifted(*_AWAY), 1).astype(np.uint8)  # [200, 8]: the cells two steps from each
N_TWO_AWAY = TWO_AWAY.shape[1]
ZERO, ONE = np.float32(0), np.float32(1)
BEANS_AT = MOVE_DIM + N_TEAM * UNIT_DIM  # opponents, beans, mates, own features
MATES_AT = BEANS_AT + N_BEANS * UNIT_DIM
OWN_AT = MATES_AT + (N_TEAM - 1) * (UNIT_DIM - 1)
ENTITY_DIM = OWN_AT + OWN_DIM
IS_BEAN = UNIT_DIM - 1


@function
def way(own: int, cell: int, scale: np.float32, out: Array, at: int) -> None:
    """Write (right, up) / scale from the own head to a cell."""
    out[at], out[at + 1] = np.float32(right(own, cell)) / scale, np.float32(-down(own, cell)) / scale


@function
def show_unit(own: int, cell: int, scale: np.float32, sight: np.float32, out: Array) -> bool:
    """Write the first features of an entity, or zeros if it is beyond `sight`; return whether it is in sight."""
    far = distance(own, cell)
    for n in range(len(out)):
        out[n] = ZERO
    if far > sight:
        return False
    out[0], out[1] = ONE, far / scale
    way(own, cell, scale, out, 2)
    return True


@function
def show_self(g: Board, b: int, snake: int, own: int, scale: np.float32, out: Array) -> None:
    """Write the own features."""
    out[0] = np.float32(g.lengths[b, snake] / LONG)
    for a in range(N_ACTIONS):
        out[1 + a] = np.float32(g.directions[b, snake] == a)
    way(own, g.tails[b, snake], scale, out, 5)
    out[7] = np.float32(g.steps[b] / EPISODE_LIMIT)
    for n in range(N_TWO_AWAY):
        out[8 + n] = np.float32(g.codes[b, TWO_AWAY[own, n]] >= FIRST_SNAKE)


@kernel
def entities(g: Board, team: Array, scale: np.float32, sight: np.float32, out: Array) -> None:
    """Write the entities up to `sight` of the snakes of `team` [B] into `out` [B, 3, obs_dim]."""
    for b in range(len(team)):
        for i in range(N_TEAM):
            seen, me = out[b, i], seat(team[b], i)
            own = g.heads[b, me]
            for a in range(N_ACTIONS):
                seen[a] = np.float32(g.codes[b, NEXT_CELL[own, a]] < FIRST_SNAKE)
            for n in range(N_SNAKES - 1):
                snake, mate = seat(team[b], n + (n >= i)), n < N_TEAM - 1
                at = MATES_AT + n * (UNIT_DIM - 1) if mate else MOVE_DIM + (n - N_TEAM + 1) * UNIT_DIM
                unit = seen[at : at + UNIT_DIM - mate]
                if show_unit(own, g.heads[b, snake], scale, sight, unit):
                    unit[4] = np.float32(g.lengths[b, snake] / LONG)
                    unit[5 + g.directions[b, snake]] = ONE
                    way(own, g.tails[b, snake], scale, unit, 9)
            for n in range(N_BEANS):
                at = BEANS_AT + g.bean_slots[b, n] * UNIT_DIM
                if show_unit(own, g.beans[b, n], scale, sight, seen[at : at + UNIT_DIM]):
                    seen[at + IS_BEAN] = ONE
            show_self(g, b, me, own, scale, seen[OWN_AT:])
