"""Recordings of SMAC's results in recorded battles, and the command that records them.

`data/<group>.npz` holds a tape (`sc2_stand_in.tape`: what the units did), the actions that led to it, and what SMAC
returned in each case (a set of `env_args`): digests of observations, state, mask and visibility matrix at every moment,
rewards and ends of every step, and whole observations and states at a few moments, to look at when a digest differs;
`facts` are what SMAC says of itself: `get_env_info`, `get_stats`, all getters of sizes, the shapes of `get_state_dict`.

    python tests/smac_parity/record.py --smac PATH       # PATH: a checkout of github.com/oxwhirl/smac

records them again, and with `--smacv2 PATH` (github.com/oxwhirl/smacv2) in its place those of SMACv2, named `v2-*`; no
game is needed. With `--check` the command compares instead of writing.

SMACv2 looks at its agents in a random order, and what an agent sees depends on it: whoever is looked at and sees an
enemy marks it as seen for all; an enemy without that mark (or a dead one that nobody is near) hides all enemies before
it. Its groups also hold these orders (`order_at_reset` [K, n], the look that its `reset` takes; `order` [F, n], the
looks at every moment), its `env_args` (`args`), and teams and start positions of the battles (`resets`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.battle.maps import MAPS

SEED = 11  # of the game and of the choices
DATA = Path(__file__).with_name("data")
GETTERS = (
    "get_obs_size", "get_state_size", "get_total_actions", "get_obs_move_feats_size", "get_obs_enemy_feats_size",
    "get_obs_ally_feats_size", "get_obs_own_feats_size", "get_ally_num_attributes", "get_enemy_num_attributes", "seed",
)  # fmt: skip
V2_GETTERS = ("get_cap_size", "get_capabilities")
INFO = ("battle_won", "dead_allies", "dead_enemies", "episode_limit")  # `outcome` columns after `terminated`

FLAGS: tuple[dict[str, Any], ...] = (
    {"continuing_episode": True},
    {"obs_all_health": False},
    {"obs_own_health": False},
    {"obs_all_health": False, "obs_own_health": False},
    {"obs_instead_of_state": True},
    {"obs_last_action": True},
    {"obs_pathing_grid": True},
    {"obs_terrain_height": True},
    {"obs_timestep_number": True},
    {"obs_timestep_number": True, "obs_instead_of_state": True},
    {"obs_last_action": True, "obs_pathing_grid": True, "obs_terrain_height": True, "obs_timestep_number": True,
     "state_timestep_number": True},
    {"state_last_action": False},
    {"state_timestep_number": True},
    {"reward_sparse": True},
    {"reward_sparse": True, "reward_scale": False},
    {"reward_only_positive": False},
    {"reward_only_positive": False, "reward_negative_scale": 1.0, "reward_defeat": -10},
    {"reward_death_value": 5},
    {"reward_win": 100},
    {"reward_defeat": -10},
    {"reward_scale": False},
    {"reward_scale_rate": 10},
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Battles on one map that several cases share.

    Attributes:
        name: of the file. map_name: the map. battles: how the agents play, battle by battle: (policy, most steps).
        args: what decides the orders too. cases: sets of further `env_args`.
        rough: whether the ground is full of holes. lingers: whether units that died are listed for one more step.
    """

    name: str
    map_name: str
    battles: tuple[tuple[str, int], ...]
    args: dict[str, Any] = field(default_factory=dict)
    cases: tuple[dict[str, Any], ...] = ({},)
    rough: bool = False
    lingers: bool = False


def _groups() -> Iterator[Group]:
    toggled = ("3m", "MMM", "2s3z", "so_many_baneling")
    waiting = ("2s_vs_1sc", "bane_vs_bane")  # maps whose enemy does not come: there the limit is reached
    for name in MAPS:
        battles = ("kiting" if name.startswith("3s_vs") else "scripted", 1000), ("random", 30)
        cases = ({}, *FLAGS) if name in toggled else ({},)
        if name in waiting:
            battles += (("idle", 1000),)
            cases = ({}, {"continuing_episode": True, "state_timestep_number": True})
        yield Group(name, name, battles, cases=cases)
    around = {"obs_pathing_grid": True, "obs_terrain_height": True}
    walks = ("scripted", 1000), ("random", 30)  # SMAC starts another game when its first episode is cut short
    yield Group("2s3z-rough", "2s3z", walks, cases=({}, around), rough=True)
    yield Group("MMM-rough-move-3", "MMM", walks, {"move_amount": 3}, ({}, around), rough=True)
    yield Group("corridor-rough-move-1", "corridor", walks, {"move_amount": 1}, ({}, around), rough=True)
    yield Group("8m-move-1.3", "8m", walks, {"move_amount": 1.3})
    for name in ("3m", "2s3z", "MMM"):
        yield Group(f"{name}-lingering", name, walks, lingers=True)
    for name in ("MMM", "2s3z"):
        yield Group(f"{name}-heuristic", name, (("idle", 1000),), {"heuristic_ai": True})
        yield Group(f"{name}-heuristic-rest", name, (("idle", 1000),), {"heuristic_ai": True, "heuristic_rest": True})


