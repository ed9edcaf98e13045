"""Observations by name: entities for graph agents, planes for convolutions, and the flat ones of features.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.envs.snakes.board import (
    COL,
    DOWN,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    N_BEANS,
    N_CELLS,
    N_TEAM,
    NEXT_CELL,
    RIGHT,
    ROW,
    TORUS_DISTANCE,
    TORUS_STEPS,
    Board,
    by_kernel,
    of_team,
    own_first,
    pair_lookup,
    shifted,
)
from omagd.envs.snakes.features import AS_SEEN, LONG, NEAR_DIM, OTHERS, SCALES, flat_features, near_features

ObsName = Literal["26", "26_raw", "30", "35", "near", "planes", "entities"]
UNIT_DIM, OWN_DIM, MOVE_DIM = 12, 16, 4
ENTITY_DIM = MOVE_DIM + (N_TEAM + N_BEANS) * UNIT_DIM + (N_TEAM - 1) * (UNIT_DIM - 1) + OWN_DIM
EVERYTHING = 10.0  # distances are divided by the sight, or by this without a limit
TWO_AWAY = np.stack([np.flatnonzero(row == 2) for row in TORUS_STEPS])


@by_kernel("entity_features")
def entity_features(
    board: Board, team: np.ndarray, sight: float | None, full: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the entities in sight of the snakes of `team` [B], [B, 3, obs_dim] float32; if `full`, also without limit.

    A unit: visible, distance, dx, dy (up), length, direction one-hot, tail dx, dy and, except for mates, is bean. Own
    features: length, direction one-hot, tail dx, dy, step, snakes on the cells two steps away. Move features: free
    neighbour cells.
    """
    b, scale = len(board), sight or EVERYTHING
    heads = own_first(board.heads, team)
    own = heads[:, :N_TEAM]
    lengths, tails = own_first(board.lengths, team) / LONG, own_first(board.tails, team)
    facing = np.eye(4, dtype=np.float32)[own_first(board.directions, team)]
    snakes = np.zeros((b, N_TEAM, 5, UNIT_DIM), np.float32)
    distance = _relative(snakes, own, heads[:, OTHERS], scale)
    snakes[..., 4] = lengths[:, OTHERS]
    snakes[..., 5:9] = facing[:, OTHERS]
    snakes[..., 9:11] = _way(own, tails[:, OTHERS], scale)
    beans = np.zeros((b, N_TEAM, N_BEANS, UNIT_DIM), np.float32)
    to_beans = _relative(beans, own, np.broadcast_to(board.beans_by_slot()[:, None], (b, N_TEAM, N_BEANS)), scale)
    beans[..., 11] = 1
    free = board.codes_at(NEXT_CELL[own]) < FIRST_SNAKE
    mine = np.empty((b, N_TEAM, OWN_DIM), np.float32)
    mine[..., 0], mine[..., 1:5] = lengths[:, :N_TEAM], facing[:, :N_TEAM]
    mine[..., 5:7] = _way(own, tails[:, :N_TEAM, None], scale)[:, :, 0]
    mine[..., 7] = board.steps[:, None] / EPISODE_LIMIT
    mine[..., 8:] = board.codes_at(TWO_AWAY[own]) >= FIRST_SNAKE
    everything = _join(free, snakes, beans, mine)
    if sight is None:
        return everything, everything.copy() if full else None
    snakes[distance > sight] = 0
    beans[to_beans > sight] = 0
    return _join(free, snakes, beans, mine), everything if full else None


def _relative(out: np.ndarray, own: np.ndarray, cells: np.ndarray, scale: float) -> np.ndarray:
    """Write visible, distance, dx, dy of `cells` [B, 3, m] into `out` [B, 3, m, D]; return the distances [B, 3, m]."""
    distance = pair_lookup(TORUS_DISTANCE, own[:, :, None], cells)
    out[..., 0] = 1
    out[..., 1] = distance / scale
    out[..., 2:4] = _way(own, cells, scale)
    return distance


def _way(own: np.ndarray, cells: np.ndarray, scale: float) -> np.ndarray:
    """Return (right, up) / scale from the own heads [B, 3] to `cells` [B, 3, m], [B, 3, m, 2] float32."""
    start = own[:, :, None]
    right, down = pair_lookup(RIGHT, start, cells), pair_lookup(DOWN, start, cells)
    return np.stack([right / np.float32(scale), -down / np.float32(scale)], -1)


