"""Which opponent plays which slot's episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omagd.envs.snakes.board import Board
from omagd.envs.snakes.chance import OPPONENT, draw
from omagd.envs.snakes.network_opponent import NetworkOpponent
from omagd.envs.snakes.opponents import SCRIPTS, Opponent, opponent
from omagd.utils.errors import UserError


class OpponentPool:
    """Opponents, how often each is drawn, and whom each slot's episode has drawn.

    Args:
        n_slots: B. first: the only opponent until `set`.
    """

    def __init__(self, n_slots: int, first: str | Opponent) -> None:
        self._known: list[Opponent] = []
        self._upto = np.ones(1)
        self.numbers = np.zeros(n_slots, np.int64)
        self.set([first])

    def set(self, opponents: Sequence[str | Opponent], weights: Sequence[float] | None = None) -> None:
        """Draw the opponents of episodes that begin from now on from `opponents`; those under way go on.

        Args:
            opponents: names of scripts, or opponents. weights: how often each is drawn, in relation; None for equally.

        Errors: UserError for an unknown name, one that stands for two opponents, or weights that are none.
        """
        pool = [opponent(which) for which in opponents]
        share = np.ones(len(pool)) if weights is None else np.asarray(weights, np.float64)
        if not pool or share.shape != (len(pool),) or not (np.isfinite(share).all() and share.min() >= 0 < share.sum()):
            raise UserError(f"opponents={[o.name for o in pool]}: weights={share.tolist()} are no shares of them")
        busy = [self._known[number] for number in np.unique(self.numbers)] if self._known else []
        known = pool + [one for one in busy if one not in pool]
        names = [one.name for one in known]
        if len(set(names)) < len(names):
            raise UserError(f"opponents={names}: one name for two opponents; give each its own")
        if self._known:
            self.numbers = np.array([known.index(self._known[number]) for number in self.numbers])
        self._known, self._upto = known, share.cumsum() / share.sum()

    def choose(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Draw an opponent for the episodes that begin in the slots `rows` [k], by their `keys` [k]."""
        uniform = (draw(keys, np.zeros(len(keys)), OPPONENT) >> np.uint64(11)) * 2.0**-53
        self.numbers[rows] = np.minimum(np.searchsorted(self._upto, uniform, side="right"), len(self._upto) - 1)

    def act(self, board: Board, rows: np.ndarray, team: np.ndarray) -> np.ndarray:
        """Return actions [k, 3] of the opponents of the slots `rows` [k], who play `team` [k]."""
        numbers = self.numbers[rows]
        playing = np.unique(numbers)
        if len(playing) == 1:
            return self._known[playing[0]].act(board if len(rows) == len(board) else board.rows(rows), team)
        actions = np.empty((len(rows), 3), np.int64)
        for number in playing:
            some = numbers == number
            actions[some] = self._known[number].act(board.rows(rows[some]), team[some])
        return actions

    def names(self) -> list[str]:
        """Return the name of each slot's opponent."""
        return [self._known[number].name for number in self.numbers]

    def snapshot(self) -> dict[str, Any]:
        """Return names, shares, whom each slot has, and the networks' arrays."""
        networks = [one.snapshot() for one in self._known if isinstance(one, NetworkOpponent)]
        names = [one.name for one in self._known]
        return {"names": names, "upto": self._upto.copy(), "numbers": self.numbers.copy(), "networks": networks}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`; an opponent that is neither script nor network must be in this pool by its name.

        Errors: ValueError where it is not.
        """
        there: dict[str, Opponent] = {one.name: one for one in self._known}
        there.update({kept["name"]: NetworkOpponent.from_snapshot(kept) for kept in snapshot["networks"]})
        there.update(SCRIPTS)
        missing = [name for name in snapshot["names"] if name not in there]
        if missing:
            raise ValueError(f"snakes_3v3: the snapshot's opponents {missing} are not here: set_opponents first")
        self._known = [there[name] for name in snapshot["names"]]
        self._upto, self.numbers = np.array(snapshot["upto"]), np.array(snapshot["numbers"])
