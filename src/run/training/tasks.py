"""The maps of a set in training: which rank plays which, and what came of it.

`task_dealing=round_robin`: every rank plays all maps in turn. `sharded`: each rank plays its own maps and as many
episodes as their weights say, so ranks play different numbers. `queue`: all ranks take the next start from one list,
so that a fast rank plays more. Whoever plays an episode, it counts once in the sums of an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from omagd import runners
from omagd.components.data import DataSource
from omagd.config.env_info import EnvInfo
from omagd.config.loading import changed
from omagd.config.schema import Config
from omagd.envs.protocol import ManyTasks
from omagd.run.training.partition import TOLERANCE, apportioned, balanced, excess, in_turn
from omagd.run.training.session import Session
from omagd.run.training.task_records import Tally
from omagd.runners.starts import DealtStarts, EpisodeSeeds, StartPool, TaskStarts, next_in_turn
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import together

OF_SETS = ("task_weights", "task_dealing", "enable_task_sharding", "sync_every_n_steps")
OF_SHARDS = ("balance_tasks_across_gpus", "min_tasks_per_gpu")
KEPT_COST = 0.5
"""Part of the measured seconds and episodes that is kept when new ones are added: lengths change with the policy."""


def episode_starts(config: Config, info: EnvInfo, purpose: str, rank: int) -> EpisodeSeeds:
    """Return where the episodes of one purpose start on one rank.

    Those of a set are on its training maps; training episodes begin in groups of `group_size`, from `n_starts` starts.
    """
    group_size = config.group_size if purpose == "train" else 1
    pool = None
    if purpose == "train" and config.n_starts is not None:
        pool = StartPool(config.seed, config.n_starts, config.rollout_skip_threshold)
    if not info.tasks and group_size == 1 and pool is None:
        return EpisodeSeeds(config.seed, purpose, rank)
    weights = [1.0] * max(info.n_training, 1)
    if purpose == "train" and info.tasks:
        weights = [config.task_weights.get(task, 1.0) for task in info.tasks[: info.n_training]]
    weights += [0.0] * (len(info.tasks) - info.n_training)
    kind = DealtStarts if purpose == "train" and config.dealing != "round_robin" else TaskStarts
    return kind(config.seed, purpose, rank, weights=weights, group_size=group_size, pool=pool)


@together
def check_dealing(config: Config, info: EnvInfo) -> Iterator[str]:
    """Reject keys of task sets that mean nothing or contradict each other. Errors: UserError."""
    given = {key: value for key, (value, _) in changed(config, (*OF_SETS, *OF_SHARDS)).items()}
    if not info.tasks:
        for key, value in given.items():
            yield f"{key}={value}: has no meaning for one map. Give a set of maps, or leave it out"
        return
    trained = info.tasks[: info.n_training]
    for name in config.task_weights:
        if name not in trained:
            yield (
                f"task_weights.{name}={config.task_weights[name]}: is not trained on here. Maps: {', '.join(trained)}"
            )
    played = [name for name in trained if config.task_weights.get(name, 1.0) > 0]
    if not played:
        yield f"task_weights={config.task_weights}: no map has a positive weight. Give one at least"
        return
    if config.enable_task_sharding and config.dealing != "sharded":
        yield f"enable_task_sharding=True: contradicts task_dealing={config.dealing}. Give one of the two"
    for key in OF_SHARDS if config.dealing != "sharded" else ():
        if key in given:
            yield f"{key}={given[key]}: needs task_dealing=sharded, not {config.dealing}, or leave it out"
    if config.min_tasks_per_gpu > len(played):
        yield (
            f"min_tasks_per_gpu={config.min_tasks_per_gpu}: there are {len(played)} map(s) to play:"
            f" {', '.join(played)}. Give at most {len(played)}"
        )
    if config.dealing != "round_robin" and not runners.REGISTRY.get(config.runner).rounds:
        yield (
            f"runner={config.runner}: task_dealing={config.dealing} deals rounds of episodes. Use runner=parallel, or"
            " task_dealing=round_robin"
        )


def training_tasks(session: Session) -> TrainingTasks:
    """Return the training maps of a run's set. Errors: TypeError for an environment that does not measure its tasks."""
    env = session.env
    if not isinstance(env, ManyTasks):
        raise TypeError(f"{type(env).__name__} has tasks, but not the methods of ManyTasks")
    starts = session.runners["train"].stream
    return TrainingTasks(session.config, session.info, session.dist, starts, env.n_slots, lambda: env.seconds)


