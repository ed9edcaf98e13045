"""`skirmish` with other sights and starts: what agents see, where battles begin, and what is rejected."""

from dataclasses import replace

import numpy as np
import pytest

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled.engine import compiled
from omagd.envs.battle.maps import BORDER, MAPS, SIZE
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.battle.units import UNITS
from omagd.envs.factory import make_env
from omagd.utils.errors import UserError

WALLED = ("corridor", "2c_vs_64zg")
OPEN = [name for name in MAPS if name not in WALLED]
SEEDS = np.arange(2048) * 10**15
COMPILED = compiled()[0]


def begin(name, start, seeds=SEEDS):
    """Return a simulator whose battles have begun."""
    sim = COMPILED(SkirmishArgs(map_name=name, start=start).spec, len(seeds))
    sim.reset(np.ones(len(seeds), bool), seeds)
    return sim


def places(name, start):
    """Return the allies' and the enemies' places, each [B, units, 2] float64."""
    sim = begin(name, start)
    both, n = np.stack([sim.units.x, sim.units.y], -1).astype(float), MAPS[name].n_agents
    return both[:, :n], both[:, n:]


# --- where battles begin


@pytest.mark.parametrize(("name", "start"), list(zip(OPEN, ["mixed", "hidden"] * len(OPEN), strict=False)))
def test_all_units_begin_on_the_ground(name, start):
    sim = begin(name, start, SEEDS[:256])
    radius = np.array([UNITS[i].radius for i in MAPS[name].unit_ids()])
    for place in (sim.units.x, sim.units.y):
        assert (place >= BORDER + radius - 1e-5).all() and (place <= SIZE - BORDER - radius + 1e-5).all()
    assert overlaps(sim, radius) <= 1.15 * overlaps(begin(name, "formation", SEEDS[:256]), radius)


def overlaps(sim, radius):
    x, y = sim.units.x, sim.units.y
    apart = np.hypot(x[:, :, None] - x[:, None], y[:, :, None] - y[:, None])
    return (apart < radius[:, None] + radius).sum() - apart.shape[0] * apart.shape[1]


@pytest.mark.parametrize("start", ["mixed", "hidden"])
def test_a_start_depends_on_its_seed_alone(start):
    def state(seeds):
        return begin("MMM2", start, seeds).snapshot()["floats"]

    alone, together = np.concatenate([state(SEEDS[k : k + 1]) for k in range(8)], -1), state(SEEDS)
    np.testing.assert_array_equal(alone, together[..., :8])
    np.testing.assert_array_equal(state(SEEDS[::-1]), together[..., ::-1])
    assert len(np.unique(together[0, 0])) > 1000


def mirrored(ally, enemy):
    """Return [B] bool: each of the first enemies is an ally's mirror image."""
    image = np.stack([SIZE - enemy[..., 0], enemy[..., 1]], -1)[:, : ally.shape[1]]
    return (np.abs(image[:, :, None] - ally[:, None]).max(-1) < 1e-4).any(2).all(1)


def test_half_of_the_mixed_battles_are_mirrored():
    """As SMACv2's `reflect_position`: allies anywhere in the west, further enemies anywhere in the east."""
    ally, enemy = places("5m_vs_6m", "mixed")
    mirrors = mirrored(ally, enemy)
    assert mirrors.mean() == pytest.approx(0.5, abs=0.05)  # 4.5 standard errors
    ally, more = ally[mirrors], enemy[mirrors, 5]
    low = BORDER + 0.375
    for values, least, greatest in (
        (ally[..., 0], low, 15), (ally[..., 1], low, SIZE - low),
        (more[..., 0], 16, SIZE - low), (more[..., 1], low, SIZE - low),
    ):  # fmt: skip
        share = (values.ravel() - least) / (greatest - least)
        assert (np.abs(np.quantile(share, [0, 0.25, 0.5, 0.75, 1]) - [0, 0.25, 0.5, 0.75, 1]) < 0.06).all()
    # Allies are sorted and enemies are not: an enemy's number does not tell whose image it is.
    image = np.abs(enemy[mirrors, 0, None, 1] - ally[..., 1]).argmin(1)
    assert (np.abs(np.bincount(image, minlength=5) / len(image) - 0.2) < 0.06).all()


# --- what agents see


