"""Rewards of both teams' snakes, and the sums of an episode.

Shapes: B slots, k of them; 3 snakes of the own team.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.snakes.board import N_TEAM, PLAIN_DISTANCE, TORUS_STEPS, Board, of_team, pair_lookup
from omagd.envs.snakes.engine import StepOutcome

SUMS = ("own", "other", "beans", "deaths")
"""Sums over an episode: raw rewards of both teams, own beans and deaths."""


def score_rewards(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return [k, 3]: own raw reward minus a third of the other team's sum, from raw rewards [k, 3] of both."""
    return own - others.sum(1, keepdims=True) / 3


def potential(heads: np.ndarray, beans: np.ndarray, scale: float) -> np.ndarray:
    """Return the potential P = -scale × steps to the nearest bean, [k, 3], of `heads` [k, 3] and `beans` [k, 5].

    Rewards gamma P(s') - P(s) change no optimal policy (Ng, Harada and Russell, ICML 1999).
    """
    return -scale * pair_lookup(TORUS_STEPS, heads[:, :, None], beans[:, None, :]).min(2)


def baseline_rewards(
    own: np.ndarray, lead: np.ndarray, over: np.ndarray, heads: np.ndarray, beans: np.ndarray
) -> np.ndarray:
    """Return the reward [k, 3] of the published baseline.

    Standing of the team (+50 won, -25 lost, else +10 ahead, -5 behind, 0 even) + (20 if the snake ate, else minus its
    plain distance to the nearest bean and minus 10 if it died with a loss).
    own: raw rewards [k, 3]. lead: [k], difference of the teams' sums. over: [k] bool. heads [k, 3], beans [k, 5].
    """
    standing = np.where(over, np.where(lead > 0, 50, -25), np.where(lead > 0, 10, -5)) * (lead != 0)
    distance = pair_lookup(PLAIN_DISTANCE, heads[:, :, None], beans[:, None, :]).min(2)
    return standing[:, None] + np.where(own > 0, 20.0, -distance - 10.0 * (own < 0))


class Prices(NamedTuple):
    """How steps are paid; the fields of `SnakesArgs` without "reward"."""

    reward: str
    potential_scale: float
    potential_gamma: float
    win: float


class Ledger:
    """Pays the steps of `n_slots` games, and sums up their episodes.

    Attributes:
        sums: by the names `SUMS`, [B] int64 each.
    """

    def __init__(self, prices: Prices, n_slots: int) -> None:
        self._prices = prices
        self._totals = np.zeros((len(SUMS), n_slots), np.int64)
        self.sums = dict(zip(SUMS, self._totals, strict=True))

    def begin(self, rows: np.ndarray) -> None:
        """Start episodes in the slots `rows` [k]."""
        self._totals[:, rows] = 0

    def potential(self, board: Board, team: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the potential of the snakes of `team` [B] in the slots `rows`, [k, 3]; zero if the reward has none."""
        if self._prices.reward != "potential":
            return np.zeros((len(rows), N_TEAM))
        heads = of_team(board.heads[rows], team[rows])
        return potential(heads, board.beans[rows], self._prices.potential_scale)

    def pay(
        self, outcome: StepOutcome, board: Board, team: np.ndarray, rows: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Add the step to the sums; return the rewards [k, 3] of the snakes of `team` [B].

        outcome: of the slots `rows` [k]. before: potentials [k, 3] before the step.
        """
        prices, side = self._prices, team[rows]
        own, other = of_team(outcome.raw, side), of_team(outcome.raw, 1 - side)
        parts = own, other, of_team(outcome.ate, side), of_team(outcome.hit, side)
        for total, values in zip(self._totals, parts, strict=True):
            total[rows] += values.sum(1)
        lead = self.sums["own"][rows] - self.sums["other"][rows]
        if prices.reward == "baseline":
            heads = of_team(board.heads[rows], side)
            return baseline_rewards(own, lead, outcome.over, heads, board.beans[rows])
        reward = score_rewards(own, other) + (prices.win * np.sign(lead) * outcome.over)[:, None]
        if prices.reward == "potential":
            # The potential of the end is zero: the shaping then cancels over an episode.
            after = np.where(outcome.over[:, None], 0, self.potential(board, team, rows))
            reward += prices.potential_gamma * after - before
        return reward