def _join(free: np.ndarray, snakes: np.ndarray, beans: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return the parts in the order of the layout; `snakes` [B, 3, 5, D] has the two mates first."""
    lead = free.shape[:2]
    mates, opponents = snakes[:, :, : N_TEAM - 1, :-1], snakes[:, :, N_TEAM - 1 :]
    parts = [free, *(part.reshape(*lead, -1) for part in (opponents, beans, mates)), mine]
    return np.concatenate(parts, 2, dtype=np.float32)


N_PLANES, MIDDLE_ROW, MIDDLE_COL = 11, 5, 10
PLANES_DIM = N_PLANES * N_CELLS


# The cells in reading order of the board shifted so that a given cell is in row 5, column 10, [200, 200].
_WINDOWS = shifted(ROW - MIDDLE_ROW, COL - MIDDLE_COL)


@by_kernel("plane_features")
def plane_features(board: Board, team: np.ndarray, centred: bool) -> np.ndarray:
    """Return the 11 planes of the snakes of `team` [B], [B, 3, 2200] float32, plane after plane.

    0 beans; 1, 2, 3 own head, body, tail; 4 share of the game left; 5, 6, 7 mates' and 8, 9, 10 opponents' heads,
    bodies, tails.
    """
    b = len(board)
    codes = AS_SEEN[team[:, None], board.codes]
    heads, tails = _marks(board.heads, codes, board.lengths), _marks(board.tails, codes, board.lengths)
    planes = np.zeros((b, N_TEAM, N_PLANES, N_CELLS), np.float32)
    own = of_team(board.heads, team)
    for i in range(N_TEAM):
        where = _WINDOWS[own[:, i]] if centred else np.broadcast_to(np.arange(N_CELLS), (b, N_CELLS))
        seen = [np.take_along_axis(each, where, 1) for each in (heads, codes, tails)]
        planes[:, i, 0] = seen[1] == 1
        for first, values in zip((1, 2, 3), seen, strict=True):
            is_own = values == FIRST_SNAKE + i
            planes[:, i, first] = is_own
            planes[:, i, first + 4] = (values >= FIRST_SNAKE) & (values < FIRST_SNAKE + N_TEAM) & ~is_own
            planes[:, i, first + 7] = values >= FIRST_SNAKE + N_TEAM
    planes[:, :, 4] = (1 - board.steps / EPISODE_LIMIT)[:, None, None]
    return planes.reshape(b, N_TEAM, PLANES_DIM)


def _marks(cells: np.ndarray, codes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the `codes` at the `cells` [B, 6] of snakes with a body, 0 elsewhere, [B, 200]."""
    marks = np.zeros_like(codes)
    boards, snakes = np.nonzero(lengths)
    at = cells[boards, snakes]
    marks[boards, at] = codes[boards, at]
    return marks


@dataclass(frozen=True)
class Observer:
    """Observations of a team; the fields are those of `SnakesArgs`."""

    obs: ObsName = "26"
    normalise: bool = True
    centred: bool = True
    sight: float | None = None

    @property
    def layout(self) -> EntityLayout | None:
        """Entity layout of "entities". Opponents and beans are its "enemies": everything that is not of the team."""
        sizes = MOVE_DIM, N_TEAM + N_BEANS, UNIT_DIM, N_TEAM - 1, UNIT_DIM - 1, OWN_DIM
        return EntityLayout(*sizes, sight=self.sight or EVERYTHING) if self.obs == "entities" else None

    @property
    def obs_dim(self) -> int:
        """Features of one snake's observation."""
        if self.layout is not None:
            return self.layout.obs_dim
        whole = {"planes": PLANES_DIM, "near": NEAR_DIM}
        return whole[self.obs] if self.obs in whole else len(SCALES[self.obs.removesuffix("_raw")])

    def observe(self, board: Board, team: np.ndarray, full: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Return what `team` [B] sees, [B, 3, obs_dim] float32; if `full`, also without the range limit, else None."""
        if self.obs == "entities":
            return entity_features(board, team, self.sight, full)
        if self.obs == "planes":
            seen = plane_features(board, team, self.centred)
        elif self.obs == "near":
            seen = near_features(board, team)
        else:
            name = self.obs.removesuffix("_raw")
            seen = flat_features(board, team, name, self.normalise and name == self.obs)
        return seen, seen.copy() if full else None
