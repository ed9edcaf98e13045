"""Parity with SMAC and SMACv2: in recorded battles with recorded actions, all numbers are equal in single precision.

`smac_parity` holds the recordings and the command that records them; tapes take the place of the game.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import sc2_stand_in
from sc2_stand_in import battle_seed
from smac_parity import DATA, GROUPS, INFO, SEED
from smac_parity.replay import PLAIN, args_of, battles, compare_requests, replay, stored, tape_env

from omagd.envs import REGISTRY
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.interface import SmacInterface
from omagd.envs.battle.maps import MAPS, get_map
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.battle.v2_semantics import EnemyVisibility


@pytest.fixture
def recorded_orders(monkeypatch):
    """Return a function that lets agents observe in the orders in which SMACv2 has done it in a group."""

    def use(name):
        arrays = stored(name)
        looks = np.split(arrays["order"], np.cumsum(arrays["steps"] + 1)[:-1])
        orders = [order for number, rows in enumerate(looks) for order in (arrays["order_at_reset"][number], *rows)]
        left = iter(orders)
        monkeypatch.setattr(EnemyVisibility, "order", lambda self, slot: next(left))

    return use


# Every flag of the maps that have all of them, on two of these four.
TOGGLED = [name for name, group in GROUPS.items() if len(group.cases) > 2]
PAIRED = [(name, n) for name, n in PLAIN if name not in TOGGLED or not n or (n + TOGGLED.index(name)) % 2]


@pytest.mark.parametrize(("name", "number"), PAIRED)
def test_semantics_equal_smac(name, number, recorded_orders):
    if GROUPS[name].second:
        recorded_orders(name)
    replay(tape_env(name, args_of(name, number)), name, number)


class Recorded(SkirmishEnv):
    """`skirmish` from the seeds of the recorded battles, whose units the same rules of physics moved."""

    battles = 0

    def reset(self, which, seeds):
        super().reset(which, np.array([battle_seed(SEED, self.battles)]))
        self.battles += 1

    def seed(self):
        return SEED


@pytest.mark.parametrize(("name", "number"), [case for case in PAIRED if case[0] in MAPS and case[0][:3] != "MMM"])
def test_kernels_equal_smac(name, number):
    """Battles, observations and rewards of `skirmish`; medivacs have come to heal at another rate since."""
    group = GROUPS[name]
    replay(SmacInterface(Recorded(SkirmishArgs(map_name=name, **group.args, **group.cases[number]), 1)), name, number)


def in_sight_of_all(units, n):
    """Return [n] bool: the agent lives, and all other living units are within SMAC's sight range."""
    distance = np.hypot(units.x[0, :n, None] - units.x[0], units.y[0, :n, None] - units.y[0])
    return units.alive[0, :n] & ((distance < 8.999) | ~units.alive[0]).all(axis=1)


@pytest.mark.parametrize("name", [name for name in dict(PLAIN) if name not in MAPS or name in ("MMM", "1c3s5z")])
def test_full_observations_ignore_range_sector_and_order(name):
    """They equal the observation where it shows a unit, and show all living units and no dead ones."""
    args = args_of(name)
    clear_args = args.model_copy(update={"obs_order_fix": True})  # every enemy in sight is visible
    env, clear_env = tape_env(name, args), tape_env(name, clear_args)
    layout, units = env.env.info.layout, env.env._simulator.units
    enemies = slice(layout.move_dim, layout.move_dim + layout.n_enemies * layout.enemy_dim)
    ranged = GROUPS[name].second and (args.conic_fov or args.use_unit_ranges)
    for actions in battles(stored(name)):
        env.reset(seed=SEED)
        clear_env.reset(seed=SEED)
        for row in actions:
            (obs, full), (clear, clear_full) = (
                (one.get_obs(), one.get_obs(no_range_limit=True)) for one in (env, clear_env)
            )
            n, alive = len(obs), units.alive[0]
            np.testing.assert_array_equal(full, clear_full)
            np.testing.assert_array_equal(full[obs != 0], obs[obs != 0])
            np.testing.assert_array_equal(clear[obs != 0], obs[obs != 0])
            shown = full[:, enemies].reshape(n, -1, layout.enemy_dim)[..., 1:4].any(-1)
            np.testing.assert_array_equal(shown, alive[:n, None] & alive[None, n:])
            if not args.obs_timestep_number:
                assert not full[~alive[:n]].any()
            if not ranged:
                everyone = in_sight_of_all(units, n)
                np.testing.assert_array_equal(full[everyone], clear[everyone])
            env.step(row)
            clear_env.step(row)


def test_battles_cover_every_way_to_end():
    """A win, a defeat, and the limit are among the recorded battles, or equality would say little."""
    first_cases = [name for name, number in PLAIN if number == 0 and not GROUPS[name].second]
    over, won = np.concatenate([stored(name)["outcomes"][0] for name in first_cases])[:, :2].T == 1
    assert won.sum() >= 3
    assert (over & ~won).sum() >= 10
    idle = stored("2s_vs_1sc")
    assert idle["steps"][-1] == get_map("2s_vs_1sc").limit
    assert idle["outcomes"][1][-1, 1 + INFO.index("episode_limit")] == 1


@pytest.fixture
def recorded_lineups(recorded_orders, monkeypatch):
    """Return a function that lets the teams, start positions and orders of a group of SMACv2 be those recorded."""

    def use(name):
        from omagd.envs.sc2 import v2_backend  # slow: imports pysc2

        def next_lineup(config, seed, attempt):
            drawn = next(lineups)
            team = drawn["team_gen"]
            places = (np.array(drawn[f"{side}_start_positions"]["item"]) for side in ("ally", "enemy"))
            return v2_backend.Lineup(tuple(team["ally_team"]), tuple(team["enemy_team"]), *places)

        lineups = iter(json.loads(str(stored(name)["resets"])))
        recorded_orders(name)
        monkeypatch.setattr(v2_backend, "draw_lineup", next_lineup)

    return use


# Every unit type, and every kind of group that is not a plain map. An older game sends another format of terrain.
PLAYED = {
    "2s_vs_1sc", "1c3s5z", "8m-move-1.3", "3m-lingering", "MMM-heuristic-rest", "v2-zerg-conic", "v2-protoss-untold",
    "v2-terran-conic-heuristic-rest",
}  # fmt: skip
VERSIONS = [*((name, "4.10") for name in sorted(PLAYED)), ("corridor-rough-move-1", "4.6.2")]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_the_game_environment_equals_smac(name, version, recorded_lineups, tmp_path, monkeypatch):
    """The whole way: our commands reach the game's units, and its answers our observations, as SMAC's do."""
    group, folder = GROUPS[name], sc2_stand_in.install(tmp_path / "StarCraftII", version)
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("SC2_STAND_IN_TAPE", str(DATA / f"{name}.npz"))
    monkeypatch.setenv("SC2_STAND_IN_RECORD", str(tmp_path / "ours.npz"))
    if group.lingers:
        monkeypatch.setenv("SC2_STAND_IN_LINGER", "1")
    if group.second:
        recorded_lineups(name)
    number = len(group.cases) - 1 if len(group.cases) == 2 else 0
    env = REGISTRY.get("sc2_v2" if group.second else "sc2")(args_of(name, number))
    try:
        replay(env, name, number)
    finally:
        env.close()
    compare_requests(tmp_path / "ours.npz", name)
    assert sc2_stand_in.running(folder) == []
