"""Greedy and epsilon-greedy choice among the available actions."""

from __future__ import annotations

import numpy as np


class Greedy:
    """The best available action, whatever is explored."""

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64: for each agent the available action of greatest value, the first one among equals.

        q: [B, n, A] float. available: [B, n, A] bool; where nothing is available the answer is 0. The rest is not read.
        """
        return np.where(available, q, -np.inf).argmax(axis=-1)


class EpsilonGreedy(Greedy):
    """With probability epsilon, for each agent on its own, any available action instead of the best one.

    Every call draws two numbers for every agent of every slot, used or not, so that the stream depends on the number of
    calls alone: not on who is alive, which slots are active or how many actions are available.
    """

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64; greedy if there is no `rng`. epsilon: share of random actions. Shapes as in `Greedy`."""
        best = super().select(q, available, epsilon, rng)
        if rng is None:
            return best
        explores = rng.random(best.shape) < epsilon
        wanted = np.floor(rng.random(best.shape) * available.sum(axis=-1))
        # The action whose place among the available ones is `wanted`.
        anything = (np.cumsum(available, axis=-1) > wanted[..., None]).argmax(axis=-1)
        return np.where(explores, anything, best)
