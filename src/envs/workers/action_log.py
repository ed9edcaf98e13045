"""What the running episodes of single environments consist of where they are deterministic: seeds and actions."""

from __future__ import annotations

from typing import Any

import numpy as np


class ActionLog:
    """The reset seed of each slot's episode and the actions since.

    Args:
        n_slots: B. n_agents: n.

    Attributes:
        begun: [B] bool, an episode has been started there. seeds: [B] int64. lengths: [B] int64, steps so far.
    """

    def __init__(self, n_slots: int, n_agents: int) -> None:
        self.begun = np.zeros(n_slots, bool)
        self.seeds = np.zeros(n_slots, np.int64)
        self.lengths = np.zeros(n_slots, np.int64)
        self._actions = np.zeros((n_slots, 64, n_agents), np.int32)

    def begin(self, slots: np.ndarray, seeds: np.ndarray) -> None:
        """Episodes start in the slot numbers `slots`, from `seeds` [len(slots)]."""
        self.begun[slots] = True
        self.seeds[slots] = seeds
        self.lengths[slots] = 0

    def add(self, slots: np.ndarray, actions: np.ndarray) -> None:
        """Note the `actions` [len(slots), n] that are played next in `slots`."""
        steps = self.lengths[slots]
        if len(steps) and steps.max() == self._actions.shape[1]:
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], 1)
        self._actions[slots, steps] = actions
        self.lengths[slots] = steps + 1

    def actions(self, slot: int, leave_out: int = 0) -> np.ndarray:
        """Return [T, n] int64 the actions of a slot's episode without the last `leave_out`."""
        return self._actions[slot, : self.lengths[slot] - leave_out].astype(np.int64)

    def snapshot(self) -> dict[str, Any]:
        """Return everything as arrays; `actions` is [B, T, n] int32, where T is the longest episode."""
        longest = int(self.lengths.max(initial=0))
        kept = {
            "begun": self.begun,
            "seeds": self.seeds,
            "lengths": self.lengths,
            "actions": self._actions[:, :longest],
        }
        return {name: values.copy() for name, values in kept.items()}
