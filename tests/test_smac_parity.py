"""Parity with SMAC and SMACv2: in recorded battles with recorded actions, all numbers are equal in single precision.

`smac_parity` holds the recordings and the command that records them; tapes take the place of the game.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import sc2_stand_in
from sc2_stand_in.tape import REQUESTS
from smac_parity import DATA, GROUPS, INFO, SEED, V2_GROUPS, interface_facts
from smac_parity.replay import PLAIN, V2_PLAIN, Semantics, battles, compare, replay, stored, v2_facts

from omagd.envs import REGISTRY
from omagd.envs.battle.maps import MAPS, get_map
from omagd.envs.battle.v2_semantics import EnemyVisibility


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return sc2_stand_in.install(tmp_path_factory.mktemp("sc2") / "StarCraftII")


@pytest.fixture
def game(installed, monkeypatch):
    """Return the folder of a stand-in that $SC2PATH names."""
    monkeypatch.setenv("SC2PATH", str(installed))
    return installed


@pytest.mark.parametrize(("name", "number"), PLAIN)
def test_semantics_equal_smac(name, number):
    group, arrays = GROUPS[name], stored(name)
    args = {**group.args, **group.cases[number]}
    env = Semantics(name, args)
    log = replay(env, arrays, number == 0)
    compare(log, arrays, number, args.get("continuing_episode", False))
    theirs, ours = json.loads(str(arrays["facts"][number])), env.facts()
    if args.get("obs_timestep_number"):  # SMAC's observations are one longer than it says
        n_agents = theirs["info"]["n_agents"]
        ours["obs_shape"] -= 1
        ours["state_shape"] -= n_agents * args.get("obs_instead_of_state", False)
    assert ours == {key: theirs["info"][key] for key in ours}
    assert env.stats() == pytest.approx(theirs["stats"])


@pytest.fixture
def recorded_orders(monkeypatch):
    """Return a function that lets agents be looked at in the orders in which SMACv2 has done it in a group."""

    def use(name):
        arrays, orders, start = stored(name), [], 0
        for number, steps in enumerate(arrays["steps"]):
            orders += [arrays["order_at_reset"][number], *arrays["order"][start : start + steps + 1]]
            start += steps + 1
        left = iter(orders)
        monkeypatch.setattr(EnemyVisibility, "order", lambda self, slot: next(left))

    return use


@pytest.mark.parametrize("name", V2_PLAIN)
def test_semantics_equal_smacv2(name, recorded_orders):
    recorded_orders(name)
    arrays, env = stored(name), Semantics(name, v2_facts(name)[0])
    compare(replay(env, arrays, True), arrays, 0, False)
    theirs, ours = json.loads(str(arrays["facts"][0])), env.facts()
    assert ours == {key: theirs["info"][key] for key in ours}
    assert env.stats() == pytest.approx(theirs["stats"])


def in_sight_of_all(units, n):
    """Return [n] bool: the agent lives, and all other living units are within SMAC's sight range."""
    distance = np.hypot(units.x[0, :n, None] - units.x[0], units.y[0, :n, None] - units.y[0])
    return units.alive[0, :n] & ((distance < 8.999) | ~units.alive[0]).all(axis=1)


@pytest.mark.parametrize("name", [*sorted({name for name, _ in PLAIN}), *V2_PLAIN])
def test_full_observations_ignore_range_sector_and_order(name):
    """They equal the observation where it shows a unit, and show all living units and no dead ones."""
    second = name in V2_GROUPS
    args = v2_facts(name)[0] if second else GROUPS[name].args
    env, arrays = Semantics(name, args), stored(name)
    fixed = Semantics(name, {**args, "obs_order_fix": True}) if second else env  # every enemy in sight is visible
    layout = env.layout
    enemies = slice(layout.move_dim, layout.move_dim + layout.n_enemies * layout.enemy_dim)
    ranged = args.get("conic_fov") or args.get("use_unit_ranges")
    for actions in battles(arrays):
        env.reset()
        if second:
            fixed.reset()
        for row in actions:
            (obs, *_, full), (clear, *_, clear_full) = env.look(), fixed.look()
            n, alive = len(obs), env.units.alive[0]
            np.testing.assert_array_equal(full, clear_full)
            np.testing.assert_array_equal(full[obs != 0], obs[obs != 0])
            np.testing.assert_array_equal(clear[obs != 0], obs[obs != 0])
            shown = full[:, enemies].reshape(n, -1, layout.enemy_dim)[..., 1:4].any(-1)
            np.testing.assert_array_equal(shown, alive[:n, None] & alive[None, n:])
            if not args.get("obs_timestep_number"):
                assert not full[~alive[:n]].any()
            if not ranged:
                everyone = in_sight_of_all(env.units, n)
                np.testing.assert_array_equal(full[everyone], clear[everyone])
            env.step(row)
            if second:
                fixed.step(row)


def test_battles_cover_every_way_to_end():
    """A win, a defeat, and the limit are among the recorded battles, or equality would say little."""
    ends = np.concatenate([stored(name)["outcomes"][0] for name, number in PLAIN if number == 0])
    over, won = ends[:, 0] == 1, ends[:, 1] == 1
    assert won.sum() >= 3
    assert (over & ~won).sum() >= 10
    idle = stored("2s_vs_1sc")
    assert idle["steps"][-1] == get_map("2s_vs_1sc").limit
    assert idle["outcomes"][1][-1, 1 + INFO.index("episode_limit")] == 1


