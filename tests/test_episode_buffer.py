"""Storage of episodes: what is kept, how batches are drawn and packed ahead, and files that return the same bits."""

from __future__ import annotations

import hashlib
import json
import threading

import numpy as np
import pytest
import torch

from omagd.components.data import Sampler
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_file import MARK, load_range
from omagd.utils.errors import UserError
from omagd.utils.packing import UNKNOWN, EpisodeMeta, PackedBatch, RecordedEpisode, pack_episodes

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


def recorded(number: int, steps: int) -> RecordedEpisode:
    return RecordedEpisode(episode(number, steps), EpisodeMeta(number % 3, 2**62 + number, number % 2, f"g{number}"))


def filled(count: int, capacity: int = 50) -> EpisodeBuffer:
    buffer = EpisodeBuffer(capacity)
    buffer.add([recorded(i, 1 + i % 7) for i in range(count)])
    return buffer


def assert_same(one: PackedBatch, other: PackedBatch) -> None:
    assert (one.packing, one.sample_index, one.meta) == (other.packing, other.sample_index, other.meta)
    for name in one.data:
        assert one[name].dtype == other[name].dtype
        assert one[name].numpy().tobytes() == other[name].numpy().tobytes()


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


def test_a_file_and_ranges_of_episodes_give_the_buffer_again(tmp_path):
    """With the origin of each episode; ranges hold each episode once, though some have left the buffer."""
    buffer, ranges, stored = EpisodeBuffer(20), [], 0
    for added in (3, 0, 14, 9, 7):
        buffer.add([recorded(buffer.added + i, 1 + i) for i in range(added)])
        part = buffer.since(stored)
        assert (part.first, len(part.records)) == (stored, added)
        part.save(tmp_path / f"{stored}.episodes")
        ranges.append((tmp_path / f"{stored}.episodes", part.describe()))
        stored += added
    assert len(buffer.since(0).records) == len(buffer) == 20
    oldest = buffer.added - len(buffer)
    path = tmp_path / "deep" / "buffer.ep"
    buffer.save(path, {"map": "3m", "n": 3})
    from_ranges, from_file, larger = EpisodeBuffer(20), EpisodeBuffer(20), EpisodeBuffer(25)
    found = [load_range(file, said).from_number(oldest) for file, said in ranges if said["count"]]
    from_ranges.restore([one for part in found for one in part.each()], buffer.added)
    from_file.load(path, {"map": "3m"})
    larger.restore([buffer.since(0)], buffer.added)
    drawn = np.random.default_rng(5).choice(20, 11, replace=False)
    expected = pack_episodes([buffer.episodes[i] for i in drawn])
    assert expected.meta[0].group == f"g{int(expected['number'][0])}"
    for one in (buffer, from_ranges, from_file, larger):
        assert (numbers(one), one.nbytes) == (list(range(13, 33)), buffer.nbytes)
        assert_same(one.sample(11, np.random.default_rng(5)), expected)
        assert_same(one.batch(drawn.tolist()).select(range(11)), expected)
    assert from_ranges.added == larger.added == 33
    for one in (from_file, larger):
        one.add([episode(77, 2)])  # the oldest leaves, or there is room
        assert one.batch([-1]).meta == (UNKNOWN,)
    assert (numbers(from_file), numbers(larger)) == ([*range(14, 33), 77], [*range(13, 33), 77])
    assert [file.name for file in path.parent.iterdir()] == ["buffer.ep"]
    for empty in (EpisodeBuffer(3), filled(2)):
        EpisodeBuffer(3).save(tmp_path / "empty")
        empty.load(tmp_path / "empty")
        empty.restore([EpisodeBuffer(3).since(0)], 0)
        assert len(empty) == 0


def test_a_range_that_does_not_fit_its_description_is_rejected(tmp_path):
    part = filled(4).since(1)
    part.save(tmp_path / "s")
    said = part.describe()
    assert len(load_range(tmp_path / "s", said).records) == 3
    for wrong in ({"count": 2}, {"count": 4}, {"codec": None}, {"codec": {"spec": [], "plain": []}}, {"first": "x"}):
        with pytest.raises(ValueError, match="."):
            load_range(tmp_path / "s", {**said, **wrong})
    with pytest.raises(ValueError, match="cannot be read"):
        load_range(tmp_path / "nowhere", said)


