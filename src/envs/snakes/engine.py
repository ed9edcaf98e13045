"""The rules of the public 3v3 snakes engine for many boards at once, without a loop over boards.

A step: reversals are replaced by a random other direction; heads advance, beans are eaten, tails follow; heads on a
body or on another head die; the dead return in index order; beans are refilled to five. A game ends after 200 steps, or
if a snake or a bean finds no room. docs/snakes.md has the rules; tests/test_snakes_engine.py compares every step of
1,040 recorded games of the public engine.

A snake is stored in a ring buffer of cells: `ring[b, i, top]` is its head, `ring[b, i, top - j]` its j-th segment. A
move writes one cell, whatever the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from omagd.envs.snakes.board import (
    BEAN,
    COL,
    EMPTY,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    N_BEANS,
    N_CELLS,
    N_SNAKES,
    NEXT_CELL,
    ROW,
    START_LENGTH,
    Board,
)
from omagd.envs.snakes.draws import Draws, keys_of

SEARCH = NEXT_CELL[:, [3, 1, 0, 2]]  # neighbours in the order of the public breadth-first search


def respawn(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the respawn position of one snake on each of k boards with `codes` [k, 200].

    The public rule: scan the cells row by row for the first empty one from which a breadth-first search reaches three
    empty cells. Returns cells [k, 3] head first, directions [k], found [k] bool; where not found, the others are
    undefined.
    """
    free = codes == EMPTY
    cells, found = np.zeros((len(codes), 3), np.int64), np.zeros(len(codes), bool)
    scan, left = free.copy(), np.arange(len(codes))
    while len(left):
        start = scan[left].argmax(1)
        scan[left, start] = False
        cells[left], found[left] = _search(free[left], start)
        left = left[~found[left]]
        left = left[scan[left].any(1)]
    return cells, _facing(cells), found


