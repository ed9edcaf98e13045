"""Where episodes start: reset seeds, the tasks of a set, groups of episodes with one start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from omagd.utils.seeding import stream_seed, stream_seeds

NO_GROUP = -1
ENDLESS = 2**62
MANY = 8  # slots from which on their seeds cost less together than one by one


@dataclass
class Origins:
    """Where the episodes of all slots come from: reset seed, task and group, each [B] int64; group -1: none."""

    seed: np.ndarray
    task: np.ndarray
    group: np.ndarray

    @classmethod
    def of(cls, seed: np.ndarray) -> Origins:
        """Return the origins of episodes of one task, each for itself."""
        return cls(seed, np.zeros_like(seed), np.full_like(seed, NO_GROUP))

    def where(self, which: np.ndarray, other: Origins) -> Origins:
        """Return these in the slots `which` [B] bool, those of `other` elsewhere."""
        return Origins(*(np.where(which, getattr(self, s.name), getattr(other, s.name)) for s in fields(self)))


class EpisodeSeeds:
    """Reset seeds of one purpose on one rank; an episode's seed is a function of its slot and its number there.

    Args:
        seed: the run's seed. purpose: "train", "test", "pretrain", ... rank: of this process.

    Attributes:
        per_round: episodes that each slot plays in one round of training.
    """

    per_round: ClassVar[int] = 1

    def __init__(self, seed: int, purpose: str, rank: int = 0) -> None:
        self._place = (seed, f"env/{purpose}", rank)
        self._generation = 0
        self._played: list[int] = []

    def renew(self, generation: int) -> None:
        """Draw from another stream from here on: that of the same place and `generation` > 0."""
        self._generation = generation
        self._played = []

    def draw(self, which: np.ndarray) -> np.ndarray:
        """Return the next seed of each slot in `which` [B] bool as [B] int64, 0 elsewhere."""
        self._played += [0] * (len(which) - len(self._played))
        seeds = np.zeros(len(which), np.int64)
        seed, purpose, rank = self._place
        if self._generation:
            purpose = f"{purpose}/{self._generation}"
        begun = np.flatnonzero(which)
        if len(begun) >= MANY:
            seeds[begun] = stream_seeds(seed, purpose, rank, begun, np.array(self._played, np.int64)[begun])
        else:
            seeds[begun] = [stream_seed(seed, purpose, rank, slot, self._played[slot]) for slot in begun.tolist()]
        for slot in begun.tolist():
            self._played[slot] += 1
        return seeds

    def begun(self, free: np.ndarray) -> np.ndarray:
        """Return which slots [B] bool begin an episode now, where those in `free` [B] bool could: here, all of them."""
        return free

    def origins(self, which: np.ndarray) -> Origins:
        """Return the origins of the next episodes of the slots `which` [B] bool; others hold anything."""
        return Origins.of(self.draw(which))

    def state_dict(self) -> dict[str, Any]:
        """Return how many episodes each slot has begun, and in which generation."""
        return {"played": list(self._played), "generation": self._generation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the episodes of `state`."""
        self._played = [int(count) for count in state["played"]]
        self._generation = int(state["generation"])


def next_in_turn(credit: np.ndarray, weights: np.ndarray) -> int:
    """Return the next of several by smooth weighted round robin, and change `credit` [n] in place.

    Each one's credit grows by its weight; the one with the most credit is next and pays 1. weights: [n], sum 1.
    """
    credit += weights
    chosen = int(credit.argmax())
    credit[chosen] -= 1.0
    return chosen


Start = tuple[int, int]
"""Task and reset seed."""


