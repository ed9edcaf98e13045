"""The Python interface: `omagd.run(config)` and `omagd.load_policy(path)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omagd.config.env_info import EnvInfo
from omagd.config.loading import validate
from omagd.config.schema import Config
from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.run.build import build_mac, load_agent, load_products, of_checkpoint
from omagd.run.run import run_seeds
from omagd.utils.checkpoint import find_step_folder, run_folder_of
from omagd.utils.errors import UserError


def run(config: Config) -> dict[str, Any]:
    """Run what a configuration asks for, as the command line does, without Sacred; return its summary.

    Args:
        config: from `omagd.config.loading.resolve(config="qmix", env_config="skirmish", updates={"seed": 2})`. With
            several ranks, call it under `if __name__ == "__main__":`, since they import the calling script.
    Errors: UserError for what the configuration gets wrong.
    """
    from omagd.run.preflight import preflight

    preflight(config)
    return run_seeds(None, config)


class LoadedPolicy:
    """A trained team that acts greedily; it remembers the episode, so call `reset` when one starts.

    Attributes:
        config: of the run that trained it. info: facts of its environment.
    """

    def __init__(self, config: Config, info: EnvInfo, mac: Any) -> None:
        self.config = config
        self.info = info
        self._mac = mac
        self.reset()

    def reset(self) -> None:
        """Forget the episode."""
        self._mac.begin(1)
        self._mac.reset(np.ones(1, bool))
        self._step = 0

    def act(self, obs: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the actions [n] int64 for `obs` [n, obs_dim] float32 and available actions `mask` [n, A].

        Errors: ValueError for other shapes.
        """
        obs, mask = np.asarray(obs, np.float32), np.asarray(mask, bool)
        expected = (self.info.n_agents, self.info.obs_dim), (self.info.n_agents, self.info.n_actions)
        if (obs.shape, mask.shape) != expected:
            raise ValueError(f"obs {obs.shape} and mask {mask.shape} must be {expected[0]} and {expected[1]}")
        no_state = np.zeros((1, self.info.state_dim), np.float32)
        full = obs[None] if self._mac.wants_full_obs else None
        seen = Observation(obs[None], no_state, mask[None], full)
        decision = self._mac.act(Tick(seen, np.array([self._step]), np.ones(1, bool)), None)
        self._step += 1
        return np.asarray(decision.actions[0])


def load_policy(path: str | Path, load_step: int = 0) -> LoadedPolicy:
    """Return the trained team of a run.

    Args:
        path: a run's folder, its `models/`, or one step's folder. load_step: the step to load, the last one for 0.
    Errors: UserError for a missing or damaged file.
    """
    folder = find_step_folder(str(path), load_step, key="path")
    run_folder = run_folder_of(folder)
    facts = []
    for name in ("config.json", "env_info.json"):
        try:
            facts.append(json.loads((run_folder / name).read_text()))
        except (OSError, ValueError) as problem:
            raise UserError(f"path={path}: {run_folder / name} cannot be read ({problem})") from problem
    config, info = validate(facts[0]), EnvInfo.from_dict(facts[1])
    device = torch.device("cpu")
    products = load_products(of_checkpoint(config, folder), info, device)
    mac = build_mac(config, info, device, products)
    load_agent(mac, folder, "path")
    return LoadedPolicy(config, info, mac)
