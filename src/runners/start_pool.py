"""A fixed number of starts of each task, of which mastered ones are visited less often."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from omagd.utils.seeding import stream_seed

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
