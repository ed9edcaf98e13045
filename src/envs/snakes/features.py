"""Flat observations of a snake ("26", "30", "35", "near"), and the state for mixers.

Positions are absolute: row, column. Differences (dx to the right, dy down) and distances are those of the torus.
Codes: 0 empty, 1 bean, 2 to 4 own team, 5 to 7 the other team (for side b the teams' codes are exchanged, so that both
sides see the game alike). Beans are listed oldest first; "near" sorts by distance.

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

"near", 174, the nearest first; dx to the right and dy up, both / 10; steps = |dx| + |dy|, / 10; lengths / 20:
     0- 3  neighbour cells (up, down, left, right) free of snakes
     4- 7  a mate could move there     8- 11  length of the longest opponent that could move there, else 0
    12- 71  five beans, 12 each: up, down, left, right of the head; dx, dy, steps; for mates and then opponents, by how
            many steps the nearest is farther away, and the sign of that; the smaller of both
    72-116  two mates, then three opponents, 9 each: dx, dy, steps, length, direction one-hot, steps to its nearest bean
   117-125  own length, direction one-hot, dx and dy of the tail; difference of the teams' lengths / 20; step / 200
   126-173  snakes in the 7 × 7 cells around the head, row by row without the head's

State, 66: for each snake, own team first, row, column, direction one-hot (4), length / 20, tail row, tail column; rows
and columns of the beans, ordered by slot; difference of the teams' lengths / 20; steps / 200. Rows and columns are
normalised.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import (
    COL,
    DOWN,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    HEIGHT,
    N_BEANS,
    N_CELLS,
    N_SNAKES,
    N_TEAM,
    NEXT_CELL,
    RIGHT,
    ROW,
    TORUS_DISTANCE,
    TORUS_STEPS,
    WIDTH,
    Board,
    by_kernel,
    own_first,
    pair_lookup,
    shifted,
)

LONG = 20.0  # lengths are divided by this
STATE_DIM = N_SNAKES * 9 + 12
# Indices of the five other snakes for each of the three, own team first.
OTHERS = np.array([[j for j in range(N_SNAKES) if j != i] for i in range(N_TEAM)])
# Code of a cell as team 0 and team 1 see it.
AS_SEEN = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 5, 6, 7, 2, 3, 4]], np.uint8)
_PLACE, _WAY = (HEIGHT, WIDTH), (WIDTH / 2, HEIGHT / 2, float(np.hypot(WIDTH / 2, HEIGHT / 2)))
_HEAD = (*_PLACE, 7, 7, 7, 7)
SCALES: dict[str, np.ndarray] = {
    "26": np.array([*_HEAD, *_PLACE * 5, *_PLACE * 5], np.float32),
    "30": np.array([*_HEAD, *_WAY * 2, 1, 1, *_PLACE * 5, 1, 1, *_PLACE * 2], np.float32),
    "35": np.array([*_HEAD, *_PLACE * 5, *_WAY * 2, 1, *_PLACE * 5, 1, 1], np.float32),
}


@by_kernel("flat_features")
def flat_features(board: Board, team: np.ndarray, name: str, normalise: bool) -> np.ndarray:
    """Return the observations of the snakes of `team` [B], [B, 3, D] float32; `name` is a key of `SCALES`."""
    heads = own_first(board.heads, team)
    own = heads[:, :N_TEAM]
    b = len(heads)
    near_codes = AS_SEEN[team[:, None, None], board.codes_at(NEXT_CELL[own])]
    beans = np.broadcast_to(_places(board.beans)[:, None], (b, N_TEAM, 10))
    others = _places(heads[:, OTHERS])
    start = [_places(own[..., None]), near_codes]
    if name == "26":
        parts = [*start, beans, others]
    else:
        lengths = own_first(board.lengths, team)
        rows, start_cell = np.arange(b)[:, None, None], own[..., None]
        nearest = board.beans[rows, _two_nearest(own, board.beans)]
        ways = [pair_lookup(table, start_cell, nearest) for table in (RIGHT, DOWN, TORUS_DISTANCE)]
        near = np.stack(ways, -1).reshape(b, N_TEAM, 6)
        order = N_TEAM + _two_nearest(own, heads[:, N_TEAM:])
        their_heads = heads[rows, order]
        threats = lengths[rows, order] / 3 / (pair_lookup(TORUS_DISTANCE, start_cell, their_heads) + 1)
        if name == "30":
            parts = [*start, near, threats, beans, np.zeros((b, N_TEAM, 2)), _places(their_heads)]
        else:
            parts = [*start, beans, near, lengths[:, :N_TEAM, None] / LONG, others, threats]
    seen = np.concatenate([part.astype(np.float32, copy=False) for part in parts], 2)
    return seen / SCALES[name] if normalise else seen


@by_kernel("state_features")
def state_features(board: Board, team: np.ndarray) -> np.ndarray:
    """Return the state [B, 66] float32 with `team` [B] first."""
    b = len(board)
    scale = np.array(_PLACE, np.float32)
    snakes = np.empty((b, N_SNAKES, 9), np.float32)
    heads, tails = own_first(board.heads, team), own_first(board.tails, team)
    lengths = own_first(board.lengths, team)
    snakes[..., 0:2] = _places(heads[..., None]) / scale
    snakes[..., 2:6] = np.eye(4, dtype=np.float32)[own_first(board.directions, team)]
    snakes[..., 6] = lengths / LONG
    snakes[..., 7:9] = _places(tails[..., None]) / scale
    beans = _places(board.beans_by_slot()) / np.tile(scale, 5)
    lead = (lengths[:, :N_TEAM].sum(1) - lengths[:, N_TEAM:].sum(1)) / LONG
    rest = np.stack([lead, board.steps / EPISODE_LIMIT], 1)
    return np.concatenate([snakes.reshape(b, -1), beans, rest], 1, dtype=np.float32)


def _places(cells: np.ndarray) -> np.ndarray:
    """Return row, column, row, column, ... [..., 2 m] float32 of cells [..., m]."""
    places = np.stack([ROW[cells], COL[cells]], -1).astype(np.float32)
    return places.reshape(*cells.shape[:-1], -1)


def _two_nearest(own: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Return the indices of the two of `cells` [B, m] that are nearest to each own head [B, 3], [B, 3, 2]."""
    distance = pair_lookup(TORUS_DISTANCE, own[..., None], cells[:, None])
    return distance.argsort(2, kind="stable")[..., :2]


