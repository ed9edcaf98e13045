"""Random numbers: every one follows from `seed=`, with an independent stream for each purpose and place."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. Output n of the seed s
# is mix(s + n * GOLDEN), a function of the counter: a number is the same whether drawn alone or among others.
GOLDEN = 0x9E3779B97F4A7C15
Words = TypeVar("Words", np.ndarray, np.uint64)
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def splitmix64(counter: Words) -> Words:
    """Return SplitMix64's output function of uint64 values, one to one; kernels compile it for one value."""
    z = (counter ^ (counter >> np.uint64(30))) * np.uint64(FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(FACTORS[1])
    return z ^ (z >> np.uint64(31))


def uniform(number: Tensor, key: int | Tensor) -> Tensor:
    """Return a float64 in [0, 1) for each `number` (int64) of the stream `key`, on the tensor's device.

    key: one stream for all numbers, or int64 that broadcast to them.

    SplitMix64 without its last shift, which changes low bits only. Signed arithmetic: torch has no uint64 products.
    """
    x = (number + 1) * (GOLDEN - 2**64) + key
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - 2**64)
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def stream_seed(seed: int, purpose: str, *place: int) -> int:
    """Return the 63-bit seed of the stream for `purpose` ("explore", "replay", ...) at `place` (rank, slot, ...)."""
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *place]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def stream_seeds(seed: int, purpose: str, *place: int | np.ndarray) -> np.ndarray:
    """Return `stream_seed` of B places, [B] int64; numbers in `place` are below 2^32, one at least an array [B].

    The algorithm of NumPy's SeedSequence (M. E. O'Neill's `seed_seq_fe`), whose numbers are promised not to change.
    """
    parts = [part for number in (seed, zlib.crc32(purpose.encode())) for part in _words(number)]
    place += (0,) * (4 - len(parts) - len(place))
    words = np.stack(np.broadcast_arrays(*parts, *place)).astype(np.uint32)
    mixing, output = _powers(0x43B0D7E5, 0x931E8875, 4 * len(words) + 1), _powers(0x8B51F9DD, 0x58F38DED, 3)

    def hashed(value: Any, constants: np.ndarray, first: int, count: int) -> Any:
        value = (value ^ constants[first : first + count]) * constants[first + 1 : first + count + 1]
        return value ^ (value >> np.uint32(16))

    def mixed(one: Any, other: Any) -> Any:
        value = np.uint32(0xCA01F9DD) * one - np.uint32(0x4973F715) * other
        return value ^ (value >> np.uint32(16))

    pool = hashed(words[:4], mixing, 0, 4)
    for source in range(4):
        others = [place for place in range(4) if place != source]
        pool[others] = mixed(pool[others], hashed(pool[source], mixing, 4 + 3 * source, 3))
    for number, word in enumerate(words[4:], start=4):
        pool = mixed(pool, hashed(word, mixing, 4 * number, 4))
    high, low = hashed(pool[:2], output, 0, 2).astype(np.int64)
    return (high << 31) ^ low


def _words(number: int) -> list[int]:
    """Return the 32-bit words of a number ≥ 0, the lowest first."""
    return [number >> bit & 0xFFFFFFFF for bit in range(0, max(number.bit_length(), 1), 32)]


@cache
def _powers(first: int, factor: int, count: int) -> np.ndarray:
    """Return `first` times powers of `factor`, modulo 2^32, as [count, 1]."""
    return np.array([[first * pow(factor, k, 2**32) % 2**32] for k in range(count)], np.uint32)


def generator(seed: int, purpose: str, *place: int) -> np.random.Generator:
    """Return a NumPy generator with that seed."""
    return np.random.default_rng(stream_seed(seed, purpose, *place))


