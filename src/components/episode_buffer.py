"""Replay: the newest episodes, each stored at its own length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.components.episode_file import Facts, read_episodes, write_episodes
from omagd.utils.packing import Episode, PackedBatch, pack_episodes

Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _spec(episode: Episode) -> Spec:
    return {name: (value.dtype, tuple(value.shape[1:])) for name, value in episode.items()}


def _nbytes(episode: Episode) -> int:
    return sum(value.nbytes for value in episode.values())


class EpisodeBuffer:
    """At most `capacity` episodes; a new one replaces the oldest.

    Args:
        capacity: episodes. device: where they are kept and batches come from; None for main memory.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        self.capacity = capacity
        self.device = torch.device(device or "cpu")
        self._episodes: deque[Episode] = deque()
        self._spec: Spec | None = None
        self._dropped: set[str] = set()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._bytes

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of every episode; empty before the first one."""
        return tuple(self._spec or ())

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """All episodes, oldest first; not to be changed."""
        return tuple(self._episodes)

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes (tensors [L + 1, ...]), oldest first. Errors: ValueError unless all have the same fields."""
        for episode in episodes:
            kept = {name: self._own(value) for name, value in episode.items() if name not in self._dropped}
            spec = _spec(kept)
            if self._spec is None:
                self._spec = spec
            if spec != self._spec:
                odd = sorted(name for name in {*spec, *self._spec} if spec.get(name) != self._spec.get(name))
                raise ValueError(f"an episode differs from the others of this buffer in {', '.join(odd)}")
            if len(self._episodes) == self.capacity:
                self._bytes -= _nbytes(self._episodes.popleft())
            self._episodes.append(kept)
            self._bytes += _nbytes(kept)

    def _own(self, value: Tensor) -> Tensor:
        """Return `value` on the buffer's device, and alone in its memory."""
        value = value.to(self.device)
        return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()

    def can_sample(self, batch_size: int) -> bool:
        """Whether there are `batch_size` episodes."""
        return len(self._episodes) >= batch_size

    def sample(self, batch_size: int, rng: np.random.Generator) -> PackedBatch:
        """Draw `batch_size` different episodes, all equally likely. Errors: ValueError when there are too few."""
        chosen = rng.choice(len(self._episodes), size=batch_size, replace=False)
        return pack_episodes([self._episodes[i] for i in chosen])

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the episodes at `indices` (0: the oldest), packed."""
        return pack_episodes([self._episodes[i] for i in indices])

    def drop(self, names: Iterable[str]) -> None:
        """Forget the fields `names`, and leave them out of whatever is added from now on."""
        self._dropped |= set(names)
        old = list(self._episodes)
        self.clear()
        self.add(old)

    def clear(self) -> None:
        """Forget all episodes."""
        self._episodes.clear()
        self._spec, self._bytes = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values: each field of all episodes in one tensor (a copy)."""
        rows = [len(next(iter(episode.values()))) for episode in self._episodes]
        data = {name: torch.cat([episode[name] for episode in self._episodes]).cpu() for name in self.fields}
        return {"rows": rows, "data": data, "dropped": sorted(self._dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by `state`. Errors: ValueError when it holds more than `capacity` episodes."""
        rows = [int(count) for count in state["rows"]]
        if len(rows) > self.capacity:
            raise ValueError(f"{len(rows)} episodes do not fit into a buffer of {self.capacity}")
        self.clear()
        self._dropped = set(state["dropped"])
        parts = {name: values.split(rows) for name, values in state["data"].items()}
        self.add({name: part[i] for name, part in parts.items()} for i in range(len(rows)))

    def save(self, path: str | Path, facts: Facts | None = None) -> None:
        """Write all episodes to one file, with `facts` about what they are (environment, map, shapes)."""
        write_episodes(path, list(self._episodes), facts or {})

    def load(self, path: str | Path, facts: Facts | None = None, key: str = "pretrain_buffer_path") -> None:
        """Replace all episodes by those of a file.

        Args:
            path: from `save`. facts: each must be the same in the file. key: configuration key to name in errors.

        Errors: UserError for a missing, damaged or unfitting file, or one with more than `capacity` episodes.
        """
        episodes = read_episodes(path, facts or {}, key, self.capacity)
        self.clear()
        self.add(episodes)
