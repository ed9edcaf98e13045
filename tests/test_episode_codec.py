"""What is stored in short comes back bit for bit; the episodes of all environments do so in test_env_protocol."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_codec import Codec, RuleBroken, spec_of
from omagd.utils.packing import Episode, pack_episodes

torch.set_num_threads(1)

ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, 1.5], np.float32)


def made_up(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """An episode with masks of odd sizes and every odd number there is, in `full_obs` and where `obs` shows it."""
    rng = np.random.default_rng(seed)
    rows, n, d = int(rng.integers(1, 12)), 3, 5
    full = torch.from_numpy(rng.choice(ODD, (rows, n, d))).to(dtype)
    shown = torch.from_numpy(rng.random((rows, n, d)) < 0.5)
    return {
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
    }


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Episode, other: Episode) -> None:
    assert list(one) == list(other)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert bits(one[name]) == bits(other[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_every_bit_of_made_up_episodes_comes_back(dtype):
    episodes = [made_up(seed, dtype) for seed in range(40)]
    codec = Codec(spec_of(episodes[0]))
    float_bytes = 15 * dtype.itemsize
    # obs, state, masks of 33 and of 9, actions, reward, terminated, full_obs, recon
    assert codec.width == 2 + 12 + 5 + 2 + 6 + 4 + 1 + float_bytes + 30
    for episode in episodes:
        records = codec.encode(episode)
        assert_same(codec.decode(records), episode)
        for name in episode:
            assert bits(codec.field(records, name)) == bits(episode[name])


def test_what_breaks_a_rule_is_refused_by_the_codec_and_stored_plain_by_the_buffer():
    mask = made_up(1)
    mask["avail_actions"][0, 0, 0] = 2
    signed = made_up(2)
    signed["obs"][0, 0, 0], signed["full_obs"][0, 0, 0] = -0.0, 1.0
    other = made_up(4)
    other["obs"][-1, 1, 1], other["full_obs"][-1, 1, 1] = 7.0, 7.5
    for broken, name in ((mask, "avail_actions"), (signed, "obs"), (other, "obs")):
        codec = Codec(spec_of(broken))
        with pytest.raises(RuleBroken, match=name):
            codec.encode(broken)
        buffer = EpisodeBuffer(6)
        episodes = [made_up(5), made_up(6), broken, made_up(7)]
        buffer.add(episodes)
        for kept, episode in zip(buffer.episodes, episodes, strict=True):
            assert_same(kept, episode)
        rows = sum(len(episode["reward"]) for episode in episodes)
        assert buffer.nbytes == rows * codec.without(name).width
        assert_same(buffer.batch([2, 0, 1]).data, pack_episodes([episodes[i] for i in (2, 0, 1)]).data)