@pytest.mark.parametrize("sight", [2.0, 5.0, 6.0, 7.5, 12.0])
@pytest.mark.parametrize("name", ["3m", "MMM"])
def test_agents_see_and_attack_up_to_their_sight(name, sight):
    """Independent of the code under test: from positions, once per agent and unit."""
    env = SkirmishEnv(SkirmishArgs(map_name=name, start="mixed", sight_range=sight), 32)
    env.reset(np.ones(32, bool), SEEDS[:32])
    rng, layout, n = np.random.default_rng(0), env.info.layout, env.info.n_agents
    assert layout.sight == sight and set(env.rules().ranges(0)[0]) == {sight} == set(env.rules().frame(0).scene.sight)
    found = 0
    for _ in range(12):
        shown, units = env.observe(full=True), env.rules()._backend.units
        x, y, alive = units.x.astype(float), units.y.astype(float), units.alive
        dx, dy = (each[:, None, :] - each[:, :n, None] for each in (x, y))
        distance, pair = np.hypot(dx, dy), alive[:, None] & alive[:, :n, None]
        near = pair & (distance < sight)
        size = layout.n_enemies * layout.enemy_dim
        blocks = shown.obs[..., layout.move_dim : layout.move_dim + size].reshape(32, n, layout.n_enemies, -1)
        seen = near[..., n:]
        assert ((blocks != 0).any(-1) == seen).all()
        np.testing.assert_array_equal(blocks[..., 1][seen], (distance[..., n:][seen] / sight).astype(np.float32))
        np.testing.assert_array_equal(blocks[..., 2][seen], (dx[..., n:][seen] / sight).astype(np.float32))
        attack = shown.avail_actions[:, :, 6 : 6 + layout.n_enemies]
        healer = env.rules()._medivac()[:, :n, None]
        assert (np.where(healer, False, attack) == (seen & (distance[..., n:] <= 6) & ~healer)).all()
        if healer.any():
            heals = shown.avail_actions[:, :, 6 : 6 + n] & healer
            assert not (heals & ~near[..., :n]).any()
        full = shown.full_obs[..., layout.move_dim : layout.move_dim + size].reshape(blocks.shape)
        np.testing.assert_array_equal(full[seen], blocks[seen])
        assert ((full[..., 1:] != 0).any(-1) == pair[..., n:]).all()
        found += int(seen.sum())
        env.step(env.scripted_actions("attack_nearest", rng), ~env.rules().ended)
    assert found > 50


# --- names, keys and what does not fit


def test_a_map_may_say_its_fog():
    given = SkirmishArgs(map_name="3m", start="mixed", sight_range=6)
    named = SkirmishArgs(map_name="3m_mixed_sight6")
    assert given == named == SkirmishArgs(map_name="3m_mixed_sight6", start="mixed") and named.spec.name
    assert named.spec == replace(MAPS["3m"], name="3m_mixed_sight6", start="mixed", sight_range=6.0)
    assert SkirmishArgs(map_name="3s_vs_5z_sight4.5").spec.name == "3s_vs_5z_sight4.5"
    assert SkirmishArgs(map_name="4m_hidden").spec.start == "hidden"
    assert SkirmishArgs(map_name="3m", sight_range=9, start="formation").spec is MAPS["3m"]


@pytest.mark.parametrize(("env_args", "words"), [
    ({"map_name": "corridor", "start": "mixed"}, "env_args.start=mixed: works on open maps, all but corridor and"),
    ({"map_name": "3m_mixed", "start": "hidden"}, "env_args.map_name=3m_mixed: says start=mixed, not hidden"),
    ({"map_name": "3m_sight5", "sight_range": 6}, "says sight_range=5.0, not 6"),
    ({"map_name": "3m_sight0"}, "env_args.sight_range=0.0: must be at least 2"),
    ({"map_name": "3m", "sight_range": 1}, "env_args.sight_range=1: must be at least 2"),
    ({"map_name": "3n_mixed_sight6"}, "each also with a start and a sight, as in 3m_mixed_sight6"),
    ({"map_name": ["3m_sight6", "5m"]}, "cannot be in one set: sight is"),
])  # fmt: skip
def test_what_does_not_fit_is_rejected(env_args, words):
    with pytest.raises(UserError) as caught:
        make_env("skirmish", env_args, 1, processes=False)
    assert words in caught.value.message
