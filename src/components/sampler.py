"""Batches for successive updates, the next one packed by a thread while the current one is learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.utils.packing import PackedBatch


class Sampler:
    """Draws batches from a buffer that is not changed meanwhile. What is drawn does not depend on `workers`.

    Args:
        buffer: of episodes. batch_size: episodes. rng: for the draws, used by the caller's thread alone.
        device: where batches go. workers: 1: a thread packs, decodes and copies ahead, where there is a next batch
            and the buffer does not lie on a GPU itself.
    """

    def __init__(
        self, buffer: EpisodeBuffer, batch_size: int, rng: np.random.Generator, device: torch.device, workers: int
    ) -> None:
        self.buffer, self.batch_size, self.rng = buffer, batch_size, rng
        self.device = device
        self.ahead = workers > 0 and buffer.device.type == "cpu"
        self._stream = torch.cuda.Stream(device) if self.ahead and device.type == "cuda" else None

    def batches(self, count: int) -> Iterator[PackedBatch]:
        """Yield `count` batches on the device.

        The thread has ended when the last batch is given, or the iterator closed; an error in it is raised here.
        """
        if not self.ahead or count < 2:
            for _ in range(count):
                yield self._pack(self._draw())
            return
        with ThreadPoolExecutor(1, thread_name_prefix="replay") as thread:
            coming: Future[PackedBatch] = thread.submit(self._pack, self._draw())
            for _ in range(count - 1):
                batch = coming.result()
                coming = thread.submit(self._pack, self._draw())
                yield self._handed_over(batch)
            batch = coming.result()
        yield self._handed_over(batch)

    def _draw(self) -> Sequence[int]:
        return self.buffer.draw(self.batch_size, self.rng)

    def _pack(self, indices: Sequence[int]) -> PackedBatch:
        batch = self.buffer.batch(indices)
        if self._stream is None:
            return batch.to(self.device)
        with torch.cuda.stream(self._stream):
            return batch.pinned().to(self.device)

    def _handed_over(self, batch: PackedBatch) -> PackedBatch:
        """Let the current stream wait for a batch that came by the copying stream, and keep its memory until used."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for value in batch.data.values():
                value.record_stream(current)
        return batch