class TrainingTasks:
    """Deals the training maps to this rank, and keeps the statistics of all ranks.

    All ranks compute the same plan of an iteration from shared state; only this rank's part of it is played here.

    Args:
        config, info, dist: the run. starts: of this rank's training episodes. n_slots: of each rank. seconds: returns
            the seconds that the environment has spent on each task so far. clock: returns the seconds of this rank.

    Attributes:
        tally: results of each map. shares: [W, n] part of each map's episodes that each rank plays.
    """

    def __init__(
        self,
        config: Config,
        info: EnvInfo,
        dist: Dist,
        starts: EpisodeSeeds,
        n_slots: int,
        seconds: Callable[[], np.ndarray],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.dist = config, dist
        self._starts, self._n_slots, self._seconds = starts, n_slots, seconds
        self._clock = clock
        self.names = info.tasks[: info.n_training]
        weights = np.array([config.task_weights.get(name, 1.0) for name in self.names])
        self.weights = weights / weights.sum()
        self.tally = Tally(self.names)
        self.costs = np.zeros((2, len(self.names)))  # seconds and episodes, newer ones count more
        self.rebalanced = 0
        self._credit = np.zeros(len(self.names))
        self._iteration = 0
        self._assign(self._dealt())

    # --- dealing

    def deal(self, data: DataSource) -> None:
        """Give this rank its starts of the next iteration, where it does not simply play all maps in turn."""
        starts = self._starts
        if not isinstance(starts, DealtStarts):
            return
        size = starts.group_size
        rounds = 1 if data.sampled else -(-self.config.batch_size // self._n_slots)
        plan = self._plan(self.dist.world_size * rounds * (self._n_slots // size))
        self._iteration += 1
        if self.config.dealing == "queue":
            starts.deal(self._from_queue(plan))
            data.expect(1, self.config.batch_size)  # others take over what this rank does not play
        else:
            mine = self._from_shares(plan)
            starts.deal(mine)
            data.expect(len(mine) * size, self._batch_size())

    def _plan(self, count: int) -> list[int]:
        """Return the tasks of the next `count` starts, exactly in proportion to their weights in the long run."""
        return [next_in_turn(self._credit, self.weights) for _ in range(count)]

    def _from_shares(self, plan: Sequence[int]) -> list[int]:
        """Return this rank's part of a plan; a rank that would have none begins one in advance."""
        owners = [next_in_turn(self._owed[:, task], self.shares[:, task]) for task in plan]
        mine = [task for task, owner in zip(plan, owners, strict=True) if owner == self.dist.rank]
        for rank in sorted(set(range(self.dist.world_size)) - set(owners)):
            task = int(np.where(self.shares[rank] > 0, self._owed[rank], -np.inf).argmax())
            self._owed[rank, task] -= 1.0
            self._owed[:, task] += self.shares[:, task]
            self._credit[task] -= 1.0
            self._credit += self.weights
            if rank == self.dist.rank:
                mine.append(task)
        return mine

    def _from_queue(self, plan: Sequence[int]) -> Iterator[int]:
        """Yield tasks as this rank is free to play them; every rank plays one at least.

        The first W starts belong to the ranks in order. The number of each further one is taken from a counter in the
        store of the process group.
        """
        key, n_ranks = f"tasks/{self._iteration}", self.dist.world_size
        if self.dist.is_main and self._iteration > 2:
            self.dist.store.delete_key(f"tasks/{self._iteration - 2}")
        number = self.dist.rank
        while number < len(plan):
            yield plan[number]
            number = n_ranks - 1 + self.dist.store.add(key, 1)

    def _batch_size(self) -> int:
        """Return this rank's part of the batch of all ranks: the share of all episodes that it plays.

        So an episode that is sampled from the ranks' buffers is of a map with the probability of the map's weight.
        """
        total = self.dist.world_size * self.config.batch_size
        return apportioned(total, (self.shares @ self.weights).tolist())[self.dist.rank]

    def _dealt(self) -> np.ndarray:
        """Return shares [W, n] as the configuration and the measured seconds say; of a task without weight 0."""
        config, n_ranks = self.config, self.dist.world_size
        if config.dealing != "sharded":
            return np.full((n_ranks, len(self.names)), 1.0 / n_ranks)
        loads = self._loads()
        played = loads > 0
        shares = np.zeros((n_ranks, len(self.names)))
        if config.balance_tasks_across_gpus:
            shares[:, played] = balanced(loads[played], n_ranks, config.min_tasks_per_gpu)
        else:
            shares[:, played] = in_turn(int(played.sum()), n_ranks, config.min_tasks_per_gpu)
        return shares

    def _loads(self) -> np.ndarray:
        """Return the seconds of each task per episode of the run, [n]; unknown ones as the mean of the others."""
        seconds, episodes = self.costs
        known = episodes > 0
        each = np.where(known, seconds / np.maximum(episodes, 1e-9), seconds.sum() / max(episodes.sum(), 1e-9))
        return self.weights * np.where(each > 0, each, 1.0)

    def _assign(self, shares: np.ndarray) -> None:
        self.shares, self._owed = shares, np.zeros_like(shares)

    # --- results

    def begin(self) -> None:
        """Start to measure the playing of this rank."""
        self._began = self._clock(), self._seconds().copy()

    def played(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Add the episodes that have ended since `begin`, as in `Rollout.log`, and the time.

        The time of the environments is their task's. The rest, mostly acting, costs the same for all maps, since inputs
        have one shape: it is divided by steps.
        """
        steps = dict.fromkeys(self.names, 0)
        for episode in log:
            name, length = str(episode["task"]), int(episode["length"])
            steps[name] += length
            self.tally.note(name, int(episode["seed"]), length, episode.get("battle_won"))
        began, before = self._began
        spent = (self._seconds() - before)[: len(self.names)]
        others = max(self._clock() - began - float(spent.sum()), 0.0)
        parts = np.array(list(steps.values()), float)
        self.tally.spend(spent + others * parts / max(parts.sum(), 1.0))

    def due(self, iteration: int) -> bool:
        """Whether the statistics are exchanged after this iteration."""
        return iteration % self.config.sync_every_n_steps == 0

    def synchronise(self) -> bool:
        """Add what all ranks have played since the last time; return whether maps have other ranks now.

        A collective. Only increments are exchanged, and each is added once.
        """
        seconds, episodes = self.tally.synchronise(self.dist)
        if not episodes.any():
            return False
        self.costs = KEPT_COST * self.costs + np.stack([seconds, episodes])
        return self.rebalance()

    def rebalance(self) -> bool:
        """Deal the maps again if the busiest rank would be more than `TOLERANCE` above the mean; return whether."""
        if self.config.dealing != "sharded" or not self.config.balance_tasks_across_gpus:
            return False
        if excess(self.shares, self._loads()) <= TOLERANCE:
            return False
        before = self.shares
        self._assign(self._dealt())
        self.rebalanced += 1
        return not np.array_equal(before, self.shares)

    def deal_by_rank(self) -> str:
        """Return which maps each rank plays, empty where each rank plays all."""
        if self.config.dealing != "sharded":
            return ""
        played = [[name for name, share in zip(self.names, own, strict=True) if share > 0] for own in self.shares]
        return "; ".join(f"{rank}: {', '.join(names)}" for rank, names in enumerate(played))

    def record(self) -> dict[str, float]:
        """Return the values for logs, of all ranks up to the last exchange."""
        facts = self.tally.facts()
        values = {f"train/{name}/{key}": float(value) for name, each in facts.items() for key, value in each.items()}
        if self.config.dealing == "sharded":
            values["rebalanced"] = float(self.rebalanced)
        return values

    def summary(self) -> dict[str, Any]:
        """Return the entry `tasks` of the summary: by map, results and the ranks that play it."""
        found = {}
        for task, (name, facts) in enumerate(self.tally.facts().items()):
            ranks = np.flatnonzero(self.shares[:, task]).tolist() if self.weights[task] > 0 else []
            found[name] = {**facts, **self.tally.starts(name), "ranks": ranks}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks share."""
        return {
            "tally": self.tally.state_dict(),
            "costs": self.costs.tolist(),
            "credit": self._credit.tolist(),
            "iteration": self._iteration,
            "shares": self.shares.tolist(),
            "owed": self._owed.tolist(),
            "rebalanced": self.rebalanced,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; among another number of ranks with tasks dealt by the measured costs."""
        self.tally.load_state_dict(state["tally"])
        self.costs = np.array(state["costs"])
        self._credit = np.array(state["credit"])
        self._iteration, self.rebalanced = int(state["iteration"]), int(state["rebalanced"])
        if len(state["shares"]) == self.dist.world_size:
            self._assign(np.array(state["shares"]))
            self._owed = np.array(state["owed"])
            self.rebalance()
        else:
            self._assign(self._dealt())
