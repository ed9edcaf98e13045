"""SplitMix64: its published test vectors, and the streams that are drawn by it."""

from __future__ import annotations

import numpy as np
import torch

from omagd.envs.battle.physics import seeded_uniform
from omagd.envs.snakes.draws import draw, keys_of
from omagd.utils.seeding import GOLDEN, splitmix64, uniform


def test_splitmix64_gives_the_published_vectors_and_all_streams_keep_their_bits():
    outputs = splitmix64(np.arange(1, 4, dtype=np.uint64) * np.uint64(GOLDEN))  # of the seed 0
    assert outputs.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = keys_of(np.array([0, 7, 2**62 + 3]))
    assert keys.tolist() == [0xE220A8397B1DCDAF, 0xC584133AC916AB3C, 0x64AE8065F1CA0B55]
    drawn = draw(keys, np.array([0, 1, 2]), 5)
    assert drawn.tolist() == [0xC9B5AE106698F0BB, 0x6CA8F3247486042F, 0x299809073D8AD93E]
    assert seeded_uniform(np.array([0, 7]), 2).tolist() == [
        [0.6524484753608704, 0.7215081453323364], [0.7012121081352234, 0.6497042775154114]
    ]  # fmt: skip
    numbers = uniform(torch.tensor([0, 5, 2**40]), 123456789)
    assert numbers.tolist() == [0.13373499211736684, 0.7004310576226229, 0.17513188866386764]
