"""What one snake sees as a flat vector: "26", "30" and "35"; and the state for mixers.

Places are absolute: row, column. Differences (dx to the right, dy down) and distances go the shorter way around the
torus. Codes: 0 empty, 1 bean, 2 to 4 one's own team, 5 to 7 the other (side b sees the teams' numbers exchanged, so
that both sides look alike); beans stand oldest first; "near" sorts by distance.

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

Normalised: rows / 10, columns / 20, codes / 7, dx / 10, dy / 5, distances / 11.18 (the longest); others as they are.

State, 66: for each snake, own team first, row, column, direction one-hot (4), length / 20, tail row, tail column; the
beans' rows and columns, each bean at its own number; difference of the teams' lengths / 20; steps / 200. Rows and
columns as normalised.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    COL,
    DOWN,
    EPISODE_LIMIT,
    HEIGHT,
    N_SNAKES,
    N_TEAM,
    NEXT_CELL,
    RIGHT,
    ROW,
    TORUS_DISTANCE,
    WIDTH,
    Board,
    between,
)

LONG = 20.0  # a length that is divided by
STATE_DIM = N_SNAKES * 9 + 12
# Places of the five other snakes for each of the three, own team first.
OTHERS = np.array([[j for j in range(N_SNAKES) if j != i] for i in range(N_TEAM)])
# Codes as each team sees them.
AS_SEEN = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 5, 6, 7, 2, 3, 4]], np.uint8)
_PLACE, _WAY = (HEIGHT, WIDTH), (WIDTH / 2, HEIGHT / 2, float(np.hypot(WIDTH / 2, HEIGHT / 2)))
_HEAD = (*_PLACE, 7, 7, 7, 7)
SCALES: dict[str, np.ndarray] = {
    "26": np.array([*_HEAD, *_PLACE * 5, *_PLACE * 5], np.float32),
    "30": np.array([*_HEAD, *_WAY * 2, 1, 1, *_PLACE * 5, 1, 1, *_PLACE * 2], np.float32),
    "35": np.array([*_HEAD, *_PLACE * 5, *_WAY * 2, 1, *_PLACE * 5, 1, 1], np.float32),
}


def flat_features(name: str, normalise: bool, board: Board, team: np.ndarray) -> np.ndarray:
    """Return what the snakes of `team` [B] see, [B, 3, D] float32; `name` is a key of `SCALES`."""
    heads = board.own_first(board.heads, team)
    own = heads[:, :N_TEAM]
    b = len(heads)
    near_codes = AS_SEEN[team[:, None, None], board.codes_at(NEXT_CELL[own])]
    beans = np.broadcast_to(_places(board.beans)[:, None], (b, N_TEAM, 10))
    others = _places(heads[:, OTHERS])
    start = [_places(own[..., None]), near_codes]
    if name == "26":
        parts = [*start, beans, others]
    else:
        lengths = board.own_first(board.lengths, team)
        near = _two_nearest_beans(board.beans, own)
        threats, their_heads = _two_nearest_opponents(heads, lengths)
        if name == "30":
            parts = [*start, near, threats, beans, np.zeros((b, N_TEAM, 2)), _places(their_heads)]
        else:
            parts = [*start, beans, near, lengths[:, :N_TEAM, None] / LONG, others, threats]
    seen = np.concatenate([part.astype(np.float32, copy=False) for part in parts], 2)
    return seen / SCALES[name] if normalise else seen


def state_features(board: Board, team: np.ndarray) -> np.ndarray:
    """Return the state [B, 66] float32 with `team` [B] first."""
    b = len(board)
    scale = np.array(_PLACE, np.float32)
    snakes = np.empty((b, N_SNAKES, 9), np.float32)
    heads, tails = board.own_first(board.heads, team), board.own_first(board.tails, team)
    lengths = board.own_first(board.lengths, team)
    snakes[..., 0:2] = _places(heads[..., None]) / scale
    snakes[..., 2:6] = np.eye(4, dtype=np.float32)[board.own_first(board.directions, team)]
    snakes[..., 6] = lengths / LONG
    snakes[..., 7:9] = _places(tails[..., None]) / scale
    beans = _places(board.beans_by_slot()) / np.tile(scale, 5)
    lead = (lengths[:, :N_TEAM].sum(1) - lengths[:, N_TEAM:].sum(1)) / LONG
    rest = np.stack([lead, board.steps / EPISODE_LIMIT], 1)
    return np.concatenate([snakes.reshape(b, -1), beans, rest], 1, dtype=np.float32)


def _places(cells: np.ndarray) -> np.ndarray:
    """Return rows and columns in turn, [..., 2 m] float32, of cells [..., m]."""
    places = np.stack([ROW[cells], COL[cells]], -1).astype(np.float32)
    return places.reshape(*cells.shape[:-1], -1)


def _two_nearest_beans(beans: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return (dx, dy, distance) of two beans for each own head [B, 3], [B, 3, 6]."""
    start, end = own[:, :, None], np.broadcast_to(beans[:, None], (*own.shape, 5))
    order = between(TORUS_DISTANCE, start, end).argsort(2, kind="stable")[..., :2]
    end = np.take_along_axis(end, order, 2)
    way = [between(table, start, end) for table in (RIGHT, DOWN, TORUS_DISTANCE)]
    return np.stack(way, -1).reshape(*own.shape, 6)


def _two_nearest_opponents(heads: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the threats [B, 3, 2] and heads [B, 3, 2] of two opponents for each own snake; arguments own first."""
    shape = (len(heads), N_TEAM, N_TEAM)
    theirs = np.broadcast_to(heads[:, None, N_TEAM:], shape)
    distance = between(TORUS_DISTANCE, heads[:, :N_TEAM, None], theirs)
    order = distance.argsort(2, kind="stable")[..., :2]
    length = np.take_along_axis(np.broadcast_to(lengths[:, None, N_TEAM:], shape), order, 2)
    threat = length / 3 / (np.take_along_axis(distance, order, 2) + 1)
    return threat, np.take_along_axis(theirs, order, 2)
