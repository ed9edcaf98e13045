"""The environment of a task set: each slot plays one map after another, in arrays of a common shape.

That is the shape of the largest maps, with zeros where a map has fewer units: a unit that a map does not have looks
like one that is dead from the beginning. An absent agent can only choose action 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EnvInfo, StateLayout
from omagd.envs.frames import Frame
from omagd.envs.outputs import counted_together
from omagd.envs.protocol import BatchedEnv, CanBeResident, Observation, ResidentGame, StepResult
from omagd.envs.task_sets import TaskSet
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    import torch

NONE = -1
UNITS = ("move_dim", "enemy_dim", "ally_dim", "own_dim", "position", "sight", "health", "healer")


OF_SETS = "env_args.map_name: a set of maps"


def common_info(infos: Sequence[EnvInfo], label: str, n_training: int) -> EnvInfo:
    """Return the facts of a set from those of its maps. label: name of the set.

    Errors: UserError for maps without units, and for maps whose units have different features.
    """
    first = infos[0]
    if first.box is not None:
        raise UserError(f"env_args.map_name: {first.name} with continuous actions cannot be in a set. Give one map")
    layouts = [info.layout_for(OF_SETS, info.name) for info in infos]
    states = [_state_layout(info) for info in infos]
    for info in infos:
        here, there = unit_features(info), unit_features(first)
        different = [name for name in here if here[name] != there[name]]
        if different:
            name = different[0]
            raise UserError(
                f"env_args.map_name: {info.map_name} and {first.map_name} cannot be in one set: {name} is"
                f" {here[name]} and {there[name]}. Give maps whose units have the same features"
            )
    largest = replace(
        layouts[0],
        n_enemies=max(layout.n_enemies for layout in layouts),
        n_allies=max(layout.n_allies for layout in layouts),
    )
    n_agents, n_actions = max(info.n_agents for info in infos), max(info.n_actions for info in infos)
    state = replace(
        states[0], n_allies=n_agents, n_enemies=largest.n_enemies, last_actions=n_actions * bool(states[0].last_actions)
    )
    others = first.state_dim - states[0].width
    scripts = [name for name in first.scripted_policies if all(name in info.scripted_policies for info in infos)]
    sizes = {(info.n_agents, info.n_actions, info.obs_dim, info.state_dim) for info in infos}
    return replace(
        first, map_name=label, n_agents=n_agents, n_actions=n_actions, obs_dim=largest.obs_dim,
        state_dim=state.width + others, episode_limit=max(info.episode_limit for info in infos), layout=largest,
        state_layout=state, scripted_policies=tuple(scripts), tasks=tuple(info.map_name for info in infos),
        n_training=n_training, padded=len(sizes) > 1,
    )  # fmt: skip


def _state_layout(info: EnvInfo) -> StateLayout:
    if info.state_layout is None:
        raise UserError(
            f"env_args.map_name: {info.map_name} has a state without units, which a set of maps needs. Where"
            " env_args.obs_instead_of_state=True is given, leave it out"
        )
    return info.state_layout


def unit_features(info: EnvInfo) -> dict[str, object]:
    """Return what all maps that one policy plays must have in common, by name. Errors: as `common_info`."""
    layout, state = info.layout_for(OF_SETS, info.name), _state_layout(info)
    return {
        **{name: getattr(layout, name) for name in UNITS},
        "n_normal_actions": info.n_normal_actions,
        "features of an ally in the state": state.ally_dim,
        "features of an enemy in the state": state.enemy_dim,
        "other features of the state": info.state_dim - state.width,
        "last actions in the state": bool(state.last_actions),
        "agent_rewards": info.agent_rewards,
    }


class Placement:
    """Where the numbers of one map stand in arrays of the common shape.

    Args:
        info: of the map. common: of the set.

    Attributes:
        n_agents, n_actions: of the map. obs: [obs_dim], state: [state_dim] of the map, int64 columns in the common
            arrays.
    """

    def __init__(self, info: EnvInfo, common: EnvInfo) -> None:
        assert info.layout is not None and common.layout is not None
        assert info.state_layout is not None and common.state_layout is not None
        self.n_agents, self.n_actions = info.n_agents, info.n_actions
        own, wide = info.layout, common.layout
        self.obs = _columns(
            common.obs_dim,
            (wide.move_dim, own.move_dim),
            (wide.n_enemies * wide.enemy_dim, own.n_enemies * own.enemy_dim),
            (wide.n_allies * wide.ally_dim, own.n_allies * own.ally_dim),
            (wide.own_dim, own.own_dim),
        )
        state, broad = info.state_layout, common.state_layout
        last = np.arange(broad.n_allies * broad.last_actions).reshape(broad.n_allies, broad.last_actions)
        others = info.state_dim - state.width
        units = _columns(
            broad.units_dim,
            (broad.n_allies * broad.ally_dim, state.n_allies * state.ally_dim),
            (broad.n_enemies * broad.enemy_dim, state.n_enemies * state.enemy_dim),
        )
        self.state = np.concatenate([
            units,
            broad.units_dim + last[: state.n_allies, : state.last_actions].ravel(),
            broad.width + np.arange(others),
        ])  # fmt: skip


def _columns(total: int, *parts: tuple[int, int]) -> np.ndarray:
    """Return the first columns of each part: (width in the common array, columns of the map)."""
    starts = np.cumsum([0, *(wide for wide, _ in parts)])
    assert starts[-1] == total
    return np.concatenate([start + np.arange(used) for start, (_, used) in zip(starts[:-1], parts, strict=True)])


class _Pool:
    """Slots of one map, in one environment.

    Attributes:
        env: plays the map. task: its index. place: of its numbers in common arrays. outer: [b] int64, the slot of the
            set that each slot here plays for, or NONE.
    """

    def __init__(self, env: BatchedEnv, task: int, place: Placement) -> None:
        self.env, self.task, self.place = env, task, place
        self.outer = np.full(env.n_slots, NONE)
        self.began = np.zeros(env.n_slots, bool)  # observed only after its first reset

    def used(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which slots [b] bool play for the outer slots `which` [B] bool, and these outer slots, in order."""
        inner = (self.outer != NONE) & which[self.outer]
        return inner, self.outer[inner]


