"""The rules of the public 3v3 snakes engine as kernels over boards, and the engine that plays them.

A step: reversals are replaced by a random other direction; heads advance, beans are eaten, tails follow; heads on a
body or on another head die; the dead return in index order; beans are refilled to five. A game ends after 200 steps, or
if a snake or a bean finds no room. docs/snakes.md has the rules; tests/test_snakes_engine.py compares every step of
1,040 recorded games of the public engine.

A snake is stored in a ring buffer of cells: `ring[b, i, top]` is its head, `ring[b, i, top - j]` its j-th segment. A
move writes one cell, whatever the length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from omagd.envs.snakes.board import (
    BEAN,
    COL,
    EMPTY,
    EPISODE_LIMIT,
    FIRST_SNAKE,
    N_ACTIONS,
    N_BEANS,
    N_CELLS,
    N_SNAKES,
    NEXT_CELL,
    ROW,
    START_LENGTH,
    Array,
    Board,
    function,
    kernel,
)
from omagd.envs.snakes.draws import below, draw, draw_bean, key_of
from omagd.utils.compiling import as_kernels_take

RING = 256  # length of a snake's ring buffer; a snake has at most 200 cells
SEARCH = NEXT_CELL[:, [3, 1, 0, 2]]  # neighbours in the order of the public breadth-first search
DIRECTION, STARTS, NOWHERE = np.uint64(3), 256, -1


class Bodies(NamedTuple):
    """What only the engine knows: ring [B, 6, 256] uint8, top [B, 6] int64, stuck [B] bool."""

    ring: Array
    top: Array
    stuck: Array


class Recorded(NamedTuple):
    """Draws that were recorded and are played instead of random ones; empty arrays: random ones.

    Attributes:
        starts: [B, 6, 2], cell of the tail and direction. turns, beans: of all boards, in the order in which they are
            needed. next_turn, next_bean: [B], where each board's next ones are. All int64.
    """

    starts: Array
    turns: Array
    beans: Array
    next_turn: Array
    next_bean: Array


class StepOutcome(NamedTuple):
    """The result of a step on k boards.

    Attributes:
        raw: [k, 6] int64, 1 for a bean, -(length - 3) for a death, the length before this step's bean.
        hit: [k, 6] bool, who died. ate: [k, 6] bool. over: [k] bool, whether the game has ended.
    """

    raw: Array
    hit: Array
    ate: Array
    over: Array


@function
def put(g: Board, s: Bodies, b: int, snake: int, head: int, neck: int, tail: int, direction: int) -> None:
    """Put a new snake on three cells."""
    code = np.uint8(FIRST_SNAKE + snake)
    g.codes[b, head], g.codes[b, neck], g.codes[b, tail] = code, code, code
    ring = s.ring[b, snake]
    ring[0], ring[1], ring[2] = tail, neck, head
    s.top[b, snake], g.lengths[b, snake] = START_LENGTH - 1, START_LENGTH
    g.heads[b, snake], g.tails[b, snake], g.directions[b, snake] = head, tail, direction


@function
def start(g: Board, s: Bodies, recorded: Recorded, b: int, snake: int) -> None:
    """Place a snake on three cells in a line; draw again until all are empty."""
    codes, attempt = g.codes[b], 0
    while True:
        if len(recorded.starts):
            tail, direction = recorded.starts[b, snake, 0], recorded.starts[b, snake, 1]
        else:
            value = draw(g.keys[b], 0, STARTS * snake + attempt % STARTS)
            tail, direction = below(value, N_CELLS), np.int64(value & DIRECTION)
        neck = NEXT_CELL[tail, direction]
        head = NEXT_CELL[neck, direction]
        if codes[tail] == EMPTY and codes[neck] == EMPTY and codes[head] == EMPTY:
            put(g, s, b, snake, head, neck, tail, direction)
            return
        attempt += 1


@function
def refill(g: Board, recorded: Recorded, b: int, moment: int) -> None:
    """Close the gaps of eaten beans, and add beans until there are five or no cell is empty."""
    beans, slots, codes = g.beans[b], g.bean_slots[b], g.codes[b]
    count = 0
    for place in range(N_BEANS):
        if beans[place] >= 0:
            cell, slot = beans[place], slots[place]
            for later in range(place, count, -1):  # the gaps between keep their order behind it
                beans[later], slots[later] = beans[later - 1], slots[later - 1]
            beans[count], slots[count] = cell, slot
            count += 1
    for place in range(count, N_BEANS):
        n_free = 0
        for cell in range(N_CELLS):
            n_free += codes[cell] == EMPTY
        if n_free:
            if len(recorded.starts):
                cell = recorded.beans[recorded.next_bean[b]]
                recorded.next_bean[b] += 1
            else:
                cell = draw_bean(codes, g.keys[b], moment, place, n_free)
            beans[place], codes[cell] = cell, BEAN


@function
def turn(g: Board, recorded: Recorded, b: int, snake: int, moment: int, action: int) -> int:
    """Return the direction in which a snake moves: its action, or what replaces a reversal."""
    back = g.directions[b, snake] ^ 1
    if action != back:
        return action
    if len(recorded.starts):
        recorded.next_turn[b] += 1
        return recorded.turns[recorded.next_turn[b] - 1]
    third = below(draw(g.keys[b], moment, snake), 3)
    return third + (third >= back)


@function
def advance(g: Board, s: Bodies, recorded: Recorded, actions: Array, b: int, ate: Array) -> None:
    """Move all heads, let them eat [6], and let the tails follow. New heads are not drawn yet."""
    heads, beans, codes, moment = g.heads[b], g.beans[b], g.codes[b], g.steps[b] + 1
    for i in range(N_SNAKES):
        direction = turn(g, recorded, b, i, moment, actions[i])
        heads[i], g.directions[b, i] = NEXT_CELL[heads[i], direction], direction
        s.top[b, i] = (s.top[b, i] + 1) % RING
        s.ring[b, i, s.top[b, i]] = heads[i]
        ate[i] = False
    for bean in range(N_BEANS):
        for i in range(N_SNAKES):
            if heads[i] == beans[bean]:
                ate[i], beans[bean], codes[heads[i]] = True, NOWHERE, EMPTY
                break
    for i in range(N_SNAKES):
        if ate[i]:
            g.lengths[b, i] += 1
        else:
            codes[s.ring[b, i, (s.top[b, i] - g.lengths[b, i]) % RING]] = EMPTY


@function
def collide(codes: Array, heads: Array, i: int) -> bool:
    """Return whether a head is on a body or on another head."""
    for j in range(N_SNAKES):
        if j != i and heads[j] == heads[i]:
            return True
    return codes[heads[i]] >= FIRST_SNAKE


@function
def respawn(g: Board, s: Bodies, b: int, snake: int) -> None:
    """Let a snake return at the first position with room; without room its length is 0 and the game is over.

    The public rule: scan the cells row by row for the first empty one from which a breadth-first search reaches three
    empty cells: two neighbours of the start, or one and the next cell beyond it. Around a corner the start is the
    middle of the body.
    """
    codes = g.codes[b]
    for cell in range(N_CELLS):
        if codes[cell] == EMPTY:
            first, third = NOWHERE, NOWHERE
            for way in range(4):
                near = SEARCH[cell, way]
                if codes[near] == EMPTY:
                    if first == NOWHERE:
                        first = near
                    elif third == NOWHERE:
                        third = near
            corner = third != NOWHERE and (ROW[first] == ROW[cell]) != (ROW[third] == ROW[cell])
            if first != NOWHERE and third == NOWHERE:
                for way in range(4):
                    near = SEARCH[first, way]
                    if third == NOWHERE and codes[near] == EMPTY and near != cell:
                        third = near
            if third != NOWHERE:
                head, neck = (first, cell) if corner else (cell, first)
                put(g, s, b, snake, head, neck, third, facing(head, neck))
                return
    g.lengths[b, snake], s.stuck[b] = 0, True


@function
def facing(head: int, neck: int) -> int:
    """Return the direction of a new snake, as the public engine: across an edge of the torus it is reversed."""
    if ROW[head] == ROW[neck]:
        return 3 if COL[head] > COL[neck] else 2
    return 1 if ROW[head] > ROW[neck] else 0


@function
def bury(g: Board, s: Bodies, b: int, hit: Array) -> None:
    """Clear the bodies of those who were `hit` [6], then let them return in index order."""
    for i in range(N_SNAKES):
        if hit[i]:
            for segment in range(1, g.lengths[b, i]):
                g.codes[b, s.ring[b, i, (s.top[b, i] - segment) % RING]] = EMPTY
    for i in range(N_SNAKES):
        if hit[i]:
            respawn(g, s, b, i)


@function
def play_board(g: Board, s: Bodies, recorded: Recorded, actions: Array, b: int, out: StepOutcome, row: int) -> None:
    """Play one step of board `b`, and write its outcome at `row`."""
    hit, ate, any_hit, short = out.hit[row], out.ate[row], False, False
    advance(g, s, recorded, actions, b, ate)
    for i in range(N_SNAKES):
        hit[i] = collide(g.codes[b], g.heads[b], i)
        any_hit |= hit[i]
        out.raw[row, i] = START_LENGTH + ate[i] - g.lengths[b, i] if hit[i] else np.int64(ate[i])
    for i in range(N_SNAKES):
        if not hit[i]:
            g.codes[b, g.heads[b, i]] = FIRST_SNAKE + i
    if any_hit:
        bury(g, s, b, hit)
    total = 0
    for i in range(N_SNAKES):
        total += g.lengths[b, i]
        g.tails[b, i] = s.ring[b, i, (s.top[b, i] - g.lengths[b, i] + 1) % RING]
    for bean in range(N_BEANS):
        short |= g.beans[b, bean] < 0
    g.steps[b] += 1
    if short:
        refill(g, recorded, b, g.steps[b])
    out.over[row] = g.steps[b] >= EPISODE_LIMIT or total + N_BEANS > N_CELLS or s.stuck[b]


@kernel
def play(g: Board, s: Bodies, recorded: Recorded, actions: Array, rows: Array, out: StepOutcome) -> bool:
    """Play `actions` [k, 6] on the boards `rows` [k], unless one does not exist; return whether they were played."""
    for row in range(len(rows)):
        for i in range(N_SNAKES):
            if actions[row, i] < 0 or actions[row, i] >= N_ACTIONS:
                return False
    for row in range(len(rows)):
        play_board(g, s, recorded, actions[row], rows[row], out, row)
    return True


@kernel
def reset(g: Board, s: Bodies, recorded: Recorded, rows: Array, seeds: Array) -> None:
    """Start new games on the boards `rows` [k] from `seeds` [k]."""
    for row in range(len(rows)):
        b = rows[row]
        for cell in range(N_CELLS):
            g.codes[b, cell] = EMPTY
        g.keys[b], g.steps[b], s.stuck[b] = key_of(seeds[row]), 0, False
        for bean in range(N_BEANS):
            g.beans[b, bean], g.bean_slots[b, bean] = NOWHERE, bean
        for snake in range(N_SNAKES):
            start(g, s, recorded, b, snake)
        refill(g, recorded, b, 0)


def nothing_recorded() -> Recorded:
    """Return no recorded draws: games draw at random."""
    empty = np.zeros(0, np.int64)
    return Recorded(np.zeros((0, 6, 2), np.int64), empty, empty, empty, empty)


class Engine:
    """`n_boards` games side by side.

    Args:
        n_boards: B. recorded: draws of recorded games; None: random draws from the boards' keys.

    Attributes:
        board: the public state, always up to date.
    """

    def __init__(self, n_boards: int, recorded: Recorded | None = None) -> None:
        each = n_boards, N_SNAKES
        ring, top = np.zeros((*each, RING), np.uint8), np.zeros(each, np.int64)
        self._bodies = Bodies(ring, top, np.zeros(n_boards, bool))
        heads, tails, lengths, directions = np.zeros((4, *each), np.int64)
        self.board = Board(
            np.zeros((n_boards, N_CELLS), np.uint8), heads, tails, lengths, directions,
            beans=np.full((n_boards, N_BEANS), -1),
            bean_slots=np.tile(np.arange(N_BEANS), (n_boards, 1)),
            keys=np.zeros(n_boards, np.uint64),
            steps=np.zeros(n_boards, np.int64),
        )  # fmt: skip
        self._arrays = self.board, self._bodies, recorded or nothing_recorded()

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start new games on the boards `rows` [k] from `seeds` [k] (int64 ≥ 0)."""
        k = len(rows)
        chosen = as_kernels_take("rows", rows, np.int64, (k,))
        reset(*self._arrays, chosen, as_kernels_take("seeds", seeds, np.int64, (k,)))

    def step(self, actions: np.ndarray, rows: np.ndarray) -> StepOutcome:
        """Play `actions` [k, 6] on the boards `rows` [k], no board twice. Errors: ValueError for an unknown action."""
        k = len(rows)
        hit, ate = np.empty((2, k, N_SNAKES), bool)
        out = StepOutcome(np.empty((k, N_SNAKES), np.int64), hit, ate, np.empty(k, bool))
        chosen = as_kernels_take("actions", actions, np.int64, (k, N_SNAKES))
        if not play(*self._arrays, chosen, as_kernels_take("rows", rows, np.int64, (k,)), out):
            raise ValueError(f"actions of snakes are 0 to 3: {actions.tolist()}")
        return out

    def segments(self, row: int) -> list[list[int]]:
        """Return the cells of each snake on a board, head first."""
        ring, top = self._bodies.ring[row], self._bodies.top[row]
        lengths = self.board.lengths[row]
        return [ring[i, (top[i] - np.arange(lengths[i])) % RING].tolist() for i in range(N_SNAKES)]

    def snapshot(self) -> dict[str, Any]:
        """Return all games as arrays."""
        return {name: values.copy() for name, values in self._saved().items()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`."""
        for name, values in self._saved().items():
            values[:] = snapshot[name]

    def _saved(self) -> dict[str, np.ndarray]:
        return {**self._bodies._asdict(), **self.board._asdict()}
