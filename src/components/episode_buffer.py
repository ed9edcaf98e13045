"""Storage of episodes: each at its own length and compactly encoded, or in one block of a device's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast

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
from omagd.utils.packing import Episode, EpisodeMeta, FixedPacking, PackedBatch, meta_of, time_order

SHORT, TOGETHER = 8, 256
"""Rows up to which episodes are encoded together, and how many of them."""

ROUNDING = 8  # rows of batches of fixed shapes are a multiple: few shapes, and little more than the longest episode


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

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """All episodes, oldest first; read-only. A field is decoded on each access."""
        if self._codec is None:
            return ()
        places = map(self._place, range(len(self)))
        return tuple(StoredEpisode(self._codec, self._records[i], self._meta[i]) for i in places)

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
            old, self._codec = self._codec, self._codec.without(broken)
            for i, stored in enumerate(self._records):
                self._records[i] = self._codec.encode(StoredEpisode(old, stored, self._meta[i]))[0].to(self.device)
            records, _ = self._codec.encode(episode)
        return records.to(self.device)

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
        if not -len(self._records) <= index < len(self._records):
            raise IndexError(f"no episode {index} among {len(self._records)}")
        return (self._oldest + index) % len(self._records)

    def draw(self, batch_size: int, rng: np.random.Generator) -> Sequence[int]:
        """Draw the indices of `batch_size` different episodes, all equally likely. Errors: ValueError for too few."""
        return rng.choice(len(self._records), size=batch_size, replace=False).tolist()

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

    def take_all(self) -> PackedBatch:
        """Return all episodes, packed, and remove them; `added` stays."""
        batch = self.batch(range(len(self)))
        self._records, self._meta, self._oldest = [], [], 0
        return batch

    def clear(self) -> None:
        """Remove all episodes and start counting from 0."""
        self._records, self._meta, self._oldest = [], [], 0
        self._codec, self.added = None, 0

    def since(self, number: int) -> EpisodeRange:
        """Return the stored episodes from the `number`-th ever added on."""
        first = min(max(number, self.added - len(self)), self.added)
        places = [self._place(i) for i in range(first - (self.added - len(self)), len(self))]
        records, meta = tuple(self._records[i] for i in places), tuple(self._meta[i] for i in places)
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


class BlockEpisode(Mapping[str, Tensor]):
    """One of the episodes in tensors [E, T, ...]; its fields are views, which change with them.

    Args:
        block: tensors by name. place: of the episode in them. rows: L + 1. meta: where it comes from.
    """

    def __init__(self, block: Episode, place: int, rows: int, meta: EpisodeMeta) -> None:
        self.block, self.place, self.rows, self.meta = block, place, rows, meta

    def __getitem__(self, name: str) -> Tensor:
        return self.block[name][self.place, : self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.block)

    def __len__(self) -> int:
        return len(self.block)


class ResidentBuffer(EpisodeBuffer):
    """`EpisodeBuffer` in one tensor [capacity, T, R] on a device; the same draws give the same batches, bit for bit.

    Args:
        capacity: episodes. device: of the tensor, and of batches. rows: T, of the longest episode.
    """

    def __init__(self, capacity: int, device: torch.device | str, rows: int) -> None:
        super().__init__(capacity, torch.empty(0, device=device).device)  # with its number, which "cuda" lacks
        self._rows = rows
        self._memory: Tensor | None = None  # allocated with the first episode; `_records` are views of it

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes, oldest first; those of one block are encoded together, where the buffer is.

        Errors: ValueError for a block on another GPU, which would come through the host.
        """
        for key, found in groupby(episodes, key=lambda e: id(e.block) if isinstance(e, BlockEpisode) else None):
            group = list(found)
            if key is None or not self._add_block(cast(list[BlockEpisode], group)):
                super().add(group)

    def _add_block(self, episodes: list[BlockEpisode]) -> bool:
        """Add episodes of one block; return False, with nothing changed, where their fields cannot be encoded so."""
        for value in episodes[0].block.values():
            if value.device.type != "cpu" and value.device != self.device:
                raise ValueError(f"episodes on {value.device} cannot be stored on {self.device}")
        block = {name: value.to(self.device, non_blocking=True) for name, value in episodes[0].block.items()}
        spec: Spec = {name: (value.dtype, tuple(value.shape[2:])) for name, value in block.items()}
        codec, (count, rows) = self._codec or Codec(spec), next(iter(block.values())).shape[:2]
        if spec != codec.spec or rows != self._rows:
            return False
        firsts = range(0, count, TOGETHER)
        parts = [codec.encode({n: v[i : i + TOGETHER].flatten(0, 1) for n, v in block.items()}) for i in firsts]
        fits = [kept for _, of_part in parts for kept in of_part.values()]
        if fits and not bool(torch.stack(fits).all()):  # the one value that the host reads
            return False
        self._codec = codec
        self.added += max(0, len(episodes) - self.capacity)
        kept = episodes[-self.capacity :]
        places = [self._next(episode.rows, episode.meta) for episode in kept]
        encoded = torch.cat([records for records, _ in parts]).view(count, rows, codec.width)
        chosen = encoded.index_select(0, self._index([episode.place for episode in kept]))
        self._allocated().index_copy_(0, self._index(places), chosen)
        return True

    def _put(self, records: Tensor, meta: EpisodeMeta) -> None:
        self._records[self._next(len(records), meta)].copy_(records)

    def _next(self, rows: int, meta: EpisodeMeta) -> int:
        """Return the place of the next episode, after noting its origin and number of rows."""
        self.added += 1
        if len(self._records) < self.capacity:
            place = len(self._records)
            self._records.append(self._allocated()[place, :rows])
            self._meta.append(meta)
            return place
        place, self._oldest = self._oldest, (self._oldest + 1) % self.capacity
        self._records[place], self._meta[place] = self._allocated()[place, :rows], meta
        return place

    def _allocated(self) -> Tensor:
        assert self._codec is not None
        if self._memory is None or self._memory.shape[2] != self._codec.width:
            shape = self.capacity, self._rows, self._codec.width
            self._memory = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return self._memory

    def _encode(self, episode: Episode) -> Tensor:
        """Return an episode's records; where that changes the encoding of all, they move to other memory."""
        encoded = super()._encode(episode)
        if self._memory is not None and self._codec is not None and self._memory.shape[2] != self._codec.width:
            memory = self._allocated()
            for place, records in enumerate(self._records):
                self._records[place] = memory[place, : len(records)].copy_(records)
        return encoded

    def _index(self, places: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(places).to(self.device, non_blocking=True)

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the episodes at `indices` (0: the oldest), packed; the host knows their lengths and does not wait."""
        assert self._codec is not None
        drawn = [self._place(i) for i in indices]
        packing, order, _ = time_order([len(self._records[place]) for place in drawn])
        places = [drawn[i] for i in order]
        rows = torch.tensor(places)[packing.episode] * self._rows + packing.step
        fields = self._codec.decode(self._allocated().flatten(0, 1), self._index(rows))
        return PackedBatch(fields, packing, order, tuple(self._meta[place] for place in places))

    def fixed(self, indices: Sequence[int]) -> FixedDraw:
        """Return the episodes at `indices` (0: the oldest) as a batch of fixed shapes, which is not yet read."""
        places = [self._place(i) for i in indices]
        lengths = [len(self._records[place]) for place in places]
        rows = min(-(-max(lengths) // ROUNDING) * ROUNDING, self._rows)
        return FixedDraw(self, torch.tensor([places, lengths]), rows)

    def at(self, places: Tensor, lengths: Tensor, rows: int) -> PackedBatch:
        """Return stored episodes in `rows` rows each, in a `FixedPacking`; only launches work on the device.

        places, lengths: [B] int64 on the device. rows: T, at least the largest of the lengths.
        """
        assert self._codec is not None
        # Rows after an episode's end are copies of its closing row, so that nothing depends on what lies there.
        step = torch.arange(rows, device=self.device).unsqueeze(1).minimum(lengths - 1)
        fields = self._codec.decode(self._allocated().flatten(0, 1), (places * self._rows + step).flatten())
        return PackedBatch(fields, FixedPacking((rows,) * len(places), lengths), ())

    def layout(self) -> Hashable:
        """Return what changes when stored episodes move or are encoded in another way."""
        memory = self._allocated()
        return memory.data_ptr(), memory.shape, self._codec

    def clear(self) -> None:
        """Remove all episodes and start counting from 0."""
        super().clear()
        self._memory = None

    def since(self, number: int) -> EpisodeRange:
        """Return the stored episodes from the `number`-th ever added on, as copies in main memory."""
        found = super().since(number)
        return EpisodeRange(found.first, found.codec, tuple(r.cpu().clone() for r in found.records), found.meta)


@dataclass(frozen=True, eq=False)
class FixedDraw:
    """Episodes drawn for an update of fixed shapes. The host knows which they are and how long.

    Attributes:
        buffer: that holds them. drawn: [2, B] int64 on the CPU, their places in its memory and their lengths in rows.
        rows: T of the batch, a multiple of `ROUNDING` or the largest possible.
    """

    buffer: ResidentBuffer
    drawn: Tensor
    rows: int

    def shape(self) -> Hashable:
        """Return what the shapes of work on the batch depend on: B and T."""
        return self.drawn.shape[1], self.rows

    def batches(self, drawn: Tensor, parts: int) -> list[PackedBatch]:
        """Return the batch in at most `parts` parts; only launches work. drawn: `self.drawn` on the device."""
        parts = min(parts, drawn.shape[1])
        places, lengths = drawn.unbind()
        return [self.buffer.at(places[i::parts], lengths[i::parts], self.rows) for i in range(parts)]


def _rows(episode: Episode) -> int:
    return len(next(iter(episode.values())))


def _popped(episodes: deque[Episode]) -> Iterator[Episode]:
    """Yield episodes and release each one once it has been read."""
    while episodes:
        yield episodes.popleft()


def _odd(spec: Spec, other: Spec) -> str:
    return ", ".join(sorted(name for name in {*spec, *other} if spec.get(name) != other.get(name)))