NEAR_DIM = 174
SCALE, REACH = 10, 3
# "near" looks up what depends on two cells. A pair is numbered by its differences, 39 (rows + 9) + columns + 19, which
# is the difference of two numbers `_NEAR_PLACE`, plus `_SAME`.
_COLUMNS = 2 * WIDTH - 1
_NEAR_PLACE = ROW * _COLUMNS + COL
_SAME = (HEIGHT - 1) * _COLUMNS + WIDTH - 1


def _examples() -> tuple[np.ndarray, np.ndarray]:
    """Return a first and a second cell for each pair number, [741] each."""
    down, right = np.divmod(np.arange((2 * HEIGHT - 1) * _COLUMNS), _COLUMNS) - np.array([[HEIGHT - 1], [WIDTH - 1]])
    first, second = ((np.maximum(0, s * down), np.maximum(0, s * right)) for s in (-1, 1))
    return first[0] * WIDTH + first[1], second[0] * WIDTH + second[1]


def _gaps() -> np.ndarray:
    """Return the last five features of a bean, [1024, 5], by 32 (mates' extra steps + 16) + opponents' + 16."""
    mates, opponents = np.divmod(np.arange(1024), 32) - np.array([[16]])
    seen = [mates / SCALE, np.sign(mates), opponents / SCALE, np.sign(opponents)]
    return np.stack([*seen, np.minimum(mates, opponents) / SCALE], -1).astype(np.float32)


_AROUND = [(r, c) for r in range(-REACH, REACH + 1) for c in range(-REACH, REACH + 1) if (r, c) != (0, 0)]
_WINDOW = shifted(*np.array(_AROUND).T)  # the 48 cells around each cell, row by row, [200, 48]
_BESIDE = [_WINDOW[0].tolist().index(cell) for cell in NEXT_CELL[0]]
_FROM, _TO = _examples()
_STEPS = TORUS_STEPS[_FROM, _TO].astype(np.int64)
# For each pair: dx, dy and steps; and before them, whether the second cell is up, down, left, right of the first.
_AWAY = np.stack([RIGHT[_FROM, _TO] / SCALE, -DOWN[_FROM, _TO] / SCALE, _STEPS / SCALE], -1).astype(np.float32)
_SIDES = np.stack([_AWAY[:, 1] > 0, _AWAY[:, 1] < 0, _AWAY[:, 0] < 0, _AWAY[:, 0] > 0], -1)
_NEAR_WAY = np.concatenate([_SIDES, _AWAY], 1, dtype=np.float32)
# Bit a is set if action a leads from the first cell to a neighbour of the second.
_MEETS = ((TORUS_STEPS[NEXT_CELL[_FROM], _TO[:, None]] == 1) << np.arange(4)).sum(1)
_BITS = (np.arange(16)[:, None] >> np.arange(4) & 1).astype(np.float32)
_GAPS = _gaps()
_LENGTH = (np.arange(256) / LONG).astype(np.float32)
_FACING = np.eye(4, dtype=np.float32)
# By 16 direction + steps to a bean: direction one-hot and steps.
_GOING = np.concatenate([_FACING.repeat(16, 0), np.tile(np.arange(16) / SCALE, 4)[:, None]], 1, dtype=np.float32)


