"""Storage of episodes, each at its own length and compactly encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omagd.components.episode_codec import (
    Codec,
    EpisodeRange,
    Facts,
    Spec,
    StoredEpisode,
    read_episodes,
    spec_of,
    write_episodes,
)
from omagd.utils.packing import Episode, EpisodeMeta, PackedBatch, meta_of, time_order

SHORT, TOGETHER = 8, 256
"""Rows up to which episodes are encoded together, and how many of them."""

UNLIMITED = 2**62
"""Capacity of a buffer that never replaces an episode."""


class EpisodeBuffer:
    """At most `capacity` episodes; a new one replaces the oldest. Decoded episodes equal the added ones bit for bit.

    Args:
        capacity: episodes. device: where they are stored and batches are built; None for main memory.

    Attributes:
        added: number of episodes ever added.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        self.capacity = capacity
        self.device = torch.device(device or "cpu")
        self._records: list[Tensor] = []  # a ring: the oldest episode is at `_oldest`
        self._meta: list[EpisodeMeta] = []
        self._oldest = 0
        self._codec: Codec | None = None
        self.added = 0

    def __len__(self) -> int:
        return len(self._records)

    def _stored(self, place: int) -> Tensor:
        """Return the records of an episode, [L + 1, R]."""
        return self._records[place]

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """All episodes, oldest first; read-only. A field is decoded on each access."""
        if self._codec is None:
            return ()
        places = map(self._place, range(len(self)))
        return tuple(StoredEpisode(self._codec, self._stored(i), self._meta[i]) for i in places)

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes (tensors [L + 1, ...]), oldest first. Errors: ValueError unless all have the same fields."""
        waiting: list[Episode] = []  # short ones of one length, mostly single steps, which are encoded together
        for episode in episodes:
            rows = _rows(episode)
            if waiting and (rows != _rows(waiting[0]) or rows > SHORT or len(waiting) == TOGETHER):
                self._put_together(waiting)
                waiting = []
            spec = spec_of(episode)
            if self._codec is None:
                self._codec = Codec(spec)
            if spec != self._codec.spec:
                self._put_together(waiting)
                raise ValueError(f"an episode differs from the others of this buffer in {_odd(spec, self._codec.spec)}")
            waiting.append(episode)
        self._put_together(waiting)

    def _put_together(self, episodes: list[Episode]) -> None:
        """Put episodes of one length and spec."""
        if len(episodes) == 1:
            self._put(self._encode(episodes[0]), meta_of(episodes[0]))
        elif episodes:
            joined = {name: torch.cat([episode[name] for episode in episodes]) for name in episodes[0]}
            for episode, records in zip(episodes, self._encode(joined).split(_rows(episodes[0])), strict=True):
                self._put(records.clone(), meta_of(episode))  # a copy, whose memory is freed when it is replaced

    def _encode(self, episode: Episode) -> Tensor:
        """Return an episode's records; a field that breaks its rule is stored plain from now on, in all episodes."""
        assert self._codec is not None
        records, fits = self._codec.encode(episode)
        if broken := [name for name, kept in fits.items() if not kept]:
            self._recode(self._codec.without(broken))
            records, _ = self._codec.encode(episode)
        return records.to(self.device)

    def _recode(self, codec: Codec) -> None:
        """Encode all stored episodes as `codec` does."""
        assert self._codec is not None
        episodes = [StoredEpisode(self._codec, self._stored(i), self._meta[i]) for i in range(len(self))]
        self._codec, self._records = codec, [codec.encode(episode)[0].to(self.device) for episode in episodes]

    def _put(self, records: Tensor, meta: EpisodeMeta) -> None:
        self.added += 1
        if len(self._records) < self.capacity:
            self._records.append(records)
            self._meta.append(meta)
            return
        self._records[self._oldest], self._meta[self._oldest] = records, meta
        self._oldest = (self._oldest + 1) % self.capacity

    def _place(self, index: int) -> int:
        """Return where an episode (0: the oldest) is stored. Errors: IndexError."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"no episode {index} among {len(self)}")
        return (self._oldest + index) % len(self)

    def draw(self, batch_size: int, rng: np.random.Generator) -> Sequence[int]:
        """Draw the indices of `batch_size` different episodes, all equally likely. Errors: ValueError for too few."""
        return rng.choice(len(self), size=batch_size, replace=False).tolist()

    def sample(self, batch_size: int, rng: np.random.Generator) -> PackedBatch:
        """Draw `batch_size` different episodes and return them packed. Errors: ValueError when there are too few."""
        return self.batch(self.draw(batch_size, rng))

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the episodes at `indices` (0: the oldest), packed."""
        assert self._codec is not None
        places = [self._place(i) for i in indices]
        packing, order, rows = time_order([len(self._records[place]) for place in places])
        places = [places[i] for i in order]
        records = torch.cat([self._records[place] for place in places])
        fields = self._codec.decode(records, rows.to(self.device))
        return PackedBatch(fields, packing, order, tuple(self._meta[place] for place in places))

    def forget(self) -> None:
        """Remove all episodes; `added` stays."""
        self._records, self._meta, self._oldest = [], [], 0

    def clear(self) -> None:
        """Remove all episodes and start counting from 0."""
        self.forget()
        self._codec, self.added = None, 0

    def since(self, number: int) -> EpisodeRange:
        """Return the stored episodes from the `number`-th ever added on."""
        first = min(max(number, self.added - len(self)), self.added)
        places = [self._place(i) for i in range(first - (self.added - len(self)), len(self))]
        records, meta = tuple(map(self._stored, places)), tuple(self._meta[i] for i in places)
        return EpisodeRange(first, self._codec, records, meta)

    def restore(self, ranges: Iterable[EpisodeRange], added: int) -> None:
        """Replace all episodes by the newest ones of `ranges`, oldest first; `added` were added in all.

        Errors: ValueError unless all have the same fields.
        """
        known = [(part.codec, part) for part in ranges if part.codec is not None and part.records]
        self.clear()
        plain = {name for codec, _ in known for name in codec.plain}
        for codec, part in known:
            if self._codec is None:
                self._codec = Codec(codec.spec, plain)
            if codec.spec != self._codec.spec:
                raise ValueError(f"episodes differ in {_odd(codec.spec, self._codec.spec)}")
            for records, meta in zip(part.records, part.meta, strict=True):
                same = codec.plain == self._codec.plain
                encoded = records.to(self.device) if same else self._encode(StoredEpisode(codec, records, meta))
                self._put(encoded, meta)
        self.added = added

    def save(self, path: str | Path, facts: Facts | None = None) -> None:
        """Write all episodes to one file, with `facts` about their environment (name, map, shapes)."""
        write_episodes(path, self.episodes, facts or {})

    def load(self, path: str | Path, facts: Facts | None = None, key: str = "pretrain_buffer_path") -> None:
        """Replace all episodes by those of a file.

        Args:
            path: from `save`. facts: each must be the same in the file. key: configuration key to name in errors.

        Errors: UserError for a missing, damaged or unfitting file, or one with more than `capacity` episodes.
        """
        episodes = deque(read_episodes(path, facts or {}, key, self.capacity))
        self.clear()
        self.add(_popped(episodes))


def _rows(episode: Episode) -> int:
    return len(next(iter(episode.values())))


def _popped(episodes: deque[Episode]) -> Iterator[Episode]:
    """Yield episodes and release each one once it has been read."""
    while episodes:
        yield episodes.popleft()


def _odd(spec: Spec, other: Spec) -> str:
    return ", ".join(sorted(name for name in {*spec, *other} if spec.get(name) != other.get(name)))
