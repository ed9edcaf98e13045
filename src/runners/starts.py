"""Where the episodes of a task set start: which task each slot plays next, and which episodes share a start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omagd.runners.rollout import EpisodeSeeds, Origins


class TaskStarts(EpisodeSeeds):
    """Assigns tasks to slots in proportion to weights, and gives groups of K slots one start.

    Tasks follow by smooth weighted round robin: with every episode each task's credit grows by its weight; the task
    with the most credit is next and pays 1. So the tasks of a round are mixed, and their shares are exact.

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
                new.task[group] = self._next_task()
                if size > 1:
                    new.group[group] = self._n_groups
                    self._n_groups += 1
        seeds = self.draw(drawn)
        for begun in np.flatnonzero(drawn).tolist():
            new.seed[begun : begun + size] = seeds[begun]
        self._last = new
        return new

    def _next_task(self) -> int:
        self._credit += self._weights
        task = int(self._credit.argmax())
        self._credit[task] -= 1.0
        return task

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
