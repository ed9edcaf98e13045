"""A tiny single environment: drivers at a crossing must go one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omagd.envs.protocol import MultiAgentEnv

WAIT, GO = 0, 1
LONGEST_QUEUE = 5


class CrossroadsArgs(BaseModel):
    """Arguments: number of roads (agents), steps of an episode, chance that a car arrives on a road in a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    n_roads: int = Field(default=2, ge=2, le=8)
    episode_limit: int = Field(default=12, ge=1)
    arrival: float = Field(default=0.6, ge=0.0, le=1.0)


class Crossroads(MultiAgentEnv):
    """Each agent is a road that sees its own queue and whether the light points at it.

    One car that goes alone earns 1; two or more that go at once crash, which costs 1, and none of them gets through.
    Going needs a car in the queue. `battle_won`: an episode without a crash in which at least one car passed.
    Observation: own queue / 5, light, crash in the last step. State: all queues / 5, light one-hot, share of the time.
    """

    args_model = CrossroadsArgs
    deterministic = True  # an episode follows from its seed and the actions: it can be replayed after a kill

    def __init__(self, args: CrossroadsArgs) -> None:
        self.args = args
        self._episodes = 0
        self.reset(seed=0)

    def reset(self, seed: int | None = None) -> None:
        """Start an episode from `seed`, or from the last episode's generator."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._queues = self._rng.integers(0, 3, self.args.n_roads)
        self._t = self._passed = self._crashes = 0
        self._crashed = False

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Let the cars go, then let new ones arrive."""
        going = np.flatnonzero(np.asarray(actions) == GO)
        if (self._queues[going] == 0).any():
            raise ValueError("an empty road cannot go")
        self._crashed = len(going) > 1
        if len(going) == 1:
            self._queues[going[0]] -= 1
            self._passed += 1
        self._crashes += self._crashed
        arrived = self._rng.random(self.args.n_roads) < self.args.arrival
        self._queues = np.minimum(self._queues + arrived, LONGEST_QUEUE)
        self._t += 1
        terminated = self._t >= self.args.episode_limit
        self._episodes += terminated
        reward = -1.0 if self._crashed else float(len(going))
        return reward, terminated, {"battle_won": terminated and not self._crashes and self._passed > 0}

    def _light(self) -> np.ndarray:
        return np.eye(self.args.n_roads, dtype=np.float32)[self._t % self.args.n_roads]

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, 3] float32; there is nothing more to see without limits."""
        crashed = np.full(self.args.n_roads, self._crashed)
        return np.stack([self._queues / LONGEST_QUEUE, self._light(), crashed], 1).astype(np.float32)

    def get_state(self) -> np.ndarray:
        """Return [2 n + 1] float32."""
        time = self._t / self.args.episode_limit
        return np.concatenate([self._queues / LONGEST_QUEUE, self._light(), [time]]).astype(np.float32)

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, 2] bool."""
        return np.stack([np.ones(self.args.n_roads, bool), self._queues > 0], 1)

    def get_env_info(self) -> dict[str, Any]:
        """Return the field's dictionary; without `obs_component`, so no graphs."""
        return {
            "n_agents": self.args.n_roads,
            "n_actions": 2,
            "obs_shape": 3,
            "state_shape": 2 * self.args.n_roads + 1,
            "episode_limit": self.args.episode_limit,
        }

    def get_stats(self) -> dict[str, float]:
        """Return the number of finished episodes."""
        return {"episodes": float(self._episodes)}
