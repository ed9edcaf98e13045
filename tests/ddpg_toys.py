"""A small DDPG learner, and random single steps for its tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from q_toys import make_learner, random_episode
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.utils.dist_utils import Dist

INFO = EnvInfo("snakes_3v3", "", 3, 4, 26, 66, 200, 4, agent_rewards=True)


def ddpg_config(**updates: Any) -> Config:
    """Return a small configuration of DDPG with `updates`."""
    small = {"rnn_hidden_dim": 8, "tau": 0.1, "lr": 0.01, "critic_lr": 0.02, "learner": "ddpg_learner_ddp"}
    return resolve("snakes_ddpg", "snakes", {**small, **updates})


def make_ddpg(
    dist: Dist | None = None, dtype: torch.dtype = torch.float64, seed: int = 0, device: torch.device | str = "cpu",
    info: EnvInfo = INFO, **updates: Any,
) -> Any:  # fmt: skip
    """Return a warmed-up learner with its own controller; equal seeds give equal weights."""
    return make_learner(ddpg_config(**updates), dist, dtype, seed, info, device)


def random_steps(
    seed: int, count: int, length: int = 1, team: bool = False, info: EnvInfo = INFO
) -> list[dict[str, Tensor]]:
    """Return random episodes of `length` steps; every third one terminates. team: without rewards of single agents."""
    rng, out = np.random.default_rng(seed), []
    for i in range(count):
        episode = random_episode(1000 * seed + i, length, truncated=i % 3 > 0, info=info)
        if info.box is None:
            episode["action_probs"] = torch.from_numpy(rng.random((length + 1, 3, 4))).float()
        if not team:
            episode["agent_reward"] = torch.from_numpy(rng.normal(size=(length + 1, 3))).float()
        out.append(episode)
    return out
