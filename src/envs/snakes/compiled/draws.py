"""Random numbers of a board in kernels; compare `omagd.envs.snakes.draws`."""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.envs.snakes.compiled.compiling import function
from omagd.envs.snakes.compiled.tables import EMPTY, N_CELLS, Array
from omagd.envs.snakes.draws import BEANS, TRIES
from omagd.utils.seeding import GOLDEN, splitmix64

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
    """Return an integer in [0, n) from a uniform uint64."""
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
