"""Small worlds, made-up episodes and an independent reference for the tests of Q-learning."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers import REGISTRY as MACS
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.nq_learner import NQLearner
from omagd.learners.synced_optimizer import Stats
from omagd.run.training.stages.health import held_in_common
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode, pack_episodes

LAYOUT = EntityLayout(move_dim=4, n_enemies=3, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
INFO = EnvInfo("toy", "toy", 3, 9, LAYOUT.obs_dim, 7, 12, n_normal_actions=6, layout=LAYOUT)
SMALL: dict[str, Any] = {"rnn_hidden_dim": 8, "gnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6}

GRAPH: dict[str, Any] = {"use_graph_reconstruction": True, "learner": "nq_graph_learner"}


def toy_config(**updates: Any) -> Config:
    """Return a small configuration of plain QMIX with `updates`."""
    return resolve("qmix", "skirmish", {**SMALL, **updates})


def random_episode(seed: int, length: int, truncated: bool = False, info: EnvInfo = INFO) -> dict[str, Tensor]:
    """Return an episode of `length` steps (length + 1 rows) of chance; the action taken is available."""
    rng = np.random.default_rng(seed)
    rows, n = length + 1, info.n_agents
    available = rng.random((rows, n, info.n_actions)) < 0.5
    actions = rng.integers(info.n_actions, size=(rows, n))
    actions[-1] = 0
    np.put_along_axis(available, actions[..., None], True, axis=-1)
    terminated = np.zeros(rows, np.uint8)
    if length and not truncated:
        terminated[-2] = 1
    reward = rng.normal(size=rows).astype(np.float32)
    reward[-1] = 0
    obs = rng.normal(size=(rows, n, info.obs_dim)).astype(np.float32)
    arrays = {
        "obs": obs,
        "state": rng.normal(size=(rows, info.state_dim)).astype(np.float32),
        "avail_actions": available.astype(np.uint8),
        "actions": actions.astype(np.uint8),
        "reward": reward,
        "terminated": terminated,
        "recon": (obs * 0.5).astype(np.float16),
    }
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


@dataclass
class Made:
    """What a reconstructor returns."""

    fields: dict[str, Tensor]
    obs: Tensor
    guessed: Tensor


class HalvingReconstructor:
    """Stands in for the real one: halves what is seen, and stores that in 16 bits."""

    def begin(self, n_slots: int) -> None:
        """Remember the number of slots."""
        self.n_slots = n_slots
        self.resets: list[list[bool]] = []

    def reset(self, which: np.ndarray) -> None:
        """Remember who was reset."""
        self.resets.append(which.tolist())

    def step(self, obs: np.ndarray, step: np.ndarray, active: np.ndarray | None = None) -> Made:
        """Return half of what is seen; negative first features are guesses."""
        half = (torch.as_tensor(obs) * 0.5).half()
        return Made({"recon": half}, half.float(), self._guessed(half))

    def restore(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the same from what was stored."""
        return fields["recon"].float(), self._guessed(fields["recon"])

    def _guessed(self, half: Tensor) -> Tensor:
        return half[..., : LAYOUT.n_nodes] < 0


def make_learner(
    config: Config, info: EnvInfo = INFO, dist: Dist | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> NQLearner:
    """Return a warmed-up learner with a controller of its own; equal seeds give equal weights."""
    torch.manual_seed(seed)
    reconstructor = HalvingReconstructor() if config.use_graph_reconstruction else None
    mac: BasicMAC = MACS.get(config.mac)(config, info, torch.device("cpu"), reconstructor)
    mac.agent.to(dtype)
    learner: NQLearner = LEARNERS.get(config.learner)(mac, config, info, dist or Dist())
    learner.warm_up()
    return learner


def padded(episodes: list[Episode]) -> dict[str, Tensor]:
    """Return the episodes side by side, [B, T, ...], zeros where they have ended, and `rows`, the rows of each."""
    rows = [len(episode["reward"]) for episode in episodes]
    out: dict[str, Tensor] = {"rows": torch.tensor(rows)}
    for name, first in episodes[0].items():
        full = torch.zeros((len(episodes), max(rows), *first.shape[1:]), dtype=first.dtype)
        for i, episode in enumerate(episodes):
            full[i, : rows[i]] = episode[name]
        out[name] = full
    return out


def gradients_of(learner: NQLearner, episodes: list[Episode]) -> tuple[list[Tensor], Stats]:
    """Do one update; return the gradients with which the optimizer stepped (none if it did not) and the stats."""
    seen: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

    handle = learner.optimizer.register_step_pre_hook(keep)
    stats = learner.update(pack_episodes(episodes), episodes=0)
    handle.remove()
    return seen, stats


def state_of(learner: Any) -> dict[str, Tensor]:
    """Return copies of all that a learner has learned: weights, targets, the optimizers' state."""
    state = {name: value.detach().clone() for name, value in held_in_common(learner).items()}
    for key, optimizer in vars(learner).items():
        if isinstance(optimizer, torch.optim.Optimizer):
            for place, values in enumerate(optimizer.state.values()):
                state.update({f"{key} {place} {name}": value.clone() for name, value in values.items()})
    return state


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def copy_learner(source: Any, target: Any) -> None:
    """Load a learner's checkpoint into another one."""
    for name, module in source.modules().items():
        target.modules()[name].load_state_dict(copy.deepcopy(module.state_dict()))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
