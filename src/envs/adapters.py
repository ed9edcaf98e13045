"""Single environments that look batched, in this process or in others."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.envs.actions import random_actions
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv, Observation, StepResult
from omagd.envs.single import BatchedAsSingle, single_env
from omagd.envs.workers import worker
from omagd.envs.workers.action_log import ActionLog

__all__ = ["BatchedAsSingle", "VectorEnv", "SerialEnvs", "env_info_from_dict"]


def env_info_from_dict(name: str, map_name: str, facts: dict[str, Any]) -> EnvInfo:
    """Return what the field's `get_env_info()` dictionary describes; with a layout if it names `obs_component`.

    An `env_info` in it is taken as it is.
    `entity_position` and `entity_health` may name the places of (dx, dy) and health in a unit's block; else SMAC's.
    """
    if "env_info" in facts:
        return facts["env_info"]
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
        scripted_policies=tuple(dict.fromkeys((worker.RANDOM, *facts.get("scripted_policies", ())))),
        has_win=bool(facts.get("has_win", True)),
        agent_rewards=bool(facts.get("agent_rewards", False)),
    )


class VectorEnv(BatchedEnv):
    """What both adapters share: arrays of all slots, and orders to some of them.

    Attributes:
        deterministic: whether the environments are; then a snapshot is what was played since the resets.
    """

    _arrays: worker.Arrays
    _said: dict[int, Any]
    _journal: ActionLog | None
    _chosen: bool
    _results: dict[str, None]

    def _begin(self, env_cls: type, args: BaseModel, facts: dict[str, Any], name: str | None) -> None:
        """Take the environment's facts; results are labelled with `name`, by default the class's."""
        self.args_model = type(args)  # type: ignore[misc]
        self.deterministic = env_cls.deterministic  # type: ignore[misc, attr-defined]
        self._said = {}
        self._results = {}  # names that episodes have ended with, in their order
        self._chosen = False  # whether what the scripts choose is what the slots now show
        label = name or env_cls.__name__
        map_name = args.model_dump().get("map_name") or facts.get("map_name") or label
        self.info = env_info_from_dict(label, str(map_name), facts)
        self._journal = ActionLog(self.n_slots, self.info.n_agents) if self.deterministic else None

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
        chosen = np.asarray(seeds)[slots]
        self._arrays["seeds"][slots] = chosen
        self._chosen = False
        if self._journal is not None:
            self._journal.begin(slots, chosen)
        self._order(worker.RESET, slots)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the active slots, all at once where they have processes."""
        self.step_start(actions, active)
        return self.step_finish(active)

    def step_start(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Let the active slots begin to play `actions`."""
        slots = np.flatnonzero(active)
        self._settle(slots)
        chosen = np.asarray(actions)[slots]
        self._arrays["actions"][slots] = chosen
        self._chosen = False
        if self._journal is not None:
            self._journal.add(slots, chosen)
        self._order(worker.STEP, slots)

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Wait for the active slots and return what their step brought."""
        active = np.asarray(active, bool)
        self._settle(np.flatnonzero(active))
        terminated = self._arrays["terminated"] & active
        each = np.where(active[:, None], self._arrays["agent_reward"], np.float32(0.0))
        return StepResult(
            reward=np.where(active, self._arrays["reward"], np.float32(0.0)),
            agent_reward=each if self.info.agent_rewards else None,
            terminated=terminated,
            truncated=self._arrays["truncated"] & active,
            lost=self._arrays["lost"] & active,
            info=self._episode_info(terminated) if terminated.any() else {},
        )

    def _episode_info(self, terminated: np.ndarray) -> dict[str, np.ndarray]:
        slots = np.flatnonzero(terminated).tolist()
        names = {slot: list(self._info_names(slot)) for slot in slots}
        self._results.update(dict.fromkeys(name for slot in slots for name in names[slot]))
        found = {name: np.zeros(self.n_slots, np.float32) for name in self._results}
        for slot in slots:
            for column, name in enumerate(names[slot]):
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
        """Return [B, n] actions: "random" is drawn here, for what else there is each environment is asked."""
        if policy not in self.info.scripted_policies:
            return super().scripted_actions(policy, rng)
        if policy == worker.RANDOM:
            self._settle(self._starting())
            return random_actions(self._arrays["avail"], rng)
        if not self._chosen:
            self._ask(worker.CHOOSE)
            self._chosen = True
        return self._arrays["scripted"][:, worker.scripts_of(self.info.scripted_policies).index(policy)].copy()

    def snapshot(self) -> dict[str, Any]:
        """Return what was played since the resets. Errors: NotImplementedError where that is not all there is."""
        if self._journal is None:
            return super().snapshot()
        self._settle(np.arange(self.n_slots))
        return {**self._journal.snapshot(), "results": list(self._results)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Play what a `snapshot` of as many slots holds. Errors: ValueError for other numbers, NotImplementedError."""
        if self._journal is None:
            return super().restore(snapshot)
        begun, lengths, actions = snapshot["begun"], snapshot["lengths"], snapshot["actions"]
        if len(begun) != self.n_slots or actions.shape[2] != self.info.n_agents:
            found = f"{actions.shape[2]} agents in {len(begun)} slots"
            raise ValueError(f"the snapshot is of {found}, not {self.info.n_agents} in {self.n_slots}")
        self.reset(begun, snapshot["seeds"])
        for step in range(actions.shape[1]):
            self.step_start(actions[:, step], lengths > step)
        self._settle(np.arange(self.n_slots))
        self._arrays["want_full"][0] = False
        self._results = dict.fromkeys(snapshot["results"])

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


class SerialEnvs(VectorEnv):
    """Single environments in this process, one after another."""

    def __init__(self, env_cls: type, args: BaseModel, n_slots: int, name: str | None = None) -> None:
        self.n_slots = n_slots
        self._envs: list[MultiAgentEnv] = [single_env(env_cls, args) for _ in range(n_slots)]
        self._begin(env_cls, args, self._envs[0].get_env_info(), name)
        specs = worker.array_specs(self.info, n_slots)
        self._arrays = worker.array_views(bytearray(worker.total_size(specs)), specs)
        self._at: int | None = None
        self._players = [worker.SlotPlayer(env, slot, self._arrays) for slot, env in enumerate(self._envs)]

    def _info_names(self, slot: int) -> list[str]:
        return self._players[slot].info_names

    def _order(self, order: int, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self._at = slot
            player = self._players[slot]
            player.obey(order)
            for message in player.told:
                self._take(message[:1], message[1:])
            player.told.clear()
        self._at = None

    def slots_at_work(self) -> dict[int, int]:
        """Return the seed of the slot that is being reset or stepped; one after another is."""
        at = self._at
        return {} if at is None else {at: int(self._arrays["seeds"][at])}

    def _settle(self, slots: np.ndarray) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()
