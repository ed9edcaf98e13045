"""Small configurations, made-up episodes and learners for the tests of Q-learning."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import ActionBox, EntityLayout, EnvInfo, StateLayout
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers import REGISTRY as MACS
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.nq_learner import NQLearner
from omagd.learners.synced_optimizer import Stats
from omagd.modules.graph_reconstructers.belief_head import new_head
from omagd.modules.graph_reconstructers.graphs import GraphTables, obs_to_nodes
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction, Reconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.training.stages.base import held_in_common
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode, pack_episodes

LAYOUT = EntityLayout(move_dim=4, n_enemies=3, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
UNITS = StateLayout(n_allies=3, ally_dim=1, n_enemies=3, enemy_dim=1)
INFO = EnvInfo("toy", "toy", 3, 9, LAYOUT.obs_dim, 7, 12, n_normal_actions=6, layout=LAYOUT, state_layout=UNITS)
INFO = replace(INFO, image=(5, 6, 1))  # for agents that read images
BOXED = replace(INFO, n_actions=4, box=ActionBox.of(np.tile([-1.0, 0.0], (3, 1)), np.tile([3.0, 1.0], (3, 1))))
SMALL: dict[str, Any] = {"rnn_hidden_dim": 8, "gnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6}

GRAPH: dict[str, Any] = {"use_graph_reconstruction": True, "learner": "nq_graph_learner"}


def toy_config(**updates: Any) -> Config:
    """Return a small configuration of plain QMIX with `updates`."""
    return resolve("qmix", "skirmish", {**SMALL, **updates})


def random_episode(seed: int, length: int, truncated: bool = False, info: EnvInfo = INFO) -> dict[str, Tensor]:
    """Return an episode of `length` steps (length + 1 rows) of random numbers; the action taken is available."""
    rng = np.random.default_rng(seed)
    rows, n = length + 1, info.n_agents
    available = rng.random((rows, n, info.n_actions)) < 0.5
    actions = rng.integers(info.n_actions, size=(rows, n))
    actions[-1] = 0
    np.put_along_axis(available, actions[..., None], True, axis=-1)
    if info.box is not None:
        available[:], actions = True, info.box.uniform((rows,), rng)
        actions[-1] = 0
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
        "actions": actions.astype(np.uint8 if info.box is None else np.float32),
        "reward": reward,
        "terminated": terminated,
        "recon": (obs * 0.5).astype(np.float16),
        "log_prob": -np.log(available.sum(-1)).astype(np.float32),  # of a uniform policy
    }
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def foggy(episode: dict[str, Tensor], dead: bool = True, sight: float = 0.8) -> dict[str, Tensor]:
    """Return a random episode in which agents see parts of `full_obs`, where some units, and agents, are dead."""
    nodes, back = obs_to_nodes(episode["obs"], LAYOUT), GraphTables(LAYOUT, torch.device("cpu")).obs
    lives, own = (nodes[..., 2] < 1.2) | (not dead), torch.arange(nodes.shape[-2]) == 0
    full = nodes * (lives & lives[..., :1])[..., None]
    seen = full * ((nodes[..., 1].abs() < sight) | own)[..., None]
    return {**episode, "obs": back(seen), "full_obs": back(full)}


class HalvingReconstructor(Reconstructor):
    """Replaces the real one: halves what is seen; negative numbers among the first N features mark guessed nodes."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, torch.device("cpu"))

    def begin(self, n_slots: int) -> None:
        """Forget all resets."""
        self.resets: list[list[bool]] = []

    def reset(self, which: np.ndarray) -> None:
        """Record which slots were reset."""
        self.resets.append(which.tolist())

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        fields = {"recon": (obs * 0.5).half()}
        return Reconstruction(fields, *self.restore(fields))

    def restore(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the same from what was stored."""
        return fields["recon"].float(), fields["recon"][..., : LAYOUT.n_nodes] < 0


def make_learner(
    config: Config, dist: Dist | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, info: EnvInfo = INFO,
    device: torch.device | str = "cpu",
) -> NQLearner:  # fmt: skip
    """Return a warmed-up learner with its controller; equal seeds give equal weights."""
    torch.manual_seed(seed)
    reconstructor = HalvingReconstructor() if config.use_graph_reconstruction else None
    mac: BasicMAC = MACS.get(config.mac)(config, info, torch.device(device), reconstructor)
    mac.agent.to(dtype)
    if config.belief_loss != "none":
        mac.head = new_head(config, info, next(mac.agent.parameters()))
    if config.belief_loss == "tokens":
        with torch.random.fork_rng():  # the mixer begins as it does without
            mac.head.learn_codes(Tokenizer(config.tokenizer_config, LAYOUT).eval().to(device))
    learner: NQLearner = LEARNERS.get(config.learner)(mac, config, info, dist or Dist())
    learner.warm_up()
    return learner


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
    """Return copies of a learner's weights, targets and optimizer states."""
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


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return `out` and the gradients of `inputs` under `upstream_of(out)`."""
    return [out, *torch.autograd.grad(out, inputs, upstream_of(out), retain_graph=True)]


def upstream_of(out: Tensor) -> Tensor:
    """Return a random gradient of `out` that depends on its shape and type alone."""
    return torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