class Generators:
    """The NumPy generators of one rank, each made when it is first asked for.

    Attributes:
        generation: distinguishes the streams of a run that continues among another number of ranks; empty at first.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank = seed, rank
        self.generation: Sequence[int] = ()
        self._made: dict[str, np.random.Generator] = {}

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the generator for `purpose`."""
        if purpose not in self._made:
            self._made[purpose] = generator(self.seed, purpose, self.rank, *self.generation)
        return self._made[purpose]

    def renew(self, generation: int) -> None:
        """Begin new streams; the generators stay the same objects."""
        self.generation = (generation,)
        for purpose, rng in self._made.items():
            rng.bit_generator.state = generator(self.seed, purpose, self.rank, generation).bit_generator.state

    def state_dict(self) -> dict[str, Any]:
        """Return the states by purpose."""
        return {purpose: rng.bit_generator.state for purpose, rng in self._made.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for purpose, saved in state.items():
            self.rng(purpose).bit_generator.state = saved


def seed_everything(seed: int, purpose: str, *place: int) -> None:
    """Seed the global generators of random, NumPy and torch, which draw initial weights and dropout."""
    import torch

    value = stream_seed(seed, purpose, *place)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def random_state() -> dict[str, Any]:
    """Return the state of the global generators, including that of the GPU if it has been used."""
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
    """Restore a `random_state`."""
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


NO_GROUP = -1


@dataclass
class Origins:
    """Where the episodes of all slots come from: reset seed, task and group, each [B] int64; group -1: none."""

    seed: np.ndarray
    task: np.ndarray
    group: np.ndarray

    @classmethod
    def of(cls, seed: np.ndarray) -> Origins:
        """Return the origins of episodes of one task, each for itself."""
        return cls(seed, np.zeros_like(seed), np.full_like(seed, NO_GROUP))

    @property
    def keys(self) -> np.ndarray:
        """Keys of the random numbers of actions, [B] int64: an episode's seed; in a group, which shares it, others."""
        _, first, group = np.unique(self.group, return_index=True, return_inverse=True)
        member = np.where(self.group == NO_GROUP, 0, np.arange(len(self.group)) - first[group])
        # Minus: a battle draws its start from the mix of its seed plus GOLDEN.
        drawn = splitmix64(self.seed.astype(np.uint64) - member.astype(np.uint64) * np.uint64(GOLDEN))
        return np.where(member, drawn.view(np.int64), self.seed)

    def where(self, which: np.ndarray, other: Origins) -> Origins:
        """Return these in the slots `which` [B] bool, those of `other` elsewhere."""
        return Origins(*(np.where(which, getattr(self, s.name), getattr(other, s.name)) for s in fields(self)))


class EpisodeSeeds:
    """Reset seeds of one purpose on one rank; an episode's seed is a function of its slot and its number there.

    Args:
        seed: the run's seed. purpose: "train", "test", "pretrain", ... rank: of this process.

    Attributes:
        per_round: episodes that each slot plays in one round of training.
    """

    per_round: ClassVar[int] = 1

    def __init__(self, seed: int, purpose: str, rank: int = 0) -> None:
        self._place = (seed, f"env/{purpose}", rank)
        self._generation = 0
        self._played: list[int] = []

    def renew(self, generation: int) -> None:
        """Draw from another stream from here on: that of the same place and `generation` > 0."""
        self._generation = generation
        self._played = []

    def draw(self, which: np.ndarray) -> np.ndarray:
        """Return the next seed of each slot in `which` [B] bool as [B] int64, 0 elsewhere."""
        self._played += [0] * (len(which) - len(self._played))
        seeds = np.zeros(len(which), np.int64)
        seed, purpose, rank = self._place
        if self._generation:
            purpose = f"{purpose}/{self._generation}"
        begun = np.flatnonzero(which)
        seeds[begun] = stream_seeds(seed, purpose, rank, begun, np.array(self._played, np.int64)[begun])
        for slot in begun.tolist():
            self._played[slot] += 1
        return seeds

    def begun(self, free: np.ndarray) -> np.ndarray:
        """Return which slots [B] bool begin an episode now, where those in `free` [B] bool could: here, all of them."""
        return free

    def origins(self, which: np.ndarray, lost: bool = False) -> Origins:
        """Return the origins of the next episodes of the slots `which` [B] bool; others hold anything.

        lost: they replace episodes that the slots have lost.
        """
        return Origins.of(self.draw(which))

    def state_dict(self) -> dict[str, Any]:
        """Return how many episodes each slot has begun, and in which generation."""
        return {"played": list(self._played), "generation": self._generation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the episodes of `state`."""
        self._played = [int(count) for count in state["played"]]
        self._generation = int(state["generation"])
