"""Single environments that look batched, and a batched one that looks single."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.envs import shared_env_worker as worker
from omagd.envs.actions import random_actions
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv, Observation, StepResult


def env_info_from_dict(name: str, map_name: str, facts: dict[str, Any]) -> EnvInfo:
    """Return what the field's `get_env_info()` dictionary describes; with a layout if it names `obs_component`.

    `entity_position` and `entity_health` may name the places of (dx, dy) and health in a unit's block; else SMAC's.
    """
    layout = None
    if facts.get("obs_component") is not None:
        move, (n_enemies, enemy_dim), (n_allies, ally_dim), own = facts["obs_component"]
        layout = EntityLayout(
            int(np.prod(move)),
            n_enemies,
            enemy_dim,
            n_allies,
            ally_dim,
            int(np.prod(own)),
            position=tuple(facts.get("entity_position", (2, 3))),
            health=int(facts.get("entity_health", 4 if min(enemy_dim, ally_dim) > 4 else -1)),
        )
    return EnvInfo(
        name=name,
        map_name=map_name,
        n_agents=int(facts["n_agents"]),
        n_actions=int(facts["n_actions"]),
        obs_dim=int(np.prod(facts["obs_shape"])),
        state_dim=int(np.prod(facts["state_shape"])),
        episode_limit=int(facts["episode_limit"]),
        n_normal_actions=int(facts.get("n_normal_actions", 0)),
        layout=layout,
        scripted_policies=("random",),
        has_win=bool(facts.get("has_win", True)),
    )


class ManyEnvs(BatchedEnv):
    """What both adapters share: arrays of all slots, and orders to some of them."""

    _arrays: worker.Arrays
    _said: dict[int, Any]

    def _begin(self, env_cls: type[MultiAgentEnv], args: BaseModel, facts: dict[str, Any], name: str | None) -> None:
        """Take the environment's facts; results are labelled with `name`, by default the class's."""
        self.args_model = type(args)  # type: ignore[misc]
        self._said = {}
        label = name or env_cls.__name__
        map_name = args.model_dump().get("map_name") or facts.get("map_name") or label
        self.info = env_info_from_dict(label, str(map_name), facts)

    @abstractmethod
    def _order(self, order: int, slots: np.ndarray) -> None:
        """Let the slot numbers `slots` begin what is ordered."""

    @abstractmethod
    def _settle(self, slots: np.ndarray) -> None:
        """Wait until the slot numbers `slots` have done what they were ordered."""

    @abstractmethod
    def _info_names(self, slot: int) -> list[str]:
        """Return the names of the columns of `info` in that slot."""

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes in the slots `which`, slot b from `seeds[b]`. Who observes or steps them waits for it."""
        slots = np.flatnonzero(which)
        self._settle(slots)
        self._arrays["seeds"][slots] = np.asarray(seeds)[slots]
        self._order(worker.RESET, slots)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the active slots, all at once where they have processes."""
        self.step_start(actions, active)
        return self.step_finish(active)

    def step_start(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Let the active slots begin to play `actions`."""
        slots = np.flatnonzero(active)
        self._settle(slots)
        self._arrays["actions"][slots] = np.asarray(actions)[slots]
        self._order(worker.STEP, slots)

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Wait for the active slots and return what their step brought."""
        active = np.asarray(active, bool)
        self._settle(np.flatnonzero(active))
        terminated = self._arrays["terminated"] & active
        return StepResult(
            reward=np.where(active, self._arrays["reward"], np.float32(0.0)),
            terminated=terminated,
            truncated=self._arrays["truncated"] & active,
            lost=self._arrays["lost"] & active,
            info=self._episode_info(terminated) if terminated.any() else {},
        )

    def _episode_info(self, terminated: np.ndarray) -> dict[str, np.ndarray]:
        names = dict.fromkeys(name for slot in range(self.n_slots) for name in self._info_names(slot))
        found = {name: np.zeros(self.n_slots, np.float32) for name in names}
        for slot in np.flatnonzero(terminated):
            for column, name in enumerate(self._info_names(int(slot))):
                found[name][slot] = self._arrays["info"][slot, column]
        return found

    def observe(self, full: bool = False) -> Observation:
        """Return copies of what all slots show; once asked for, `full_obs` is computed along with each step.

        Waits for resets. Rows of slots that are between `step_start` and `step_finish` hold anything.
        """
        if full and not self._arrays["want_full"][0]:
            self._ask(worker.SHOW_FULL)
        else:
            self._settle(self._starting())
        self._arrays["want_full"][0] = full
        obs, state, avail = (self._arrays[name].copy() for name in ("obs", "state", "avail"))
        return Observation(obs, state, avail, self._arrays["full_obs"].copy() if full else None)

    def _starting(self) -> np.ndarray:
        """Return the slot numbers whose episodes are being started."""
        return np.empty(0, np.int64)

    def _ask(self, order: int) -> list[Any]:
        """Let all slots do what is ordered and return what they say to it, in order; None from who says nothing."""
        everyone = np.arange(self.n_slots)
        self._settle(everyone)
        self._said.clear()
        self._order(order, everyone)
        self._settle(everyone)
        return [self._said.get(slot) for slot in range(self.n_slots)]

    def _take(self, mark: bytes, body: bytes) -> int:
        """Keep what a slot said and return its number."""
        slot, said = json.loads(body)
        self._said[slot] = worker.UNSUPPORTED if mark == worker.UNSUPPORTED else said
        return int(slot)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions drawn uniformly from the available ones (policy "random")."""
        if policy not in self.info.scripted_policies:
            return super().scripted_actions(policy, rng)
        self._settle(self._starting())
        return random_actions(self._arrays["avail"], rng)

    def get_stats(self) -> dict[str, float]:
        """Return the counters summed over the slots; "_rate" ends names that are averaged, "_build" the largest."""
        each = [stats or {} for stats in self._ask(worker.STATS)]
        names = dict.fromkeys(name for stats in each for name in stats)
        total = {name: sum(stats.get(name, 0.0) for stats in each) for name in names}
        for name in names:
            if name.endswith("_rate"):
                total[name] /= len(each)
            elif name.endswith("_build"):
                total[name] = max(stats.get(name, 0.0) for stats in each)
        return total

    def save_replay(self, folder: str) -> None:
        """Let each environment write its replay, into `folder` or where it was told. Errors: NotImplementedError."""
        path = np.frombuffer(folder.encode()[: worker.MAX_PATH], np.uint8)
        self._arrays["folder"][:] = 0
        self._arrays["folder"][: len(path)] = path
        if worker.UNSUPPORTED in self._ask(worker.REPLAY):
            super().save_replay(folder)