@by_kernel("near_features")
def near_features(board: Board, team: np.ndarray) -> np.ndarray:
    """Return "near" of the snakes of `team` [B], [B, 3, 174] float32."""
    b = len(board)
    heads, lengths = own_first(board.heads, team), own_first(board.lengths, team)
    directions, tails = own_first(board.directions, team), own_first(board.tails, team)
    own, places = heads[:, :N_TEAM], _NEAR_PLACE.take(heads)
    start = places[:, :N_TEAM] - _SAME
    out = np.empty((b, N_TEAM, NEAR_DIM), np.float32)
    out[..., 126:] = _blocked(board, own)
    np.subtract(1, out[..., 126:][..., _BESIDE], out=out[..., 0:4])
    to_beans = _NEAR_PLACE.take(board.beans)[:, None] - (places - _SAME)[:, :, None]  # [B, 6, 5]
    steps = _STEPS.take(to_beans)
    _show_beans(out[..., 12:72].reshape(b, N_TEAM, N_BEANS, 12), to_beans[:, :N_TEAM], steps)
    to_others = places.take(OTHERS, 1) - start[..., None]  # [B, 3, 5], mates first
    meets = _MEETS.take(to_others)
    out[..., 4:8] = _BITS.take(meets[..., 0] | meets[..., 1], 0)
    theirs = _LENGTH.take(lengths[:, None, N_TEAM:, None])
    out[..., 8:12] = (_BITS.take(meets[..., N_TEAM - 1 :], 0) * theirs).max(2)
    facts = lengths << 6 | directions << 4 | steps.min(2)
    _show_snakes(out[..., 72:117].reshape(b, N_TEAM, 5, 9), to_others, facts.take(OTHERS, 1))
    out[..., 117] = _LENGTH.take(lengths[:, :N_TEAM])
    out[..., 118:122] = _FACING.take(directions[:, :N_TEAM], 0)
    out[..., 122:124] = _AWAY.take(_NEAR_PLACE.take(tails[:, :N_TEAM]) - start, 0)[..., :2]
    out[..., 124] = ((lengths[:, :N_TEAM].sum(1) - lengths[:, N_TEAM:].sum(1)) / LONG)[:, None]
    out[..., 125] = (board.steps / EPISODE_LIMIT)[:, None]
    return out


def _blocked(board: Board, own: np.ndarray) -> np.ndarray:
    """Return whether a snake is on the 48 cells around the own heads [B, 3], [B, 3, 48]."""
    cells = _WINDOW.take(own, 0)
    cells += N_CELLS * np.arange(len(own))[:, None, None]
    return (board.codes >= FIRST_SNAKE).reshape(-1).take(cells)


def _show_beans(out: np.ndarray, ways: np.ndarray, steps: np.ndarray) -> None:
    """Write the beans into `out` [B, 3, 5, 12], nearest first.

    ways: pair numbers from the own heads, [B, 3, 5]. steps: from all heads, [B, 6, 5]. Each bean is packed into one
    integer with its steps in the highest bits, so that sorting integers sorts beans.
    """
    mine = steps[:, :N_TEAM]
    one, two, three = mine[:, 0], mine[:, 1], mine[:, 2]
    mates = np.stack([np.minimum(two, three), np.minimum(one, three), np.minimum(one, two)], 1) - mine
    opponents = steps[:, N_TEAM:].min(1)[:, None] - mine
    packed = mine << 23 | np.arange(N_BEANS) << 20 | ways << 10 | mates + 16 << 5 | opponents + 16
    packed.sort(2)
    out[..., :7] = _NEAR_WAY.take(packed >> 10 & 1023, 0)
    out[..., 7:] = _GAPS.take(packed & 1023, 0)


def _show_snakes(out: np.ndarray, ways: np.ndarray, facts: np.ndarray) -> None:
    """Write mates and opponents into `out` [B, 3, 5, 9], nearest first. ways, facts: [B, 3, 5], the mates first."""
    packed = _STEPS.take(ways) << 27 | np.arange(5) << 24 | ways << 14 | facts
    packed[..., : N_TEAM - 1].sort(2)
    packed[..., N_TEAM - 1 :].sort(2)
    out[..., 0:3] = _AWAY.take(packed >> 14 & 1023, 0)
    out[..., 3] = _LENGTH.take(packed >> 6 & 255)
    out[..., 4:] = _GOING.take(packed & 63, 0)
