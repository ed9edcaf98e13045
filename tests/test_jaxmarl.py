"""JaxMARL's environments play here what they play on their own, on the host and where agents act."""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import pytest
from resident_toys import assert_same, game, played

import omagd
from omagd.config.loading import resolve
from omagd.envs.factory import make_env
from omagd.envs.jaxmarl_env import JaxMarlEnv
from omagd.envs.protocol import random_actions
from omagd.run.cli.main import config_from, main
from omagd.runners import REGISTRY as RUNNERS
from omagd.utils.errors import UserError

SLOTS = 4
ALL = np.ones(SLOTS, bool)
SMALL_HANABI = {"num_colors": 2, "num_ranks": 2, "num_cards_of_rank": [2, 1], "hand_size": 2, "max_info_tokens": 3}
WORLDS = {
    "MPE_simple_spread_v3": {"max_steps": 4, "common_reward": False, "continuing_episode": False},
    "MPE_simple_speaker_listener_v4": {"max_steps": 9, "time_limit": 5, "reward_scalarisation": "mean"},
    "overcooked": {"layout": "coord_ring", "max_steps": 6, "shaped_reward": 0.5, "random_reset": True},
    "hanabi": SMALL_HANABI,
    "coin_game": {"num_inner_steps": 5, "num_outer_steps": 1},  # its last observation is of another game
}
ENDING = ("hanabi", "coin_game")


