"""The rewards as kernels over boards; compare `omagd.envs.snakes.rewards`."""

from __future__ import annotations

import math

import numpy as np

from omagd.envs.snakes.board import N_BEANS, N_SNAKES, N_TEAM, Board
from omagd.envs.snakes.compiled.compiling import function, kernel
from omagd.envs.snakes.compiled.engine import Outcome
from omagd.envs.snakes.compiled.tables import Array, Boards, arrays_of, plain_square, steps_between
from omagd.envs.snakes.engine import StepOutcome
from omagd.envs.snakes.rewards import Ledger, Prices

SCORE, POTENTIAL, BASELINE = range(3)  # kinds of rewards
KINDS = {"score": SCORE, "potential": POTENTIAL, "baseline": BASELINE}
SCALE, GAMMA, WIN = range(3)  # entries of the prices
OWN, OTHER, BEANS, DEATHS = range(4)  # rows of the sums


@function
def potential_of(g: Boards, scale: float, b: int, head: int) -> float:
    """Return the potential of a head."""
    least = steps_between(head, g.beans[b, 0])
    for bean in range(1, N_BEANS):
        least = min(least, steps_between(head, g.beans[b, bean]))
    return -scale * least


@kernel
def potentials(g: Boards, price: Array, team: Array, rows: Array, out: Array) -> None:
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
def baseline(g: Boards, b: int, head: int, own: int) -> float:
    """Return what the baseline's reward pays a snake for its own raw reward."""
    if own > 0:
        return 20.0
    least = plain_square(head, g.beans[b, 0])
    for bean in range(1, N_BEANS):
        least = min(least, plain_square(head, g.beans[b, bean]))
    return -math.sqrt(least) - 10.0 * (own < 0)


@kernel
def pay(
    g: Boards, kind: int, price: Array, out: Outcome, team: Array, rows: Array, before: Array, totals: Array,
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
                after = 0.0 if over else potential_of(g, price[SCALE], b, head)
                reward[row, i] += price[GAMMA] * after - before[row, i]


class CompiledLedger(Ledger):
    """`Ledger` by kernels; rewards, sums and snapshots are the reference's, bit for bit."""

    def __init__(self, prices: Prices, n_slots: int) -> None:
        super().__init__(prices, n_slots)
        self._kind = KINDS[prices.reward]
        self._price = np.array(prices[1:], np.float64)

    def potential(self, board: Board, team: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the potential of the snakes of `team` [B] in the slots `rows`, [k, 3]; zero if the reward has none."""
        out = np.zeros((len(rows), N_TEAM))
        if self._kind == POTENTIAL:
            potentials(arrays_of(board), self._price, team, rows, out)
        return out

    def pay(
        self, outcome: StepOutcome, board: Board, team: np.ndarray, rows: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Add the step to the sums; return the rewards [k, 3] of the snakes of `team` [B]."""
        out, reward = Outcome(outcome.raw, outcome.hit, outcome.ate, outcome.over), np.empty((len(rows), N_TEAM))
        pay(arrays_of(board), self._kind, self._price, out, team, rows, before, self._totals, reward)
        return reward
