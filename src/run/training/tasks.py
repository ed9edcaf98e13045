"""The maps of a set in training: which rank plays which, and what came of it.

`task_dealing=round_robin`: every rank plays all maps in turn. `sharded`: each rank plays its own maps and as many
episodes as their weights say, so ranks play different numbers. Whoever plays an episode, it counts once in the sums of
an update.

Letters: W ranks, n tasks. Shares are [W, n], the part of each task's episodes that each rank plays; columns sum to 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from omagd.components.data import DataSource
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.envs.protocol import ManyTasks
from omagd.run.training.stages.base import Session, Shaper
from omagd.runners.runner import DealtStarts, TaskStarts, next_in_turn
from omagd.utils.dist_utils import Dist
from omagd.utils.seeding import EpisodeSeeds

TOLERANCE = 0.05
"""How far the busiest rank may be above the mean before tasks are dealt again, as a share of the mean."""

LITTLE = 0.01
"""Share of a task that a rank plays because it needs more tasks."""


def in_turn(n_tasks: int, n_ranks: int, least: int = 1) -> np.ndarray:
    """Return the shares when task i goes to rank i mod W, and each rank has at least `least` tasks.

    Where there are too few, a rank plays further ones together with others.
    """
    owned = np.arange(n_tasks) % n_ranks == np.arange(n_ranks)[:, None]
    for rank, own in enumerate(owned):
        spare = [task for task in np.roll(range(n_tasks), -rank).tolist() if not own[task]]
        own[spare[: max(0, least - int(own.sum()))]] = True
    shares: np.ndarray = owned / owned.sum(0)
    return shares


def balanced(loads: np.ndarray, n_ranks: int, least: int = 1) -> np.ndarray:
    """Return shares with which all ranks have the same to do, except for further tasks of `LITTLE` for `least`.

    The tasks stand in a row, each as long as its load, and the row is cut in W equal parts (McNaughton 1959, Scheduling
    with deadlines and loss functions): so at most W - 1 cuts divide a task.

    Args:
        loads: [n] seconds of each task per episode of the run, all positive. n_ranks: W. least: tasks of each rank.
    """
    ends = np.cumsum(loads)
    cuts = np.linspace(0, ends[-1], n_ranks + 1)[:, None]
    shares = (np.minimum(ends, cuts[1:]) - np.maximum(ends - loads, cuts[:-1])) / loads
    shares = np.where(shares > LITTLE / 10, shares, 0)  # not what rounding has left
    for rank, own in enumerate(shares):
        spare = [task for task in np.roll(range(len(loads)), -rank).tolist() if not own[task]]
        own[spare[: max(0, least - int((own > 0).sum()))]] = LITTLE
    balance: np.ndarray = shares / shares.sum(0)
    return balance


def excess(shares: np.ndarray, loads: np.ndarray) -> float:
    """Return how far the busiest rank is above the mean of the ranks, as a share of the mean."""
    busy = shares @ loads
    return float(busy.max() / busy.mean() - 1)


def apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers with the sum `total` in proportion to `shares`, at least 1 each (largest remainders)."""
    exact = np.asarray(shares, float) / math.fsum(shares) * total
    numbers = np.maximum(np.floor(exact), 1).astype(int)
    order = np.argsort(numbers - exact, kind="stable")
    for place in range(max(total - int(numbers.sum()), 0)):
        numbers[order[place % len(order)]] += 1
    while numbers.sum() > total and (numbers > 1).any():
        numbers[np.where(numbers > 1, numbers - exact, -np.inf).argmax()] -= 1
    return [int(number) for number in numbers]


LAST = 100
"""Newest outcomes of a map that are kept."""


