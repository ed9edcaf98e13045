"""Action selectors: choose one available action for each agent from the values of all actions."""

from __future__ import annotations

import numpy as np

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry("action_selector", "omagd.action_selectors")


@REGISTRY.register("greedy")
class Greedy:
    """The best available action, without exploration."""

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64: each agent's available action with the largest value, the first one of several.

        q: [B, n, A] float. available: [B, n, A] bool; without any available action the result is 0.
        """
        return np.where(available, q, -np.inf).argmax(axis=-1)


@REGISTRY.register("epsilon_greedy")
class EpsilonGreedy(Greedy):
    """With probability epsilon, independently for each agent, a uniform available action instead of the best one.

    Every call draws two random numbers for each agent of each slot, used or not. So the stream depends only on the
    number of calls, not on living agents, active slots or available actions.
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
        # The available action number `wanted`.
        anything = (np.cumsum(available, axis=-1) > wanted[..., None]).argmax(axis=-1)
        return np.where(explores, anything, best)