class SerialEnvs(ManyEnvs):
    """Single environments in this process, one after another."""

    def __init__(self, env_cls: type[MultiAgentEnv], args: BaseModel, n_slots: int, name: str | None = None) -> None:
        self.n_slots = n_slots
        self._envs = [env_cls(args) for _ in range(n_slots)]  # type: ignore[call-arg]
        self._begin(env_cls, args, self._envs[0].get_env_info(), name)
        specs = worker.array_specs(self.info, n_slots)
        self._arrays = worker.array_views(bytearray(worker.total_size(specs)), specs)
        self._players = [worker.SlotPlayer(env, slot, self._arrays) for slot, env in enumerate(self._envs)]

    def _info_names(self, slot: int) -> list[str]:
        return self._players[slot].info_names

    def _order(self, order: int, slots: np.ndarray) -> None:
        for slot in slots:
            player = self._players[slot]
            player.obey(order)
            for message in player.told:
                self._take(message[:1], message[1:])
            player.told.clear()

    def _settle(self, slots: np.ndarray) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()


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
        info = {name: values.item(0) for name, values in result.info.items()}
        info["episode_limit"] = result.truncated.item(0)
        if result.lost.item(0):
            info["lost"] = 1
        return result.reward.item(0), result.terminated.item(0), info

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
