"""Every random number of a run follows from `seed=`: one independent stream for each purpose and place."""

from __future__ import annotations

import random
import zlib

import numpy as np


def stream_seed(seed: int, purpose: str, *place: int) -> int:
    """Return the 63-bit seed of the stream for `purpose` ("explore", "replay", ...) at `place` (rank, slot, ...)."""
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *place]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def generator(seed: int, purpose: str, *place: int) -> np.random.Generator:
    """Return a NumPy generator for that stream."""
    return np.random.default_rng(stream_seed(seed, purpose, *place))


def seed_everything(seed: int, purpose: str, *place: int) -> None:
    """Seed the global generators (random, numpy, torch): model initialisation, then dropout per rank."""
    import torch

    value = stream_seed(seed, purpose, *place)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
