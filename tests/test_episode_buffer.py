"""Storage of episodes: which are kept, how batches are drawn and packed ahead, and files that return the same bits."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from omagd.components.data import PrioritisedReplay
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_codec import MARK, Codec, load_range, spec_of
from omagd.config.loading import resolve
from omagd.utils.errors import UserError
from omagd.utils.packing import (
    UNKNOWN,
    WEIGHT,
    Episode,
    EpisodeMeta,
    PackedBatch,
    Packing,
    RecordedEpisode,
    pack_episodes,
    time_order,
)

ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, 1.5], np.float32)
WIDTH = 60 + 12 + 5 + 2 + 6 + 4 + 1 + 30 + 8 + 2
"""Bytes of a row of `made_up`: full_obs, state, masks of 33 and 9, actions, reward, terminated, recon, number, obs."""


def made_up(number: int, steps: int = 4, dtype: torch.dtype = torch.float32) -> RecordedEpisode:
    """Return an episode with masks of odd sizes and odd floats; `obs` shows a part of `full_obs`."""
    rng = np.random.default_rng(number)
    rows, n, d = steps + 1, 3, 5
    full = torch.from_numpy(rng.choice(ODD, (rows, n, d))).to(dtype)
    shown = torch.from_numpy(rng.random((rows, n, d)) < 0.5)
    fields = {
        "obs": torch.where(shown, full, torch.zeros((), dtype=dtype)),
        "state": torch.from_numpy(rng.choice(ODD, (rows, 3))),
        "avail_actions": torch.from_numpy((rng.random((rows, n, 11)) < 0.5).astype(np.uint8)),
        "flags": torch.from_numpy(rng.random((rows, 9)) < 0.5),
        "actions": torch.from_numpy(rng.integers(0, 300, (rows, n)).astype(np.int16)),
        "reward": torch.from_numpy(rng.choice(ODD, rows)),
        "terminated": torch.from_numpy(rng.integers(0, 2, rows).astype(np.uint8)),
        "nothing": torch.zeros((rows, 0)),
        "full_obs": full,
        "recon": torch.from_numpy(rng.choice(ODD, (rows, n, d)).astype(np.float16)),
        "number": torch.full((rows,), number),
    }
    return RecordedEpisode(
        fields, EpisodeMeta(number % 3, 2**62 + number, number % 2, f"g{number}", (0.0, 1.0, np.nan)[number % 3])
    )


def filled(count: int, capacity: int = 50) -> EpisodeBuffer:
    buffer = EpisodeBuffer(capacity)
    buffer.add([made_up(i, 1 + i % 7) for i in range(count)])
    return buffer


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Episode, other: Episode) -> None:
    assert list(one) == list(other)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert bits(one[name]) == bits(other[name]), name


def assert_same_batch(one: PackedBatch, other: PackedBatch) -> None:
    assert (one.packing, one.sample_index, one.meta) == (other.packing, other.sample_index, other.meta)
    assert_same(one.data, other.data)


def nbytes(buffer: EpisodeBuffer) -> int:
    return sum(records.nbytes for records in buffer.since(0).records)


def numbers(buffer: EpisodeBuffer) -> list[int]:
    return [int(episode["number"][0]) for episode in buffer.episodes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_every_bit_of_made_up_episodes_comes_back(dtype):
    episodes = [made_up(seed, seed % 12, dtype) for seed in range(40)]
    codec = Codec(spec_of(episodes[0]))
    assert codec.width == WIDTH + 15 * (dtype.itemsize - 4)
    for episode in episodes:
        records, fits = codec.encode(episode)
        assert list(fits) == ["obs", "avail_actions", "flags"] and all(fits.values())
        assert_same(codec.decode(records), episode)
        assert_same({name: codec.field(records, name) for name in episode}, episode)


@pytest.mark.parametrize(("rule", "values"), [
    ("avail_actions", {"avail_actions": 2}), ("obs", {"obs": -0.0, "full_obs": 1}), ("obs", {"obs": 7, "full_obs": 8}),
])  # fmt: skip
def test_a_field_that_breaks_its_rule_is_stored_plain_by_the_buffer(rule, values):
    episodes = [made_up(seed) for seed in range(4)]
    for name, value in values.items():
        episodes[2][name][0, 0, 0] = value
    codec, buffer = Codec(spec_of(episodes[2])), EpisodeBuffer(6)
    assert [name for name, kept in codec.encode(episodes[2])[1].items() if not kept] == [rule]
    buffer.add(episodes)
    for stored, episode in zip(buffer.episodes, episodes, strict=True):
        assert_same(stored, episode)
    assert nbytes(buffer) == 4 * 5 * codec.without([rule]).width
    assert_same_batch(buffer.batch([2, 0, 1]), pack_episodes([episodes[i] for i in (2, 0, 1)]))


def test_short_episodes_are_encoded_together_and_stored_as_single_ones_are():
    steps = [made_up(number, 1) for number in range(20)]
    steps[7]["avail_actions"] += 1
    together, apart = EpisodeBuffer(15), EpisodeBuffer(15)
    together.add(iter(steps))
    for step in steps:
        apart.add([step])
    assert (together.added, nbytes(together)) == (apart.added, nbytes(apart)) == (20, 15 * 2 * (WIDTH - 5 + 33))
    for stored, step in zip(together.episodes, steps[5:], strict=True):
        assert_same(stored, step)
    assert all(records.untyped_storage().nbytes() == records.nbytes for records in together.since(0).records)


def test_the_newest_episodes_stay_and_bytes_are_counted():
    buffer = EpisodeBuffer(3)
    for i in range(5):
        buffer.add([made_up(i, i + 1)])
        held = list(range(max(0, i - 2), i + 1))
        assert numbers(buffer) == held == [int(buffer.batch([j])["number"][0]) for j in range(len(held))]
        assert nbytes(buffer) == sum(WIDTH * (j + 2) for j in held)


@pytest.mark.parametrize(
    "rows", [[3, 1, 5, 3, 1, 5], [1], [2, 2], [1, 9], list(np.random.default_rng(0).integers(1, 70, 64))]
)
def test_rows_are_packed_step_by_step_longest_episodes_first(rows):
    packing, order, place = time_order(rows)
    assert order == tuple(sorted(range(len(rows)), key=lambda i: (-rows[i], i)))
    assert packing.lengths == tuple(int(rows[i]) for i in order)
    wanted = [(t, e) for t in range(max(rows)) for e in range(len(rows)) if t < packing.lengths[e]]
    assert list(zip(packing.step.tolist(), packing.episode.tolist(), strict=True)) == wanted
    assert packing.batch_sizes == [sum(length > t for length in rows) for t in range(max(rows))]
    laid = [(t, e) for e in range(len(rows)) for t in range(packing.lengths[e])]
    assert [laid[i] for i in place.tolist()] == wanted
    assert packing.closing.tolist() == [t == packing.lengths[e] - 1 for t, e in wanted]
    row = {place: number for number, place in enumerate(wanted)}
    assert packing.starts.tolist() == [row[t, 0] for t in range(max(rows))]
    assert packing.row(packing.step, packing.episode).tolist() == list(range(len(wanted)))
    assert packing.row(packing.step - 3, packing.episode).tolist() == [row[max(t - 3, 0), e] for t, e in wanted]
    assert packing.next_row.tolist() == [row[min(t + 1, packing.lengths[e] - 1), e] for t, e in wanted]


@pytest.mark.parametrize("lengths", [(), (2, 3), (3, 0), (1, -1)])
def test_packings_need_decreasing_lengths_of_a_row_or_more(lengths):
    with pytest.raises(ValueError, match="decreasing lengths"):
        Packing(lengths)


def test_draws_are_uniform_and_without_replacement():
    buffer, rng = filled(12), np.random.default_rng(0)
    counts = np.zeros(12)
    for _ in range(2000):
        drawn = buffer.draw(4, rng)
        assert len(set(drawn)) == 4
        counts[drawn] += 1
    expected = 2000 * 4 / 12
    # Chi-square with 11 degrees of freedom, shrunk by the correction for draws without replacement; 0.9999 quantile 37.
    assert ((counts - expected) ** 2 / expected).sum() < 37
    with pytest.raises(ValueError, match="larger sample"):
        buffer.draw(13, rng)


def test_prioritised_draws_follow_the_errors_and_their_weights_undo_it():
    """The third has nine times the error, one is not finite; new ones get the largest, also in place of old ones."""
    config = resolve("qmix", "matrix_game", {"batch_size": 4, "updates_per_iteration": 300, "per_alpha": 0.5})
    buffer, places = EpisodeBuffer(5), []
    read = lambda drawn: buffer.batch(places.append(drawn) or drawn)  # noqa: E731
    errors = lambda: torch.tensor([(1.0, torch.nan, 9.0)[meta.slot] for meta in batch.meta])  # noqa: E731
    data = PrioritisedReplay(config, np.random.default_rng(0), buffer, read, errors)
    for name in (0, 1, 2, 0, 1):  # `made_up` counts slots modulo 3
        data.add([made_up(name, 1 + name)])
    for batch in data.batches():
        assert WEIGHT in batch
    np.testing.assert_allclose(data.priorities, [1, 1, 9, 1, 1], atol=1e-5)
    places.clear()
    for batch in data.batches():
        alike = np.where([meta.slot == 2 for meta in batch.meta], (5 * 3 / 7) ** -0.4, (5 * 1 / 7) ** -0.4)
        np.testing.assert_allclose(batch[WEIGHT], alike[batch.packing.episode], rtol=1e-5)
    shares = np.bincount(np.concatenate(places)) / 1200
    np.testing.assert_allclose(shares, [1 / 7, 1 / 7, 3 / 7, 1 / 7, 1 / 7], atol=0.02)
    data.add([made_up(0), made_up(1)])
    np.testing.assert_allclose(data.priorities, [9, 1, 1, 9, 9], atol=1e-5)
    data.priorities = data.priorities[3:]  # a run that was resumed by other ranks
    next(data.batches())
    np.testing.assert_allclose(data.priorities, [9, 9, 9, 9, 9], atol=1e-5)


@pytest.mark.parametrize("change", [{}, {"state": torch.zeros(5, 3).double()}])
def test_an_episode_with_other_fields_is_rejected_by_name(change):
    fields = {name: value for name, value in made_up(9).items() if name != "state"}
    with pytest.raises(ValueError, match="in state$"):
        filled(2).add([fields | change])


def test_every_kind_of_damage_is_rejected_and_nothing_is_lost(tmp_path):
    path = tmp_path / "buffer.ep"
    filled(5).save(path)
    whole = path.read_bytes()
    places = [0, *(whole.index(name.encode()) + 165 for name in ("about.npy", "rows.npy", "field/obs.npy"))]
    damaged = [whole[:p] + bytes([whole[p] ^ 1]) + whole[p + 1 :] for p in places]
    damaged += [whole[:-1], whole[: len(whole) // 2], whole[:30], b""]
    buffer = filled(3)
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match="pretrain_buffer_path=.*buffer.ep") as error:
            buffer.load(path)
        assert "\n" not in error.value.render()
        assert numbers(buffer) == [0, 1, 2]


def test_a_file_and_ranges_of_episodes_restore_the_buffer(tmp_path):
    """With the origin of each episode; ranges hold each episode once, though some have left the buffer."""
    buffer, ranges, stored = EpisodeBuffer(20), [], 0
    for added in (3, 0, 14, 9, 7):
        buffer.add([made_up(buffer.added + i, 1 + i) for i in range(added)])
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
    found = [load_range(*each).from_number(oldest) for each in ranges if each[1]["count"]]
    from_ranges.restore([one for part in found for one in part.each()], buffer.added)
    from_file.load(path, {"map": "3m"})
    larger.restore([buffer.since(0)], buffer.added)
    drawn = buffer.draw(11, np.random.default_rng(5))
    expected = pack_episodes([buffer.episodes[i] for i in drawn])
    assert expected.meta[0].group == f"g{int(expected['number'][0])}"
    for one in (buffer, from_ranges, from_file, larger):
        assert (numbers(one), nbytes(one)) == (list(range(13, 33)), nbytes(buffer))
        assert_same_batch(one.batch(drawn), expected)
        np.testing.assert_equal([m.outcome for m in one.batch(drawn).meta], [m.outcome for m in expected.meta])
        assert_same_batch(one.batch(drawn).select(range(11)), expected)
    assert from_ranges.added == larger.added == 33
    for one, first in ((from_file, 14), (larger, 13)):
        one.add([dict(made_up(77))])  # the oldest leaves if the buffer is full
        assert one.batch([-1]).meta == (UNKNOWN,)
        assert numbers(one) == [*range(first, 33), 77]
    assert [file.name for file in path.parent.iterdir()] == ["buffer.ep"]
    for empty in (EpisodeBuffer(3), filled(2)):
        EpisodeBuffer(3).save(tmp_path / "empty")
        empty.load(tmp_path / "empty")
        empty.restore([EpisodeBuffer(3).since(0)], 0)
        assert len(empty) == 0


def test_a_range_that_does_not_fit_its_description_is_rejected(tmp_path):
    part = filled(4).since(1)
    part.save(tmp_path / "s")
    described = part.describe()
    assert len(load_range(tmp_path / "s", described).records) == 3
    for wrong in ({"count": 2}, {"count": 4}, {"codec": None}, {"codec": {"spec": [], "plain": []}}, {"first": "x"}):
        with pytest.raises(ValueError, match="."):
            load_range(tmp_path / "s", {**described, **wrong})
    with pytest.raises(ValueError, match="cannot be read"):
        load_range(tmp_path / "nowhere", described)


def test_a_file_of_another_run_or_size_is_rejected_and_others_can_read_it(tmp_path):
    path = tmp_path / "buffer.ep"
    filled(5).save(path, {"map": "3m"})
    for capacity, name, options, message in (
        (9, "buffer.ep", {"facts": {"map": "8m"}}, "map is 3m there and 8m in this run"),
        (4, "buffer.ep", {"facts": {"map": "3m"}}, "holds 5 episodes, this run keeps 4"),
        (4, "nowhere", {"key": "some_key"}, "some_key=.*nowhere cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            EpisodeBuffer(capacity).load(tmp_path / name, **options)
    with np.load(path) as found:
        assert json.loads(found["about"].item())["facts"] == {"map": "3m"} and found["rows"].tolist() == [2, 3, 4, 5, 6]
        assert (found["field/recon"].dtype, found["field/actions"].shape) == (np.float16, (20, 3))


def test_a_file_of_version_1_is_read(tmp_path):
    path, values = tmp_path / "buffer.ep", np.arange(10, dtype=np.float32).reshape(5, 2)
    sha256 = hashlib.sha256(values.tobytes()).hexdigest()
    fields = [{"name": "x", "dtype": "float32", "shape": [2], "sha256": sha256}]
    header = {"version": 1, "facts": {"map": "3m"}, "rows": [2, 3], "fields": fields}
    for meta, origin in ({}, UNKNOWN), ({"slot": [0, 4], "outcome": [None, 1.0]}, EpisodeMeta(slot=4, outcome=1.0)):
        text = json.dumps({**header, "meta": meta}).encode()
        start = MARK + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
        path.write_bytes(start + values.tobytes())
        buffer = EpisodeBuffer(9)
        buffer.load(path, {"map": "3m"})
        assert [episode["x"].tolist() for episode in buffer.episodes] == [values[:2].tolist(), values[2:].tolist()]
        assert buffer.batch([1]).meta == (origin,)
        whole = path.read_bytes()
        for place in (9, 20, 50, len(start) - 1, len(start), len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(UserError, match="damaged"):
                buffer.load(path)
        path.write_bytes(whole + b"x")
        with pytest.raises(UserError, match="damaged"):
            buffer.load(path)