@pytest.mark.parametrize(("env", "args"), [("jaxmarl", {"key": "hanabi"}), ("smax", {"map_name": "3m"})])
def test_a_missing_extra_is_reported_in_one_line(env, args, monkeypatch):
    for name in ("jax", "jaxmarl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        make_env(env, args, 1, processes=False)
    assert caught.value.render() == f'error: env={env} needs jax, jaxmarl: pip install "omagd[{env}]"'


def test_a_device_that_jax_has_not_is_reported_in_one_line(monkeypatch):
    jax = pytest.importorskip("jax", reason="the extra [jaxmarl] is not installed")
    monkeypatch.setattr(jax, "devices", lambda: (_ for _ in ()).throw(RuntimeError("no GPU")))
    with pytest.raises(UserError, match="JAX has no such device here"):
        make_env("smax", {}, 1, processes=False)


@cache
def made(key: str) -> JaxMarlEnv:
    """Return a world, compiled once."""
    pytest.importorskip("jaxmarl", reason="the extra [jaxmarl] is not installed")
    return make_env("jaxmarl", {"key": key, **WORLDS[key]}, SLOTS, processes=False)


def copied(env):
    return [array.copy() for array in (env.observe().obs, env.observe().state, env.observe().avail_actions)]


def episode(env, seed, script=None):
    """Play all slots to their ends; return what is shown and the results, and the actions."""
    rng, active, log, chosen = np.random.default_rng(seed), ALL, [], []
    env.reset(ALL, np.arange(SLOTS) + seed)
    while active.any():
        log += copied(env)
        chosen.append(random_actions(log[-1], rng) if script is None else script[len(chosen)])
        result = env.step(chosen[-1], active)
        log += [result.reward, result.terminated, result.truncated, result.info.get("score", active)]
        log += [] if result.agent_reward is None else [result.agent_reward]
        active = active & ~result.terminated
    return log + copied(env), chosen


@pytest.mark.parametrize("key", WORLDS)
def test_an_episode_is_jaxmarls_own_and_follows_from_seed_and_actions(key):
    """Observations, masks, rewards and ends against the package's own reset and step of one slot, not batched."""
    env = made(key)
    log, script = episode(env, 104)  # from which an agent of Overcooked earns a shaped reward
    np.testing.assert_equal(episode(env, 104, script)[0], log)
    jax, own, info = env._program.jax, env._program.env, env.info
    first, step = jax.numpy.array([0, 104], dtype="uint32"), jax.jit(own.step_env)
    (obs, state), width, over, limit = own.reset(first), 7 + info.agent_rewards, False, env.args.time_limit
    for t, actions in enumerate(script):
        seen, row, avail, reward, ended, truncated, *_ = (values[0] for values in log[width * t : width * (t + 1)])
        each = [np.asarray(obs[name]).ravel().astype(np.float32) for name in own.agents]
        for i, values in enumerate(each):
            np.testing.assert_allclose(seen[i], np.pad(values, (0, info.obs_dim - len(values))), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row, np.concatenate(each), rtol=1e-5, atol=1e-6)
        if key == "hanabi":
            masks = own.get_legal_moves(state).values()
            assert (avail == np.stack([np.asarray(mask) for mask in masks]).astype(bool)).all()
            assert avail[:, :-1].any(1).sum() == 1 and (avail[:, -1] != avail[:, :-1].any(1)).all()
        else:
            assert avail.sum(1).tolist() == [own.action_space(name).n for name in own.agents]
        moves = {name: jax.numpy.int32(actions[0, i]) for i, name in enumerate(own.agents)}
        obs, state, rewards, dones, more = step(jax.random.fold_in(first, t), state, moves)
        given = np.array([float(rewards[name]) for name in own.agents])
        if key == "overcooked":
            given += 0.5 * np.array([float(more["shaped_reward"][name]) for name in own.agents])
        wanted = given.mean() if env.args.reward_scalarisation == "mean" else given.sum()
        assert reward == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        if info.agent_rewards:
            np.testing.assert_allclose(log[width * t + 7][0], given, rtol=1e-4, atol=1e-6)
        over = bool(dones["__all__"]) or t + 1 == limit
        assert (ended, truncated) == (over, over and key not in ENDING and env.args.continuing_episode)
        if over:
            break
    assert key != "overcooked" or log[width * t + 6][0] == 0, "no soup: rewards that shape are no score"
    assert over and (key == "hanabi" or t + 1 == info.episode_limit == {"overcooked": 6}.get(key, 5))


def test_snapshots_continue_bit_for_bit():
    for key in WORLDS:
        env = made(key)
        log, script = episode(env, 7)
        env.reset(ALL, np.arange(SLOTS) + 7)
        env.step(script[0], ALL)
        saved, after = env.snapshot(), []
        for _ in range(2):
            env.restore(saved)
            result = env.step(script[1], ALL)
            after.append([*copied(env), result.reward, result.terminated])
            episode(env, 9)
        np.testing.assert_equal(after[0], after[1])


@pytest.mark.parametrize("key", [key for key in WORLDS if key != "MPE_simple_spread_v3"])
def test_rounds_where_agents_act_are_those_of_the_host(key):
    env = made(key)
    both = [game(runner=runner, env=env, slots=SLOTS) for runner in ("parallel", "resident")]
    one, other = (played(plays, mac, explore=None, full_obs=True) for plays, mac in both)
    assert one.n_episodes == SLOTS and {entry["episode_limit"] for entry in one.log} == {key not in ENDING}
    assert ["score" in entry for entry in one.log] == [key == "overcooked"] * SLOTS
    assert_same(one, other)


def test_rewards_of_single_agents_are_not_played_on_a_device():
    keys = {"runner": "resident", "env_args.key": "hanabi", "env_args.common_reward": False}
    with pytest.raises(UserError, match=r"not with env_args.common_reward=False. Use runner=parallel"):
        RUNNERS.get("resident").check(resolve(config="iql", env_config="jaxmarl", updates=keys))


@pytest.mark.parametrize(("key", "more", "words"), [
    ("hanaby", {}, "Did you mean 'hanabi'? Known: "), ("HeuristicEnemySMAX", {}, "Use --env-config=smax"),
    ("overcooked", {"layout": "cramped_rom"}, "layout=cramped_rom is not known. Did you mean 'cramped_room'?"),
    ("overcooked", {"maxsteps": 9}, "unexpected keyword argument 'maxsteps'"),
    ("MPE_simple_spread_v3", {"max_step": 9}, "it does not read env_args.max_step=9"),
    ("MPE_simple_spread_v3", {"action_type": "Continuous"}, "its actions are Box; only Discrete"),
    ("hanabi", {"num_agents": 9}, "Number of agents must be between 2 and 5"),
])  # fmt: skip
def test_what_cannot_be_played_is_one_line(key, more, words, capsys):
    pytest.importorskip("jaxmarl", reason="the extra [jaxmarl] is not installed")
    given = [f"env_args.{name}={value}" for name, value in {"key": key, **more}.items()]
    assert main(["--config=iql", "--env-config=jaxmarl", "--dry-run", "with", *given]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said and said.startswith("error: env_args.")


LEARNING = {
    "MPE_simple_speaker_listener_v4": "--config=vdn with obs_agent_id=True",
    "overcooked": "--config=mappo with agent=cnn_rnn agent_args.layers=[[4,3,1]] runner=resident",
    "hanabi": "--config=iql with runner=resident",
}


@pytest.mark.parametrize("key", LEARNING)
def test_learners_train(key, tmp_path):
    pytest.importorskip("jaxmarl", reason="the extra [jaxmarl] is not installed")
    config, _, more = LEARNING[key].partition(" with ")
    words = "batch_size_run=4 batch_size=4 t_max=40 test_nepisode=4 test_interval=20 seed=1 use_cuda=False"
    given = [f"env_args.{name}={str(value).replace(' ', '')}" for name, value in {"key": key, **WORLDS[key]}.items()]
    words = [config, "--env-config=jaxmarl", "with", *more.split(), *words.split(), f"local_results_path={tmp_path}"]
    results = omagd.run(config_from([*words, "save_model=False", *given]))
    assert np.isfinite(results["stages"]["stage3"]["values"]["test_return_mean"])
