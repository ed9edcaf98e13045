"""Replay in a device's memory: the batches of the ordinary buffer, and no value read but one for each round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated_gpu import DEVICE, simulated_gpu

from omagd.components.episode_buffer import UNLIMITED, EpisodeBuffer
from omagd.resident import replay
from omagd.resident.replay import BlockEpisode, ResidentBuffer
from omagd.utils.packing import EpisodeMeta, RecordedEpisode, Rows

ROWS, AGENTS, ACTIONS = 7, 2, 11


def block_of(seed: int, count: int = 5, full: bool = True, device: str | torch.device = "cpu") -> list[BlockEpisode]:
    """Return episodes of different lengths in one block; what comes after an episode's end is anything."""
    rng = torch.Generator().manual_seed(seed)
    whole = torch.randn(count, ROWS, AGENTS, 9, generator=rng)
    fields = {
        "obs": torch.where(torch.rand(whole.shape, generator=rng) < 0.5, whole, 0) if full else whole,
        "avail_actions": (torch.rand(count, ROWS, AGENTS, ACTIONS, generator=rng) < 0.5).to(torch.uint8),
        "actions": torch.randint(ACTIONS, (count, ROWS, AGENTS), generator=rng, dtype=torch.uint8),
        "reward": torch.randn(count, ROWS, generator=rng),
    }
    if full:
        fields["full_obs"] = whole
    fields = {name: value.to(device) for name, value in fields.items()}
    rows = torch.randint(2, ROWS + 1, (count,), generator=rng).tolist()
    order = torch.randperm(count, generator=rng).tolist()
    return [BlockEpisode(fields, place, rows[place], EpisodeMeta(place, seed)) for place in order]


def assert_same_batches(one: EpisodeBuffer, other: EpisodeBuffer) -> None:
    assert len(one) == len(other)
    assert one.added == other.added
    for seed in range(4):
        a, b = (buffer.sample(min(6, len(one)), np.random.default_rng(seed)) for buffer in (one, other))
        assert (a.packing, a.sample_index, a.meta) == (b.packing, b.sample_index, b.meta)
        assert list(a.data) == list(b.data)
        assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a.data)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("capacity", [3, 8, 40, UNLIMITED])
def test_batches_are_those_of_the_ordinary_buffer(capacity, full):
    """Before and after the buffer is full, with rounds that are larger than it, and with single episodes."""
    plain, resident = EpisodeBuffer(capacity), ResidentBuffer(capacity, "cpu", ROWS)
    for seed in range(7):
        episodes = block_of(seed, 5 if seed % 4 else 50, full=full)
        steps = [RecordedEpisode({name: rows[:1] for name, rows in e.items()}, e.meta) for e in episodes]
        added = [episodes, [*episodes[:2], *block_of(90 + seed, 3, full=full)], episodes[1:4], steps][seed % 4]
        for buffer in (plain, resident):
            buffer.add(added)
        assert_same_batches(plain, resident)


@pytest.mark.parametrize("name", ["obs", "avail_actions"])
def test_a_field_that_breaks_its_rule_is_kept_as_it_is(name, monkeypatch):
    monkeypatch.setattr(replay, "TOGETHER", 2)
    plain, resident = EpisodeBuffer(8), ResidentBuffer(8, "cpu", ROWS)
    rounds = [block_of(0), block_of(1), block_of(2)]
    rounds[1][0][name][0] = 3
    for episodes in rounds:
        for buffer in (plain, resident):
            buffer.add(episodes)
        assert_same_batches(plain, resident)


def test_a_restored_buffer_continues_as_the_saved_one():
    saved, others = ResidentBuffer(8, "cpu", ROWS), [ResidentBuffer(8, "cpu", ROWS), EpisodeBuffer(8)]
    saved.add(block_of(0))
    saved.add(block_of(1))
    parts = [saved.since(0)]
    before = [records.clone() for records in parts[0].records]
    saved.add(block_of(2))
    assert all(map(torch.equal, parts[0].records, before)), "what a checkpoint holds has changed"
    for other in others:
        other.restore(parts, 10)
        other.add(block_of(2))
        assert_same_batches(saved, other)
    saved.clear()
    assert (len(saved), saved.added) == (0, 0)


def test_episodes_of_the_cpu_are_sent_together_and_those_of_another_gpu_rejected():
    """Agents may act on the CPU while the replay is on a GPU; "cuda" means the current one."""
    expected = EpisodeBuffer(8)
    expected.add(block_of(0))
    with simulated_gpu() as gpu:
        buffer = ResidentBuffer(8, "cuda", ROWS)
        assert buffer.device == DEVICE
        buffer.add(block_of(0))
        assert sum(gpu.waits.values()) == 1, gpu.waits
        batch = buffer.sample(4, np.random.default_rng(0))
        buffer.device = torch.device("cuda", 1)
        with pytest.raises(ValueError, match="episodes on cuda:0 cannot be stored on cuda:1"):
            buffer.add(block_of(0, device=DEVICE))
    same = expected.sample(4, np.random.default_rng(0))
    assert all(torch.equal(batch[name].value, same[name]) for name in same.data)


def test_rows_are_made_of_plain_numbers_and_sliced():
    rows = Rows(lambda *row: row, np.arange(3), ["a", "b", "c"])
    assert [*rows[1:]] == [(1, "b"), (2, "c")]
    assert type(rows[0][0]) is int
