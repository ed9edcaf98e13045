"""Replay in one block of a device's memory, and batches of fixed shapes from it.

Shapes: B episodes of a batch, T rows of each, S = T B.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from omagd.components.episode_buffer import TOGETHER, EpisodeBuffer
from omagd.components.episode_codec import Codec, EpisodeRange, Spec
from omagd.utils.packing import Episode, EpisodeMeta, PackedBatch, Packing, time_order

ROUNDING = 8  # rows of batches of fixed shapes are a multiple: few shapes, and little more than the longest episode


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


@dataclass(frozen=True, eq=False)
class FixedPacking(Packing):
    """B episodes in T rows each: an episode's closing row is repeated up to row T. S = T B, row t B + b.

    Shapes depend on no value on the device, so that a CUDA graph can be made of work on them.

    Args:
        lengths: T, B times. rows: [B] int64 on the device, real rows of each episode, 1 to T.
    """

    rows: Tensor

    @cached_property
    def closing(self) -> Tensor:
        """True for closing rows and their repetitions, [S] bool, on the device."""
        step = torch.arange(self.n_steps, device=self.rows.device).unsqueeze(1)
        return (step >= self.rows - 1).flatten()

    @cached_property
    def next_row(self) -> Tensor:
        """For each row that of the next step of its episode, for closing ones the row itself, [S] int64."""
        row = torch.arange(self.n_steps * self.n_episodes, device=self.rows.device)
        return torch.where(self.closing, row, row + self.n_episodes)

    def places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return episode and step of each row, computed on the device: a CUDA graph copies nothing from the host."""
        row = torch.arange(self.n_steps * self.n_episodes, device=device)
        return row % self.n_episodes, row // self.n_episodes

    def row(self, step: Tensor, episode: Tensor) -> Tensor:
        """Return the rows of steps of episodes; those of steps before 0 are first rows."""
        return step.clamp(min=0) * self.n_episodes + episode


class ResidentBuffer(EpisodeBuffer):
    """`EpisodeBuffer` in one tensor [capacity, T, R] on a device; the same draws give the same batches, bit for bit.

    Args:
        capacity: episodes. device: of the tensor, and of batches. rows: T, of the longest episode.
    """

    def __init__(self, capacity: int, device: torch.device | str, rows: int) -> None:
        super().__init__(capacity, torch.empty(0, device=device).device)  # with its number, which "cuda" lacks
        self._rows = rows
        self._memory: Tensor | None = None  # allocated with the first episode; `_records` are views of it
        self._counted: tuple[Hashable, Tensor] | None = None

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

    def counts(self, of: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return on the CPU what `of` counts in each stored episode, [E, k] by its place in the memory.

        of: returns [B, k] of a batch of fixed shapes. It is asked when episodes have changed, and the host waits then.
        """
        key = of, self.added, self.layout()
        if self._counted is None or self._counted[0] != key:
            lengths, found = torch.tensor([len(records) for records in self._records]), []
            for place in torch.arange(len(lengths)).split(TOGETHER):
                found.append(of(self.at(self._index(place), self._index(lengths[place]), self._rows)))
            self._counted = key, torch.cat(found).cpu()
        return self._counted[1]

    def layout(self) -> Hashable:
        """Return what changes when stored episodes move or are encoded in another way."""
        memory = self._allocated()
        return memory.data_ptr(), memory.shape, self._codec

    def clear(self) -> None:
        """Remove all episodes and start counting from 0."""
        super().clear()
        self._memory = self._counted = None

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

    def batches(self, drawn: Tensor, parts: int) -> list[PackedBatch]:
        """Return the batch in at most `parts` parts; only launches work. drawn: `self.drawn` on the device."""
        parts = min(parts, drawn.shape[1])
        places, lengths = drawn.unbind()
        return [self.buffer.at(places[i::parts], lengths[i::parts], self.rows) for i in range(parts)]

    def counts(self, of: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return on the CPU what `of` counts in each drawn episode, [B, k]; see `ResidentBuffer.counts`."""
        return self.buffer.counts(of)[self.drawn[0]]
