"""Packing ahead in a thread gives the same batches as packing when asked, and leaves no thread behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from omagd.components.data import Sampler
from omagd.components.episode_buffer import EpisodeBuffer

torch.set_num_threads(1)

CPU = torch.device("cpu")


def filled() -> EpisodeBuffer:
    buffer = EpisodeBuffer(30)
    rng = np.random.default_rng(0)
    buffer.add({"obs": torch.from_numpy(rng.normal(size=(2 + i % 9, 2, 3)))} for i in range(40))
    return buffer


def threads() -> int:
    return sum(thread.name.startswith("replay") for thread in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_batches_do_not_depend_on_the_thread(count):
    buffer, drawn = filled(), []
    for workers in (0, 1):
        rng = np.random.default_rng(8)
        sampler = Sampler(buffer, 11, rng, CPU, workers)
        batches = list(sampler.batches(count)) + list(sampler.batches(2))
        drawn.append((batches, rng.random()))
        assert threads() == 0
    (plain, after), (ahead, after_ahead) = drawn
    assert after == after_ahead
    assert len(plain) == len(ahead) == count + 2
    for one, other in zip(plain, ahead, strict=True):
        assert (one.packing, one.sample_index) == (other.packing, other.sample_index)
        assert torch.equal(one["obs"], other["obs"])
    reference = np.random.default_rng(8)
    for batch in plain:
        again = buffer.sample(11, reference)
        assert torch.equal(batch["obs"], again["obs"])


def test_the_next_batch_is_packed_while_the_current_one_is_used():
    buffer, packed = filled(), threading.Event()
    batch = buffer.batch

    def slow(indices):
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("packed by the caller")
        packed.set()
        return batch(indices)

    buffer.batch = slow
    batches = Sampler(buffer, 3, np.random.default_rng(0), CPU, 1).batches(3)
    next(batches)
    packed.clear()
    next(batches)
    assert packed.wait(10)
    assert threads() == 1
    next(batches)
    assert threads() == 0


def test_an_error_of_the_thread_arrives_and_an_iterator_that_is_left_ends_its_thread():
    buffer = filled()
    sampler = Sampler(buffer, 3, np.random.default_rng(0), CPU, 1)
    batches = sampler.batches(5)
    next(batches)
    batches.close()
    assert threads() == 0

    def broken(indices):
        raise MemoryError("no room")

    buffer.batch = broken
    with pytest.raises(MemoryError, match="no room"):
        next(sampler.batches(5))
    assert threads() == 0
    with pytest.raises(ValueError, match="larger sample"):
        list(Sampler(filled(), 31, np.random.default_rng(0), CPU, 1).batches(2))
    assert threads() == 0
