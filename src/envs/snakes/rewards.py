"""Rewards of both teams' snakes as kernels over boards, and the sums of an episode.

"score": the own raw reward minus a third of the other team's sum. "potential": the same with potential-based shaping.
"baseline", as published: `standing` and `baseline`. Shapes: B slots, k of them; 3 snakes of the own team.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from omagd.envs.snakes.board import (
    N_BEANS,
    N_SNAKES,
    N_TEAM,
    Array,
    Board,
    function,
    kernel,
    plain_square,
    steps_between,
)
from omagd.envs.snakes.engine import StepOutcome

SUMS = ("own", "other", "beans", "deaths")
"""Sums over an episode: raw rewards of both teams, own beans and deaths."""

OWN, OTHER, BEANS, DEATHS = range(len(SUMS))  # rows of the sums
SCORE, POTENTIAL, BASELINE = range(3)  # kinds of rewards
KINDS = {"score": SCORE, "potential": POTENTIAL, "baseline": BASELINE}
SCALE, GAMMA, WIN = range(3)  # entries of the price


@function
def potential_of(g: Board, scale: float, b: int, head: int) -> float:
    """Return the potential P of a head, -scale × steps to the nearest bean.

    Rewards gamma P(s') - P(s) change no optimal policy (Ng, Harada and Russell, ICML 1999).
    """
    least = steps_between(head, g.beans[b, 0])
    for bean in range(1, N_BEANS):
        least = min(least, steps_between(head, g.beans[b, bean]))
    return -scale * least


@kernel
def potentials(g: Board, price: Array, team: Array, rows: Array, out: Array) -> None:
    """Write the potentials of the snakes of `team` [B] on the boards `rows` [k] into `out` [k, 3]."""
    for row in range(len(rows)):
        b = rows[row]
        for i in range(N_TEAM):
            out[row, i] = potential_of(g, price[SCALE], b, g.heads[b, N_TEAM * team[b] + i])


@function
def standing(lead: int, over: bool) -> float:
    """Return what the baseline's reward pays for the teams' standing."""
    if lead == 0:
        return 0.0
    if over:
        return 50.0 if lead > 0 else -25.0
    return 10.0 if lead > 0 else -5.0


@function
def baseline(g: Board, b: int, head: int, own: int) -> float:
    """Return what the baseline's reward pays a snake for its own raw reward.

    20 if it ate, else minus its plain distance to the nearest bean, and minus 10 if it died with a loss.
    """
    if own > 0:
        return 20.0
    least = plain_square(head, g.beans[b, 0])
    for bean in range(1, N_BEANS):
        least = min(least, plain_square(head, g.beans[b, bean]))
    return -math.sqrt(least) - 10.0 * (own < 0)


@kernel
def pay(
    g: Board, kind: int, price: Array, out: StepOutcome, team: Array, rows: Array, before: Array, totals: Array,
    reward: Array,
) -> None:  # fmt: skip
    """Add a step to the `totals` [4, B]; write the rewards [k, 3] of the snakes of `team` [B]."""
    for row in range(len(rows)):
        b, theirs = rows[row], 0
        first = N_TEAM * team[b]
        for i in range(N_SNAKES):
            if first <= i < first + N_TEAM:
                totals[OWN, b] += out.raw[row, i]
                totals[BEANS, b] += out.ate[row, i]
                totals[DEATHS, b] += out.hit[row, i]
            else:
                theirs += out.raw[row, i]
        totals[OTHER, b] += theirs
        over, lead = out.over[row], totals[OWN, b] - totals[OTHER, b]
        for i in range(N_TEAM):
            own, head = out.raw[row, first + i], g.heads[b, first + i]
            if kind == BASELINE:
                reward[row, i] = standing(lead, over) + baseline(g, b, head, own)
                continue
            reward[row, i] = own - theirs / 3 + price[WIN] * ((lead > 0) - (lead < 0)) * over
            if kind == POTENTIAL:
                # The potential of the end is zero: the shaping then cancels over an episode.
                after = 0.0 if over else potential_of(g, price[SCALE], b, head)
                reward[row, i] += price[GAMMA] * after - before[row, i]


class Ledger:
    """Pays the steps of `n_slots` games, and sums up their episodes.

    Args:
        kind: of `KINDS`. price: scale and discount of the potential, and for a win.

    Attributes:
        sums: by the names `SUMS`, [B] int64 each.
    """

    def __init__(self, kind: str, price: Sequence[float], n_slots: int) -> None:
        self._kind, self._price = KINDS[kind], np.array(price, np.float64)
        self._totals = np.zeros((len(SUMS), n_slots), np.int64)
        self.sums = dict(zip(SUMS, self._totals, strict=True))

    def begin(self, rows: np.ndarray) -> None:
        """Start episodes in the slots `rows` [k]."""
        self._totals[:, rows] = 0

    def potential(self, board: Board, team: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the potential of the snakes of `team` [B] in the slots `rows`, [k, 3]; zero if the reward has none."""
        out = np.zeros((len(rows), N_TEAM))
        if self._kind == POTENTIAL:
            potentials(board, self._price, team, rows, out)
        return out

    def pay(
        self, outcome: StepOutcome, board: Board, team: np.ndarray, rows: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Add the step to the sums; return the rewards [k, 3] of the snakes of `team` [B].

        outcome: of the slots `rows` [k]. before: potentials [k, 3] before the step.
        """
        reward = np.empty((len(rows), N_TEAM))
        pay(board, self._kind, self._price, outcome, team, rows, before, self._totals, reward)
        return reward
