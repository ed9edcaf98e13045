"""Rules of SMACv2 that recorded battles do not show: lineups, limits of sight and reach, arguments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from omagd.config.loading import base_values, config_names
from omagd.envs.battle.args import CapabilityArgs, SmacArgs, SmacV2Args, StartArgs, TeamArgs, v2_map
from omagd.envs.battle.backend import Terrain, Units
from omagd.envs.battle.lineups import draw_lineup
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.battle.v2_semantics import V2Semantics, Vision
from omagd.envs.factory import validate_env_args
from omagd.utils.errors import UserError

FIELD = Terrain(32, 32, (0, 0, 32, 32), np.ones((32, 32), bool), np.zeros((32, 32), np.float32))
ON = np.ones(1, bool)


# --- lineups of SMACv2


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
    assert "medivac" not in {lineup.enemies[2] for lineup in drawn}  # as in SMACv2, added units are a team again
    # Of 2 independent types, given that not both are medivacs (0.1 each).
    share = np.mean([team.count("medivac") for team in teams]) / 2
    assert ("medivac", "medivac") not in teams and share == pytest.approx((0.1 - 0.01) / 0.99, abs=0.015)
    assert all(len(lineup.enemies) == 2 for lineup in lineups(5, n_units=4, n_enemies=2))


def test_reflected_enemies_mirror_the_allies():
    for lineup in lineups(200, n_units=3, n_enemies=5, dist_type="reflect_position", map_x=40, map_y=20):
        ally, enemy = lineup.ally_places, lineup.enemy_places
        assert (ally >= 0).all() and (ally <= (19, 20)).all()
        np.testing.assert_array_equal(enemy[:3], np.stack([40 - ally[:, 0], ally[:, 1]], axis=1))
        assert (enemy[3:, 0] >= 20).all() and (enemy[3:] <= (40, 20)).all()


def test_surrounding_enemies_stand_in_groups_on_the_diagonals():
    counts = []
    for lineup in lineups(400, n_units=4, n_enemies=9, dist_type="surrounded"):
        groups = np.unique(lineup.enemy_places, axis=0) - 16
        distance = np.abs(groups)
        np.testing.assert_allclose(distance[:, 0], distance[:, 1])
        assert (lineup.ally_places == 16).all() and (distance >= 2 - 1e-9).all() and (distance <= 16 + 1e-9).all()
        assert len(np.unique(np.sign(groups), axis=0)) == len(groups)  # each has its own diagonal
        counts.append(len(groups))
    assert set(counts) == {1, 2, 3, 4} and counts.count(1) == pytest.approx(100, abs=30)
    mixed = [(lineup.ally_places == 16).all() for lineup in lineups(1000, p=0.2)]  # reflected with probability p
    assert np.mean(mixed) == pytest.approx(0.8, abs=0.05)


# --- visibility


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
    args = SmacV2Args(capability_config=config, obs_order_fix=True, **flags)  # no enemy hides another
    beyond, within = np.nextafter(np.float32([reach, sight]), np.float32([10, 0]))
    x = np.array([[0.0, reach, beyond, sight, within]], np.float32)
    zero, full, kinds = np.zeros_like(x), np.full_like(x, 45.0), np.full(x.shape, UNIT_ID["marine"], np.int16)
    units = Units(x, zero, full, full, zero, zero, zero, zero, kinds, full > 0)
    backend = SimpleNamespace(n_slots=1, terrain=FIELD, units=units)
    semantics = V2Semantics(v2_map(args), args, backend)
    semantics.begin(ON, np.zeros(1, np.int64))
    seen, first = semantics.observe(), semantics.layout.move_dim
    assert seen.avail_actions[0, 0, -4:].tolist() == [True, False, False, False]
    blocks = seen.obs[0, 0, first : first + 4 * semantics.layout.enemy_dim].reshape(4, -1)
    assert blocks[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]  # may be attacked
    assert blocks.any(axis=1).tolist() == [True, True, at_sight, True]


def test_change_fov_with_move_turns_the_view():
    args = SmacV2Args(conic_fov=True, change_fov_with_move=True)
    assert args.variant.n_actions(v2_map(args)) == 11 and args.variant.direction
    vision = Vision(args, 1, 5)
    vision.turn(np.array([[1, 2, 3, 4, 5]]), ON)
    np.testing.assert_allclose(vision.direction[0, 1:], [(0, 1), (0, -1), (1, 0), (-1, 0)], atol=1e-9)


# --- arguments of SMACv2


@pytest.mark.parametrize("name", [name for name in config_names("envs") if name.startswith("sc2_v2")])
def test_each_race_has_every_key(name):
    content = base_values(env_config=name)
    typed = validate_env_args(content["env"], content["env_args"])
    plain = typed.model_dump(mode="json")
    assert (content["env"], content["env_args"]) == ("sc2_v2", plain) and v2_map(typed).n_agents == 5
    smac = SmacArgs().model_dump(mode="json", exclude={"map_name", "reward_shield_fix"})
    assert {key: plain[key] for key in smac} == smac


@pytest.mark.parametrize(("change", "words"), [
    ({"capability_config": {"attack": {}}}, "capability_config.attack"),
    ({"capability_config": {"team_gen": {"unit_types": ["marine"], "weights": [0.5]}}}, "add up to 1"),
    ({"obs_starcraft": False}, "obs_starcraft"), ({"obs_ordr_fix": True}, "obs_order_fix"),
    ({"map_name": "10gen_zergs"}, "10gen_zerg"),
    ({"capability_config": {"team_gen": {"unit_types": ["marine", "zealot"], "weights": [0.5, 0.5]}}}, "zealot"),
])  # fmt: skip
def test_unsupported_arguments_maps_and_races_are_rejected(change, words):
    with pytest.raises(UserError, match=words):
        v2_map(validate_env_args("sc2_v2", change))
