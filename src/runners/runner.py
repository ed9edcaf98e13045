"""Runners that play rounds of episodes, the interface of all runners, and where episodes of task sets start.

A start is a reset seed, a task of a set and a group of episodes with one start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy
from omagd.envs.protocol import BatchedEnv
from omagd.runners.rollout import Recorder, Rollout, RolloutLoop, do_nothing
from omagd.utils.seeding import EpisodeSeeds, Origins

ENDLESS = 2**62


def next_in_turn(credit: np.ndarray, weights: np.ndarray) -> int:
    """Return the next of several by smooth weighted round robin, and change `credit` [n] in place.

    Each one's credit grows by its weight; the one with the most credit is next and pays 1. weights: [n], sum 1.
    """
    credit += weights
    chosen = int(credit.argmax())
    credit[chosen] -= 1.0
    return chosen


class TaskStarts(EpisodeSeeds):
    """Assigns tasks to slots in proportion to weights, and gives groups of K slots one start.

    Tasks follow each other as `next_in_turn` says, so the tasks of a round are mixed, and their shares are exact.

    Args:
        seed, purpose, rank: as in `EpisodeSeeds`. weights: of all tasks; 0: never played.
        group_size: K consecutive slots that begin with one task and seed.
    """

    def __init__(
        self, seed: int, purpose: str, rank: int = 0, *, weights: Sequence[float] = (1.0,), group_size: int = 1
    ) -> None:
        super().__init__(seed, purpose, rank)
        self.group_size = group_size
        self.set_weights(weights)
        self._last: Origins | None = None
        self._n_groups = 0

    def set_weights(self, weights: Sequence[float]) -> None:
        """Assign tasks by these weights from here on."""
        self._weights = np.asarray(weights, float) / np.sum(weights)
        self._credit = np.zeros(len(self._weights))

    def origins(self, which: np.ndarray, lost: bool = False) -> Origins:
        """Return the origins of the next episodes of the slots `which` [B] bool.

        A group gets a new start when all its slots begin; a slot that begins without the others has lost its episode
        and plays the same start again. lost: the episodes replace lost ones, on the same maps.
        """
        last = self._last or Origins.of(np.zeros(len(which), np.int64))
        new = Origins(last.seed.copy(), last.task.copy(), last.group.copy())
        size = self.group_size
        drawn = np.zeros(len(which), bool)
        for first in range(0, len(which), size):
            group = slice(first, first + size)
            if which[group].all():
                drawn[first] = True
                new.task[group] = last.task[first] if lost else self._next_task(first)
                if size > 1:
                    new.group[group] = self._n_groups
                    self._n_groups += 1
        seeds = self.draw(drawn)
        for begun in np.flatnonzero(drawn).tolist():
            new.seed[begun : begun + size] = int(seeds[begun])
        self._last = new
        return new

    def _next_task(self, first: int) -> int:
        """Return the task of the next start, which the slots from `first` on play."""
        return next_in_turn(self._credit, self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Return also the credits of the tasks, and the origins of the current episodes."""
        own: dict[str, Any] = {"weights": self._weights.tolist(), "credit": self._credit.tolist()}
        if self._last is not None:
            own["last"] = {name: values.tolist() for name, values in vars(self._last).items()}
        return {**super().state_dict(), **own, "groups": self._n_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the episodes of `state`."""
        super().load_state_dict(state)
        self._weights, self._credit = np.array(state["weights"]), np.array(state["credit"])
        last = state.get("last")
        self._last = None if last is None else Origins(**{name: np.array(values) for name, values in last.items()})
        self._n_groups = int(state["groups"])


class DealtStarts(TaskStarts):
    """Plays the tasks that `deal` has given to this rank, one after another, in whichever slots are free.

    A round ends when all of them are played. Groups begin when all their slots are free.
    """

    per_round: ClassVar[int] = ENDLESS
    _dealt: Iterator[int] = iter(())

    def deal(self, tasks: Iterable[int]) -> None:
        """Play one start of each of `tasks` in the next round."""
        self._dealt = iter(tasks)
        self._free = np.zeros(0, bool)

    def begun(self, free: np.ndarray) -> np.ndarray:
        """Return which slots [B] bool begin: groups whose slots are all free, as long as there are tasks."""
        if len(self._free) != len(free):
            self._free, self._coming = np.zeros_like(free), np.zeros(len(free), np.int64)
        self._free |= free
        begun = np.zeros_like(free)
        for first in range(0, len(free), self.group_size):
            group = slice(first, first + self.group_size)
            if self._free[group].all() and (task := next(self._dealt, None)) is not None:
                begun[group], self._coming[first] = True, task
        self._free &= ~begun
        return begun

    def _next_task(self, first: int) -> int:
        return int(self._coming[first])


class Runner:
    """Plays a fixed number of episodes per slot, so that short episodes are not preferred to long ones.

    Args:
        env: all slots. config: the run. info: facts of `env`. stream: reset seeds, this runner's own.

    Attributes:
        lost: episodes that were void and replaced.
        ticked, asked: called at every tick, and with every call of the environment; see `RolloutLoop`.
        prepare: called before episodes begin or continue; opponents are set here.
    """

    unit: ClassVar[str] = "episodes"  # of replay and batches
    rounds: ClassVar[bool] = True  # an iteration is a round of episodes, and leaves none in flight

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        self.env = env
        self.config = config
        self.info = info
        self.stream = stream
        self.lost = 0
        self.prepare: Callable[[], None] = do_nothing
        self.ticked: Callable[[bool], None] = do_nothing
        self.asked: Callable[[np.ndarray, np.ndarray], None] = do_nothing
        self._recorders: dict[bool, Recorder] = {}

    @staticmethod
    def slots(config: Config) -> int:
        """Return the number of slots of the environment."""
        return config.batch_size_run

    @staticmethod
    def rows(info: EnvInfo) -> int:
        """Return the most rows of one entry of the replay."""
        return info.episode_limit + 1

    @staticmethod
    def per_iteration(config: Config, environments: int) -> str:
        """Return, in words, what `environments` of all ranks play between updates."""
        return f"{environments} episodes"

    @staticmethod
    def check(config: Config) -> None:
        """Reject configurations that this runner cannot play: here, none. Errors: UserError."""

    def run(
        self,
        policy: Policy,
        *,
        explore: Exploration | None,
        episodes_per_slot: int = 1,
        full_obs: bool = False,
        keep: bool = True,
    ) -> Rollout:
        """Play `episodes_per_slot` episodes in every slot; a slot whose episode has ended begins its next one at once.

        Args:
            policy: acts. It is also asked at the closing row of an episode, whose actions are not played, since its
                own fields belong to that row too.
            explore: None to act greedily. full_obs: record `full_obs`. keep: return the episodes, or the stats alone.

        A lost episode is replaced by another one, from the next seed of its slot.
        Errors: UserError as in `RolloutLoop.tick`.
        """
        self.prepare()
        loop = self._loop(policy, full_obs, keep)
        loop.begin(episodes_per_slot)
        while not loop.over:
            loop.tick(explore)
        return self._take(loop)

    def collect(self, policy: Policy, *, explore: Exploration | None, full_obs: bool = False) -> Rollout:
        """Play one iteration of training: here, one round. Arguments as in `run`."""
        return self.run(policy, explore=explore, episodes_per_slot=self.stream.per_round, full_obs=full_obs)

    def drain(self, policy: Policy, *, explore: Exploration | None) -> Rollout:
        """Set aside, or finish and return, the episodes that `collect` left in flight: here, none."""
        return Rollout()

    @property
    def in_flight(self) -> bool:
        """Whether `collect` has left episodes unfinished."""
        return False

    def snapshot(self) -> dict[str, Any]:
        """Return the state between two calls, as arrays, tensors and plain values; changes nothing."""
        return {"stream": self.stream.state_dict(), "lost": self.lost}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`; its episodes in flight go on with the next `collect`."""
        self.stream.load_state_dict(snapshot["stream"])
        self.lost = int(snapshot["lost"])

    def renew(self, generation: int) -> None:
        """Draw other, reproducible seeds from here on: see `EpisodeSeeds.renew`. No episode may be in flight."""
        self.stream.renew(generation)

    def _loop(self, policy: Policy, full_obs: bool, keep: bool, kind: type[RolloutLoop] = RolloutLoop) -> RolloutLoop:
        """Return a loop that has not begun."""
        recorder = self._recorder(full_obs) if keep else None
        loop = kind(self.env, self.info, policy, recorder, full_obs or policy.wants_full_obs, self.stream)
        loop.ticked, loop.asked = self.ticked, self.asked
        return loop

    def _take(self, loop: RolloutLoop) -> Rollout:
        rollout = loop.take()
        self.lost += rollout.lost
        return rollout

    def _recorder(self, full_obs: bool) -> Recorder:
        if full_obs not in self._recorders:
            self._recorders[full_obs] = Recorder(self.info, self.env.n_slots, full_obs)
        self._recorders[full_obs].begin()
        return self._recorders[full_obs]


class ParallelRunner(Runner):
    """Plays `batch_size_run` slots."""


class EpisodeRunner(Runner):
    """Plays one slot."""

    @staticmethod
    def slots(config: Config) -> int:
        """Return 1, whatever `batch_size_run` says."""
        return 1
