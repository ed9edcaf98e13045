"""Rewards of the three own snakes; the team's reward is their sum.

raw: 1 for a bean, -(length - 3) for a death. lead: own team's sum of raw rewards since the start, less the other's.

score      raw - (sum of the opponents' raw) / 3; the sum over the team is the change of the lead.
potential  score + gamma * P' - P, with P = -scale * steps on the torus to the nearest bean before the step, P' after it
           and 0 at the end of the game: potential-based (Ng, Harada, Russell, 1999), the best play stays the same.
baseline   (at the end: 50 if the lead is positive, -25 if negative; before: 10 or -5; 0 for an even game)
           + (20 if raw > 0, else -distance - 10 if raw < 0, else -distance), distance Euclidean, without going around
           the edges, to the nearest bean; heads after respawns, beans after new ones are laid out.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.snakes.board import PLAIN_DISTANCE, TORUS_STEPS, between


def score_rewards(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return [k, 3] from the raw rewards of both teams, [k, 3] each."""
    return own - others.sum(1, keepdims=True) / 3


def potential(heads: np.ndarray, beans: np.ndarray, scale: float) -> np.ndarray:
    """Return P [k, 3] for `heads` [k, 3] and `beans` [k, 5]."""
    return -scale * between(TORUS_STEPS, heads[:, :, None], beans[:, None, :]).min(2)


def baseline_rewards(
    own: np.ndarray, lead: np.ndarray, over: np.ndarray, heads: np.ndarray, beans: np.ndarray
) -> np.ndarray:
    """Return [k, 3] from own raw rewards [k, 3], lead [k], over [k] bool, own heads [k, 3], beans [k, 5]."""
    standing = np.where(over, np.where(lead > 0, 50, -25), np.where(lead > 0, 10, -5)) * (lead != 0)
    distance = between(PLAIN_DISTANCE, heads[:, :, None], beans[:, None, :]).min(2)
    return standing[:, None] + np.where(own > 0, 20.0, -distance - 10.0 * (own < 0))