READS = ("observation", "data")  # change nothing in the game, and SMACv2 asks for them more often


def compare_requests(path, arrays, left_out, args):
    """Demand that a tape of ours holds SMAC's requests outside of battles, but those named, and none for the dead.

    SMAC's own script (`heuristic_ai`) gives orders to dead units, which the game ignores; ours leaves them out.
    """
    with np.load(path) as tape:
        ours, dead = tape["requests"], tape["dead_orders"]
    places = [REQUESTS.index(name) for name in left_out]
    kept = [rows[~np.isin(rows[:, 1], places)].tolist() for rows in (ours, arrays["requests"])]
    assert kept[0] == kept[1]
    assert not dead.any()
    assert arrays["dead_orders"].any() == bool(args.get("heuristic_ai"))


def compare_facts(ours, theirs):
    """Demand what SMAC says of itself, but of the observation's length where that is not its own (docs/sc2.md)."""
    for part in ("info", "sizes", "state_dict"):
        assert {key: ours[part][key] for key in theirs[part]} == theirs[part], part
    assert {key: ours["stats"][key] for key in theirs["stats"]} == pytest.approx(theirs["stats"])


class Played:
    """The environment `sc2` or `sc2_v2` on the stand-in, which plays a tape."""

    def __init__(self, name, args):
        env = REGISTRY.get(name)
        self._env = env(env.args_model(**args))

    def reset(self):
        self._env.reset(seed=1)

    def look(self):
        env = self._env
        full = env.get_obs(no_range_limit=True)
        return env.get_obs(), env.get_state(), env.get_avail_actions(), env.get_visibility_matrix(), full

    def step(self, actions):
        return self._env.step(actions.astype(np.int64))

    def facts(self):
        return interface_facts(self._env)

    def close(self):
        self._env.close()


# Every unit type, every way to end, and every group that is not a plain map.
PLAYED = {"3m", "MMM", "1c3s5z", "6h_vs_8z", "2s_vs_1sc", "bane_vs_bane", "2c_vs_64zg"} | set(GROUPS) - set(MAPS)


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(PLAYED))
def test_the_game_environment_equals_smac(name, game, tmp_path, monkeypatch):
    """The whole way: our commands reach the game's units, and its answers our observations, as SMAC's do."""
    group, arrays, ours = GROUPS[name], stored(name), tmp_path / "ours.npz"
    monkeypatch.setenv("SC2_STAND_IN_TAPE", str(DATA / f"{name}.npz"))
    monkeypatch.setenv("SC2_STAND_IN_RECORD", str(ours))
    if group.lingers:
        monkeypatch.setenv("SC2_STAND_IN_LINGER", "1")
    number = len(group.cases) - 1 if len(group.cases) == 2 else 0
    args = {**group.args, **group.cases[number]}
    env = Played("sc2", {"map_name": group.map_name, "seed": SEED, **args})
    try:
        log = replay(env, arrays, number == 0)
        facts = env.facts()
    finally:
        env.close()
    compare(log, arrays, number, args.get("continuing_episode", False))
    compare_facts(facts, json.loads(str(arrays["facts"][number])))
    compare_requests(ours, arrays, (), group.args)
    assert sc2_stand_in.running(game) == []


@pytest.mark.processes
@pytest.mark.parametrize("name", ["corridor-rough-move-1"])
def test_an_older_game_sends_another_format_of_terrain(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "StarCraftII", version="4.6.2")))
    test_the_game_environment_equals_smac(name, tmp_path / "StarCraftII", tmp_path, monkeypatch)


@pytest.mark.processes
@pytest.mark.parametrize("name", V2_GROUPS)
def test_the_game_environment_equals_smacv2(name, game, recorded_orders, tmp_path, monkeypatch):
    """Line-ups, too, are those recorded: units are created where they say, and appear as the tape has them."""
    from omagd.envs.sc2 import v2_backend
    from omagd.envs.sc2.v2_backend import Lineup

    args, resets = v2_facts(name)
    lineups = iter(resets)

    def recorded_lineup(config, seed, attempt):
        drawn = next(lineups)
        team = drawn["team_gen"]
        places = (np.array(drawn[f"{side}_start_positions"]["item"]) for side in ("ally", "enemy"))
        return Lineup(tuple(team["ally_team"]), tuple(team["enemy_team"]), *places)

    recorded_orders(name)
    monkeypatch.setattr(v2_backend, "draw_lineup", recorded_lineup)
    monkeypatch.setenv("SC2_STAND_IN_TAPE", str(DATA / f"{name}.npz"))
    monkeypatch.setenv("SC2_STAND_IN_RECORD", str(tmp_path / "ours.npz"))
    arrays, env = stored(name), Played("sc2_v2", args)
    try:
        log = replay(env, arrays, True)
        facts = env.facts()
    finally:
        env.close()
    compare(log, arrays, 0, False)
    compare_facts(facts, json.loads(str(arrays["facts"][0])))
    compare_requests(tmp_path / "ours.npz", arrays, READS, V2_GROUPS[name].args)
    assert sc2_stand_in.running(game) == []
