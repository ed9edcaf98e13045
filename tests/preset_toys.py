"""Every shipped configuration and learner on a toy environment, small: for tests on the CPU and on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graph_toys
import numpy as np
import torch
from plugin_toys import own_names

import omagd.config
from omagd import learners, runners
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.types import Exploration
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.learners.protocol import records_full_obs
from omagd.run.checkpoint.store import pack
from omagd.run.training.build import build_mac, new_predictor, new_tokenizer
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.tasks import episode_starts
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

CPU = torch.device("cpu")
PRESETS = sorted(path.stem for path in (Path(omagd.config.__file__).parent / "algs").glob("*.yaml"))
LAYOUT = EntityLayout(move_dim=2, n_enemies=2, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
UNITS = StateLayout(n_allies=3, ally_dim=1, n_enemies=2, enemy_dim=1)
LENGTH = 3
KIND = (
    "mac", "agent", "mixer", "runner", "action_selector", "use_graph_reconstruction", "belief_loss",
    "use_full_obs", "use_team_obs", "gumbel_softmax",
)  # fmt: skip
"""Keys that choose classes, or what these read: configurations that differ in others only are of one kind."""
SMALL: dict[str, Any] = {
    **{key: value for key, value in graph_toys.SMALL.items() if key.startswith(("tokenizer", "mask"))},
    "rnn_hidden_dim": 8, "gnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6, "batch_size": 4,
    "buffer_size": 16, "batch_size_run": 4,
}  # fmt: skip


class Toy(BatchedEnv):
    """Episodes of three steps; seed and step determine all observations."""

    def __init__(self, config: Config, n_slots: int) -> None:
        each = config.mac == "ddpg_mac"
        facts: Any = {"layout": LAYOUT, "state_layout": UNITS, "agent_rewards": each}
        self.info = EnvInfo("toy", "toy", 3, 7, LAYOUT.obs_dim, 5, LENGTH, 5, **facts)
        self.n_slots, self.t, self.seed = n_slots, np.zeros(n_slots, int), np.zeros(n_slots, int)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        self.t[which], self.seed[which] = 0, seeds[which]

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self.t += active
        each = np.where(active[:, None], actions == 1, 0).astype(np.float32)
        ended = active & (self.t == LENGTH)
        of_agents = each if self.info.agent_rewards else None
        results = {"battle_won": each[:, 0]}
        return StepResult(each.sum(1), ended, np.zeros_like(ended), results, agent_reward=of_agents)

    def observe(self, full: bool = False) -> Observation:
        rngs = [np.random.default_rng((int(s), int(t))) for s, t in zip(self.seed, self.t, strict=True)]
        n, info = self.info.n_agents, self.info
        everything = np.stack([rng.normal(size=(n, info.obs_dim)) for rng in rngs]).astype(np.float32)
        seen = everything.copy()
        seen[..., 2:7] = 0  # no agent sees the first enemy
        state = np.stack([rng.normal(size=info.state_dim) for rng in rngs]).astype(np.float32)
        mask = np.stack([rng.random((n, info.n_actions)) < 0.5 for rng in rngs])
        mask[..., 1] = True
        return Observation(seen, state, mask, everything if full else None)


def config_of(preset: str, **updates: Any) -> Config:
    environment = "snakes" if preset.startswith("snakes") else "skirmish"
    groups = {"group_size": 2} if preset == "rloo" else {}
    return resolve(preset, environment, {**SMALL, **groups, **updates})


class Made:
    """A controller, a learner and a runner of a configuration on a device; equal numbers for equal seeds."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device, env = device, Toy(config, config.batch_size_run)
        pretrained = PretrainedModules()
        if config.use_graph_reconstruction:
            pretrained.tokenizer = new_tokenizer(config, env.info, device).eval()
            pretrained.predictor = new_predictor(config, env.info, device).eval()
            if config.mask_predictor_config.kind == "masked":  # the others read no tokens
                pretrained.predictor.bind(pretrained.tokenizer.table())
        self.mac = build_mac(config, env.info, device, pretrained)
        self.full_obs = self.mac.wants_full_obs or records_full_obs(config)
        self.learner = learners.REGISTRY.get(config.learner)(self.mac, config, env.info, Dist(device=device))
        self.learner.warm_up()
        starts = episode_starts(config, env.info, "train", 0)
        self.runner = runners.REGISTRY.get(config.runner)(env, config, env.info, starts)

    def play(self) -> list[Any]:
        """Return episodes (or steps) of training."""
        explore = Exploration(0.5, np.random.default_rng(0))
        return [
            e for _ in range(4) for e in self.runner.collect(self.mac, explore=explore, full_obs=self.full_obs).episodes
        ]

    def batch(self, episodes: list[Any]) -> Any:
        """Return a batch as stage 3 draws it."""
        buffer = EpisodeBuffer(64, self.device)
        buffer.add(episodes)
        if self.learner.data == "on_policy":  # the first ones, which groups consist of
            return buffer.batch(range(4)).to(self.device)
        return buffer.batch(buffer.draw(4, np.random.default_rng(3))).to(self.device)

    def weights(self) -> dict[str, torch.Tensor]:
        state = {name: module.state_dict() for name, module in self.learner.modules().items()}
        return {f"{name}.{key}": value for name, of in pack(state).items() for key, value in of.items()}


def cases(keys: tuple[str, ...] = KIND) -> list[tuple[str, str]]:
    """Return (configuration, learner): a shipped configuration of each kind, and learners that none of them names."""
    kinds: dict[tuple[str, ...], tuple[str, str]] = {}
    for preset in PRESETS:
        config = config_of(preset)
        kind = learners.REGISTRY.get(config.learner), *(str(getattr(config, key)) for key in keys)
        kinds.setdefault(kind, (preset, config.learner))
    found = list(kinds.values())
    known = {learners.REGISTRY.get(learner) for _, learner in found}
    for name in own_names(learners.REGISTRY):
        if learners.REGISTRY.get(name) not in known:
            found.append((next(preset for preset in PRESETS if _fits(preset, name)), name))
    return found


def _fits(preset: str, learner: str) -> bool:
    try:
        Made(config_of(preset, learner=learner), CPU)
    except UserError:
        return False
    return True
