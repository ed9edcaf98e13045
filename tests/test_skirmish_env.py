"""`skirmish`: scripted policies, configuration files, and the message when the game is missing."""

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


@pytest.mark.parametrize("map_name", ["MMM", "2s_vs_1sc", "bane_vs_bane"])
def test_scripts_choose_available_actions(map_name):
    env, rng = make(map_name, 8), np.random.default_rng(1)
    for policy in env.info.scripted_policies:
        active = np.ones(8, bool)
        env.reset(active, np.arange(8))
        for _ in range(25):
            actions = env.scripted_actions(policy, rng)
            assert np.take_along_axis(env.observe().avail_actions, actions[..., None], -1).all()
            active &= ~env.step(actions, active).terminated


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


def test_random_script_is_uniform_over_available_actions():
    env, rng = make("3m", 256), np.random.default_rng(0)
    env.reset(np.ones(256, bool), np.zeros(256, np.int64))  # the same battle 256 times
    avail = env.observe().avail_actions[0]
    drawn = np.concatenate([env.scripted_actions("random", rng) for _ in range(20)])
    for agent in range(3):
        share = np.bincount(drawn[:, agent], minlength=9) / len(drawn)
        assert not share[~avail[agent]].any()
        np.testing.assert_allclose(share[avail[agent]], 1 / avail[agent].sum(), atol=0.03)


def test_the_layout_names_the_column_of_health():
    for flags in ({}, {"obs_all_health": False}):
        env = make("2s3z", 1, **flags)
        env.reset(np.ones(1, bool), np.zeros(1, np.int64))
        layout, shown = env.info.layout, env.observe(full=True).full_obs[0, 0]
        block = shown[layout.move_dim :][: layout.enemy_dim]
        assert (layout.health == -1) == bool(flags)
        assert flags or (block[layout.health] == 1.0 and layout.health < layout.enemy_dim)


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
