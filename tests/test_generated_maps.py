"""Maps from their names: SMAC's own come out as SMAC has them, and all can be played."""

from dataclasses import replace

import numpy as np
import pytest

from omagd.envs.battle.maps import BORDER, MAPS, SIZE, generated_map, skirmish_map
from omagd.envs.factory import make_env

FROM_SMAC = [name for name in MAPS if generated_map(name) is not None]
OTHERS = ("1m 4m_vs_3m 12m 64m 1s 1s5z 4s6z 5z_vs_3s 64z 30h 2M4m1d 4m2d_vs_3m 2c_vs_9g 1c2s3z_vs_5m").split()
NOT_ARMIES = "3m_ 0m 03m 3x m 3 3m_vs_ _vs_3m 3m_vs_3m_vs_3m 1000m MMM".split()


def test_smacs_maps_come_out_of_their_names_but_for_step_limits_and_one_formation():
    """Also a check of the type order, the races and the type bits."""
    assert len(FROM_SMAC) == 16
    for name in FROM_SMAC:
        spec, known = generated_map(name), MAPS[name]
        assert replace(spec, limit=known.limit, spacing=known.spacing) == known, name
        assert spec.limit == known.limit or name.startswith(("3s_vs", "2m_vs", "3s5z_vs"))
        assert skirmish_map(name) is known


@pytest.mark.parametrize(("name", "allies", "enemies", "bits", "limit", "obs_dim", "n_actions"), [
    ("4m", "4 marine", "4 marine", 0, 60, 4 + 4 * 5 + 3 * 5 + 1, 10),
    ("7m_vs_8m", "7 marine", "8 marine", 0, 120, 4 + 8 * 5 + 6 * 5 + 1, 14),
    ("1s4z", "1 stalker 4 zealot", "1 stalker 4 zealot", 2, 120, 4 + 5 * 8 + 4 * 8 + 4, 11),
    ("4z1s", "1 stalker 4 zealot", "4 zealot 1 stalker", 2, 120, 4 + 5 * 8 + 4 * 8 + 4, 11),
    ("2M4m1d", "2 marauder 4 marine 1 medivac", "2 marauder 4 marine 1 medivac", 3, 150, 4 + 7 * 8 + 6 * 8 + 4, 13),
    ("3m_vs_2s", "3 marine", "2 stalker", 0, 120, 4 + 2 * 6 + 2 * 5 + 1, 8),
    ("1m", "1 marine", "1 marine", 0, 60, 4 + 5 + 1, 7),
])  # fmt: skip
def test_names_give_armies_sizes_and_features(name, allies, enemies, bits, limit, obs_dim, n_actions):
    """Sizes by hand: moves, units (health, position, distance, attackable, shield, type bits), the agent's own."""
    spec = generated_map(name)
    for units, text in ((spec.allies, allies), (spec.enemies, enemies)):
        counts = text.split()
        assert units == tuple(unit for k, unit in zip(counts[::2], counts[1::2], strict=True) for _ in range(int(k)))
    info = make_env("skirmish", {"map_name": name}, 1, processes=False).info
    assert (spec.unit_type_bits, info.episode_limit, info.obs_dim, info.n_actions) == (bits, limit, obs_dim, n_actions)


@pytest.mark.parametrize("name", OTHERS)
def test_all_units_start_apart_on_the_map_and_battles_end(name):
    spec = generated_map(name)
    env, everyone = make_env("skirmish", {"map_name": name}, 8, processes=False), np.ones(8, bool)
    env.reset(everyone, np.arange(8))
    units = env.rules()._backend.units
    x, y, n = units.x.copy(), units.y.copy(), spec.n_agents
    for place in (x, y):
        assert (place >= BORDER).all() and (place <= SIZE - BORDER).all()
    distance = np.hypot(x[:, :n, None] - x[:, None, n:], y[:, :n, None] - y[:, None, n:])
    assert distance.min() > 6, "no battle begins within range of weapons"
    active, rng, killed = everyone, np.random.default_rng(0), 0.0
    for _ in range(env.info.episode_limit):
        result = env.step(env.scripted_actions("attack_nearest", rng), active)
        ended = result.terminated & active
        killed += sum(float(result.info[key][ended].sum()) for key in ("dead_enemies", "dead_allies") if ended.any())
        active = active & ~result.terminated
    assert not active.any() and killed > 0


@pytest.mark.parametrize("name", NOT_ARMIES)
def test_other_names_describe_no_army(name):
    assert generated_map(name) is None