class StartPool:
    """Draws starts, the same ones on all ranks.

    A start whose newest group was won by all is *mastered*. It is skipped when it is drawn; after `threshold` skips by
    all ranks it is forgotten, so it is played again when it is drawn next. (In RIPT, each rank has a table of its own.)
    What ranks note takes effect when they exchange it, so the table is the same on all of them.

    Args:
        seed: the run's seed. size: number of starts of each task. threshold: None: nothing is skipped.
    """

    def __init__(self, seed: int, size: int, threshold: int | None = None) -> None:
        self._seed, self._size, self._threshold = seed, size, threshold
        self._skips: dict[Start, int] = {}  # of mastered starts
        self._news: list[tuple[Start, str]] = []

    def draw(self, task: int, source: int) -> int:
        """Return the reset seed of a start of `task`. source: the random number that decides."""
        rng = np.random.default_rng(source)
        for _ in range(self._size):  # where all of them are mastered, one is played all the same
            start = task, stream_seed(self._seed, "env/starts", task, int(rng.integers(self._size)))
            if start not in self._skips:
                break
            self._news.append((start, "skipped"))
        return start[1]

    def note(self, task: int, seed: int, outcomes: Sequence[float]) -> None:
        """Note the outcomes of a group, 1 for a won battle."""
        if self._threshold is not None:
            mastered = all(outcome == 1.0 for outcome in outcomes)
            self._news.append(((task, seed), "mastered" if mastered else "open"))

    def take_news(self) -> list[tuple[Start, str]]:
        """Return what this rank has noted since the last time."""
        news, self._news = self._news, []
        return news

    def learn(self, news: Iterable[tuple[Start, str]]) -> None:
        """Change the table by what all ranks have noted, in the same order on all of them."""
        for start, what in news:
            if what == "mastered":
                self._skips[start] = 0
            elif what == "open":
                self._skips.pop(start, None)
            elif start in self._skips:
                self._skips[start] += 1
        assert self._threshold is not None or not self._skips
        self._skips = {start: skips for start, skips in self._skips.items() if skips < (self._threshold or 0)}

    def __len__(self) -> int:
        """Return the number of mastered starts."""
        return len(self._skips)

    def state_dict(self) -> list[list[int]]:
        """Return the mastered starts with their skips, between two exchanges."""
        return [[*start, skips] for start, skips in self._skips.items()]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        """Continue from `state_dict()`."""
        self._skips = {(task, seed): skips for task, seed, skips in state}


class TaskStarts(EpisodeSeeds):
    """Assigns tasks to slots in proportion to weights, and gives groups of K slots one start.

    Tasks follow each other as `next_in_turn` says, so the tasks of a round are mixed, and their shares are exact.

    Args:
        seed, purpose, rank: as in `EpisodeSeeds`. weights: of all tasks; 0: never played.
        group_size: K consecutive slots that begin with one task and seed. pool: where the seeds come from; None: each
            is another one.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        rank: int = 0,
        *,
        weights: Sequence[float] = (1.0,),
        group_size: int = 1,
        pool: StartPool | None = None,
    ) -> None:
        super().__init__(seed, purpose, rank)
        self.pool = pool
        self.group_size = group_size
        self.set_weights(weights)
        self._last: Origins | None = None
        self._n_groups = 0

    def set_weights(self, weights: Sequence[float]) -> None:
        """Assign tasks by these weights from here on."""
        self._weights = np.asarray(weights, float) / np.sum(weights)
        self._credit = np.zeros(len(self._weights))

    def origins(self, which: np.ndarray) -> Origins:
        """Return the origins of the next episodes of the slots `which` [B] bool.

        A group gets a new start when all its slots begin; a slot that begins without the others has lost its episode
        and plays the same start again.
        """
        last = self._last or Origins.of(np.zeros(len(which), np.int64))
        new = Origins(last.seed.copy(), last.task.copy(), last.group.copy())
        size = self.group_size
        drawn = np.zeros(len(which), bool)
        for first in range(0, len(which), size):
            group = slice(first, first + size)
            if which[group].all():
                drawn[first] = True
                new.task[group] = self._next_task(first)
                if size > 1:
                    new.group[group] = self._n_groups
                    self._n_groups += 1
        seeds = self.draw(drawn)
        for begun in np.flatnonzero(drawn).tolist():
            seed = int(seeds[begun])
            new.seed[begun : begun + size] = seed if self.pool is None else self.pool.draw(int(new.task[begun]), seed)
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

    A round ends when all of them are played. Groups begin when all their slots are free. A lost episode is replaced by
    one of the same task.
    """

    per_round: ClassVar[int] = ENDLESS
    _dealt: Iterator[int] = iter(())

    def deal(self, tasks: Iterable[int]) -> None:
        """Play one start of each of `tasks` in the next round; an iterator is asked when a slot is free."""
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
