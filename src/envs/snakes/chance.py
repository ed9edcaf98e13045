"""Chance without a state: a number follows from a board's key, the moment and the number of the draw.

SplitMix64 over a counter (`omagd.utils.seeding`): a board draws the same alone as among others. Moments: 0 is the
start, t + 1 the step after t.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from omagd.utils.seeding import GOLDEN, splitmix64

_STEP = np.uint64(GOLDEN)
# Numbers of draws within a moment: turns 0 to 5, beans from BEANS on, players' from PLAYERS on, the episode's opponent.
BEANS, PLAYERS, OPPONENT = 16, 4096, 8192
_TRIES = 32


def keys_of(seeds: np.ndarray) -> np.ndarray:
    """Return the keys of boards with the reset `seeds` (int64 ≥ 0), uint64."""
    return splitmix64(seeds.astype(np.uint64) * _STEP + _STEP)


def draw(keys: np.ndarray, moments: np.ndarray, index: np.ndarray | int) -> np.ndarray:
    """Return uint64 for boards with `keys` [k] at their `moments` [k]; `index` (below 65536) tells draws apart."""
    counter = np.asarray(moments).astype(np.uint64) * np.uint64(65536) + np.asarray(index).astype(np.uint64)
    return splitmix64(keys + counter * _STEP)


def below(values: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    """Return whole numbers in [0, n) from uint64 `values`, int64; n below 2**31, off uniform by less than n / 2**32."""
    high = values >> np.uint64(32)
    return ((high * np.asarray(n).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


class Draws(Protocol):
    """Where the engine's chance comes from. `keys`, `moments`: [k], one entry for each board that draws."""

    def start(self, rows: np.ndarray, keys: np.ndarray, snake: int, attempt: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cells and directions [k] at which `snake` may start on the boards `rows` [k], at this attempt."""
        ...

    def turn(
        self, rows: np.ndarray, keys: np.ndarray, moments: np.ndarray, snakes: np.ndarray, directions: np.ndarray
    ) -> np.ndarray:
        """Return [k] what replaces a reversal of `snakes` [k] that now move in `directions` [k]."""
        ...

    def bean(self, rows: np.ndarray, keys: np.ndarray, moments: np.ndarray, place: int, free: np.ndarray) -> np.ndarray:
        """Return [k] cells for the bean that fills `place` in the list; `free` [k, 200] bool has one in every row."""
        ...


class SeededDraws:
    """Uniform draws that follow from the boards' keys."""

    def start(self, rows: np.ndarray, keys: np.ndarray, snake: int, attempt: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cells and directions, [k] each."""
        values = draw(keys, np.zeros(len(keys)), 256 * snake + attempt % 256)
        return below(values, 200), (values & np.uint64(3)).astype(np.int64)

    def turn(
        self, rows: np.ndarray, keys: np.ndarray, moments: np.ndarray, snakes: np.ndarray, directions: np.ndarray
    ) -> np.ndarray:
        """Return one of the three directions that are no reversal, [k]."""
        third = below(draw(keys, moments, snakes), 3)
        return third + (third >= (directions ^ 1))

    def bean(self, rows: np.ndarray, keys: np.ndarray, moments: np.ndarray, place: int, free: np.ndarray) -> np.ndarray:
        """Return free cells, [k]: the first free one of some draws, else one by its rank among the free ones."""
        index = BEANS + 2 * _TRIES * place
        cells = below(draw(keys, moments, index), free.shape[1])
        everyone = np.arange(len(keys))
        left = everyone[~free[everyone, cells]]
        for attempt in range(1, _TRIES):
            if not len(left):
                return cells
            cells[left] = below(draw(keys[left], moments[left], index + attempt), free.shape[1])
            left = left[~free[left, cells[left]]]
        if len(left):
            rank = below(draw(keys[left], moments[left], index + _TRIES), free[left].sum(1))
            cells[left] = (free[left].cumsum(1) > rank[:, None]).argmax(1)
        return cells
