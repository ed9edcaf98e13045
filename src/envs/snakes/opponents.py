"""Who plays the other team: a small registry of scripts, and the protocol that a frozen earlier self keeps as well.

Strength as measured (benchmarks/results/snakes_table.json): random < l1 < l3 < l4 < evasion < greedy. Distances are
Euclidean and do not go around the edges, as in the public scripts; ties: up, down, left, right, and the oldest bean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from omagd.envs.snakes.board import (
    FIRST_SNAKE,
    N_ACTIONS,
    N_TEAM,
    NEXT_CELL,
    PLAIN_DISTANCE,
    PLAIN_SQUARE,
    Board,
    between,
)
from omagd.envs.snakes.chance import below
from omagd.utils.errors import UserError, nearest

_FAR = 10_000


@runtime_checkable
class Opponent(Protocol):
    """Anything that chooses for a team; its choice may depend on nothing but the board.

    Attributes:
        name: for results and snapshots; unique in a pool.
    """

    name: str

    def act(self, board: Board, team: np.ndarray) -> np.ndarray:
        """Return actions [B, 3] for the snakes of `team` [B] (0 or 1) on `board`, in index order."""
        ...


class Script:
    """A scripted opponent: a name and a function."""

    def __init__(self, name: str, choose: Callable[[Board, np.ndarray], np.ndarray]) -> None:
        self.name, self._choose = name, choose

    def act(self, board: Board, team: np.ndarray) -> np.ndarray:
        """Return actions [B, 3] for the snakes of `team` [B]."""
        return self._choose(board, team)


def _random(board: Board, team: np.ndarray) -> np.ndarray:
    """Draw any of the four, reversals too."""
    draws = [below(board.chance(i), N_ACTIONS) for i in range(2 * N_TEAM)]
    return board.of_team(np.stack(draws, 1), team)


def _nearest_beans(board: Board, heads: np.ndarray) -> np.ndarray:
    """Return [B, 3] the cell of the bean nearest to each head."""
    far = between(PLAIN_SQUARE, heads[:, :, None], board.beans[:, None, :])
    return np.take_along_axis(board.beans, far.argmin(2), 1)


def _shared_beans(board: Board, heads: np.ndarray) -> np.ndarray:
    """Return [B, 3] a bean for each head: in order, the nearest that none before has taken."""
    far = between(PLAIN_SQUARE, heads[:, :, None], board.beans[:, None, :])
    chosen, rows = np.empty(heads.shape, np.int64), np.arange(len(heads))
    for i in range(N_TEAM):
        chosen[:, i] = far[:, i].argmin(1)
        far[rows, :, chosen[:, i]] = _FAR
    return np.take_along_axis(board.beans, chosen, 1)


def _steps(board: Board, heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells around the heads [B, 3, 4], and whether a snake holds them."""
    cells = NEXT_CELL[heads]
    return cells, board.codes_at(cells) >= FIRST_SNAKE


def _greedy(board: Board, team: np.ndarray) -> np.ndarray:
    """Share the beans out; step to the free cell nearest to one's own."""
    heads = board.of_team(board.heads, team)
    cells, blocked = _steps(board, heads)
    far = between(PLAIN_SQUARE, cells, _shared_beans(board, heads)[:, :, None])
    return np.where(blocked, _FAR, far).argmin(2)


def _toward_nearest(penalty: float) -> Callable[[Board, np.ndarray], np.ndarray]:
    """Return a script that steps toward the nearest bean; a cell that is held costs `penalty` cells more."""

    def choose(board: Board, team: np.ndarray) -> np.ndarray:
        heads = board.of_team(board.heads, team)
        cells, blocked = _steps(board, heads)
        far = between(PLAIN_DISTANCE, cells, _nearest_beans(board, heads)[:, :, None])
        return (far + penalty * blocked).argmin(2)

    return choose


def _evasion(board: Board, team: np.ndarray) -> np.ndarray:
    """Of the free cells from which a second free step leads on, take the one nearest to the nearest bean."""
    heads = board.of_team(board.heads, team)
    cells, blocked = _steps(board, heads)
    onward = board.codes_at(NEXT_CELL[cells]) < FIRST_SNAKE
    far = between(PLAIN_SQUARE, cells, _nearest_beans(board, heads)[:, :, None])
    return (far + _FAR * blocked + _FAR * ~onward.any(3)).argmin(2)


SCRIPTS: dict[str, Script] = {
    name: Script(name, choose)
    for name, choose in (
        ("random", _random),
        ("l1", _toward_nearest(0.0)),
        ("l3", _toward_nearest(5.0)),
        ("l4", _toward_nearest(1000.0)),
        ("evasion", _evasion),
        ("greedy", _greedy),
    )
}

LADDERS = {
    "measured": ("random", "l1", "l3", "l4", "greedy"),
    "published": ("random", "l1", "greedy", "l3", "l4"),
}
"""Opponents by level: in order of their measured strength, and as published. Evasion comes in by a key of its own."""


def opponent(which: str | Opponent) -> Opponent:
    """Return the script of that name, or `which` itself if it is an opponent. Errors: UserError for other names."""
    if not isinstance(which, str):
        return which
    if which not in SCRIPTS:
        raise UserError(
            f"opponent={which}: no such opponent.{nearest(which, list(SCRIPTS))}", f"known: {', '.join(SCRIPTS)}"
        )
    return SCRIPTS[which]
