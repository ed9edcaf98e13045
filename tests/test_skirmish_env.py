"""Environments without a game: `skirmish` with its scripted policies, and the two tiny environments."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import yaml

from omagd.config.env_info import EnvInfo
from omagd.config.loading import HERE
from omagd.envs import REGISTRY
from omagd.envs.battle.args import POLICIES, SkirmishArgs, SmacArgs
from omagd.envs.battle.maps import skirmish_map
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.sanity import MatrixGame, MatrixGameArgs, MemoryGame, MemoryGameArgs
from omagd.envs.sc2.sc2_env import SC2Env
from omagd.utils.errors import UserError

CONFIGS = HERE / "envs"


def started(env, seeds=None):
    """Start an episode in every slot; return the environment and its slots [B] bool."""
    everywhere = np.ones(env.n_slots, bool)
    env.reset(everywhere, np.arange(env.n_slots) if seeds is None else seeds)
    return env, everywhere


def win_rate(map_name, policy, n_slots=64):
    """Play one battle per slot to its end; the environment rejects actions that are not available."""
    env, active = started(SkirmishEnv(SkirmishArgs(map_name=map_name), n_slots))
    rng, won = np.random.default_rng(1), np.zeros(n_slots, bool)
    while active.any():
        result = env.step(env.scripted_actions(policy, rng), active)
        won |= result.info["battle_won"]
        active = active & ~result.terminated
    assert env.get_stats()["battles_game"] == n_slots and env.get_stats()["battles_won"] == won.sum()
    return won.mean()


def test_scripts_choose_available_actions_and_win_as_often_as_they_should():
    assert win_rate("3m", "random") < 0.1 and win_rate("2s3z", "random") < 0.1
    assert win_rate("2s3z", "attack_nearest") > 0.2
    assert win_rate("3s_vs_3z", "kiting") >= win_rate("3s_vs_3z", "attack_nearest")
    for map_name, policy in itertools.product(["MMM", "2s_vs_1sc", "bane_vs_bane"], POLICIES):
        win_rate(map_name, policy, 4)


@pytest.mark.parametrize(("map_name", "flags"), [
    ("MMM2", {"obs_timestep_number": True}),
    ("1M2m1d", {"obs_all_health": False, "obs_last_action": True}),
])  # fmt: skip
def test_the_layout_names_the_column_of_healers_whose_targets_are_the_other_agents_in_order(map_name, flags):
    env, everywhere = started(SkirmishEnv(SkirmishArgs(map_name=map_name, **flags), 1))
    layout, n, rng = env.info.layout, env.info.n_agents, np.random.default_rng(0)
    names, column = skirmish_map(map_name).allies, layout.obs_dim - layout.own_dim + layout.healer
    first = layout.move_dim + layout.n_enemies * layout.enemy_dim
    healed = 0
    for _ in range(30):
        seen = env.observe(full=True)
        alive = ~seen.avail_actions[0, :, 0]
        assert (seen.obs[0, :, column] == alive * [name == "medivac" for name in names]).all()
        blocks = seen.full_obs[0, :, first : first + (n - 1) * layout.ally_dim].reshape(n, n - 1, -1)
        for i in np.flatnonzero(seen.obs[0, :, column]):
            for j in np.flatnonzero(seen.avail_actions[0, i, 6:]):
                assert blocks[i, j - (j > i), 1] * 9 <= 6, "the ally of that place is in reach"
                healed += 1
        result = env.step(env.scripted_actions("attack_nearest", rng), everywhere)
        if result.terminated[0]:
            break
    assert healed > 0
    attackers = SkirmishEnv(SkirmishArgs(map_name="2s3z"), 1).info
    assert attackers.layout.healer == -1


def test_files_of_runs_before_healers_were_known_are_read():
    info = SkirmishEnv(SkirmishArgs(map_name="MMM"), 1).info
    old = info.to_dict()
    del old["layout"]["healer"]
    read = EnvInfo.from_dict(old)
    assert read == replace(info, layout=replace(info.layout, healer=-1)) and EnvInfo.from_dict(info.to_dict()) == info
    assert read.shape_key() == info.shape_key() == "ad527b6965df589d", "tokenizers and predictors are still accepted"
    with pytest.raises(ValueError, match="impossible"):
        EnvInfo.from_dict(replace(info, layout=replace(info.layout, healer=info.layout.own_dim)).to_dict())


def test_yaml_files_hold_every_key_with_its_default():
    for name, model in (("skirmish", SkirmishArgs), ("sc2", SmacArgs)):
        content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert (content["env"], content["env_args"]) == (name, model().model_dump())
        assert REGISTRY.get(name).args_model is model


def test_a_missing_game_is_reported_with_the_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("SC2PATH", str(tmp_path))
    with pytest.raises(UserError) as caught:
        SC2Env(SmacArgs())
    assert all(part in caught.value.render() for part in (str(tmp_path), "./install_sc2.sh", "--env-config=skirmish"))


@pytest.mark.parametrize(("payoff", "best", "best_reward", "miss", "miss_reward", "safe"), [
    ("climbing", {(0, 0)}, 11.0, (0, 1), -30.0, 2), ("penalty", {(0, 0), (2, 2)}, 10.0, (0, 2), -20.0, 1),
    ("monotonic", {(2, 2)}, 8.0, (0, 2), 2.0, 2),
])  # fmt: skip
def test_matrix_game_pays_every_pair_of_actions_in_one_step(payoff, best, best_reward, miss, miss_reward, safe):
    pairs = list(itertools.product(range(3), repeat=2))
    env, everywhere = started(MatrixGame(MatrixGameArgs(payoff=payoff, penalty=-20.0), 9))
    result = env.step(np.array(pairs), everywhere)
    assert result.terminated.all() and not result.truncated.any()
    assert {pair for pair, won in zip(pairs, result.info["battle_won"], strict=True) if won} == best
    rewards = dict(zip(pairs, result.reward, strict=True))
    assert {rewards[pair] for pair in best} == {best_reward} and rewards[miss] == miss_reward
    # On average over the partner's actions, the safe action looks best; only without a risk it is.
    assert result.reward.reshape(3, 3).mean(1).argmax() == safe
    assert (payoff == "monotonic") == (max(rewards.values()) in result.reward.reshape(3, 3)[safe])


def test_memory_game_rewards_memory_and_only_memory():
    """The cue is hidden when it must be named."""
    for answers, mean in ((lambda cues: cues.argmax(-1) + 1, 1.0), (lambda cues: np.ones((600, 2), int), 1 / 9)):
        env, everywhere = started(MemoryGame(MemoryGameArgs(n_cues=3), 600))
        shown = env.observe()
        cues = shown.obs[:, :, :3]
        assert (cues.sum(-1) == 1).all() and len(np.unique(cues[:, 1], axis=0)) == 3
        assert (shown.avail_actions == [True, False, False, False]).all()
        result = env.step(np.zeros((600, 2), int), everywhere)
        assert not result.terminated.any() and not result.reward.any()
        hidden = env.observe()
        assert len(np.unique(hidden.obs.reshape(-1, env.info.obs_dim), axis=0)) == 1
        assert (hidden.avail_actions == [False, True, True, True]).all()
        np.testing.assert_array_equal(hidden.state[:, :6].reshape(cues.shape), cues)
        result = env.step(answers(cues), everywhere)
        assert result.terminated.all()
        np.testing.assert_array_equal(result.reward, result.info["battle_won"])
        assert result.reward.mean() == pytest.approx(mean, abs=0 if mean == 1 else 0.05)
