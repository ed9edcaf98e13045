"""Opponents, which play the other team: scripts, frozen networks, and the pool from which each episode draws one.

Strength as measured (benchmarks/results/snakes_table.json): random < l1 < l3 < l4 < evasion < greedy. The scripts use
plain Euclidean distances, not those of the torus, as the public ones do; ties: up, down, left, right, and oldest bean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from omagd.envs.snakes.board import (
    FIRST_SNAKE,
    N_ACTIONS,
    N_BEANS,
    N_TEAM,
    NEXT_CELL,
    Array,
    Board,
    function,
    kernel,
    plain_square,
)
from omagd.envs.snakes.draws import OPPONENT, PLAYERS, below, draw
from omagd.envs.snakes.observer import Observer
from omagd.utils.errors import UserError, unknown_name
from omagd.utils.seeding import GOLDEN, splitmix64

_DRAWS = 16  # indices of a network's draws begin here, after those of the random script
FAR = 10_000  # larger than any squared distance
RANDOM, GREEDY, EVASION, TOWARD_NEAREST = range(4)  # kinds of scripts


@function
def choose_beans(g: Board, b: int, team: int, shared: bool, chosen: Array) -> None:
    """Write the nearest bean of each snake [3]; if `shared`, of those that no earlier snake has taken."""
    for i in range(N_TEAM):
        head, best, least = g.heads[b, N_TEAM * team + i], 0, FAR + 1
        for bean in range(N_BEANS):
            far = plain_square(head, g.beans[b, bean])
            if shared:
                for earlier in range(i):
                    if chosen[earlier] == bean:
                        far = FAR
            if far < least:
                best, least = bean, far
        chosen[i] = best


@function
def shut_in(codes: Array, cell: int) -> bool:
    """Return whether snakes are on all neighbours of a cell."""
    for a in range(N_ACTIONS):
        if codes[NEXT_CELL[cell, a]] < FIRST_SNAKE:
            return False
    return True


@function
def cost(codes: Array, kind: int, penalty: float, cell: int, bean: int) -> float:
    """Return what a step to `cell` costs a snake that wants a bean.

    "greedy" takes free cells only, "evasion" those with a free neighbour; elsewhere an occupied cell costs `penalty`
    cells more.
    """
    far, blocked = plain_square(cell, bean), codes[cell] >= FIRST_SNAKE
    if kind == GREEDY:
        return np.float64(FAR if blocked else far)
    if kind == EVASION:
        return np.float64(far + FAR * blocked + FAR * shut_in(codes, cell))
    return math.sqrt(far) + penalty * blocked


@kernel
def act(g: Board, team: Array, kind: int, penalty: float, chosen: Array, actions: Array) -> None:
    """Write the actions of a script for `team` [B] into `actions` [B, 3]; chosen: [3], working memory."""
    for b in range(len(team)):
        if kind == RANDOM:
            for i in range(N_TEAM):
                index = PLAYERS + N_TEAM * team[b] + i
                actions[b, i] = below(draw(g.keys[b], g.steps[b] + 1, index), N_ACTIONS)
            continue
        choose_beans(g, b, team[b], kind == GREEDY, chosen)
        for i in range(N_TEAM):
            head, bean = g.heads[b, N_TEAM * team[b] + i], g.beans[b, chosen[i]]
            best, least = 0, cost(g.codes[b], kind, penalty, NEXT_CELL[head, 0], bean)
            for a in range(1, N_ACTIONS):
                here = cost(g.codes[b], kind, penalty, NEXT_CELL[head, a], bean)
                if here < least:
                    best, least = a, here
            actions[b, i] = best


@kernel
def random_bits(g: Board, first: int, out: Array) -> None:
    """Write players' draws of the current step, from index `first` on, into `out` [B, n]."""
    for b in range(out.shape[0]):
        for n in range(out.shape[1]):
            out[b, n] = draw(g.keys[b], g.steps[b] + 1, PLAYERS + first + n)


@dataclass
class Script:
    """A scripted opponent: "greedy" assigns the beans to its snakes, others step towards the nearest one."""

    name: str
    kind: int
    penalty: float = 0.0

    def act(self, board: Board, team: np.ndarray) -> np.ndarray:
        """Return actions [B, 3]."""
        out = np.empty((len(board), N_TEAM), np.int64)
        act(board, board.sides(team), self.kind, self.penalty, np.empty(N_TEAM, np.int64), out)
        return out


SCRIPTS = {
    script.name: script
    for script in (
        Script("random", RANDOM), Script("l1", TOWARD_NEAREST), Script("l3", TOWARD_NEAREST, 5.0),
        Script("l4", TOWARD_NEAREST, 1000.0), Script("evasion", EVASION), Script("greedy", GREEDY),
    )
}  # fmt: skip

LADDERS = {
    "measured": ("random", "l1", "l3", "l4", "greedy"),
    "published": ("random", "l1", "greedy", "l3", "l4"),
}
"""Opponents by level: by measured strength, and as published. `enable_opponent_evasion` adds evasion."""


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
            bits = np.empty((len(board), N_TEAM * N_ACTIONS), np.uint64)
            random_bits(board, _DRAWS, bits)
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
        seen = {key: value for key, value in snapshot["observer"].items() if key != "centred"}  # of earlier versions
        return cls(snapshot["name"], snapshot["layers"], Observer(**seen), snapshot["sample"])


class OpponentPool:
    """Known opponents, and the opponent of each slot's episode.

    Args:
        n_slots: B. first: the only opponent until `set` is called.
    """

    def __init__(self, n_slots: int, first: str | Opponent) -> None:
        self._known: list[Opponent] = []
        self._upto = np.ones(1)
        self.numbers = np.zeros(n_slots, np.int64)
        self.set([first])

    def set(self, opponents: Sequence[str | Opponent]) -> None:
        """Draw the opponents of new episodes from these, names of scripts or opponents; running episodes keep theirs.

        Errors: UserError for an unknown name, a name of two opponents, or none.
        """
        if unknown := [which for which in opponents if isinstance(which, str) and which not in SCRIPTS]:
            raise unknown_name("opponent", unknown[0], SCRIPTS)
        pool: list[Opponent] = [SCRIPTS[which] if isinstance(which, str) else which for which in opponents]
        if not pool:
            raise UserError("opponents=[]: give one at least")
        busy = [self._known[number] for number in np.unique(self.numbers)] if self._known else []
        known = pool + [one for one in busy if one not in pool]
        names = [one.name for one in known]
        if len(set(names)) < len(names):
            raise UserError(f"opponents={names}: two opponents have the same name; rename one")
        if self._known:
            self.numbers = np.array([known.index(self._known[number]) for number in self.numbers])
        self._known, self._upto = known, np.arange(1, len(pool) + 1) / len(pool)

    def choose(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Draw an opponent for the new episodes of the slots `rows` [k] by their `keys` [k]."""
        bits = splitmix64(keys + np.uint64(OPPONENT * GOLDEN % 2**64))  # `draw` at moment 0
        uniform = (bits >> np.uint64(11)) * 2.0**-53
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
        """Return names, shares, the opponent of each slot, and the networks."""
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
