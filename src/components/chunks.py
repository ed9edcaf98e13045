"""Chunks: pieces of consecutive steps of the episodes in a packed batch, and minibatches of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, Packing, time_order


@dataclass(frozen=True)
class Chunk:
    """Steps `first` ≤ t < `end` of an episode.

    Attributes:
        episode: its place in the packing of the batch.
    """

    episode: int
    first: int
    end: int


@dataclass(frozen=True)
class Chunks:
    """Some chunks, packed.

    Attributes:
        packing: of their rows. rows: [S] int64 (CPU), row of the batch for each row of the packing. before: [B] int64
            (CPU), for each chunk the row of the batch just before it; -1 where it begins an episode.
    """

    packing: Packing
    rows: Tensor
    before: Tensor

    def split(self, parts: int) -> list[Chunks]:
        """Return the chunks in at most `parts` parts of about equal size, each with long and short ones."""
        parts = min(parts, self.packing.n_episodes)
        if parts == 1:
            return [self]
        number = self.packing.episode
        lengths = self.packing.lengths
        return [
            Chunks(Packing(lengths[i::parts]), self.rows[number % parts == i], self.before[i::parts])
            for i in range(parts)
        ]


def pack_chunks(batch_packing: Packing, chunks: Sequence[Chunk]) -> Chunks:
    """Return chunks in a packing of their own. batch_packing: of the batch that they are cut from."""
    packing, order, gather = time_order([chunk.end - chunk.first for chunk in chunks])
    starts = batch_packing.starts.numpy()
    ordered = [chunks[i] for i in order]
    rows = np.concatenate([starts[chunk.first : chunk.end] + chunk.episode for chunk in ordered])
    before = [starts[chunk.first - 1] + chunk.episode if chunk.first else -1 for chunk in ordered]
    return Chunks(packing, torch.from_numpy(rows)[gather], torch.tensor(before))


class Minibatches:
    """Random minibatches of the chunks of all ranks' batches, drawn alike on all ranks.

    One process draws the same minibatches if it holds the episodes of all ranks in turns: the first of each rank, then
    the second of each rank, and so on. Chunks are in the order of place in the rank's sample, rank, and first step.

    Args:
        batch: of this rank. length: of a chunk in steps; 0: whole episodes. Closing rows belong to no chunk, because no
            action was taken there. dist: the ranks. A collective: every rank builds it.

    Attributes:
        steps: in the batches of all ranks.
    """

    def __init__(self, batch: PackedBatch, length: int, dist: Dist) -> None:
        self._packing = batch.packing
        places = range(batch.packing.n_episodes)
        self._episode = dict(zip(batch.sample_index, places, strict=True))
        steps = {batch.sample_index[place]: batch.packing.lengths[place] - 1 for place in places}
        self._chunks = [
            (place, rank, first, min(first + (length or count), count))
            for place, rank, count in sorted(
                (place, rank, count)
                for rank, of_rank in enumerate(dist.gather(steps))
                for place, count in of_rank.items()
            )
            for first in range(0, count, length or max(count, 1))
        ]
        self.steps = sum(end - first for _, _, first, end in self._chunks)
        self._rank = dist.rank

    def draw(self, count: int, rng: np.random.Generator) -> Iterator[Chunks | None]:
        """Yield this rank's part of each minibatch; None where only other ranks have chunks of it.

        There are `count` minibatches of about as many chunks, and no empty ones: fewer where there are fewer chunks.
        """
        order = rng.permutation(len(self._chunks))
        for chosen in np.array_split(order, count)[: len(order)]:  # the first ones are the larger ones
            drawn = (self._chunks[i] for i in chosen)
            own = [Chunk(self._episode[place], first, end) for place, rank, first, end in drawn if rank == self._rank]
            yield pack_chunks(self._packing, own) if own else None
