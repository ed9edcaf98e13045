"""Every random number of a run follows from `seed=`: one independent stream for each purpose and place."""

from __future__ import annotations

import random
import zlib
from typing import Any

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


def random_state() -> dict[str, Any]:
    """Return the state of the global generators, of the GPUs' too where they have been used."""
    import torch

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), keys, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if used else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to a `random_state`."""
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
