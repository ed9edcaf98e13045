"""One slot of a batched environment as a single environment, and sizes of single environments as `EnvInfo`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import ActionBox, EntityLayout, EnvInfo
from omagd.envs.frames import Frame
from omagd.envs.protocol import AGENT_REWARD, TRUNCATED, BatchedEnv, MultiAgentEnv, Observation, StepResult
from omagd.utils.errors import UserError
from omagd.utils.registry import built

FACTS = ("n_agents", "n_actions", "obs_shape", "state_shape", "episode_limit")
"""What `get_env_info()` must hold."""


def env_info_from_dict(name: str, map_name: str | None, facts: dict[str, Any]) -> EnvInfo:
    """Return the sizes in the dictionary of SMAC's `get_env_info()`; an `env_info` in it is returned as it is.

    facts: `obs_shape` of three sizes is that of images, (H, W, C). `obs_component` gives the entity layout.
        `entity_position` and `entity_health` may give the columns of (dx, dy) and health in a unit's block; default:
        SMAC's. `entity_sight`: what (dx, dy) are divided by, in cells.
        `entity_healer` may give the column of the agent's own block that is 1 for agents that heal; `entity_types`:
        where the one-hot type begins in an ally's and in an enemy's block, and its length. `state_layout` is the layout
        of a state of units.
    Errors: UserError for anything else.
    """
    if not isinstance(facts, Mapping):
        raise UserError(f"env={name}: get_env_info() returned {type(facts).__name__}, not a dictionary")
    if "env_info" in facts:
        info: EnvInfo = facts["env_info"]
        return info
    if absent := [key for key in FACTS if key not in facts]:
        raise UserError(f"env={name}: get_env_info() holds no {', '.join(absent)}. See docs/extending.md")
    try:
        return _sized(name, map_name, facts)
    except (TypeError, ValueError) as problem:
        raise UserError(f"env={name}: get_env_info() holds wrong values: {problem}. See docs/extending.md") from None


def _sized(name: str, map_name: str | None, facts: dict[str, Any]) -> EnvInfo:
    layout = None
    if facts.get("obs_component") is not None:
        move, (n_enemies, enemy_dim), (n_allies, ally_dim), own = facts["obs_component"]
        layout = EntityLayout(
            int(np.prod(move)), n_enemies, enemy_dim, n_allies, ally_dim, int(np.prod(own)),
            position=tuple(facts.get("entity_position", (2, 3))),
            health=int(facts.get("entity_health", 4 if min(enemy_dim, ally_dim) > 4 else -1)),
            healer=int(facts.get("entity_healer", -1)),
            sight=float(facts.get("entity_sight", 9.0)),
            **dict(zip(("ally_types", "enemy_types", "n_types"), facts.get("entity_types", (-1, -1, 0)), strict=True)),
        )  # fmt: skip
    box = None if facts.get("action_bounds") is None else ActionBox.of(*facts["action_bounds"])
    if box is not None and (len(box.low), 2 * box.dim) != (int(facts["n_agents"]), int(facts["n_actions"])):
        raise ValueError("action_bounds [n, d] need n_agents = n and n_actions = 2 d")
    seen: Any = tuple(map(int, np.atleast_1d(facts["obs_shape"])))
    return EnvInfo(
        name=name,
        map_name=str(map_name or facts.get("map_name") or name),
        n_agents=int(facts["n_agents"]),
        n_actions=int(facts["n_actions"]),
        obs_dim=int(np.prod(seen)),
        state_dim=int(np.prod(facts["state_shape"])),
        episode_limit=int(facts["episode_limit"]),
        n_normal_actions=int(facts.get("n_normal_actions", 0)),
        layout=layout,
        scripted_policies=tuple(dict.fromkeys(("random", *facts.get("scripted_policies", ())))),
        has_win=bool(facts.get("has_win", True)),
        agent_rewards=bool(facts.get("agent_rewards", False)),
        state_layout=facts.get("state_layout"),
        box=box,
        image=seen if len(seen) == 3 else None,
    )


class BatchedAsSingle(MultiAgentEnv):
    """A batched environment with one slot as a single one. more_info: further entries of `get_env_info()`."""

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

    def reset(self, seed: int | None = None) -> Any:
        """Start an episode; without a seed, from the next seed of a fixed stream."""
        self._seen = None
        chosen = int(self._rng.integers(2**62)) if seed is None else seed
        self.env.reset(self._slot, np.array([chosen], np.int64))

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions; `episode_limit` in the info means truncated, as PyMARL reads it."""
        self._seen = None
        result = self.env.step(np.asarray(actions)[None], self._slot)
        info = self._episode_info(result)
        if result.agent_reward is not None:
            info[AGENT_REWARD] = result.agent_reward[0].copy()
        return result.reward.item(0), result.terminated.item(0), info

    def _episode_info(self, result: StepResult) -> dict[str, Any]:
        info = {name: values.item(0) for name, values in result.info.items()}
        info["episode_limit"] = result.truncated.item(0)
        return {**info, "lost": 1} if result.lost.item(0) else info

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32."""
        seen = self._observe(full=no_range_limit)
        return (seen.full_obs if no_range_limit and seen.full_obs is not None else seen.obs)[0].copy()

    def get_state(self) -> np.ndarray:
        """Return [state_dim] float32."""
        return self._observe().state[0].copy()

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A] bool."""
        return self._observe().avail_actions[0].copy()

    def get_scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [n] actions of one of the environment's scripted policies."""
        self._seen = None
        return self.env.scripted_actions(policy, rng)[0]

    def _observe(self, full: bool = False) -> Observation:
        """Return the current observation, computed once per step."""
        if self._seen is None or (full and self._seen.full_obs is None):
            self._seen = self.env.observe(full=full)
        return self._seen

    def get_env_info(self) -> dict[str, Any]:
        """Return SMAC's dictionary; entries about entities only if there is a layout."""
        info = self.env.info
        facts: dict[str, Any] = {
            "n_agents": info.n_agents, "n_actions": info.n_actions, "obs_shape": info.image or info.obs_dim,
            "state_shape": info.state_dim, "episode_limit": info.episode_limit, "map_name": info.map_name,
            "has_win": info.has_win,
        }  # fmt: skip
        if (layout := info.layout) is not None:
            facts |= {
                "obs_component": layout.obs_component, "entity_position": layout.position,
                "entity_health": layout.health, "entity_healer": layout.healer, "entity_sight": layout.sight,
                "entity_types": (layout.ally_types, layout.enemy_types, layout.n_types),
                "n_enemies": layout.n_enemies, "n_allies": layout.n_allies, "n_normal_actions": info.n_normal_actions,
            }  # fmt: skip
        if info.agent_rewards:
            facts["agent_rewards"] = True
        if info.state_layout is not None:
            facts["state_layout"] = info.state_layout
        if info.box is not None:
            facts["action_bounds"] = info.box.ends
        return {**facts, **self._more_info}

    def get_stats(self) -> dict[str, float]:
        """Return counters."""
        return self.env.get_stats()

    def get_frame(self) -> Frame:
        """Return the units at this moment."""
        return self.env.frame(0)

    def save_replay(self, folder: str = "") -> None:
        """Write a replay into `folder`."""
        self.env.save_replay(folder)

    def close(self) -> None:
        """Release everything."""
        self.env.close()


class OneSlot(BatchedAsSingle):
    """One slot of a batched environment, played in a process of its own with the results it has in the batch."""

    def __init__(self, env: BatchedEnv) -> None:
        super().__init__(env, {"env_info": env.info})

    def _episode_info(self, result: StepResult) -> dict[str, Any]:
        if not result.terminated.item(0):
            return {}
        info = {name: values.item(0) for name, values in result.info.items()}
        return {**info, TRUNCATED: result.truncated.item(0), "lost": result.lost.item(0)}


def single_env(env_cls: Any, args: BaseModel, name: str) -> MultiAgentEnv:
    """Return a single environment; a batched class becomes one with a single slot. name: for errors.

    Errors: UserError for an error in the constructor of a plug-in.
    """
    make = partial(built, f"env={name}", env_cls, args)
    env: MultiAgentEnv = OneSlot(make(1, protocol=BatchedEnv)) if issubclass(env_cls, BatchedEnv) else make()
    return env
