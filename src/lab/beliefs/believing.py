"""Policies that act on beliefs: the plug-in test (a script) and the swap test (a team trained on everything).

Shapes: B slots, n agents, N nodes, D features, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from omagd.config.env_info import ENEMY, EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Decision, Exploration, Policy, Tick
from omagd.envs.protocol import BatchedEnv
from omagd.lab.beliefs.census import Counter
from omagd.learners.belief_baselines import Baselines
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.map_constant import MapConstant, MapConstantReconstructor
from omagd.modules.graph_reconstructers.reconstructor import Reconstructor
from omagd.runners.runner import Runner
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.errors import UserError

DIRECTIONS = {"east": (1, 0), "west": (-1, 0), "north": (0, 1), "south": (0, -1)}


class Source(Protocol):
    """Gives what agents believe: observations [B, n, obs_dim] in which unseen units may be filled in."""

    def begin(self, n_slots: int) -> None:
        """Prepare for B = `n_slots` slots."""

    def reset(self, which: np.ndarray) -> None:
        """Forget the slots `which` [B] bool, where episodes start."""

    def believed(self, tick: Tick) -> np.ndarray:
        """Return the beliefs of one tick. Called once per tick."""


class Seen:
    """What agents see (`full`: everything)."""

    def __init__(self, full: bool = False) -> None:
        self.full = full

    def begin(self, n_slots: int) -> None:
        """Nothing to prepare."""

    def reset(self, which: np.ndarray) -> None:
        """Nothing to forget."""

    def believed(self, tick: Tick) -> np.ndarray:
        """Return `full_obs`, or `obs`."""
        seen = tick.observation
        assert seen.full_obs is not None
        return seen.full_obs if self.full else seen.obs


class Reconstructed:
    """What a reconstructor fills in."""

    def __init__(self, reconstructor: Reconstructor, info: EnvInfo) -> None:
        self.reconstructor, self._n_agents = reconstructor, info.n_agents

    def begin(self, n_slots: int) -> None:
        """Start with empty histories."""
        self.reconstructor.begin(n_slots)
        self._last_action = np.full((n_slots, self._n_agents), -1)

    def reset(self, which: np.ndarray) -> None:
        """Empty the histories of slots."""
        self.reconstructor.reset(which)
        self._last_action[which] = -1

    def believed(self, tick: Tick) -> np.ndarray:
        """Return the reconstructed observations."""
        made = self.reconstructor.step(tick.observation.obs, tick.step, tick.active, self._last_action)
        return np.asarray(made.obs.cpu().numpy())

    def acted(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Remember the actions [B, n] of the active slots: a tracker reads the agent's own motion from them."""
        self._last_action[active] = actions[active]


class Believing:
    """A policy that acts on the beliefs of a source, in place of `obs` and of `full_obs`."""

    wants_full_obs = True

    def __init__(self, policy: Policy, source: Source) -> None:
        self.policy, self.source = policy, source

    def begin(self, n_slots: int) -> None:
        """Prepare policy and source."""
        self.policy.begin(n_slots)
        self.source.begin(n_slots)

    def reset(self, which: np.ndarray) -> None:
        """Reset policy and source in slots."""
        self.policy.reset(which)
        self.source.reset(which)

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Choose actions on beliefs; nothing but the actions is kept."""
        believed = self.source.believed(tick)
        seen = replace(tick.observation, obs=believed, full_obs=believed)
        actions = self.policy.act(replace(tick, observation=seen), explore).actions
        if isinstance(self.source, Reconstructed):
            self.source.acted(actions, tick.active)
        return Decision(actions)

    def refresh(self) -> None:
        """Use the newest weights."""
        self.policy.refresh()

    def snapshot(self) -> dict[str, Any]:
        """Not used: whole episodes are played."""
        return {}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Not used: whole episodes are played."""


class BeliefScript:
    """Attacks the nearest enemy that it may attack, else walks towards the nearest that it believes in, else stops.

    It reads nothing but observations, so that it plays as well as what it believes.

    Args:
        info: of an environment with a layout. actions: names of the actions without a target, in order.

    Errors: UserError for an environment without a layout, or whose agents do not walk in four directions.
    """

    wants_full_obs = False

    def __init__(self, info: EnvInfo, actions: tuple[str, ...]) -> None:
        if info.layout is None or not {*DIRECTIONS, "stop"} <= set(actions):
            raise UserError(f"beliefs plug-in: env={info.name}: its script needs units and moves in four directions."
                            " Use env=skirmish or env=smax")  # fmt: skip
        self.layout, self.first = info.layout, info.n_normal_actions
        self.moves = np.array([actions.index(name) for name in DIRECTIONS])
        self.ways = np.array(list(DIRECTIONS.values()), np.float32)
        self.stop = actions.index("stop")

    def begin(self, n_slots: int) -> None:
        """Nothing to prepare."""

    def reset(self, which: np.ndarray) -> None:
        """Nothing to forget."""

    def refresh(self) -> None:
        """Do nothing: scripts have no weights."""

    def snapshot(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Nothing to restore."""

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Choose actions [B, n] from `obs`."""
        avail = tick.observation.avail_actions.astype(bool)
        nodes = obs_to_nodes(tick.observation.obs, self.layout)
        enemy = np.array(self.layout.node_types) == ENEMY
        place = nodes[:, :, enemy][..., list(self.layout.position)]
        distance = np.where(
            unseen(torch.from_numpy(nodes)).numpy()[:, :, enemy], np.inf, np.linalg.norm(place, axis=-1)
        )
        attack = avail[..., self.first : self.first + distance.shape[-1]]
        target = np.where(attack, np.where(np.isinf(distance), 1e6, distance), np.inf).argmin(-1)
        goal = np.take_along_axis(place, distance.argmin(-1)[..., None, None], axis=2)[:, :, 0]
        ahead = np.where(avail[..., self.moves], goal @ self.ways.T, -np.inf)  # how far each move leads to the goal
        walks = np.isfinite(distance).any(-1) & (ahead.max(-1) > 0)
        rest = np.where(avail[..., self.stop], self.stop, avail.argmax(-1))
        actions = np.where(walks, self.moves[ahead.argmax(-1)], rest)
        return Decision(np.where(attack.any(-1), self.first + target, actions).astype(np.int64))


def map_constant(baselines: Baselines, config: Config, info: EnvInfo) -> Reconstructor:
    """Return what fills in the means of fitted baselines."""
    predictor = MapConstant(info)
    predictor.table.copy_(baselines.map_constant)
    return MapConstantReconstructor(None, predictor, config, info)


def win_rates(
    env: BatchedEnv, config: Config, info: EnvInfo, policy: Policy, sources: Mapping[str, Source], episodes: int,
    counter: Counter,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return whether each battle was won, by belief, [at least `episodes`]; all play the same battles in this order."""
    found = {}
    for name, source in sources.items():
        runner = Runner(env, config, info, EpisodeSeeds(config.seed, "test"))
        acting, won = Believing(policy, source), dict[int, float]()
        for _ in range(-(-episodes // env.n_slots)):
            for entry in runner.run(acting, explore=None, full_obs=True, keep=False).log:
                won[int(entry["seed"])] = float(entry["battle_won"])
            counter(env.n_slots)
        found[name] = np.array([won[seed] for seed in sorted(won)])
    return found
