"""The skirmish environment: batches, snapshots, scripted players, and the door to the real game."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from omagd.envs import REGISTRY
from omagd.envs.battle import scripted
from omagd.envs.battle.args import SkirmishArgs, SmacArgs
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.sc2.install import builds
from omagd.envs.sc2.sc2_env import SC2Env
from omagd.utils.errors import UserError

CONFIGS = Path(scripted.__file__).parents[2] / "config" / "envs"


def make(map_name, n_slots, **flags):
    return SkirmishEnv(SkirmishArgs(map_name=map_name, **flags), n_slots)


def copy(observation):
    return [v.copy() for v in (observation.obs, observation.full_obs, observation.state, observation.avail_actions)]


def slot_actions(avail, rngs):
    """Random actions in which each slot draws from a generator of its own."""
    return np.stack([np.where(a, rng.random(a.shape), -1).argmax(-1) for a, rng in zip(avail, rngs, strict=True)])


def play(env, seeds, steps):
    """Play from `seeds` with per-slot randomness; return everything seen and received, per slot."""
    everyone = np.ones(env.n_slots, bool)
    env.reset(everyone, np.asarray(seeds))
    rngs, active, log = [np.random.default_rng(s) for s in seeds], everyone.copy(), [[] for _ in seeds]
    for _ in range(steps):
        seen = copy(env.observe(full=True))
        result = env.step(slot_actions(seen[3], rngs), active)
        for b in np.flatnonzero(active):
            facts = [v[b] for v in (result.reward, result.terminated, result.truncated, *result.info.values())]
            log[b].append([*(v[b] for v in seen), *facts])
        active &= ~result.terminated
    return log


@pytest.mark.parametrize("map_name", ["5m_vs_6m", "MMM2"])
def test_batch_of_64_equals_64_singles(map_name):
    seeds = np.arange(64) * 7 + 1
    batch = play(make(map_name, 64), seeds, 25)
    single = make(map_name, 1)
    for b in range(0, 64, 9):
        alone = play(single, seeds[b : b + 1], 25)[0]
        assert len(alone) == len(batch[b])
        for mine, theirs in zip(alone, batch[b], strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(mine, theirs, strict=True))
    assert len({log[0][0].tobytes() for log in batch}) > 32  # seeds make different battles


def test_snapshot_continues_bit_for_bit():
    env = make("2s3z", 8, obs_last_action=True, obs_timestep_number=True)
    rng = np.random.default_rng(0)
    everyone = np.ones(8, bool)
    env.reset(everyone, np.arange(8))
    for _ in range(12):
        env.step(env.scripted_actions("attack_nearest", rng), everyone)
    saved = env.snapshot()

    def rest(world):
        active, out, generator = everyone.copy(), [], np.random.default_rng(5)
        for _ in range(30):
            out += copy(world.observe(full=True))
            result = world.step(world.scripted_actions("random", generator), active)
            out += [result.reward, result.terminated]
            active &= ~result.terminated
        return [*out, np.array(sorted(world.get_stats().items()))[:, 1]]

    first = rest(env)
    other = make("2s3z", 8, obs_last_action=True, obs_timestep_number=True)
    for world in (env, other):
        world.restore(saved)
        assert all(np.array_equal(a, b) for a, b in zip(first, rest(world), strict=True))


@pytest.mark.parametrize("map_name", ["3m", "MMM", "2s_vs_1sc", "bane_vs_bane"])
@pytest.mark.parametrize("policy", scripted.POLICIES)
def test_scripts_choose_available_actions(map_name, policy):
    env, rng = make(map_name, 16), np.random.default_rng(1)
    everyone = np.ones(16, bool)
    env.reset(everyone, np.arange(16))
    active = everyone.copy()
    for _ in range(30):
        actions = env.scripted_actions(policy, rng)
        assert actions.shape == (16, env.info.n_agents) and np.issubdtype(actions.dtype, np.integer)
        assert np.take_along_axis(env.observe().avail_actions, actions[..., None], -1).all()
        active &= ~env.step(actions, active).terminated
    assert policy in env.info.scripted_policies


def wins(map_name, policy, n_slots=64):
    env, rng = make(map_name, n_slots), np.random.default_rng(1)
    active = np.ones(n_slots, bool)
    env.reset(active, np.arange(n_slots))
    won = np.zeros(n_slots, bool)
    while active.any():
        result = env.step(env.scripted_actions(policy, rng), active)
        won |= result.info["battle_won"]
        active &= ~result.terminated
    assert env.get_stats()["battles_game"] == n_slots and env.get_stats()["battles_won"] == won.sum()
    return won.mean()


def test_scripts_are_ordered_as_they_should_be():
    assert wins("3m", "random") < 0.1 and wins("2s3z", "random") < 0.1
    assert wins("2s3z", "attack_nearest") > 0.2
    assert wins("3s_vs_3z", "kiting") >= wins("3s_vs_3z", "attack_nearest")


def test_unknown_script_is_refused():
    env = make("3m", 1)
    env.reset(np.ones(1, bool), np.zeros(1, np.int64))
    with pytest.raises(NotImplementedError, match="cheat"):
        env.scripted_actions("cheat", np.random.default_rng(0))


def test_random_script_is_uniform_over_available_actions():
    env, rng = make("3m", 256), np.random.default_rng(0)
    env.reset(np.ones(256, bool), np.zeros(256, np.int64))  # the same battle 256 times
    avail = env.observe().avail_actions[0]
    drawn = np.concatenate([env.scripted_actions("random", rng) for _ in range(20)])
    for agent in range(3):
        share = np.bincount(drawn[:, agent], minlength=9) / len(drawn)
        assert not share[~avail[agent]].any()
        np.testing.assert_allclose(share[avail[agent]], 1 / avail[agent].sum(), atol=0.03)


def test_inactive_slots_stand_still():
    env, rng = make("8m", 4), np.random.default_rng(0)
    env.reset(np.ones(4, bool), np.arange(4))
    some = np.array([True, False, True, False])
    before = copy(env.observe(full=True))
    result = env.step(env.scripted_actions("attack_nearest", rng), some)
    after = copy(env.observe(full=True))
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[~some], new[~some])
    assert not np.array_equal(before[0][some], after[0][some])
    assert not result.reward[~some].any() and not any(v[~some].any() for v in result.info.values())


def test_full_observation_agrees_with_what_is_seen():
    env, rng = make("3s5z", 32), np.random.default_rng(0)
    active = np.ones(32, bool)
    env.reset(active, np.arange(32))
    hidden = 0
    for _ in range(40):
        got = env.observe(full=True)
        shown = got.obs != 0
        assert np.array_equal(got.obs[shown], got.full_obs[shown])
        hidden += ((got.full_obs != 0) & ~shown).sum()
        active &= ~env.step(env.scripted_actions("random", rng), active).terminated
    assert hidden > 1000


def test_the_layout_says_where_others_health_stands():
    for flags in ({}, {"obs_all_health": False}):
        env = make("2s3z", 1, **flags)
        env.reset(np.ones(1, bool), np.zeros(1, np.int64))
        layout, shown = env.info.layout, env.observe(full=True).full_obs[0, 0]
        block = shown[layout.move_dim :][: layout.enemy_dim]
        assert (layout.health == -1) == bool(flags)
        assert flags or (block[layout.health] == 1.0 and layout.health < layout.enemy_dim)


def test_unknown_map_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="5m_vs_6m"):
        make("5m_vs_6n", 1)


def test_yaml_files_hold_every_key_with_its_default():
    for name, model in (("skirmish", SkirmishArgs), ("sc2", SmacArgs)):
        content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert content["env"] == name
        assert content["env_args"] == model().model_dump()
        assert REGISTRY.get(name).args_model is model


def test_sc2_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("SC2PATH", str(tmp_path))
    assert builds() == []
    with pytest.raises(UserError) as caught:
        SC2Env(SmacArgs())
    text = caught.value.render()
    assert str(tmp_path) in text and "./install_sc2.sh" in text and "--env-config=skirmish" in text
    assert len(text.splitlines()) <= 3
    (tmp_path / "Versions" / "Base75689").mkdir(parents=True)
    (tmp_path / "Versions" / "Base75689" / "SC2_x64").touch()
    assert builds() == [75689]
    with pytest.raises(UserError, match="--maps-only"):
        SC2Env(SmacArgs())
