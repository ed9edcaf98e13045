"""SMACv2's rule by which agents know of enemies, which depends on the order in which agents are looked at.

The first agent looked at that has an enemy in its sight (dead ones included) finds it, and all others are told, each
with a given chance. An enemy that an agent does not know hides from it all enemies before it. When the finder or the
enemy dies, the enemy is forgotten. Shapes: B slots, n agents, m enemies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.utils.seeding import generator


class Lookout:
    """Who knows of whom in all battles.

    Args:
        share: chance that an agent is told. n_slots, n_agents, n_enemies: sizes.
    """

    def __init__(self, share: float, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._share, self._n = share, n_agents
        self._known = np.zeros((n_slots, n_agents, n_enemies), bool)
        self._finder = np.full((n_slots, n_enemies), -1)
        self._rng = [np.random.default_rng(0) for _ in range(n_slots)]
        self._numbers = np.arange(n_enemies)

    def begin(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Forget everything in the slots `which` [B] bool, whose orders follow from `seeds` [B]."""
        self._known[which], self._finder[which] = False, -1
        for slot in np.flatnonzero(which):
            self._rng[slot] = generator(int(seeds[slot]), "look")

    def order(self, slot: int) -> np.ndarray:
        """Return [n] in which order the agents of a slot are looked at next."""
        return self._rng[slot].permutation(self._n)

    def look(self, which: np.ndarray, in_sight: np.ndarray, living: np.ndarray) -> np.ndarray:
        """Look at all agents once; return [B, n, m] bool, whom an agent may see if it is in sight.

        which: [B] bool, the slots; others are False. in_sight: [B, n, m] bool, where the enemy is or has died.
        living: [B, n] bool, the agents.
        """
        clear = np.zeros_like(self._known)
        for slot in np.flatnonzero(which):
            known, finder = self._known[slot], self._finder[slot]
            for agent in self.order(int(slot)):
                if not living[slot, agent]:
                    continue
                found = in_sight[slot, agent] & (finder < 0)
                if found.any():
                    finder[found] = agent
                    known[:, found] |= self._rng[slot].random((self._n, int(found.sum()))) < self._share
                    known[agent, found] = True
                unknown = np.flatnonzero(~known[agent])
                clear[slot, agent] = self._numbers > (unknown[-1] if len(unknown) else -1)
        return clear

    def bury(self, which: np.ndarray, alive: np.ndarray) -> None:
        """Forget the dead, `alive` [B, n + m] bool, and whom they had found, in the slots `which` [B] bool."""
        for slot in np.flatnonzero(which):
            known, finder = self._known[slot], self._finder[slot]
            for agent in np.flatnonzero(~alive[slot, : self._n]):
                orphaned = finder == agent
                if orphaned.any():
                    known[:, orphaned], known[agent], finder[orphaned] = False, False, -1
            dead = ~alive[slot, self._n :]
            known[:, dead], finder[dead] = False, -1

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the future depends on."""
        states = [rng.bit_generator.state for rng in self._rng]
        return {"known": self._known.copy(), "finder": self._finder.copy(), "rng": states}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`."""
        self._known[:], self._finder[:] = snapshot["known"], snapshot["finder"]
        for rng, state in zip(self._rng, snapshot["rng"], strict=True):
            rng.bit_generator.state = state
