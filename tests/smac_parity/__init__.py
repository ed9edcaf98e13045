"""Recordings of what SMAC returns in recorded battles.

`data/<group>.npz` holds a tape (`sc2_stand_in.tape`: what the units did), the actions that led to it, and what SMAC
returned in each case (a set of `env_args`): digests of observations, state, mask and visibility matrix at every moment,
rewards and ends of every step, and whole observations and states at a few moments, to look at when a digest differs;
`facts` are SMAC's `get_env_info`, `get_stats`, all getters of sizes, and the shapes of `get_state_dict`.

    python benchmarks/record_smac.py --smac PATH       # PATH: a checkout of github.com/oxwhirl/smac

records them again, and with `--smacv2 PATH` (github.com/oxwhirl/smacv2) in its place those of SMACv2, named `v2-*`; no
game is needed. With `--check` the command compares instead of writing.

SMACv2's agents observe in a random order, and what an agent sees depends on it: the first observing agent with an enemy
in sight marks it as seen for all; an enemy without that mark (or a dead one out of sight) hides all enemies before it.
Its groups also hold these orders (`order_at_reset` [K, n], of the observation by its `reset`; `order` [F, n], of the
observations at every moment), its `env_args` (`args`), and teams and start positions of the battles (`resets`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
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
        name: of the file. map_name: the map. battles: (policy of the agents, most steps) of each battle.
        args: `env_args` of all cases, which affect the orders too. cases: further `env_args` of each case.
        rough: whether the ground is full of holes. lingers: whether units that died are listed for one more step.
    """

    name: str
    map_name: str
    battles: tuple[tuple[str, int], ...]
    args: dict[str, Any] = field(default_factory=dict)
    cases: tuple[dict[str, Any], ...] = ({},)
    rough: bool = False
    lingers: bool = False

    @property
    def second(self) -> bool:
        """Whether SMACv2 played the battles."""
        return self.name.startswith("v2-")


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


V2_FLAGS: dict[str, dict[str, Any]] = {
    "terran": {},
    "protoss": {},
    "zerg": {},
    "terran-conic": {"conic_fov": True},
    "zerg-conic": {"conic_fov": True},
    "protoss-10_vs_11": {"n_units": 10, "n_enemies": 11},
    "terran-smac-ranges": {"use_unit_ranges": False, "obs_own_pos": False, "obs_last_action": True},
    "terran-6_vs_4-conic-around": {
        "n_units": 6, "n_enemies": 4, "conic_fov": True, "num_fov_actions": 6, "obs_pathing_grid": True,
        "obs_terrain_height": True, "obs_timestep_number": True, "state_timestep_number": True,
    },
    "protoss-untold": {"prob_obs_enemy": 0.0, "action_mask": False, "reward_only_positive": False},
    "terran-conic-heuristic-rest": {"conic_fov": True, "heuristic_ai": True, "heuristic_rest": True},
    "zerg-all-seen": {"fully_observable": True, "obs_all_health": False, "reward_sparse": True},
}  # fmt: skip
V2_BATTLES = (("scripted", 1000), ("random", 40), ("scripted", 60))
GROUPS: dict[str, Group] = {group.name: group for group in _groups()}
for _name, _flags in V2_FLAGS.items():
    GROUPS[f"v2-{_name}"] = Group(f"v2-{_name}", f"10gen_{_name.partition('-')[0]}", V2_BATTLES, _flags)


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

    def see(self, env: Any) -> tuple[np.ndarray, np.ndarray]:
        """Add what `env` shows; return observations and state."""
        obs, state = np.array(env.get_obs(), np.float32), np.array(env.get_state(), np.float32)
        rest = env.get_avail_actions(), env.get_visibility_matrix()
        self.digests.append((digest(obs), digest(state), *map(digest, rest)))
        return obs, state

    def keep(self, seen: list[tuple[np.ndarray, np.ndarray]], group: Group, case: int) -> None:
        """Keep some of the observations and states of the battle that has just ended."""
        start, middle, last = len(self.digests) - len(seen), (len(seen) - 1) // 2, len(seen) - 1
        moments = sorted({0, middle, last} if case == 0 else {middle})
        if group.second:
            moments = [moment for moment in range(len(seen)) if (start + moment) % 10 == 0]
        self.kept += [(start + moment, *seen[moment]) for moment in moments]


def play(
    env: Any, group: Group, case: int, battles: Iterable[Iterable[Any]], reset: Callable[[int], Any]
) -> tuple[Log, list[np.ndarray]]:
    """Play battles of a group in an environment with SMAC's methods.

    Args:
        case: number of the case. battles: the actions of each step of each battle. reset: starts a battle by number.

    Returns the log, and the actions of each battle up to its end.
    """
    log, played = Log(), []
    for number, actions in enumerate(battles):
        reset(number)
        seen, chosen = [log.see(env)], []
        for row in actions:
            chosen.append(list(row))
            reward, over, info = env.step(list(row))  # SMAC's script overwrites its argument
            log.rewards.append(reward)
            log.outcomes.append([int(over), *(int(info.get(name, -1)) for name in INFO)])
            seen.append(log.see(env))
            if over:
                break
        log.keep(seen, group, case)
        played.append(np.array(chosen, np.uint8))
    log.facts = interface_facts(env)
    return log, played


def interface_facts(env: Any) -> dict[str, Any]:
    """Return sizes, names and counters of an environment with SMAC's methods; call it after a `reset`."""
    getters = [*GETTERS, *(V2_GETTERS if "cap_shape" in env.get_env_info() else ())]
    shapes = {name: list(np.shape(values)) for name, values in env.get_state_dict().items()}
    sizes = {name: np.ravel(getattr(env, name)()).tolist() for name in getters}
    return {"info": env.get_env_info(), "stats": env.get_stats(), "sizes": sizes, "state_dict": shapes}
