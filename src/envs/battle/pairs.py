"""Distances between all units, once per substep, in reused memory: [U, U, B]."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.roster import Battle, Roster

INDEX_BITS = 127  # low bits of a squared distance that carry the unit index; relative error below 2**-16
NOBODY = np.int32(0x7F000000)
FAR_AWAY, APART = np.float32(1.0e4), np.float32(1.0e-3)


def memory_size(units: int, slots: int) -> int:
    """Return how many float32 numbers `Pairs` works in."""
    return (2 + 4 * units) * units * slots


class Pairs:
    """Differences and squared distances of all units of all slots; the dead lie far away from everyone.

    Args:
        memory: float32, at least `memory_size(U, B)` numbers to work in.

    Attributes:
        x, y: [U, B] positions used. dx, dy: [U, U, B] position of the first unit less that of the second. d2: squared.
    """

    def __init__(self, roster: Roster, slots: int, memory: np.ndarray) -> None:
        self._roster = roster
        units = roster.total
        number = np.arange(units, dtype=np.float32)[:, None]
        # A hair's breadth between the columns, so that units on one spot know in which direction to part.
        self._offset_x, self._offset_y = APART * number, APART * ((number * 7) % 11)
        self._far = FAR_AWAY + 100 * number
        places = 2 * units * slots
        self.x, self.y = memory[:places].reshape(2, units, slots)
        pairs = memory[places : memory_size(units, slots)]
        self.dx, self.dy, self.d2, self.work = pairs.reshape(4, units, units, slots)
        self._index = np.arange(units, dtype=np.int32)

    def measure(self, battle: Battle) -> None:
        """Compute everything anew."""
        dead = battle.alive == 0
        np.add(battle.x, self._offset_x, out=self.x)
        np.add(battle.y, self._offset_y, out=self.y)
        np.copyto(self.x, self._far, where=dead)
        np.subtract(self.x[:, None], self.x[None], out=self.dx)
        np.subtract(self.y[:, None], self.y[None], out=self.dy)
        np.multiply(self.dx, self.dx, out=self.d2)
        np.multiply(self.dy, self.dy, out=self.work)
        self.d2 += self.work

    def nearest_foe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return [U, B] index of and centre distance to the nearest foe that the unit can hit."""
        n = self._roster.n
        key = np.concatenate([self._nearest(slice(0, n), slice(n, None)), self._nearest(slice(n, None), slice(0, n))])
        return key & INDEX_BITS, np.sqrt((key & ~INDEX_BITS).view(np.float32))

    def _nearest(self, who: slice, whom: slice) -> np.ndarray:
        """Return the smallest of (distance, index) packed into one integer: positive floats sort like their bits."""
        key = (self.d2[who, whom].view(np.int32) & ~INDEX_BITS) | self._index[whom][None, :, None]
        if not self._roster.all_hit:
            key = np.where(self._roster.can_hit[who, whom, None], key, NOBODY)
        return np.minimum.reduce(key, axis=1)
