"""A small DDPG learner, and random single steps for its tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers import REGISTRY as MACS
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.ddpg_learner import DDPGLearner
from omagd.utils.dist_utils import Dist

INFO = EnvInfo("snakes_3v3", "", 3, 4, 26, 66, 200, 4, agent_rewards=True)


def ddpg_config(**updates: Any) -> Config:
    """Return a small configuration of DDPG with `updates`."""
    small = {"rnn_hidden_dim": 8, "tau": 0.1, "lr": 0.01, "critic_lr": 0.02, "learner": "ddpg_learner_ddp"}
    return resolve("snakes_ddpg", "snakes", {**small, **updates})


def make_ddpg(
    dist: Dist | None = None, dtype: torch.dtype = torch.float64, seed: int = 0, **updates: Any
) -> DDPGLearner:
    """Return a warmed-up learner with a controller of its own; equal seeds give equal weights."""
    torch.manual_seed(seed)
    config = ddpg_config(**updates)
    mac = MACS.get(config.mac)(config, INFO, torch.device("cpu"), None)
    mac.agent.to(dtype)
    learner: DDPGLearner = LEARNERS.get(config.learner)(mac, config, INFO, dist or Dist())
    learner.warm_up()
    return learner


def random_steps(seed: int, count: int, length: int = 1, team: bool = False) -> list[dict[str, Tensor]]:
    """Return random episodes of `length` steps; every third one terminates. team: without rewards of single agents."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        rows = length + 1
        ended = np.zeros(rows, np.uint8)
        ended[:-1][-1:] = i % 3 == 0
        arrays = {
            "obs": rng.normal(size=(rows, 3, 26)).astype(np.float32),
            "actions": rng.integers(4, size=(rows, 3)).astype(np.uint8),
            "reward": rng.normal(size=rows).astype(np.float32),
            "agent_reward": rng.normal(size=(rows, 3)).astype(np.float32),
            "terminated": ended,
            "action_probs": rng.random((rows, 3, 4)).astype(np.float32),
        }
        out.append({name: torch.from_numpy(value) for name, value in arrays.items() if not (team and "agent" in name)})
    return out
