"""Opponents, which play the other team: scripts, frozen networks, and the pool from which each episode draws one.

Strength as measured (benchmarks/results/snakes_table.json): random < l1 < l3 < l4 < evasion < greedy. The scripts use
plain Euclidean distances, not those of the torus, as the public ones do; ties: up, down, left, right, and oldest bean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from omagd.envs.snakes.board import (
    FIRST_SNAKE,
    N_ACTIONS,
    N_TEAM,
    NEXT_CELL,
    PLAIN_SQUARE,
    Board,
    by_kernel,
    of_team,
    pair_lookup,
)
from omagd.envs.snakes.draws import OPPONENT, below, draw, uniform01
from omagd.envs.snakes.observer import Observer
from omagd.utils.errors import UserError, unknown_name

_DRAWS = 16  # indices of a network's draws begin here, after those of the random script
FAR = 10_000  # larger than any squared distance


class NetworkOpponent:
    """A feed-forward network with ReLU, shared by the three snakes; its outputs are values or logits.

    Args:
        name: unique among opponents. layers: (weight [out, in], bias [out]) as in torch's `Linear`.
        observer: its observations. sample: draw from the softmax of its outputs, else take the largest.

    Errors: ValueError if the layers do not fit each other, the observation, or four actions.
    """

    def __init__(
        self, name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], observer: Observer, sample: bool = False
    ) -> None:
        self.name, self.observer, self.sample = name, observer, sample
        self.layers = [(np.array(weight, np.float32), np.array(bias, np.float32)) for weight, bias in layers]
        sizes = [observer.obs_dim, *(len(bias) for _, bias in self.layers)]
        shapes = [weight.shape for weight, _ in self.layers]
        if sizes[-1] != N_ACTIONS or shapes != list(zip(sizes[1:], sizes[:-1], strict=True)):
            raise ValueError(f"opponent {name}: layers {shapes} do not map {sizes[0]} features to {N_ACTIONS} actions")

    def __eq__(self, other: object) -> bool:
        """Whether two opponents have the same name and weights, as one that was saved and restored has."""
        return isinstance(other, NetworkOpponent) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self.name)

    def _facts(self) -> tuple[object, ...]:
        return self.name, self.observer, self.sample, [part.tobytes() for layer in self.layers for part in layer]

    def act(self, board: Board, team: np.ndarray) -> np.ndarray:
        """Return actions [B, 3]."""
        values, _ = self.observer.observe(board, team)
        for i, (weight, bias) in enumerate(self.layers):
            values = (values if i == 0 else np.maximum(values, 0)) @ weight.T + bias
        if self.sample:  # argmax of logits + Gumbel noise is a draw from the softmax
            bits = board.random_bits(_DRAWS, N_TEAM * N_ACTIONS)
            uniform = ((bits >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
            values = values - np.log(-np.log(uniform * (1 - 2.0**-40))).reshape(values.shape)
        return values.argmax(2)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as arrays and plain values."""
        layers = [(weight.copy(), bias.copy()) for weight, bias in self.layers]
        return {"name": self.name, "layers": layers, "observer": asdict(self.observer), "sample": self.sample}

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any]) -> NetworkOpponent:
        """Return the opponent of a `snapshot`."""
        return cls(snapshot["name"], snapshot["layers"], Observer(**snapshot["observer"]), snapshot["sample"])


