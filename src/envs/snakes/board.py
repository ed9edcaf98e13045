"""The board as players see it: cells, distances on the torus, and the positions of snakes and beans.

Cells are numbered row by row, 0 to 199; row 0 is on top. Actions and directions: 0 up, 1 down, 2 left, 3 right; the
reverse of a is a ^ 1. Codes of cells: 0 empty, 1 bean, 2 to 7 snake 0 to 5. Snakes 0, 1, 2 are team 0.
Shapes: B boards, k of them; 6 snakes, 3 of each team; 5 beans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from omagd.envs.snakes.draws import PLAYERS, draw

HEIGHT, WIDTH = 10, 20
N_CELLS = HEIGHT * WIDTH
N_SNAKES, N_TEAM, N_BEANS = 6, 3, 5
N_ACTIONS = 4
START_LENGTH = 3
EPISODE_LIMIT = 200
EMPTY, BEAN, FIRST_SNAKE = 0, 1, 2

ROW, COL = np.divmod(np.arange(N_CELLS), WIDTH)
STEPS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])


def _torus_difference(size: int, place: np.ndarray) -> np.ndarray:
    """Return [200, 200] the shortest signed difference between the cells' coordinates `place` on a ring of `size`."""
    gap = place[None, :] - place[:, None]
    return np.where(np.abs(gap) > size // 2, gap - np.sign(gap) * size, gap).astype(np.int16)


def shifted(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return the cell that is `rows` [m] down and `cols` [m] right of each cell on the torus, [200, m]."""
    return (ROW[:, None] + rows) % HEIGHT * WIDTH + (COL[:, None] + cols) % WIDTH


NEXT_CELL = shifted(*STEPS.T)  # [200, 4]: the cell that each action leads to
# Differences from the first cell to the second on the torus; down and right are positive.
DOWN, RIGHT = _torus_difference(HEIGHT, ROW), _torus_difference(WIDTH, COL)
TORUS_DISTANCE = np.hypot(DOWN, RIGHT).astype(np.float32)
TORUS_STEPS = (np.abs(DOWN) + np.abs(RIGHT)).astype(np.int16)
# Euclidean distance on the plain board, which the public scripts use; its square has the same order and is exact.
PLAIN_SQUARE = ((ROW[:, None] - ROW) ** 2 + (COL[:, None] - COL) ** 2).astype(np.int32)
PLAIN_DISTANCE = np.sqrt(PLAIN_SQUARE)


def pair_lookup(table: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return table[start, end] of a [200, 200] `table` for broadcast cells; faster than indexing with two arrays."""
    return table.reshape(-1).take(start * N_CELLS + end)


def of_team(values: np.ndarray, team: np.ndarray) -> np.ndarray:
    """Return the `values` [B, 6] of the snakes of `team` [B] (0 or 1), [B, 3]."""
    return values.reshape(-1, 2, N_TEAM)[np.arange(len(values)), team]


def own_first(values: np.ndarray, team: np.ndarray) -> np.ndarray:
    """Return the `values` [B, 6] of the snakes of `team` [B], then those of the other team, [B, 6]."""
    swapped = values.reshape(-1, 2, N_TEAM)[:, ::-1].reshape(values.shape)
    return np.where(team[:, None] == 0, values, swapped)


F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Board:
    """The public state of B boards; its arrays belong to the engine and are valid until its next call.

    Attributes:
        codes: [B, 200] uint8. heads, tails: [B, 6] cells. lengths: [B, 6]. directions: [B, 6], of the last moves.
        beans: [B, 5] cells, oldest first; -1 where a full board has no room. bean_slots: [B, 5], a number 0 to 4 that
            each of these beans keeps until it is eaten.
        keys: [B] uint64, for random numbers. steps: [B], played so far.
        kernels: by name, compiled functions that compute the same as those that are decorated with `by_kernel`.
    """

    kernels: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    codes: np.ndarray
    heads: np.ndarray
    tails: np.ndarray
    lengths: np.ndarray
    directions: np.ndarray
    beans: np.ndarray
    bean_slots: np.ndarray
    keys: np.ndarray
    steps: np.ndarray

    def __len__(self) -> int:
        """Return B."""
        return len(self.codes)

    def rows(self, which: np.ndarray) -> Board:
        """Return the boards with the numbers `which` [k]."""
        return type(self)(**{part.name: getattr(self, part.name)[which] for part in fields(self)})

    def codes_at(self, cells: np.ndarray) -> np.ndarray:
        """Return the codes of `cells` [B, ...], uint8."""
        offset = N_CELLS * np.arange(len(cells)).reshape(-1, *[1] * (cells.ndim - 1))
        return self.codes.reshape(-1).take(offset + cells)

    def beans_by_slot(self) -> np.ndarray:
        """Return the cells of the beans ordered by their slot, [B, 5]."""
        placed = np.empty_like(self.beans)
        np.put_along_axis(placed, self.bean_slots, self.beans, 1)
        return placed

    def random_bits(self, first: int, n: int) -> np.ndarray:
        """Return random uint64 [B, n] of the current step for players, with the indices from `first` (0 to 4095) on."""
        return draw(self.keys[:, None], self.steps[:, None] + 1, PLAYERS + first + np.arange(n))


def by_kernel(name: str) -> Callable[[F], F]:
    """Decorate a function of a board: where the board has a kernel of that name, it computes the same, faster."""

    def decorate(reference: F) -> F:
        @wraps(reference)
        def choose(board: Board, *args: Any, **kwargs: Any) -> Any:
            return board.kernels.get(name, reference)(board, *args, **kwargs)

        return cast(F, choose)

    return decorate
