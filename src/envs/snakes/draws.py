"""Counter-based random numbers: each follows from a board's key, a moment and the index of the draw.

SplitMix64 of a counter (`omagd.utils.seeding`) has no state, so a board draws the same numbers alone as among others.
Moment 0 is the start of a game, t + 1 its step after t.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.envs.snakes.board import EMPTY, N_CELLS, Array, function
from omagd.utils.seeding import GOLDEN, splitmix64

# Indices of draws within a moment, below 65536: reversals 0 to 5, beans from BEANS on, players from PLAYERS on, and the
# choice of the episode's opponent.
BEANS, PLAYERS, OPPONENT = 16, 4096, 8192
TRIES = 32  # random cells that are tried for a bean before one is chosen among the free cells
GOLD, HALF, MOMENT = np.uint64(GOLDEN), np.uint64(32), 65536
mix = function(splitmix64)


@function
def key_of(seed: int) -> np.uint64:
    """Return the key of a board with a reset seed."""
    return mix(np.uint64(seed) * GOLD + GOLD)


@function
def draw(key: np.uint64, moment: int, index: int) -> np.uint64:
    """Return a random uint64 of a board."""
    return mix(key + np.uint64(moment * MOMENT + index) * GOLD)


@function
def below(value: np.uint64, n: int) -> int:
    """Return an integer in [0, n) from a uniform uint64: its upper 32 bits times n, without the lower 32 bits.

    n is below 2**31. Off uniform by less than n / 2**32.
    """
    signed: Any = np.int64(((value >> HALF) * np.uint64(n)) >> HALF)
    return signed


@function
def draw_bean(codes: Array, key: np.uint64, moment: int, place: int, n_free: int) -> int:
    """Return the cell of the bean at a place of the list; `n_free` cells, at least one, are empty."""
    index = BEANS + 2 * TRIES * place
    for attempt in range(TRIES):
        cell = below(draw(key, moment, index + attempt), N_CELLS)
        if codes[cell] == EMPTY:
            return cell
    rank = below(draw(key, moment, index + TRIES), n_free)
    for cell in range(N_CELLS):
        if codes[cell] == EMPTY:
            if rank == 0:
                return cell
            rank -= 1
    return -1