V2_BATTLES = (("scripted", 1000), ("random", 40), ("scripted", 60))
V2_GROUPS: dict[str, Group] = {
    f"v2-{name}": Group(f"v2-{name}", f"10gen_{name.partition('-')[0]}", V2_BATTLES, args)
    for name, args in {
        "terran": {},
        "protoss": {},
        "zerg": {},
        "terran-conic": {"conic_fov": True},
        "zerg-conic": {"conic_fov": True},
        "protoss-10_vs_11": {"n_units": 10, "n_enemies": 11},
        "terran-smac-ranges": {"use_unit_ranges": False, "obs_own_pos": False, "obs_last_action": True},
        "terran-6_vs_4-conic-around": {
            "n_units": 6,
            "n_enemies": 4,
            "conic_fov": True,
            "num_fov_actions": 6,
            "obs_pathing_grid": True,
            "obs_terrain_height": True,
            "obs_timestep_number": True,
            "state_timestep_number": True,
        },
        "protoss-untold": {"prob_obs_enemy": 0.0, "action_mask": False, "reward_only_positive": False},
        "terran-conic-heuristic-rest": {"conic_fov": True, "heuristic_ai": True, "heuristic_rest": True},
        "zerg-all-seen": {"fully_observable": True, "obs_all_health": False, "reward_sparse": True},
    }.items()
}

GROUPS: dict[str, Group] = {group.name: group for group in _groups()}


def digest(values: np.ndarray) -> int:
    """Return a number that stands for these values in single precision; zeros of both signs are the same."""
    return zlib.crc32(np.ascontiguousarray(np.asarray(values, np.float32) + np.float32(0)).tobytes())


@dataclass
class Log:
    """What an environment returned over the battles of a group, F moments and S steps in all.

    Attributes:
        digests: F x (observations, state, mask, visibility). rewards: S.
        outcomes: S x (terminated, *INFO), -1 for what is absent.
        kept: (moment, observations, state) of a few moments. facts: sizes and statistics.
    """

    digests: list[tuple[int, ...]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    outcomes: list[list[int]] = field(default_factory=list)
    kept: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def see(self, obs: np.ndarray, state: np.ndarray, avail: np.ndarray, visible: np.ndarray, keep: bool) -> None:
        """Note what a moment shows."""
        if keep:
            self.kept.append((len(self.digests), np.array(obs, np.float32), np.array(state, np.float32)))
        self.digests.append((digest(obs), digest(state), digest(avail), digest(visible)))

    def note(self, reward: float, terminated: bool, info: dict[str, Any]) -> None:
        """Note what a step brought."""
        self.rewards.append(reward)
        self.outcomes.append([int(terminated), *(int(info.get(name, -1)) for name in INFO)])


def interface_facts(env: Any) -> dict[str, Any]:
    """Return what an environment with SMAC's methods says of itself; call it after a `reset`."""
    getters = [*GETTERS, *(V2_GETTERS if "cap_shape" in env.get_env_info() else ())]
    shapes = {name: list(np.shape(values)) for name, values in env.get_state_dict().items()}
    sizes = {name: np.ravel(getattr(env, name)()).tolist() for name in getters}
    return {"info": env.get_env_info(), "stats": env.get_stats(), "sizes": sizes, "state_dict": shapes}


def pack(logs: list[Log]) -> dict[str, np.ndarray]:
    """Return the logs of a group's cases as arrays: those of one shape stacked, what was kept by the case's number."""
    arrays = {
        "digests": np.array([log.digests for log in logs], np.uint32),
        "rewards": np.array([log.rewards for log in logs], np.float32),
        "outcomes": np.array([log.outcomes for log in logs], np.int8),
        "facts": np.array([json.dumps(log.facts) for log in logs]),
    }
    for number, log in enumerate(logs):
        if number and log.digests == logs[0].digests:
            continue  # nothing else to see than in the first case
        moments, obs, states = zip(*log.kept, strict=True)
        arrays[f"moments_{number}"] = np.array(moments, np.int32)
        arrays[f"obs_{number}"], arrays[f"states_{number}"] = np.stack(obs), np.stack(states)
    return arrays


def moments_to_keep(steps: int, first_case: bool) -> set[int]:
    """Return at which moments of a battle of so many steps everything is stored."""
    return {0, steps // 2, steps} if first_case else {steps // 2}