class OpponentPool:
    """Known opponents with their weights, and the opponent of each slot's episode.

    Args:
        n_slots: B. first: the only opponent until `set` is called.
    """

    def __init__(self, n_slots: int, first: str | Opponent) -> None:
        self._known: list[Opponent] = []
        self._upto = np.ones(1)
        self.numbers = np.zeros(n_slots, np.int64)
        self.set([first])

    def set(self, opponents: Sequence[str | Opponent], weights: Sequence[float] | None = None) -> None:
        """Draw the opponents of new episodes from `opponents`; running episodes keep theirs.

        Args:
            opponents: names of scripts, or opponents. weights: relative frequencies; None: equal.

        Errors: UserError for an unknown name, a name of two opponents, or invalid weights.
        """
        pool = [opponent(which) for which in opponents]
        share = np.ones(len(pool)) if weights is None else np.asarray(weights, np.float64)
        if not pool or share.shape != (len(pool),) or not (np.isfinite(share).all() and share.min() >= 0 < share.sum()):
            fix = "give one number for each opponent, none negative, not all 0"
            raise UserError(f"opponents={[o.name for o in pool]}: weights={share.tolist()}: {fix}")
        busy = [self._known[number] for number in np.unique(self.numbers)] if self._known else []
        known = pool + [one for one in busy if one not in pool]
        names = [one.name for one in known]
        if len(set(names)) < len(names):
            raise UserError(f"opponents={names}: two opponents have the same name; rename one")
        if self._known:
            self.numbers = np.array([known.index(self._known[number]) for number in self.numbers])
        self._known, self._upto = known, share.cumsum() / share.sum()

    def choose(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Draw an opponent for the new episodes of the slots `rows` [k] by their `keys` [k]."""
        uniform = uniform01(draw(keys, np.zeros(len(keys)), OPPONENT))
        self.numbers[rows] = np.minimum(np.searchsorted(self._upto, uniform, side="right"), len(self._upto) - 1)

    def act(self, board: Board, rows: np.ndarray, team: np.ndarray) -> np.ndarray:
        """Return the actions [k, 3] of the opponents in the slots `rows` [k], which play `team` [k]."""
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
        """Return names, weights, the opponent of each slot, and the networks."""
        networks = [one.snapshot() for one in self._known if isinstance(one, NetworkOpponent)]
        names = [one.name for one in self._known]
        return {"names": names, "upto": self._upto.copy(), "numbers": self.numbers.copy(), "networks": networks}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot`. An opponent that is neither script nor network must be in this pool already.

        Errors: ValueError if it is not.
        """
        there: dict[str, Opponent] = {one.name: one for one in self._known}
        there.update({kept["name"]: NetworkOpponent.from_snapshot(kept) for kept in snapshot["networks"]})
        there.update(SCRIPTS)
        missing = [name for name in snapshot["names"] if name not in there]
        if missing:
            raise ValueError(
                f"snakes_3v3: unknown opponents {missing} in the snapshot; call set_opponents with them first"
            )
        self._known = [there[name] for name in snapshot["names"]]
        self._upto, self.numbers = np.array(snapshot["upto"]), np.array(snapshot["numbers"])


@runtime_checkable
class Opponent(Protocol):
    """Interface of opponents: actions of a team, a function of the board alone.

    Attributes:
        name: in results and snapshots; unique in a pool.
    """

    name: str

    def act(self, board: Board, team: np.ndarray) -> np.ndarray:
        """Return actions [B, 3] for the snakes of `team` [B] (0 or 1) on `board`, in index order."""
        ...


@dataclass
class Script:
    """A scripted opponent: its name, and the function from board and team to actions."""

    name: str
    act: Callable[[Board, np.ndarray], np.ndarray]


def _random(board: Board, team: np.ndarray) -> np.ndarray:
    """Draw any of the four actions, reversals included."""
    return of_team(below(board.random_bits(0, 2 * N_TEAM), N_ACTIONS), team)


def _nearest_beans(board: Board, heads: np.ndarray) -> np.ndarray:
    """Return the cell of the bean nearest to each head, [B, 3]."""
    far = pair_lookup(PLAIN_SQUARE, heads[:, :, None], board.beans[:, None, :])
    return np.take_along_axis(board.beans, far.argmin(2), 1)


def _shared_beans(board: Board, heads: np.ndarray) -> np.ndarray:
    """Return a bean for each head, [B, 3]: in index order, the nearest one that no earlier snake has taken."""
    far = pair_lookup(PLAIN_SQUARE, heads[:, :, None], board.beans[:, None, :])
    chosen, rows = np.empty(heads.shape, np.int64), np.arange(len(heads))
    for i in range(N_TEAM):
        chosen[:, i] = far[:, i].argmin(1)
        far[rows, :, chosen[:, i]] = FAR
    return np.take_along_axis(board.beans, chosen, 1)


def _options(
    board: Board, team: np.ndarray, beans: Callable[[Board, np.ndarray], np.ndarray] = _nearest_beans
) -> tuple[np.ndarray, ...]:
    """Return the neighbour cells of the team's heads, whether a snake is on them, and squared distances to the beans.

    All are [B, 3, 4]. beans: chooses the bean of each head.
    """
    heads = of_team(board.heads, team)
    cells = NEXT_CELL[heads]
    far = pair_lookup(PLAIN_SQUARE, cells, beans(board, heads)[:, :, None])
    return cells, board.codes_at(cells) >= FIRST_SNAKE, far


def _greedy(board: Board, team: np.ndarray) -> np.ndarray:
    """Assign the beans; step to the free cell nearest to the own bean."""
    _, blocked, far = _options(board, team, _shared_beans)
    return np.where(blocked, FAR, far).argmin(2)


def _toward_nearest(penalty: float) -> Callable[[Board, np.ndarray], np.ndarray]:
    """Return a script that steps towards the nearest bean; an occupied cell costs `penalty` cells more."""

    def choose(board: Board, team: np.ndarray) -> np.ndarray:
        _, blocked, far = _options(board, team)
        return (np.sqrt(far) + penalty * blocked).argmin(2)

    return choose


def _evasion(board: Board, team: np.ndarray) -> np.ndarray:
    """Step to the cell nearest to the nearest bean, of those that are free and have a free neighbour."""
    cells, blocked, far = _options(board, team)
    onward = board.codes_at(NEXT_CELL[cells]) < FIRST_SNAKE
    return (far + FAR * blocked + FAR * ~onward.any(3)).argmin(2)


PENALTIES = {"l1": 0.0, "l3": 5.0, "l4": 1000.0}
_ACTS = {"random": _random, **{name: _toward_nearest(cells) for name, cells in PENALTIES.items()}}
_ACTS |= {"evasion": _evasion, "greedy": _greedy}
SCRIPTS = {name: Script(name, by_kernel(name)(act)) for name, act in _ACTS.items()}

LADDERS = {
    "measured": ("random", "l1", "l3", "l4", "greedy"),
    "published": ("random", "l1", "greedy", "l3", "l4"),
}
"""Opponents by level: by measured strength, and as published. `enable_opponent_evasion` adds evasion."""


def opponent(which: str | Opponent) -> Opponent:
    """Return the script of that name, or `which` if it is an opponent. Errors: UserError for an unknown name."""
    if not isinstance(which, str):
        return which
    if which not in SCRIPTS:
        raise unknown_name("opponent", which, SCRIPTS)
    return SCRIPTS[which]