def test_a_file_of_another_run_or_of_another_size_is_rejected_and_an_older_one_is_read(tmp_path):
    path = tmp_path / "buffer.ep"
    filled(5).save(path, {"map": "3m"})
    with pytest.raises(UserError, match="map is 3m there and 8m in this run"):
        EpisodeBuffer(9).load(path, {"map": "8m"})
    with pytest.raises(UserError, match="holds 5 episodes, this run keeps 4"):
        EpisodeBuffer(4).load(path, {"map": "3m"})
    with pytest.raises(UserError, match="some_key=.*nowhere cannot be read"):
        EpisodeBuffer(4).load(tmp_path / "nowhere", key="some_key")
    raw = path.read_bytes()
    end = 48 + int.from_bytes(raw[8:16], "little")
    header = json.loads(raw[48:end])
    assert (header["facts"], header["rows"]) == ({"map": "3m"}, [2, 3, 4, 5, 6])
    kinds = {f["name"]: (f["dtype"], f["shape"]) for f in header["fields"]}
    assert (kinds["recon"], kinds["tokens"]) == (("float16", [2, 3]), ("int16", [2, 4]))
    for meta, read in ((None, True), ({"slot": [1]}, False), ({"seed": ["x"] * 5}, False), ({"place": [1] * 5}, False)):
        changed = {name: value for name, value in header.items() if name != "meta"}  # as earlier versions wrote it
        text = json.dumps(changed if meta is None else {**changed, "meta": meta}).encode()
        digest = hashlib.sha256(text).digest()
        path.write_bytes(MARK + len(text).to_bytes(8, "little") + digest + text + raw[end:])
        buffer = EpisodeBuffer(9)
        if read:
            buffer.load(path)
            assert buffer.batch([0, 1]).meta == (UNKNOWN, UNKNOWN)
        else:
            with pytest.raises(UserError, match="damaged"):
                buffer.load(path)


def threads() -> int:
    return sum(thread.name.startswith("replay") for thread in threading.enumerate())


def sampler_of(buffer: EpisodeBuffer, batch_size: int = 3, workers: int = 1, seed: int = 8) -> Sampler:
    return Sampler(buffer, batch_size, np.random.default_rng(seed), torch.device("cpu"), workers)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_batches_do_not_depend_on_the_thread(count):
    buffer, reference = filled(30), np.random.default_rng(8)
    plain, ahead = sampler_of(buffer, 11, 0), sampler_of(buffer, 11, 1)
    expected = [buffer.sample(11, reference) for _ in range(count + 2)]
    for sampler in (plain, ahead):
        batches = [*sampler.batches(count), *sampler.batches(2)]
        for one, other in zip(batches, expected, strict=True):
            assert_same(one, other)
        assert threads() == 0
    assert plain.rng.random() == ahead.rng.random() == reference.random()


def test_the_next_batch_is_packed_while_the_current_one_is_used():
    buffer, packed = filled(30), threading.Event()
    batch = buffer.batch

    def watched(indices):
        assert threading.current_thread() is not threading.main_thread()
        packed.set()
        return batch(indices)

    buffer.batch = watched
    batches = sampler_of(buffer).batches(3)
    next(batches)
    packed.clear()
    next(batches)
    assert packed.wait(10) and threads() == 1
    next(batches)
    assert threads() == 0


def test_errors_of_the_thread_are_raised_and_a_closed_iterator_ends_it():
    buffer = filled(30)
    batches = sampler_of(buffer).batches(5)
    next(batches)
    batches.close()
    assert threads() == 0
    with pytest.raises(ValueError, match="larger sample"):
        list(sampler_of(buffer, 31).batches(2))

    def broken(indices):
        raise MemoryError("no room")

    buffer.batch = broken
    with pytest.raises(MemoryError, match="no room"):
        next(sampler_of(buffer).batches(5))
    assert threads() == 0
