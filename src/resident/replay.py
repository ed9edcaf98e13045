"""Replay in one block of a device's memory, and batches of fixed shapes from it.

Shapes: B episodes of a batch, T rows of each, S = T B.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor

from omagd.components.episode_buffer import TOGETHER, UNLIMITED, EpisodeBuffer
from omagd.components.episode_codec import Codec, EpisodeRange, Spec
from omagd.utils.packing import UNKNOWN, Episode, EpisodeMeta, PackedBatch, Packing, Rows, few, meta_of, time_order

ROUNDING = 8  # rows of batches of fixed shapes are a multiple: few shapes, and little more than the longest episode
AT_ONCE = 2**28  # bytes of a block that are encoded together on a GPU
ROOM = 16  # episodes for which a buffer without limit has memory at first


class BlockEpisode(Mapping[str, Tensor]):
    """One of the episodes in tensors [E, T, ...]; its fields are views, which change with them.

    Args:
        block: tensors by name. place: of the episode in them. rows: L + 1. meta: where it comes from.
    """

    __slots__ = ("block", "place", "rows", "meta")

    def __init__(self, block: Episode, place: int, rows: int, meta: EpisodeMeta) -> None:
        self.block, self.place, self.rows, self.meta = block, place, rows, meta

    def __getitem__(self, name: str) -> Tensor:
        return self.block[name][self.place, : self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.block)

    def __len__(self) -> int:
        return len(self.block)


class BlockEpisodes(Rows[BlockEpisode]):
    """Episodes of one block, each made when it is asked for: rounds have thousands.

    Args:
        block: see `BlockEpisode`. places, rows: [k] int64. meta: k origins.
    """

    def __init__(self, block: Episode, places: np.ndarray, rows: np.ndarray, meta: Sequence[EpisodeMeta]) -> None:
        super().__init__(partial(BlockEpisode, block), places, rows, meta)
        self.block, self.places, self.rows, self.meta = block, places, rows, meta

    @classmethod
    def of(cls, episodes: Sequence[BlockEpisode]) -> BlockEpisodes:
        """Return some episodes of one block together."""
        numbers = np.array([(episode.place, episode.rows) for episode in episodes])
        return cls(episodes[0].block, numbers[:, 0], numbers[:, 1], [episode.meta for episode in episodes])


@dataclass(frozen=True, eq=False)
class FixedPacking(Packing):
    """B episodes in T rows each: an episode's closing row is repeated up to row T. S = T B, row t B + b.

    Shapes depend on no value on the device, so that a CUDA graph can be made of work on them.

    Args:
        lengths: T, B times. rows: [B] int64 on the device, real rows of each episode, 1 to T.
    """

    rows: Tensor

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        row = torch.arange(self.n_steps * self.n_episodes, device=self.rows.device)
        return row % self.n_episodes, row // self.n_episodes

    @cached_property
    def closing(self) -> Tensor:
        """True for closing rows and their repetitions, [S] bool, on the device."""
        step = torch.arange(self.n_steps, device=self.rows.device).unsqueeze(1)
        return (step >= self.rows - 1).flatten()

    @cached_property
    def acting(self) -> Tensor:
        """All rows but those of the last step, [S - B] int64; some of them are closing ones."""
        return torch.arange((self.n_steps - 1) * self.n_episodes, device=self.rows.device)

    @cached_property
    def next_row(self) -> Tensor:
        """For each row that of the next step of its episode, for closing ones the row itself, [S] int64."""
        row = torch.arange(self.n_steps * self.n_episodes, device=self.rows.device)
        return torch.where(self.closing, row, row + self.n_episodes)

    def steps_of(self, episodes: Sequence[int] | Tensor) -> tuple[Tensor, Packing]:
        """Return the first T - 1 rows of some episodes, [k] int64 on the device; those after an end stay closing."""
        step = torch.arange(self.n_steps - 1, device=self.rows.device).unsqueeze(1)
        rows = step * self.n_episodes + torch.as_tensor(episodes)
        return rows.flatten(), Packing((len(step),) * len(episodes))

    def row(self, step: Tensor, episode: Tensor) -> Tensor:
        """Return the rows of steps of episodes; those of steps before 0 are first rows."""
        return step.clamp(min=0) * self.n_episodes + episode


class ResidentBuffer(EpisodeBuffer):
    """`EpisodeBuffer` in one tensor [capacity, T, R] on a device; the same draws give the same batches, bit for bit.

    Args:
        capacity: episodes; the memory grows if it is `UNLIMITED`. device: of the tensor, and of batches. rows: T, of
            the longest episode.
    """

    def __init__(self, capacity: int, device: torch.device | str, rows: int) -> None:
        super().__init__(capacity, torch.empty(0, device=device).device)  # with its number, which "cuda" lacks
        self._rows = rows
        self._room = ROOM if capacity == UNLIMITED else capacity  # episodes for which there is memory
        self._memory: Tensor | None = None  # [room, T, R], allocated with the first episode
        self._lengths = np.zeros(self._room, np.int64)  # rows of the episode at each place
        self._counted: tuple[Hashable, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._meta)

    def _stored(self, place: int) -> Tensor:
        return self._allocated()[place, : self._lengths[place]]

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes, oldest first; those of one block are encoded together, where the buffer is.

        Errors: ValueError for a block on another GPU, which would come through the host.
        """
        if isinstance(episodes, BlockEpisodes):
            if len(episodes) and not self._add_block(episodes):
                super().add(episodes)
            return
        for key, found in groupby(episodes, key=lambda e: id(e.block) if isinstance(e, BlockEpisode) else None):
            if key is None:
                super().add(found)
            else:
                self.add(BlockEpisodes.of(cast(list[BlockEpisode], list(found))))

    def _add_block(self, episodes: BlockEpisodes) -> bool:
        """Add episodes of one block; return False, with nothing changed, where their fields cannot be encoded so."""
        for value in episodes.block.values():
            if value.device.type != "cpu" and value.device != self.device:
                raise ValueError(f"episodes on {value.device} cannot be stored on {self.device}")
        block = {name: value.to(self.device, non_blocking=True) for name, value in episodes.block.items()}
        spec: Spec = {name: (value.dtype, tuple(value.shape[2:])) for name, value in block.items()}
        codec, rows = self._codec or Codec(spec), next(iter(block.values())).shape[1]
        if spec != codec.spec or rows != self._rows:
            return False
        size = sum(value[0].nbytes for value in block.values())  # of an episode
        together = TOGETHER if self.device.type == "cpu" else max(1, AT_ONCE // size)
        parts: list[Tensor] = []
        fits: list[Tensor] = []
        for some in self._index(episodes.places[-self.capacity :]).split(together):
            records, of_part = codec.encode({n: v.index_select(0, some).flatten(0, 1) for n, v in block.items()})
            parts.append(records.view(-1, rows, codec.width))
            fits += of_part.values()
        if fits and not bool(torch.stack(fits).all()):  # the one value that the host reads
            return False
        self._codec = codec
        places = self._index(self._take(episodes.rows, episodes.meta)).split(together)
        for some, records in zip(places, parts, strict=True):
            self._allocated().index_copy_(0, some, records)
        return True

    def _put_together(self, episodes: list[Episode]) -> None:
        if episodes:
            joined = {name: torch.cat([episode[name] for episode in episodes]) for name in episodes[0]}
            records = self._encode(joined).unflatten(0, (len(episodes), -1))
            places = self._index(self._take(np.full(len(records), records.shape[1]), [*map(meta_of, episodes)]))
            self._allocated()[:, : records.shape[1]].index_copy_(0, places, records[-len(places) :])

    def _put(self, records: Tensor, meta: EpisodeMeta) -> None:
        place = int(self._take(np.array([len(records)]), [meta])[0])
        self._stored(place).copy_(records)

    def _take(self, rows: np.ndarray, meta: Sequence[EpisodeMeta]) -> np.ndarray:
        """Return the places of the newest of some episodes, after noting their origins and numbers of `rows`."""
        self.added += len(rows)
        rows, meta, before = rows[-self.capacity :], meta[-self.capacity :], len(self)
        after = min(before + len(rows), self.capacity)
        if after > self._room:
            self._room = max(after, 2 * self._room)
            self._lengths = np.pad(self._lengths, (0, self._room - len(self._lengths)))
            if (stored := self._memory) is not None:
                self._allocated()[: len(stored)].copy_(stored)
        places = (self._oldest + before + np.arange(len(rows))) % self.capacity
        self._oldest = (self._oldest + before + len(rows) - after) % self.capacity
        self._lengths[places] = rows
        self._meta += [UNKNOWN] * (after - before)
        for place, each in zip(places.tolist(), meta, strict=True):
            self._meta[place] = each
        return places

    def _allocated(self) -> Tensor:
        assert self._codec is not None
        shape = self._room, self._rows, self._codec.width
        if self._memory is None or self._memory.shape != shape:
            self._memory = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return self._memory

    def _recode(self, codec: Codec) -> None:
        super()._recode(codec)
        self._allocated()  # also where nothing is stored
        for place, records in enumerate(self._records):
            self._stored(place).copy_(records)
        self._records = []

    def _index(self, places: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(places).to(self.device, non_blocking=True)

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the episodes at `indices` (0: the oldest), packed; the host knows their lengths and does not wait."""
        return self._packed(*self._found(indices))

    def _found(self, indices: Sequence[int]) -> tuple[list[int], list[int], list[EpisodeMeta]]:
        """Return places, numbers of rows and origins of episodes."""
        places = [self._place(i) for i in indices]
        return places, self._lengths[places].tolist(), [self._meta[place] for place in places]

    def _packed(self, places: Sequence[int], lengths: Sequence[int], meta: Sequence[EpisodeMeta]) -> PackedBatch:
        assert self._codec is not None
        packing, order, _ = time_order(lengths)
        rows = torch.tensor([places[i] for i in order])[packing.episode] * self._rows + packing.step
        fields = self._codec.decode(self._allocated().flatten(0, 1), self._index(rows))
        return PackedBatch(fields, packing, order, tuple(meta[i] for i in order))

    def fixed(self, indices: Sequence[int]) -> FixedDraw:
        """Return the episodes at `indices` (0: the oldest) as a batch of fixed shapes, which is not yet read."""
        places, lengths, meta = self._found(indices)
        return self._drawn(places, lengths, partial(self._packed, places, lengths, meta))

    def sent(self, codec: Codec, records: Sequence[Tensor], packed: Callable[[], PackedBatch]) -> FixedDraw:
        """Hold the records of B episodes in main memory, sent as one block, in place of all others, and return them."""
        self._codec, self._room = codec, max(self._room, len(records))
        lengths = [*map(len, records)]
        pinned = self.device.type == "cuda"  # so that the host does not wait for the copy
        block = torch.empty(len(records), max(lengths), codec.width, dtype=torch.uint8, pin_memory=pinned)
        for rows, episode in zip(block, records, strict=True):
            rows[: len(episode)] = episode
        self._allocated()[: len(block), : max(lengths)].copy_(block, non_blocking=True)
        return self._drawn(range(len(records)), lengths, packed)

    def _drawn(self, places: Sequence[int], lengths: Sequence[int], packed: Callable[[], PackedBatch]) -> FixedDraw:
        rows = min(-(-max(lengths) // ROUNDING) * ROUNDING, self._rows)
        return FixedDraw(self, torch.tensor([places, lengths]), rows, packed)

    def whole(self, indices: Sequence[int]) -> FixedDraw:
        """Return the same, followed by episodes without steps: at least one, and few numbers of episodes in all."""
        draw = self.fixed(indices)
        more = few(len(indices)) + 1 - len(indices)
        none = torch.tensor([draw.drawn[0, :1].tolist(), [1]]).expand(2, more)
        meta = (*(self._meta[place] for place in draw.drawn[0].tolist()), *[UNKNOWN] * more)
        return replace(draw, drawn=torch.cat([draw.drawn, none], dim=1), meta=meta)

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
            lengths, found = torch.from_numpy(self._lengths[: len(self)]), []
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
        found, copies = super().since(number), []
        for first in range(0, len(found.records), TOGETHER):  # few copies from the device, and little memory there
            records = found.records[first : first + TOGETHER]
            copies += [each.clone() for each in torch.cat(records).cpu().split([*map(len, records)])]
        return EpisodeRange(found.first, found.codec, tuple(copies), found.meta)


class StagedBuffer(EpisodeBuffer):
    """`EpisodeBuffer` in main memory; the episodes of a batch of fixed shapes are sent to a device as one block.

    Args:
        capacity: episodes. device: of the batches. rows: T, of the longest episode.
    """

    def __init__(self, capacity: int, device: torch.device | str, rows: int) -> None:
        super().__init__(capacity)
        self._stage = ResidentBuffer(0, device, rows)

    def fixed(self, indices: Sequence[int]) -> FixedDraw:
        """Return the episodes at `indices` (0: the oldest) as a batch of fixed shapes, until the next call."""
        assert self._codec is not None
        records = [self._stored(self._place(i)) for i in indices]
        return self._stage.sent(self._codec, records, partial(self.batch, indices))

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the episodes at `indices` (0: the oldest), packed, on the device."""
        return super().batch(indices).to(self._stage.device)


@dataclass(frozen=True, eq=False)
class FixedDraw:
    """Episodes drawn for an update of fixed shapes. The host knows which they are and how long.

    Attributes:
        buffer: that holds them. drawn: [2, B] int64 on the CPU, their places in its memory and their lengths in rows.
        rows: T of the batch, a multiple of `ROUNDING` or the largest possible. packed: returns them packed. meta: [B],
            origin of each episode, or empty.
    """

    buffer: ResidentBuffer
    drawn: Tensor
    rows: int
    packed: Callable[[], PackedBatch]
    meta: tuple[EpisodeMeta, ...] = ()

    def batches(self, drawn: Tensor, parts: int) -> list[PackedBatch]:
        """Return the batch in at most `parts` parts; only launches work. drawn: `self.drawn` on the device."""
        parts = min(parts, drawn.shape[1])
        places, lengths = drawn.unbind()
        return [self.buffer.at(places[i::parts], lengths[i::parts], self.rows) for i in range(parts)]

    def counts(self, of: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return on the CPU what `of` counts in each drawn episode, [B, k]; see `ResidentBuffer.counts`."""
        return self.buffer.counts(of)[self.drawn[0]]