@dataclass
class Record:
    """Results of one map.

    Attributes:
        visits: episodes. wins: won ones. judged: episodes whose outcome is known. last: newest outcomes, 1 won, 0 not.
        seconds: of playing.
    """

    visits: int = 0
    wins: int = 0
    judged: int = 0
    last: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, won: float | None) -> None:
        """Add an episode; None: its outcome is unknown."""
        self.visits += 1
        if won is not None:
            self.judged += 1
            self.wins += int(won > 0)
            self.last.append(int(won > 0))

    def add(self, other: Record) -> None:
        """Add the results of `other`, which are newer, and keep the newest outcomes."""
        self.visits += other.visits
        self.wins += other.wins
        self.judged += other.judged
        self.last = [*self.last, *other.last][-LAST:]
        self.seconds += other.seconds

    def facts(self) -> dict[str, float]:
        """Return the values for logs and the summary."""
        facts: dict[str, float] = {"visits": self.visits}
        if self.judged:
            facts["wins"] = self.wins
            facts["recent_win_rate"] = float(np.mean(self.last))
        if self.visits:
            facts["seconds_per_episode"] = self.seconds / self.visits
        return facts


class Records(dict[str, Record]):
    """Results by map. names: of the maps."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name, Record()) for name in names)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values by map."""
        return {name: asdict(record) for name, record in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; earlier versions wrote further values."""
        for name in self:
            known = {spec.name: state[name][spec.name] for spec in fields(Record)}
            self[name] = Record(**{**known, "last": list(known["last"])})

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add what several ranks have, in rank order."""
        for state in states:
            more = Records(self)
            more.load_state_dict(state)
            for name, record in more.items():
                self[name].add(record)


KEPT_COST = 0.5
"""Part of the measured seconds and episodes that is kept when new ones are added: lengths change with the policy."""


def episode_starts(config: Config, info: EnvInfo, purpose: str, rank: int) -> EpisodeSeeds:
    """Return where the episodes of one purpose start on one rank.

    Those of a set are on its training maps; training episodes begin in groups of `group_size`.
    """
    group_size = config.group_size if purpose == "train" else 1
    if not info.tasks and group_size == 1:
        return EpisodeSeeds(config.seed, purpose, rank)
    weights = [1.0] * max(info.n_training, 1)
    if purpose == "train" and info.tasks:
        weights = [config.task_weights.get(task, 1.0) for task in info.tasks[: info.n_training]]
    weights += [0.0] * (len(info.tasks) - info.n_training)
    kind = DealtStarts if purpose == "train" and config.dealing != "round_robin" else TaskStarts
    return kind(config.seed, purpose, rank, weights=weights, group_size=group_size)


def training_tasks(session: Session) -> TrainingTasks:
    """Return the training maps of a run's set. Errors: TypeError for an environment that does not measure its tasks."""
    env = session.env
    if not isinstance(env, ManyTasks):
        raise TypeError(f"{type(env).__name__} has tasks, but not the methods of ManyTasks")
    starts = session.runners["train"].stream
    return TrainingTasks(session.config, session.info, session.dist, starts, env.n_slots, lambda: env.seconds)


class TrainingTasks(Shaper):
    """Divides the training maps among ranks, and keeps the statistics of all ranks.

    All ranks compute the same plan of an iteration from shared state; only this rank's part of it is played here.

    Args:
        config, info, dist: the run. starts: of this rank's training episodes. n_slots: of each rank. seconds: returns
            the seconds that the environment has spent on each task so far.

    Attributes:
        all: results of each map up to the last exchange, equal on all ranks. own: this rank's since then, part of each
            rank's own state. shares: [W, n] part of each map's episodes that each rank plays.
    """

    def __init__(
        self,
        config: Config,
        info: EnvInfo,
        dist: Dist,
        starts: EpisodeSeeds,
        n_slots: int,
        seconds: Callable[[], np.ndarray],
    ) -> None:
        self.config, self.dist = config, dist
        self._starts, self._n_slots, self._seconds = starts, n_slots, seconds
        self._clock = time.perf_counter
        self.names = info.tasks[: info.n_training]
        weights = np.array([config.task_weights.get(name, 1.0) for name in self.names])
        self.weights = weights / weights.sum()
        self.all, self.own = Records(self.names), Records(self.names)
        self.costs = np.zeros((2, len(self.names)))  # seconds and episodes, newer ones count more
        self.rebalanced = 0
        self._credit = np.zeros(len(self.names))
        self._said = ""
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
            name = str(episode["task"])
            steps[name] += int(episode["length"])
            self.own[name].note(episode.get("battle_won"))
        began, before = self._began
        spent = (self._seconds() - before)[: len(self.names)]
        others = max(self._clock() - began - float(spent.sum()), 0.0)
        parts = np.array(list(steps.values()), float)
        spent = spent + others * parts / max(parts.sum(), 1.0)
        for record, seconds in zip(self.own.values(), spent.tolist(), strict=True):
            record.seconds += seconds

    def synchronise(self, iteration: int = 0) -> bool:
        """Add what all ranks have played since the last time, if it is due; return whether maps have other ranks now.

        A collective. Only increments are exchanged, and each is added once.
        """
        if iteration % self.config.sync_every_n_steps:
            return False
        added = Records(self.names)
        added.merge(self.dist.gather(self.own.state_dict()))
        self.own.load_state_dict(Records(self.names).state_dict())
        self.all.merge([added.state_dict()])
        if not any(record.visits for record in added.values()):
            return False
        found = [[record.seconds for record in added.values()], [record.visits for record in added.values()]]
        self.costs = KEPT_COST * self.costs + np.array(found)
        return self.rebalance()

    def rebalance(self) -> bool:
        """Divide the maps again if the busiest rank would be more than `TOLERANCE` above the mean; return whether."""
        if self.config.dealing != "sharded" or not self.config.balance_tasks_across_gpus:
            return False
        if excess(self.shares, self._loads()) <= TOLERANCE:
            return False
        before = self.shares
        self._assign(self._dealt())
        self.rebalanced += 1
        return not np.array_equal(before, self.shares)

    def news(self) -> str:
        """Return which ranks play which maps, if that has changed; nothing where each rank plays all."""
        if self.config.dealing != "sharded":
            return ""
        played = [[name for name, share in zip(self.names, own, strict=True) if share > 0] for own in self.shares]
        before, self._said = self._said, "; ".join(f"{rank}: {', '.join(names)}" for rank, names in enumerate(played))
        return f"maps by rank: {self._said}" if self._said != before else ""

    def record(self) -> dict[str, float]:
        """Return the values for logs, of all ranks up to the last exchange."""
        facts = {name: record.facts() for name, record in self.all.items()}
        values = {f"train/{name}/{key}": float(value) for name, each in facts.items() for key, value in each.items()}
        if self.config.dealing == "sharded":
            values["rebalanced"] = float(self.rebalanced)
        return values

    def register(self, register: Callable[..., None]) -> None:
        """Save what all ranks share, and this rank's statistics since the last exchange."""
        register("maps", self)
        register("maps of the rank", self.own, "rank")

    def facts(self) -> dict[str, Any]:
        """Return the entry `tasks` of the summary: by map its results and the ranks that play it."""
        found = {}
        for task, (name, record) in enumerate(self.all.items()):
            ranks = np.flatnonzero(self.shares[:, task]).tolist() if self.weights[task] > 0 else []
            found[name] = {**record.facts(), "ranks": ranks}
        return {"tasks": found}

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks share."""
        return {
            "tally": self.all.state_dict(),
            "costs": self.costs.tolist(),
            "credit": self._credit.tolist(),
            "shares": self.shares.tolist(),
            "owed": self._owed.tolist(),
            "rebalanced": self.rebalanced,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; among another number of ranks with tasks divided by the measured costs."""
        self.all.load_state_dict(state["tally"])
        self.costs = np.array(state["costs"])
        self._credit = np.array(state["credit"])
        self.rebalanced = int(state["rebalanced"])
        if len(state["shares"]) == self.dist.world_size:
            self._assign(np.array(state["shares"]))
            self._owed = np.array(state["owed"])
            self.rebalance()
        else:
            self._assign(self._dealt())
