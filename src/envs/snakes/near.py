"""What is near first ("near"): a flat observation from one's own head, for agents without memory.

     0-  3  whether the cell up, down, left, right of the own head is free of snakes
     4-  7  whether a mate's head is one step from there too
     8- 11  length / 20 of the longest opponent whose head is one step from there too, 0 where none is
    12- 71  five beans, nearest first, 12 each: is it up, down, left, right; dx (right), dy (up), steps; by how many
            steps the nearest mate is farther from it, and the sign of that; the same two of the nearest opponent; by
            how many steps the nearest of all others is
    72- 89  the two mates, nearest first, 9 each: dx, dy, steps, length / 20, direction one-hot (4), steps to the bean
            that is nearest to them
    90-116  the three opponents, nearest first, likewise
   117-125  oneself: length / 20, direction one-hot (4), dx and dy of the tail, lead of the team / 20, steps / 200
   126-173  which of the other cells of the 7 x 7 around the own head hold a snake, row by row

Differences and steps go the shorter way around the torus and are divided by 10; "farther" is negative where the other
is nearer. Of those equally near the older bean or the lower index stands first. The lead is that of present lengths.

Below, what belongs together is packed into one number with the steps in its highest bits, so that sorting the numbers
sorts what they hold; what their parts mean stands in small tables of float32.
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
    N_TEAM,
    NEXT_CELL,
    RIGHT,
    ROW,
    TORUS_STEPS,
    WIDTH,
    Board,
)
from omagd.envs.snakes.features import LONG, OTHERS

NEAR_DIM = 174
_SCALE, _REACH = 10, 3
# What lies between two cells has a number: 39 (difference of rows + 9) + difference of columns + 19.
_COLUMNS = 2 * WIDTH - 1
_PLACE = ROW * _COLUMNS + COL
_SAME = (HEIGHT - 1) * _COLUMNS + WIDTH - 1


def _windows() -> np.ndarray:
    """Return [200, 48] the cells around each, row by row, without itself."""
    around = [(r, c) for r in range(-_REACH, _REACH + 1) for c in range(-_REACH, _REACH + 1) if (r, c) != (0, 0)]
    rows, cols = np.array(around).T
    return (ROW[:, None] + rows) % HEIGHT * WIDTH + (COL[:, None] + cols) % WIDTH


def _examples() -> tuple[np.ndarray, np.ndarray]:
    """Return for each way between two cells, [741], a first and a second cell."""
    down, right = np.divmod(np.arange((2 * HEIGHT - 1) * _COLUMNS), _COLUMNS) - np.array([[HEIGHT - 1], [WIDTH - 1]])
    first, second = ((np.maximum(0, s * down), np.maximum(0, s * right)) for s in (-1, 1))
    return first[0] * WIDTH + first[1], second[0] * WIDTH + second[1]


def _gaps() -> np.ndarray:
    """Return [1024, 5] what is seen of 32 (steps by which mates are farther + 16) + the same of opponents."""
    mates, opponents = np.divmod(np.arange(1024), 32) - np.array([[16]])
    seen = [mates / _SCALE, np.sign(mates), opponents / _SCALE, np.sign(opponents)]
    return np.stack([*seen, np.minimum(mates, opponents) / _SCALE], -1).astype(np.float32)


_WINDOW = _windows()
_BESIDE = [_WINDOW[0].tolist().index(cell) for cell in NEXT_CELL[0]]
_FROM, _TO = _examples()
_STEPS = TORUS_STEPS[_FROM, _TO].astype(np.int64)
# dx, dy, steps as they are seen; is the second cell up, down, left, right of the first.
_AWAY = np.stack([RIGHT[_FROM, _TO] / _SCALE, -DOWN[_FROM, _TO] / _SCALE, _STEPS / _SCALE], -1).astype(np.float32)
_SIDES = np.stack([_AWAY[:, 1] > 0, _AWAY[:, 1] < 0, _AWAY[:, 0] < 0, _AWAY[:, 0] > 0], -1)
_WAY = np.concatenate([_SIDES, _AWAY], 1, dtype=np.float32)
# Bit a: where action a leads to from the first cell is one step from the second.
_MEETS = ((TORUS_STEPS[NEXT_CELL[_FROM], _TO[:, None]] == 1) << np.arange(4)).sum(1)
_BITS = (np.arange(16)[:, None] >> np.arange(4) & 1).astype(np.float32)
_GAPS = _gaps()
_LENGTH = (np.arange(256) / LONG).astype(np.float32)
_FACING = np.eye(4, dtype=np.float32)
# Of 16 direction + steps to a bean: the direction one-hot, the steps.
_GOING = np.concatenate([_FACING.repeat(16, 0), np.tile(np.arange(16) / _SCALE, 4)[:, None]], 1, dtype=np.float32)


def near_features(board: Board, team: np.ndarray) -> np.ndarray:
    """Return what the snakes of `team` [B] see, [B, 3, 174] float32."""
    b = len(board)
    heads, lengths = board.own_first(board.heads, team), board.own_first(board.lengths, team)
    directions, tails = board.own_first(board.directions, team), board.own_first(board.tails, team)
    own, places = heads[:, :N_TEAM], _PLACE.take(heads)
    start = places[:, :N_TEAM] - _SAME
    out = np.empty((b, N_TEAM, NEAR_DIM), np.float32)
    out[..., 126:] = _blocked(board, own)
    np.subtract(1, out[..., 126:][..., _BESIDE], out=out[..., 0:4])
    to_beans = _PLACE.take(board.beans)[:, None] - (places - _SAME)[:, :, None]  # [B, 6, 5]
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
    out[..., 122:124] = _AWAY.take(_PLACE.take(tails[:, :N_TEAM]) - start, 0)[..., :2]
    out[..., 124] = ((lengths[:, :N_TEAM].sum(1) - lengths[:, N_TEAM:].sum(1)) / LONG)[:, None]
    out[..., 125] = (board.steps / EPISODE_LIMIT)[:, None]
    return out


def _blocked(board: Board, own: np.ndarray) -> np.ndarray:
    """Return [B, 3, 48] whether there is a snake on the cells around the own heads [B, 3]."""
    cells = _WINDOW.take(own, 0)
    cells += N_CELLS * np.arange(len(own))[:, None, None]
    return (board.codes >= FIRST_SNAKE).reshape(-1).take(cells)


def _show_beans(out: np.ndarray, ways: np.ndarray, steps: np.ndarray) -> None:
    """Write the beans into `out` [B, 3, 5, 12]. ways: from the own heads, [B, 3, 5]; steps: from all, [B, 6, 5]."""
    mine = steps[:, :N_TEAM]
    one, two, three = mine[:, 0], mine[:, 1], mine[:, 2]
    mates = np.stack([np.minimum(two, three), np.minimum(one, three), np.minimum(one, two)], 1) - mine
    opponents = steps[:, N_TEAM:].min(1)[:, None] - mine
    packed = mine << 23 | np.arange(N_BEANS) << 20 | ways << 10 | mates + 16 << 5 | opponents + 16
    packed.sort(2)
    out[..., :7] = _WAY.take(packed >> 10 & 1023, 0)
    out[..., 7:] = _GAPS.take(packed & 1023, 0)


def _show_snakes(out: np.ndarray, ways: np.ndarray, facts: np.ndarray) -> None:
    """Write mates and opponents into `out` [B, 3, 5, 9]. ways, facts: [B, 3, 5], the two mates first."""
    packed = _STEPS.take(ways) << 27 | np.arange(5) << 24 | ways << 14 | facts
    packed[..., : N_TEAM - 1].sort(2)
    packed[..., N_TEAM - 1 :].sort(2)
    out[..., 0:3] = _AWAY.take(packed >> 14 & 1023, 0)
    out[..., 3] = _LENGTH.take(packed >> 6 & 255)
    out[..., 4:] = _GOING.take(packed & 63, 0)
