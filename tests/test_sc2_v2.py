"""`sc2_v2`: lineups by SMACv2's distributions, visibility, arguments, and the environment on the stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import sc2_stand_in
import yaml
from command_harness import ROOT

from omagd.config.loading import config_names
from omagd.envs.actions import random_actions
from omagd.envs.battle.args import CapabilityArgs, SmacArgs, SmacV2Args, StartArgs, TeamArgs, v2_map
from omagd.envs.battle.backend import Terrain, Units
from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.envs.battle.v2_semantics import EnemyVisibility, V2Semantics, Vision
from omagd.envs.factory import validate_env_args
from omagd.envs.sc2.sc2_env import SC2Env, SC2V2Env
from omagd.envs.sc2.v2_backend import draw_lineup
from omagd.run.reporting import report
from omagd.utils.errors import UserError

FILES = [name for name in config_names("envs") if name.startswith("sc2_v2")]
ON = np.ones(1, bool)


# --- lineups


def lineups(count, n_units=5, n_enemies=None, **start):
    config = CapabilityArgs(n_units=n_units, n_enemies=n_enemies, start_positions=StartArgs(**start))
    return [draw_lineup(config, seed) for seed in range(count)]


def test_lineups_follow_from_the_seed():
    config = CapabilityArgs()
    one, same, other = draw_lineup(config, 3), draw_lineup(config, 3), draw_lineup(config, 3, attempt=1)
    assert one.allies == same.allies and (one.enemy_places == same.enemy_places).all()
    assert one.enemy_places.tolist() != other.enemy_places.tolist()
    assert len({lineup.allies for lineup in lineups(50)}) > 10


def test_types_are_drawn_by_weight_and_exceptions_never_alone():
    drawn = lineups(4000, n_units=2, n_enemies=3)
    teams = [lineup.allies for lineup in drawn]
    assert all(lineup.enemies[:2] == lineup.allies for lineup in drawn)
    assert "medivac" not in {lineup.enemies[2] for lineup in drawn}  # as SMACv2: who is added is a team again
    # Of 2 independent types, given that not both are medivacs (0.1 each).
    share = np.mean([team.count("medivac") for team in teams]) / 2
    assert ("medivac", "medivac") not in teams
    assert share == pytest.approx((0.1 - 0.01) / 0.99, abs=0.015)
    assert all(len(lineup.enemies) == 2 for lineup in lineups(5, n_units=4, n_enemies=2))


def test_reflected_enemies_mirror_the_allies():
    for lineup in lineups(200, n_units=3, n_enemies=5, dist_type="reflect_position", map_x=40, map_y=20):
        ally, enemy = lineup.ally_places, lineup.enemy_places
        assert (ally >= 0).all() and (ally[:, 0] <= 19).all() and (ally[:, 1] <= 20).all()
        np.testing.assert_array_equal(enemy[:3], np.stack([40 - ally[:, 0], ally[:, 1]], axis=1))
        assert (enemy[3:, 0] >= 20).all() and (enemy[3:] <= (40, 20)).all()


def test_surrounding_enemies_stand_in_groups_on_the_diagonals():
    counts = []
    for lineup in lineups(400, n_units=4, n_enemies=9, dist_type="surrounded"):
        assert (lineup.ally_places == 16).all()
        away = lineup.enemy_places - 16
        np.testing.assert_allclose(np.abs(away[:, 0]), np.abs(away[:, 1]))
        assert (np.abs(away) >= 2 - 1e-9).all() and (np.abs(away) <= 16 + 1e-9).all()
        places = np.unique(lineup.enemy_places, axis=0)
        assert len(np.unique(np.sign(places - 16), axis=0)) == len(places)  # a diagonal for each
        counts.append(len(places))
    assert set(counts) == {1, 2, 3, 4} and np.bincount(counts)[1] == pytest.approx(100, abs=30)


def test_the_mixture_reflects_with_probability_p():
    mixed = [(lineup.ally_places == 16).all() for lineup in lineups(1000, p=0.2)]
    assert np.mean(mixed) == pytest.approx(0.8, abs=0.05)


# --- visibility


def look(visibility, in_sight, order):
    visibility.order = lambda slot: order
    return visibility.look(ON, np.array([in_sight], bool), np.ones((1, len(order)), bool))[0].astype(int).tolist()


def test_agents_that_observe_first_see_less():
    """Agent 0 sees enemies 0 and 1, agent 1 all three: only agent 1 finds enemy 2, which hides the others before."""
    in_sight = [[1, 1, 0], [1, 1, 1]]
    first, second = (EnemyVisibility(1.0, 1, 2, 3) for _ in range(2))
    assert look(first, in_sight, [0, 1]) == [[0, 0, 0], [1, 1, 1]]
    assert look(first, in_sight, [0, 1]) == [[1, 1, 1], [1, 1, 1]]  # learned meanwhile
    assert look(second, in_sight, [1, 0]) == [[1, 1, 1], [1, 1, 1]]
    second.forget_dead(ON, np.array([[True, False, True, True, True]]))  # agent 1, who has found everyone
    assert look(second, [[1, 0, 0], [0, 0, 0]], [0, 1])[0] == [0, 0, 0]


def test_orders_follow_from_the_seed():
    one, other = EnemyVisibility(1.0, 1, 9, 3), EnemyVisibility(1.0, 1, 9, 3)
    for visibility in (one, other):
        visibility.begin(ON, np.array([5]))
    orders = [one.order(0).tolist() for _ in range(5)]
    assert orders == [other.order(0).tolist() for _ in range(5)] and orders[0] != orders[1]


RANGES = [  # flags, sight, reach, whether a unit exactly at the limit of sight is seen
    ({}, 9.0, 6.0, False),
    ({"use_unit_ranges": True}, 9.0, 5.0, False),  # of a marine
    ({"use_unit_ranges": True, "min_attack_range": 5.5}, 9.0, 5.5, False),
    ({"conic_fov": True}, 9.0, 6.0, True),
]


@pytest.mark.parametrize(("flags", "sight", "reach", "at_sight"), RANGES)
def test_units_exactly_at_the_limits_of_sight_and_attack_range(flags, sight, reach, at_sight):
    """SMACv2: attack at `<=` the reach; sight is `<`, but `<=` in a sector (`is_position_in_cone`)."""
    team = TeamArgs(unit_types=("marine",), weights=(1.0,))
    config = CapabilityArgs(n_units=1, n_enemies=4, team_gen=team)
    args = SmacV2Args(capability_config=config, obs_order_fix=True, **flags)  # enemies hide nobody
    beyond, within = np.nextafter(np.float32([reach, sight]), np.float32([10, 0]))
    away = [reach, beyond, sight, within]
    x, y = np.array([[0.0, *away]], np.float32), np.zeros((1, 5), np.float32)
    full, kinds = np.full_like(x, 45.0), np.full(x.shape, UNIT_ID["marine"], np.int16)
    units = Units(x, y, full, full, y, y, y, y, kinds, np.ones(x.shape, bool))
    field = Terrain(32, 32, (0, 0, 32, 32), np.ones((32, 32), bool), np.zeros((32, 32), np.float32))
    backend = SimpleNamespace(n_slots=1, terrain=field, units=units)
    semantics = V2Semantics(v2_map(args), args, backend, [unit.name for unit in UNITS])
    semantics.begin(ON, np.zeros(1, np.int64))
    seen, first = semantics.observe(), semantics.layout.move_dim
    assert seen.avail_actions[0, 0, -4:].tolist() == [True, False, False, False]
    blocks = seen.obs[0, 0, first : first + 4 * semantics.layout.enemy_dim].reshape(4, -1)
    assert blocks[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]  # may be attacked
    assert blocks.any(axis=1).tolist() == [True, True, at_sight, True]


def test_change_fov_with_move_turns_the_view():
    args = SmacV2Args(conic_fov=True, change_fov_with_move=True)
    assert args.variant.n_actions(v2_map(args)) == 11 and args.variant.direction
    vision = Vision(args, ["marine"], 1, 5)
    vision.turn(np.array([[1, 2, 3, 4, 5]]), ON)
    np.testing.assert_allclose(vision.direction[0, 1:], [(0, 1), (0, -1), (1, 0), (-1, 0)], atol=1e-9)


# --- arguments


@pytest.mark.parametrize("name", FILES)
def test_yaml_files_hold_every_key(name):
    content = yaml.safe_load((ROOT / "src" / "config" / "envs" / f"{name}.yaml").read_text())
    typed = validate_env_args(content["env"], content["env_args"])
    plain = typed.model_dump(mode="json")
    assert content["env"] == "sc2_v2" and content["env_args"] == plain
    assert v2_map(typed).n_agents == 5
    shared = [key for key in SmacArgs.model_fields if key not in ("map_name", "reward_shield_fix")]
    assert [key for key in shared if plain[key] != getattr(SmacArgs(), key)] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability_config": {"attack": {}}}, "capability_config.attack"),
        ({"capability_config": {"team_gen": {"unit_types": ["marine"], "weights": [0.5]}}}, "add up to 1"),
        ({"obs_starcraft": False}, "obs_starcraft"),
        ({"obs_ordr_fix": True}, "obs_order_fix"),
    ],
)
def test_unsupported_arguments_are_rejected(change, words):
    with pytest.raises(UserError, match=words):
        validate_env_args("sc2_v2", change)


def test_maps_and_races_must_fit():
    with pytest.raises(UserError, match="10gen_zerg"):
        v2_map(SmacV2Args(map_name="10gen_zergs"))
    team = TeamArgs(unit_types=("marine", "zealot"), weights=(0.5, 0.5))
    with pytest.raises(UserError, match="zealot"):
        v2_map(SmacV2Args(capability_config=CapabilityArgs(team_gen=team)))


# --- the environment


@pytest.fixture
def game(tmp_path, monkeypatch):
    """The folder of an installed stand-in; no process of it may be left at the end."""
    folder = sc2_stand_in.install(tmp_path / "StarCraftII")
    monkeypatch.setenv("SC2PATH", str(folder))
    yield folder
    assert sc2_stand_in.running(folder) == []


def play(env, seed, steps=25):
    env.reset(seed=seed)
    rng, shown = np.random.default_rng(seed), []
    for _ in range(steps):
        shown.append(np.concatenate([env.get_obs().ravel(), env.get_obs(no_range_limit=True).ravel(), env.get_state()]))
        _, over, _ = env.step(random_actions(env.get_avail_actions()[None], rng)[0])
        if over:
            break
    return np.stack(shown)


@pytest.mark.processes
def test_smac_and_smacv2_run_side_by_side_and_follow_from_seeds(game):
    smac, conic = SC2Env(SmacArgs(map_name="3m")), SC2V2Env(SmacV2Args(conic_fov=True, obs_own_pos=True))
    try:
        smac.reset(seed=1)
        first = play(conic, 7)
        assert smac.get_obs().shape == (3, 30)
        other = play(conic, 8)
        np.testing.assert_array_equal(play(conic, 7), first)
        assert other[0].tolist() != first[0].tolist()
        assert conic.get_env_info()["n_normal_actions"] == 18
        assert sum(conic.get_env_info()["state_component"]) == conic.get_state().size
    finally:
        smac.close()
        conic.close()


@pytest.mark.processes
def test_late_units_are_waited_for_and_missing_ones_drawn_again(game, monkeypatch):
    from omagd.envs.sc2 import backend, v2_backend

    attempts = []
    draw = v2_backend.draw_lineup
    monkeypatch.setattr(
        v2_backend, "draw_lineup", lambda config, seed, attempt: attempts.append(attempt) or draw(config, seed, attempt)
    )
    monkeypatch.setenv("SC2_STAND_IN_LATE_UNITS", "3")
    env = SC2V2Env(SmacV2Args())
    try:
        env.reset(seed=1)
        assert attempts == [0] and env.get_obs().any()
        monkeypatch.setattr(backend, "PATIENCE", 2)
        with pytest.raises(UserError, match="0 of 5 enemies"):
            env.reset(seed=1)
        assert attempts[1:] == 5 * list(range(v2_backend.DRAWS))
    finally:
        env.close()


@pytest.mark.parametrize("race", ["terran", "protoss", "zerg"])
def test_the_closing_command_names_a_file_that_exists(race):
    command = report._base_command({"name": "qmix", "env": "sc2_v2", "map_name": f"10gen_{race}"})
    assert f"--config=qmix --env-config=sc2_v2_{race} with env_args.map_name=10gen_{race}" in command
