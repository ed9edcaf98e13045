"""Replay: what is kept, how it is drawn, and that a file gives back the same bits or none."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_file import load_range
from omagd.utils.errors import UserError

torch.set_num_threads(1)


def episode(number: int, steps: int) -> dict[str, torch.Tensor]:
    """An episode whose every value follows from its number, of several dtypes."""
    rng = np.random.default_rng(number)
    rows = steps + 1
    return {
        "obs": torch.from_numpy(rng.normal(size=(rows, 2, 3)).astype(np.float32)),
        "actions": torch.from_numpy(rng.integers(0, 200, (rows, 2)).astype(np.uint8)),
        "tokens": torch.from_numpy(rng.integers(-1, 999, (rows, 2, 4)).astype(np.int16)),
        "recon": torch.from_numpy(rng.normal(size=(rows, 2, 3)).astype(np.float16)),
        "number": torch.full((rows,), number, dtype=torch.int64),
    }


def filled(count: int, capacity: int = 50) -> EpisodeBuffer:
    buffer = EpisodeBuffer(capacity)
    buffer.add([episode(i, 1 + i % 7) for i in range(count)])
    return buffer


def numbers(buffer: EpisodeBuffer) -> list[int]:
    each = [int(buffer.batch([i])["number"][0]) for i in range(len(buffer))]
    assert each == [int(episode["number"][0]) for episode in buffer.episodes]
    return each


def test_the_newest_episodes_stay_and_bytes_are_counted():
    buffer = EpisodeBuffer(3)
    for i in range(5):
        buffer.add([episode(i, i + 1)])
        held = range(max(0, i - 2), i + 1)
        assert numbers(buffer) == list(held)
        row = 2 * 3 * 4 + 2 * 1 + 2 * 4 * 2 + 2 * 3 * 2 + 8
        assert buffer.nbytes == sum(row * (j + 2) for j in held)
    assert not buffer.can_sample(4)
    assert buffer.can_sample(3)


def test_a_sample_holds_each_episode_whole_in_packed_order():
    buffer = filled(20)
    batch = buffer.sample(9, np.random.default_rng(3))
    drawn = np.random.default_rng(3).choice(20, 9, replace=False)
    assert list(batch.packing.lengths) == sorted((2 + i % 7 for i in drawn), reverse=True)
    padded = {name: batch.packing.pad(batch[name]) for name in buffer.fields}
    for b, place in enumerate(batch.sample_index):
        original = episode(int(drawn[place]), 1 + int(drawn[place]) % 7)
        rows = batch.packing.lengths[b]
        for name, values in original.items():
            assert torch.equal(padded[name][b, :rows], values)


def test_sampling_is_uniform_and_without_replacement():
    buffer = filled(12)
    rng = np.random.default_rng(0)
    counts = np.zeros(12)
    for _ in range(2000):
        batch = buffer.sample(4, rng)
        first_rows = batch["number"][: batch.packing.n_episodes].numpy()
        assert len(set(first_rows)) == 4
        counts[first_rows] += 1
    expected = 2000 * 4 / 12
    # Chi-square with 11 degrees of freedom, shrunk by the correction for draws without replacement; 0.9999 quantile 37.
    assert ((counts - expected) ** 2 / expected).sum() < 37
    with pytest.raises(ValueError, match="larger sample"):
        buffer.sample(13, rng)


def test_stretches_put_together_are_the_buffer_again_and_hold_each_episode_once(tmp_path):
    buffer, parts, stored = EpisodeBuffer(20), [], 0
    for added in (3, 0, 14, 9, 7):
        buffer.add([episode(buffer.added + i, 1 + i) for i in range(added)])
        stretch = buffer.since(stored)
        assert (stretch.first, len(stretch.records)) == (stored, added)
        stretch.save(tmp_path / f"{stored}.episodes")
        parts.append((tmp_path / f"{stored}.episodes", stretch.describe()))
        stored += added
    oldest = buffer.added - len(buffer)
    found = [load_range(path, said).from_number(oldest) for path, said in parts if said["count"]]
    again = EpisodeBuffer(20)
    again.restore(found, buffer.added)
    assert (numbers(again), again.added, again.nbytes) == (numbers(buffer), buffer.added, buffer.nbytes)
    for one in (buffer, again):
        one.add([episode(99, 2)])
    drawn = [one.sample(11, np.random.default_rng(5)) for one in (buffer, again)]
    for name in buffer.fields:
        assert drawn[0][name].numpy().tobytes() == drawn[1][name].numpy().tobytes()
    assert len(buffer.since(0).records) == len(buffer), "what has left is not there any more"


def test_a_stretch_that_is_not_what_is_said_of_it_is_refused(tmp_path):
    buffer = filled(4)
    stretch = buffer.since(1)
    stretch.save(tmp_path / "s")
    said = stretch.describe()
    assert len(load_range(tmp_path / "s", said).records) == 3
    for wrong in ({"count": 2}, {"count": 4}, {"codec": None}, {"codec": {"spec": [], "plain": []}}, {"first": "x"}):
        with pytest.raises(ValueError, match="."):
            load_range(tmp_path / "s", {**said, **wrong})
    with pytest.raises(ValueError, match="cannot be read"):
        load_range(tmp_path / "nowhere", said)


def test_an_episode_with_other_fields_is_refused_by_name():
    buffer = filled(2)
    odd = episode(9, 2)
    odd["obs"] = odd["obs"].double()
    with pytest.raises(ValueError, match="in obs$"):
        buffer.add([odd])
    odd = episode(9, 2)
    del odd["tokens"]
    with pytest.raises(ValueError, match="in tokens$"):
        buffer.add([odd])


def test_a_view_does_not_keep_the_whole_alive():
    big = torch.zeros(1000, 5)
    buffer = EpisodeBuffer(2)
    buffer.add([{"obs": big[3:6]}])
    stored = buffer.episodes[0]["obs"]
    assert stored.untyped_storage().nbytes() == 3 * 5 * 4


def test_state_and_file_give_the_same_batches_bit_for_bit(tmp_path):
    buffer = filled(33, capacity=20)
    path = tmp_path / "deep" / "buffer.ep"
    buffer.save(path, {"map": "3m", "n": 3})
    from_file, restored = EpisodeBuffer(20), EpisodeBuffer(25)
    from_file.load(path, {"map": "3m"})
    restored.restore([buffer.since(0)], buffer.added)
    expected = buffer.sample(11, np.random.default_rng(5))
    for other in (from_file, restored):
        assert other.nbytes == buffer.nbytes
        batch = other.sample(11, np.random.default_rng(5))
        assert batch.packing == expected.packing
        assert batch.sample_index == expected.sample_index
        for name in buffer.fields:
            assert batch[name].dtype == expected[name].dtype
            assert batch[name].numpy().tobytes() == expected[name].numpy().tobytes()
        other.add([episode(77, 2)])  # the oldest leaves, or there is room
    assert numbers(from_file) == [*range(14, 33), 77]
    assert numbers(restored) == [*range(13, 33), 77]
    assert [p.name for p in path.parent.iterdir()] == ["buffer.ep"]


def test_an_empty_buffer_can_be_saved(tmp_path):
    EpisodeBuffer(3).save(tmp_path / "empty")
    buffer = EpisodeBuffer(3)
    buffer.load(tmp_path / "empty")
    assert len(buffer) == 0
    buffer.restore([EpisodeBuffer(3).since(0)], 0)
    assert len(buffer) == 0


def test_every_kind_of_damage_is_refused_and_nothing_is_lost(tmp_path):
    path = tmp_path / "buffer.ep"
    filled(5).save(path)
    whole = path.read_bytes()
    header = int.from_bytes(whole[8:16], "little")
    places = [0, 9, 20, 50, 48 + header - 1, 48 + header, 48 + header + 700, len(whole) - 1]
    damaged = [whole[:p] + bytes([whole[p] ^ 1]) + whole[p + 1 :] for p in places]
    damaged += [whole[:-1], whole[: 48 + header], whole[:30], b"", whole + b"x"]
    buffer = filled(3)
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match="pretrain_buffer_path=.*buffer.ep") as error:
            buffer.load(path)
        assert "\n" not in error.value.render()
        assert numbers(buffer) == [0, 1, 2]


def test_a_file_of_another_run_or_of_another_size_is_refused(tmp_path):
    path = tmp_path / "buffer.ep"
    filled(5).save(path, {"map": "3m"})
    with pytest.raises(UserError, match="map is 3m there and 8m in this run"):
        EpisodeBuffer(9).load(path, {"map": "8m"})
    with pytest.raises(UserError, match="holds 5 episodes, this run keeps 4"):
        EpisodeBuffer(4).load(path, {"map": "3m"})
    with pytest.raises(UserError, match="some_key=.*nowhere cannot be read"):
        EpisodeBuffer(4).load(tmp_path / "nowhere", key="some_key")


def test_the_file_says_what_it_holds_in_json(tmp_path):
    path = tmp_path / "buffer.ep"
    filled(2).save(path, {"map": "3m"})
    raw = path.read_bytes()
    header = json.loads(raw[48 : 48 + int.from_bytes(raw[8:16], "little")])
    assert header["facts"] == {"map": "3m"}
    assert header["rows"] == [2, 3]
    kinds = {f["name"]: (f["dtype"], f["shape"]) for f in header["fields"]}
    assert kinds["recon"] == ("float16", [2, 3])
    assert kinds["tokens"] == ("int16", [2, 4])