def _search(free: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first three cells of a breadth-first search from `start` [k], head first [k, 3]; exists [k].

    Two neighbours of the start, or one neighbour and the next cell beyond it. Around a corner the start is the middle
    of the body.
    """
    rows = np.arange(len(start))
    around = SEARCH[start]
    empty = free[rows[:, None], around] & free[rows, start][:, None]
    first = around[rows, empty.argmax(1)]
    empty[rows, empty.argmax(1)] = False
    beside = empty.any(1)
    second = around[rows, empty.argmax(1)]
    beyond = SEARCH[first]
    open_beyond = free[rows[:, None], beyond] & (beyond != start[:, None])
    third = np.where(beside, second, beyond[rows, open_beyond.argmax(1)])
    has_first = free[rows, start] & free[rows, first]
    corner = beside & ((ROW[first] == ROW[start]) != (ROW[third] == ROW[start]))
    head, neck = np.where(corner, first, start), np.where(corner, start, first)
    return np.stack([head, neck, third], 1), has_first & (beside | open_beyond.any(1))


def _facing(cells: np.ndarray) -> np.ndarray:
    """Return the directions [k] of new snakes on `cells` [k, 3].

    As in the public engine, coordinates are compared without the torus: across an edge the direction is reversed.
    """
    head, neck = cells[:, 0], cells[:, 1]
    vertical = np.where(ROW[head] > ROW[neck], 1, 0)
    return np.where(ROW[head] == ROW[neck], np.where(COL[head] > COL[neck], 3, 2), vertical)


RING = 256  # length of a snake's ring buffer; a snake has at most 200 cells
_SNAKES = np.arange(N_SNAKES)


@dataclass
class StepOutcome:
    """The result of a step on k boards.

    Attributes:
        raw: [k, 6], 1 for a bean, -(length - 3) for a death, the length before this step's bean.
        hit: [k, 6] bool, who died. ate: [k, 6] bool. over: [k] bool, whether the game has ended.
    """

    raw: np.ndarray
    hit: np.ndarray
    ate: np.ndarray
    over: np.ndarray


class Engine:
    """`n_boards` games side by side.

    Args:
        n_boards: B. draws: source of random numbers.

    Attributes:
        board: the public state, always up to date.
    """

    _saved: ClassVar[tuple[str, ...]] = ("ring", "top", "stuck")

    def __init__(self, n_boards: int, draws: Draws | None = None) -> None:
        self._draws = draws or Draws()
        self._ring = np.zeros((n_boards, N_SNAKES, RING), np.uint8)
        self._top = np.zeros((n_boards, N_SNAKES), np.int64)
        self._stuck = np.zeros(n_boards, bool)
        per_snake = {name: np.zeros((n_boards, N_SNAKES), np.int64) for name in ("heads", "tails", "lengths")}
        self.board = Board(
            codes=np.zeros((n_boards, N_CELLS), np.uint8),
            directions=np.zeros((n_boards, N_SNAKES), np.int64),
            beans=np.full((n_boards, N_BEANS), -1),
            bean_slots=np.tile(np.arange(N_BEANS), (n_boards, 1)),
            keys=np.zeros(n_boards, np.uint64),
            steps=np.zeros(n_boards, np.int64),
            **per_snake,
        )

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start new games on the boards `rows` [k] from `seeds` [k] (int64 ≥ 0)."""
        board = self.board
        board.codes[rows] = EMPTY
        board.keys[rows] = keys_of(seeds)
        board.steps[rows] = 0
        board.lengths[rows] = START_LENGTH
        board.beans[rows] = -1
        board.bean_slots[rows] = np.arange(N_BEANS)
        self._stuck[rows] = False
        for snake in range(N_SNAKES):
            self._start(rows, snake)
        self._refill(rows, np.zeros(len(rows), np.int64))

    def step(self, actions: np.ndarray, rows: np.ndarray) -> StepOutcome:
        """Play `actions` [k, 6] on the boards `rows` [k], no board twice."""
        board = self.board
        moments = board.steps[rows] + 1
        actions = self._without_reversals(actions, rows, moments)
        heads = NEXT_CELL[board.heads[rows], actions]
        top = (self._top[rows] + 1) % RING
        self._top[rows], board.directions[rows], board.heads[rows] = top, actions, heads
        self._ring.reshape(-1)[self._places(rows) + top] = heads
        ate = self._eat(heads, rows)
        lengths = self._move_tails(ate, top, rows)
        hit = self._collide(heads, rows)
        raw = np.where(hit, START_LENGTH + ate - lengths, ate)
        lived = np.flatnonzero(~hit)
        codes = board.codes.reshape(-1)
        codes[(rows[:, None] * N_CELLS + heads).reshape(-1)[lived]] = FIRST_SNAKE + lived % N_SNAKES
        if hit.any():
            self._remove(hit, rows)
            for snake in _SNAKES[hit.any(0)]:
                self._respawn(rows[hit[:, snake]], int(snake))
        board.tails[rows] = self._at(rows, self._top[rows] - board.lengths[rows] + 1)
        self._refill(rows, moments)
        board.steps[rows] = moments
        full = board.lengths[rows].sum(1) + N_BEANS > N_CELLS
        return StepOutcome(raw, hit, ate, (moments >= EPISODE_LIMIT) | full | self._stuck[rows])

    def segments(self, rows: np.ndarray) -> np.ndarray:
        """Return the bodies on the boards `rows`, head first: cells [k, 6, L], undefined beyond a snake's length."""
        longest = int(self.board.lengths[rows].max(initial=START_LENGTH))
        place = (self._top[rows][..., None] - np.arange(longest)) % RING
        return self._ring.reshape(-1)[self._places(rows)[..., None] + place]

    def snapshot(self) -> dict[str, Any]:
        """Return all games as arrays."""
        saved = {name: getattr(self, f"_{name}").copy() for name in self._saved}
        return {**saved, **{name: values.copy() for name, values in vars(self.board).items()}}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`."""
        for name in self._saved:
            getattr(self, f"_{name}")[:] = snapshot[name]
        for name, values in vars(self.board).items():
            values[:] = snapshot[name]

    def _at(self, rows: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the cells at `place` [k, 6] in the rings of the snakes on the boards `rows`."""
        return self._ring.reshape(-1)[self._places(rows) + place % RING]

    def _places(self, rows: np.ndarray) -> np.ndarray:
        """Return the offset of each snake's ring in the flattened rings, [k, 6]."""
        return (rows[:, None] * N_SNAKES + _SNAKES) * RING

    def _start(self, rows: np.ndarray, snake: int) -> None:
        """Place `snake` on three cells in a line on the boards `rows`; draw again until all are empty."""
        board, left, attempt = self.board, rows, 0
        while len(left):
            tail, direction = self._draws.start(left, board.keys[left], snake, attempt)
            neck = NEXT_CELL[tail, direction]
            cells = np.stack([NEXT_CELL[neck, direction], neck, tail], 1)
            fits = (board.codes[left[:, None], cells] == EMPTY).all(1)
            self._place(left[fits], snake, cells[fits], direction[fits])
            left, attempt = left[~fits], attempt + 1

    def _place(self, rows: np.ndarray, snake: int, cells: np.ndarray, directions: np.ndarray) -> None:
        """Put `snake` on `cells` [k, 3], head first."""
        board = self.board
        board.codes[rows[:, None], cells] = FIRST_SNAKE + snake
        self._ring[rows, snake, :3] = cells[:, ::-1]
        self._top[rows, snake] = START_LENGTH - 1
        board.lengths[rows, snake] = START_LENGTH
        board.directions[rows, snake] = directions
        board.heads[rows, snake], board.tails[rows, snake] = cells[:, 0], cells[:, 2]

    def _without_reversals(self, actions: np.ndarray, rows: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """Return `actions` [k, 6] with reversals replaced."""
        directions = self.board.directions[rows]
        where, snakes = np.nonzero(actions == directions ^ 1)
        actions = actions.astype(np.int64)
        if len(where):
            now = directions[where, snakes]
            keys = self.board.keys[rows[where]]
            actions[where, snakes] = self._draws.turn(rows[where], keys, moments[where], snakes, now)
        return actions

    def _eat(self, heads: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Remove the beans under `heads`; return who ate, [k, 6] bool. A contested bean goes to the lower index."""
        board = self.board
        ate = np.zeros(heads.shape, bool)
        match = np.flatnonzero(heads[:, :, None] == board.beans[rows][:, None, :])
        if len(match):
            where, bean = match // (N_SNAKES * N_BEANS), match % N_BEANS
            _, first = np.unique(where * N_BEANS + bean, return_index=True)
            where, bean, snake = where[first], bean[first], match[first] // N_BEANS % N_SNAKES
            ate[where, snake] = True
            board.codes[rows[where], heads[where, snake]] = EMPTY
            board.beans[rows[where], bean] = -1
        return ate

    def _move_tails(self, ate: np.ndarray, top: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Clear the tail cells of snakes that did not eat, grow the others; return the lengths [k, 6]."""
        board = self.board
        lengths = board.lengths[rows]
        tails = self._at(rows, top - lengths)
        board.codes.reshape(-1)[(rows[:, None] * N_CELLS + tails)[~ate]] = EMPTY
        lengths += ate
        board.lengths[rows] = lengths
        return lengths

    def _collide(self, heads: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return who dies, [k, 6] bool: a head on a body or on another head. New heads are not in the codes yet."""
        on_body = self.board.codes.reshape(-1)[rows[:, None] * N_CELLS + heads] >= FIRST_SNAKE
        return on_body | ((heads[:, :, None] == heads[:, None, :]).sum(2) > 1)

    def _remove(self, hit: np.ndarray, rows: np.ndarray) -> None:
        """Clear the bodies of the snakes that were `hit` [k, 6], except their heads, which were never drawn."""
        where, snakes = np.nonzero(hit)
        boards = rows[where]
        count = self.board.lengths[boards, snakes] - 1
        each = np.repeat(np.arange(len(boards)), count)
        segment = np.arange(len(each)) - np.repeat(count.cumsum() - count, count) + 1
        place = (self._top[boards, snakes][each] - segment) % RING
        cells = self._ring[boards[each], snakes[each], place]
        self.board.codes[boards[each], cells] = EMPTY

    def _respawn(self, rows: np.ndarray, snake: int) -> None:
        """Respawn `snake` on the boards `rows`; without room its length is 0 and the game is over."""
        cells, directions, found = respawn(self.board.codes[rows])
        self._place(rows[found], snake, cells[found], directions[found])
        self.board.lengths[rows[~found], snake] = 0
        self._stuck[rows[~found]] = True

    def _refill(self, rows: np.ndarray, moments: np.ndarray) -> None:
        """Add beans until there are five; new ones are last in the list."""
        board = self.board
        short = (board.beans[rows] < 0).any(1)
        rows, moments = rows[short], moments[short]
        if not len(rows):
            return
        order = np.argsort(board.beans[rows] < 0, axis=1, kind="stable")
        beans = np.take_along_axis(board.beans[rows], order, 1)
        board.beans[rows] = beans
        board.bean_slots[rows] = np.take_along_axis(board.bean_slots[rows], order, 1)
        for place in range(int((beans >= 0).sum(1).min()), N_BEANS):
            needs = board.beans[rows, place] < 0
            free = board.codes[rows[needs]] == EMPTY
            needs[needs] = free.any(1)
            free, some = free[free.any(1)], rows[needs]
            cells = self._draws.bean(some, board.keys[some], moments[needs], place, free)
            board.beans[some, place] = cells
            board.codes[some, cells] = BEAN
