"""Seeds of episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.utils.seeding import stream_seed


class EpisodeSeeds:
    """Reset seeds of one purpose on one rank; the one of an episode follows from its slot and its number there.

    Args:
        seed: the run's seed. purpose: "train", "test", "pretrain", ... rank: of this process.
    """

    def __init__(self, seed: int, purpose: str, rank: int = 0) -> None:
        self._place = (seed, f"env/{purpose}", rank)
        self._generation = 0
        self._played: list[int] = []

    def renew(self, generation: int) -> None:
        """Draw from another stream from here on, which follows from the same place and `generation` > 0."""
        self._generation = generation
        self._played = []

    def draw(self, which: np.ndarray) -> np.ndarray:
        """Return the next seed of each slot in `which` [B] bool as [B] int64, 0 elsewhere."""
        self._played += [0] * (len(which) - len(self._played))
        seeds = np.zeros(len(which), np.int64)
        seed, purpose, rank = self._place
        if self._generation:
            purpose = f"{purpose}/{self._generation}"
        for slot in np.flatnonzero(which):
            seeds[slot] = stream_seed(seed, purpose, rank, int(slot), self._played[slot])
            self._played[slot] += 1
        return seeds

    def state_dict(self) -> dict[str, Any]:
        """Return how many episodes each slot has begun, and in which generation."""
        return {"played": list(self._played), "generation": self._generation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the episodes of `state`."""
        self._played = [int(count) for count in state["played"]]
        self._generation = int(state["generation"])