class TaskSetEnv(BatchedEnv):
    """Battles on several maps side by side.

    Args:
        make: (map, slots) -> environment of one map. tasks: the maps. n_slots: B.

    Attributes:
        task: [B] int64, task of the current episode of each slot; `set_tasks` chooses that of the next one. At first
            the training maps follow one another.
        seconds: [tasks] seconds spent in the environments of each task so far.
    """

    args_model = BaseModel
    divisible = False

    def __init__(self, make: Callable[[str, int], BatchedEnv], tasks: TaskSet, n_slots: int) -> None:
        self.n_slots, self.tasks = n_slots, tasks
        self._make = make
        self._pools: list[_Pool] = []
        self._next = np.arange(n_slots) % len(tasks.training)
        self.task = np.full(n_slots, NONE)
        self.seconds = np.zeros(len(tasks.maps))
        counts = np.bincount(self._next, minlength=len(tasks.maps))
        made: list[BatchedEnv] = []
        try:
            for name, count in zip(tasks.maps, counts, strict=True):
                made.append(make(name, max(int(count), 1)))
            self.info = common_info([env.info for env in made], tasks.label, len(tasks.training))
        except BaseException:
            for env in made:
                env.close()
            raise
        self.deterministic = all(env.deterministic for env in made)  # type: ignore[misc]
        for task, env in enumerate(made):
            self._pools.append(_Pool(env, task, Placement(env.info, self.info)))
        shape = n_slots, self.info.n_agents
        self._obs = np.zeros((*shape, self.info.obs_dim), np.float32)
        self._full = np.zeros_like(self._obs)
        self._state = np.zeros((n_slots, self.info.state_dim), np.float32)
        self._avail = np.zeros((*shape, self.info.n_actions), bool)
        self._clear(np.ones(n_slots, bool))
        self._timeout: float | None = None

    def set_tasks(self, which: np.ndarray, tasks: np.ndarray) -> None:
        """Choose the `tasks` [B] int64 of the next episodes of the slots `which` [B] bool."""
        self._next = np.where(which, tasks, self._next)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes of the chosen tasks in the slots `which`."""
        self._assign(which)
        for pool, inner, outer in self._timed(self._each(which)):
            of_pool = np.zeros(len(inner), np.int64)
            of_pool[inner] = seeds[outer]
            pool.env.reset(inner, of_pool)
            pool.began |= inner
        self._clear(which)

    def _clear(self, which: np.ndarray) -> None:
        """Clear the slots `which` [B] bool: a smaller map than before does not write everywhere."""
        for values in (self._obs, self._full, self._state):
            values[which] = 0.0
        self._avail[which] = False
        self._avail[which, :, 0] = True

    def _assign(self, which: np.ndarray) -> None:
        """Give each slot in `which` [B] bool a slot of its next task's environments, making more where they are few."""
        moving = which & (self.task != self._next)
        for pool in self._pools:
            pool.outer[pool.used(moving)[0]] = NONE
        for task in np.unique(self._next[moving]).tolist():
            waiting = np.flatnonzero(moving & (self._next == task)).tolist()
            for pool in [pool for pool in self._pools if pool.task == task]:
                for inner in np.flatnonzero(pool.outer == NONE)[: len(waiting)]:
                    pool.outer[inner] = waiting.pop(0)
            if waiting:
                self._add_pool(task, waiting)
        self.task = np.where(moving, self._next, self.task)

    def _add_pool(self, task: int, slots: Sequence[int]) -> _Pool:
        env = self._make(self.tasks.maps[task], len(slots))
        if self._timeout is not None:
            env.set_worker_timeout(self._timeout)
        pool = _Pool(env, task, Placement(env.info, self.info))
        pool.outer[:] = slots
        self._pools.append(pool)
        return pool

    def _each(self, which: np.ndarray) -> Iterator[tuple[_Pool, np.ndarray, np.ndarray]]:
        """Yield (pool, its slots [b] bool, the outer slots) of all pools that play for `which` [B] bool."""
        for pool in self._pools:
            inner, outer = pool.used(which)
            if len(outer):
                yield pool, inner, outer

    def _timed(self, each: Iterable[tuple[_Pool, np.ndarray, np.ndarray]]) -> Iterator[Any]:
        """Yield what `each` yields, and count the time until the next one is asked for as its task's."""
        for pool, inner, outer in each:
            began = time.perf_counter()
            yield pool, inner, outer
            self.seconds[pool.task] += time.perf_counter() - began

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the slots `active`; those of absent agents are not used."""
        each = list(self._each(active))
        for pool, inner, outer in self._timed(each):
            chosen = np.zeros((len(inner), pool.place.n_agents), np.int64)
            chosen[inner] = actions[outer, : pool.place.n_agents]
            pool.env.step_start(chosen, inner)
        b = self.n_slots
        each_agent = np.zeros((b, self.info.n_agents), np.float32) if self.info.agent_rewards else None
        flags = {name: np.zeros(b, bool) for name in ("terminated", "truncated", "lost")}
        whole = StepResult(np.zeros(b, np.float32), **flags, info={}, agent_reward=each_agent)
        for pool, inner, outer in self._timed(each):
            result = pool.env.step_finish(inner)
            for name in ("reward", "terminated", "truncated", "lost"):
                getattr(whole, name)[outer] = getattr(result, name)[inner]
            if each_agent is not None and result.agent_reward is not None:
                each_agent[outer, : pool.place.n_agents] = result.agent_reward[inner]
            for name, values in result.info.items():
                whole.info.setdefault(name, np.zeros(b, np.float32))[outer] = np.asarray(values)[inner]
        return whole

    def observe(self, full: bool = False) -> Observation:
        """Return the current observations in the common shape."""
        for pool, inner, _ in self._timed(self._each(np.ones(self.n_slots, bool))):
            inner &= pool.began
            if inner.any():
                self._place(pool, inner, pool.env.observe(full))
        return Observation(self._obs, self._state, self._avail, self._full if full else None)

    def _place(self, pool: _Pool, inner: np.ndarray, seen: Observation) -> None:
        place, outer = pool.place, pool.outer[inner]
        agents = np.arange(place.n_agents)
        cells = np.ix_(outer, agents, place.obs)
        self._obs[cells] = seen.obs[inner]
        if seen.full_obs is not None:
            self._full[cells] = seen.full_obs[inner]
        self._state[np.ix_(outer, place.state)] = seen.state[inner]
        self._avail[np.ix_(outer, agents, np.arange(place.n_actions))] = seen.avail_actions[inner]

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions of one of the policies that all maps have; 0 for absent agents."""
        actions = np.zeros((self.n_slots, self.info.n_agents), np.int64)
        for pool in self._pools:
            inner = (pool.outer != NONE) & pool.began
            if inner.any():
                chosen = pool.env.scripted_actions(policy, rng)[inner]
                actions[pool.outer[inner], : pool.place.n_agents] = chosen
        return actions

    def frame(self, slot: int) -> Frame:
        """Return the units of a slot: those of its map."""
        for pool in self._pools:
            if slot in pool.outer:
                return pool.env.frame(int(np.flatnonzero(pool.outer == slot)[0]))
        return super().frame(slot)

    def residents(self, device: torch.device, n_slots: int) -> list[ResidentGame]:
        """Return for each task its episodes in `n_slots` slots on a device, in the common shape."""
        from omagd.envs.task_set_resident import PlacedGame  # imports torch

        games: list[ResidentGame] = []
        for pool in self._pools[: len(self.tasks.maps)]:
            place, game = pool.place, cast(CanBeResident, pool.env).resident(device, n_slots)
            games.append(PlacedGame(game, place.n_agents, (place.obs, place.state), self.info))
        return games

    def snapshot(self) -> dict[str, Any]:
        """Return the tasks of the slots and the snapshots of the environments that play for them."""
        pools = [
            {"task": pool.task, "outer": pool.outer.copy(), "began": pool.began.copy(), "env": pool.env.snapshot()}
            for pool in self._pools if (pool.outer != NONE).any()
        ]  # fmt: skip
        return {"task": self.task.copy(), "next": self._next.copy(), "pools": pools}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`."""
        self.task, self._next = snapshot["task"].copy(), snapshot["next"].copy()
        free = list(self._pools)  # those that tests have needed meanwhile stay for the next test
        for pool in free:
            pool.outer[:], pool.began[:] = NONE, False
        for saved in snapshot["pools"]:
            task, outer = saved["task"], saved["outer"]
            found = next((pool for pool in free if (pool.task, len(pool.outer)) == (task, len(outer))), None)
            if found is None:
                found = self._add_pool(task, outer)
            else:
                free.remove(found)
            found.outer, found.began = outer.copy(), saved["began"].copy()
            found.env.restore(saved["env"])
        self._clear(np.ones(self.n_slots, bool))

    def busy_slots(self) -> dict[int, int]:
        """Return slot -> seed for the slots that are being reset or stepped."""
        return {int(pool.outer[inner]): seed for pool in self._pools for inner, seed in pool.env.busy_slots().items()}

    def set_worker_timeout(self, seconds: float) -> None:
        """Treat a worker process that has not answered for `seconds` as dead."""
        self._timeout = seconds
        for pool in self._pools:
            pool.env.set_worker_timeout(seconds)

    def get_stats(self) -> dict[str, float]:
        """Return the environments' counters together."""
        total = counted_together([pool.env.get_stats() for pool in self._pools])
        if "win_rate" in total:
            total["win_rate"] = total["battles_won"] / max(total["battles_game"], 1.0)
        return total

    def close(self) -> None:
        """Release all environments."""
        for pool in self._pools:
            pool.env.close()
