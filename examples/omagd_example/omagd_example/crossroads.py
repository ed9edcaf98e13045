"""A tiny environment: drivers at a crossing must go one at a time."""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omagd.envs.protocol import MultiAgentEnv


class CrossroadsArgs(BaseModel):
    """Number of roads (agents), steps of an episode, chance that a car arrives on a road in a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    n_roads: int = Field(default=2, ge=2, le=8)
    episode_limit: int = Field(default=12, ge=1)
    arrival: float = Field(default=0.6, ge=0.0, le=1.0)


class Crossroads(MultiAgentEnv):
    """One car that goes alone earns 1; several crash, which costs 1. An episode is won without a crash."""

    args_model = CrossroadsArgs
    deterministic = True  # an episode follows from its seed and the actions: it can be replayed after a kill

    def __init__(self, args):
        self.args, self.n = args, args.n_roads

    def reset(self, seed=None):
        """Start an episode."""
        self._rng = np.random.default_rng(seed)
        self._queues = self._rng.integers(0, 3, self.n)
        self._t = self._passed = self._crashes = 0

    def step(self, actions):
        """Let cars go, [n] of waiting 0 or going 1, then let others arrive."""
        going = np.flatnonzero(actions)
        crash = len(going) > 1
        self._queues[going] -= not crash
        self._passed, self._crashes = self._passed + len(going), self._crashes + crash
        self._queues = np.minimum(self._queues + (self._rng.random(self.n) < self.args.arrival), 5)
        self._t += 1
        over = self._t >= self.args.episode_limit
        return -1.0 if crash else float(len(going)), over, {"battle_won": over and self._passed > self._crashes == 0}

    def get_obs(self, no_range_limit=False):
        """Return [n, 2] float32: the road's own queue, and whether its light is green."""
        return np.stack([self._queues / 5, np.arange(self.n) == self._t % self.n], 1).astype(np.float32)

    def get_state(self):
        """Return [2 n + 1] float32: what all see, and the share of time."""
        return np.append(self.get_obs(), self._t / self.args.episode_limit).astype(np.float32)

    def get_avail_actions(self):
        """Return [n, 2] bool: going needs a car."""
        return np.stack([np.ones(self.n, bool), self._queues > 0], 1)

    def get_env_info(self):
        """Return sizes."""
        sizes = {"n_agents": self.n, "n_actions": 2, "obs_shape": 2, "state_shape": 2 * self.n + 1}
        return {**sizes, "episode_limit": self.args.episode_limit}
