"""A batched environment that looks single: the field's view of one slot, and slots that are played apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.envs.protocol import AGENT_REWARD, TRUNCATED, BatchedEnv, MultiAgentEnv, Observation, StepResult


class BatchedAsSingle(MultiAgentEnv):
    """The only slot of a batched environment as the field's single environment.

    Args:
        env: a batched environment with one slot.
        more_info: further entries of `get_env_info()` ("state_component", "map_type", ...).
    """

    def __init__(self, env: BatchedEnv, more_info: dict[str, Any] | None = None) -> None:
        if env.n_slots != 1:
            raise ValueError(f"a single environment has one slot, not {env.n_slots}")
        self.env = env
        self.args_model = env.args_model  # type: ignore[misc]
        self.deterministic = env.deterministic  # type: ignore[misc]
        self.scripted_policies = env.info.scripted_policies
        self._more_info = dict(more_info or {})
        self._rng = np.random.default_rng(0)
        self._slot = np.ones(1, bool)
        self._seen: Observation | None = None

    def reset(self, seed: int | None = None) -> None:
        """Start an episode; without a seed, the next one of a fixed stream."""
        self._seen = None
        chosen = int(self._rng.integers(2**62)) if seed is None else seed
        self.env.reset(self._slot, np.array([chosen], np.int64))

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions; `episode_limit` in the info means truncated, as PyMARL reads it."""
        self._seen = None
        result = self.env.step(np.asarray(actions)[None], self._slot)
        return result.reward.item(0), result.terminated.item(0), self._info_of(result)

    def _info_of(self, result: StepResult) -> dict[str, Any]:
        info = {name: values.item(0) for name, values in result.info.items()}
        info["episode_limit"] = result.truncated.item(0)
        if result.lost.item(0):
            info["lost"] = 1
        return {**info, **self._rewards_of(result)}

    def _rewards_of(self, result: StepResult) -> dict[str, np.ndarray]:
        """Return the entry that tells each agent's reward, where the environment does."""
        return {AGENT_REWARD: result.agent_reward[0].copy()} if result.agent_reward is not None else {}

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32."""
        seen = self._look(full=no_range_limit)
        return (seen.full_obs if no_range_limit and seen.full_obs is not None else seen.obs)[0].copy()

    def get_state(self) -> np.ndarray:
        """Return [state_dim] float32."""
        return self._look().state[0].copy()

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A] bool."""
        return self._look().avail_actions[0].copy()

    def get_scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [n] actions of one of the environment's scripts."""
        self._seen = None
        return self.env.scripted_actions(policy, rng)[0]

    def _look(self, full: bool = False) -> Observation:
        """Return what this moment shows, computed once."""
        if self._seen is None or (full and self._seen.full_obs is None):
            self._seen = self.env.observe(full=full)
        return self._seen

    def get_env_info(self) -> dict[str, Any]:
        """Return the field's dictionary; the entries on entities only where there is a layout."""
        info = self.env.info
        facts: dict[str, Any] = {
            "n_agents": info.n_agents,
            "n_actions": info.n_actions,
            "obs_shape": info.obs_dim,
            "state_shape": info.state_dim,
            "episode_limit": info.episode_limit,
            "map_name": info.map_name,
            "has_win": info.has_win,
        }
        if info.layout is not None:
            facts["obs_component"] = info.layout.obs_component
            facts["entity_position"] = info.layout.position
            facts["entity_health"] = info.layout.health
            facts["n_enemies"] = info.layout.n_enemies
            facts["n_allies"] = info.layout.n_allies
            facts["n_normal_actions"] = info.n_normal_actions
        if info.agent_rewards:
            facts["agent_rewards"] = True
        return {**facts, **self._more_info}

    def get_stats(self) -> dict[str, float]:
        """Return counters."""
        return self.env.get_stats()

    def save_replay(self, folder: str = "") -> None:
        """Write a replay into `folder`."""
        self.env.save_replay(folder)

    def close(self) -> None:
        """Release everything."""
        self.env.close()


class OneSlot(BatchedAsSingle):
    """A slot of a batched environment that is played apart from the others and tells what it would tell among them."""

    def __init__(self, env: BatchedEnv) -> None:
        super().__init__(env, {"env_info": env.info})

    def _info_of(self, result: StepResult) -> dict[str, Any]:
        rewards = self._rewards_of(result)
        if not result.terminated.item(0):
            return rewards
        info = {name: values.item(0) for name, values in result.info.items()}
        return {**info, **rewards, TRUNCATED: result.truncated.item(0), "lost": result.lost.item(0)}


def single_env(env_cls: type, args: BaseModel) -> MultiAgentEnv:
    """Return an environment of the class as a single one; a batched one with the only slot that it then has."""
    return OneSlot(env_cls(args, 1)) if issubclass(env_cls, BatchedEnv) else env_cls(args)
