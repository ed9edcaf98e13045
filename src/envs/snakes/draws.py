"""Counter-based random numbers: each follows from a board's key, a moment and the index of the draw.

SplitMix64 of a counter (`omagd.utils.seeding`) has no state, so a board draws the same numbers alone as among others.
Moment 0 is the start of a game, t + 1 its step after t.
"""

from __future__ import annotations

import numpy as np

from omagd.utils.seeding import GOLDEN, splitmix64

_STEP = np.uint64(GOLDEN)
# Indices of draws within a moment: reversals 0 to 5, beans from BEANS on, players from PLAYERS on, and the choice of
# the episode's opponent.
BEANS, PLAYERS, OPPONENT = 16, 4096, 8192
TRIES = 32  # random cells that are tried for a bean before one is chosen among the free cells


def keys_of(seeds: np.ndarray) -> np.ndarray:
    """Return the keys of boards with the reset `seeds` (int64 ≥ 0), uint64."""
    return splitmix64(seeds.astype(np.uint64) * _STEP + _STEP)


def draw(keys: np.ndarray, moments: np.ndarray, index: np.ndarray | int) -> np.ndarray:
    """Return random uint64 [k] for boards with `keys` [k] at `moments` [k]; each draw has its own `index` < 65536."""
    counter = np.asarray(moments).astype(np.uint64) * np.uint64(65536) + np.asarray(index).astype(np.uint64)
    return splitmix64(keys + counter * _STEP)


def uniform01(values: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1) from uniform uint64 `values`: their upper 53 bits."""
    return (values >> np.uint64(11)) * 2.0**-53


def below(values: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    """Return integers in [0, n) from uniform uint64 `values`, int64.

    The upper 32 bits times n, without the lower 32 bits; n below 2**31. Off uniform by less than n / 2**32.
    """
    high = values >> np.uint64(32)
    return ((high * np.asarray(n).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


class Draws:
    """Source of the engine's random numbers: uniform draws from the boards' keys. `keys`, `moments`: [k]."""

    def start(self, rows: np.ndarray, keys: np.ndarray, snake: int, attempt: int) -> tuple[np.ndarray, np.ndarray]:
        """Return candidate start cells and directions [k] of `snake` on the boards `rows` [k]."""
        values = draw(keys, np.zeros(len(keys)), 256 * snake + attempt % 256)
        return below(values, 200), (values & np.uint64(3)).astype(np.int64)

    def turn(
        self, rows: np.ndarray, keys: np.ndarray, moments: np.ndarray, snakes: np.ndarray, directions: np.ndarray
    ) -> np.ndarray:
        """Return the actions [k] that replace a reversal of `snakes` [k], which move in `directions` [k]."""
        third = below(draw(keys, moments, snakes), 3)
        return third + (third >= (directions ^ 1))

    def bean(self, rows: np.ndarray, keys: np.ndarray, moments: np.ndarray, place: int, free: np.ndarray) -> np.ndarray:
        """Return cells [k] for the bean at `place` in the list; each row of `free` [k, 200] bool has a free cell.

        The first free cell of `TRIES` draws, otherwise one that is drawn among the free cells.
        """
        index = BEANS + 2 * TRIES * place
        cells = below(draw(keys, moments, index), free.shape[1])
        rows = np.arange(len(keys))
        left = rows[~free[rows, cells]]
        for attempt in range(1, TRIES):
            if not len(left):
                return cells
            cells[left] = below(draw(keys[left], moments[left], index + attempt), free.shape[1])
            left = left[~free[left, cells[left]]]
        if len(left):
            rank = below(draw(keys[left], moments[left], index + TRIES), free[left].sum(1))
            cells[left] = (free[left].cumsum(1) > rank[:, None]).argmax(1)
        return cells
