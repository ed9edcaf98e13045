"""SMAX equals JaxMARL's own battles: observations (in another order), masks, rewards and ends."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from omagd.envs.factory import make_env
from omagd.envs.smax import OWN_DIM, STOP, UNIT_DIM, SmaxArgs, SmaxEnv
from omagd.utils.errors import UserError

SLOTS = 8


def test_a_missing_extra_is_reported_in_one_line(monkeypatch):
    monkeypatch.setattr("omagd.envs.smax.find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        make_env("smax", {"map_name": "3m"}, 1, processes=False)
    assert caught.value.render() == "error: env=smax needs the extra: pip install -e .[smax]"


@pytest.fixture(scope="module")
def env() -> SmaxEnv:
    pytest.importorskip("jaxmarl", reason="the extra [smax] is not installed")
    return SmaxEnv(SmaxArgs(map_name="3m", max_steps=25, reward_scale=10.0), SLOTS)


def _everywhere() -> np.ndarray:
    return np.ones(SLOTS, bool)


def _enemies_first(obs: np.ndarray, n: int, m: int) -> np.ndarray:
    """Reorder JaxMARL's flat observation (allies, enemies, own) into enemies, allies, own."""
    allies = (n - 1) * UNIT_DIM
    return np.concatenate([obs[allies : allies + m * UNIT_DIM], obs[:allies], obs[allies + m * UNIT_DIM :]])


def test_a_battle_is_jaxmarls_own_with_enemies_first(env):
    """Rewards, ends, observations and masks against the package's own step and reset, not batched."""
    jax, game, n, m = env._program.jax, env._program.env, 3, 3
    rng = np.random.default_rng(1)
    env.reset(_everywhere(), np.arange(SLOTS) + 100)
    first_key = jax.numpy.array([0, 100], dtype="uint32")
    _, own = game.reset(first_key)
    seen_blocks = []
    for t in range(env.info.episode_limit):
        actions = env.scripted_actions("random" if t % 4 == 3 else "attack_nearest", rng)
        moves = {agent: jax.numpy.int32(actions[0, i]) for i, agent in enumerate(game.agents)}
        obs, own, rewards, dones, _ = game.step_env(jax.random.fold_in(first_key, t), own, moves)
        avail = game.get_avail_actions(own)
        result, seen = env.step(actions, _everywhere()), env.observe()
        np.testing.assert_allclose(result.reward[0], 10 * float(rewards["ally_0"]), rtol=1e-5)
        assert result.terminated[0] == bool(dones["__all__"])
        for i, agent in enumerate(game.agents):
            expected = _enemies_first(np.asarray(obs[agent]), n, m)
            np.testing.assert_allclose(seen.obs[0, i], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(seen.avail_actions[0, i], np.asarray(avail[agent]).astype(bool))
            seen_blocks.append(bool(expected[: m * UNIT_DIM].any()))
        if result.terminated[0]:
            break
    assert result.terminated[0] and set(seen_blocks) == {True, False}


def test_full_observations_show_exactly_the_living_units(env):
    rng = np.random.default_rng(2)
    env.reset(_everywhere(), np.arange(SLOTS) + 200)
    active = _everywhere()
    dead_seen = False
    while active.any():
        active &= ~env.step(env.scripted_actions("attack_nearest", rng), active).terminated
        seen = env.observe(full=True)
        alive = env._view["alive"]
        blocks = seen.full_obs[:, :, : 5 * UNIT_DIM].reshape(SLOTS, 3, 5, UNIT_DIM)
        for i in range(3):
            others = [3, 4, 5, *[a for a in range(3) if a != i]]
            np.testing.assert_array_equal(blocks[:, i].any(-1), alive[:, [i]] & alive[:, others])
        # Positions are relative to the observer, in units of its sight: both ways of reading them agree.
        own = seen.full_obs[:, :, -OWN_DIM:]
        place = own[:, :, 1:3] * 32
        toward = blocks[:, 0, 3, 1:3] * 9.0
        both = alive[:, 0] & alive[:, 1]
        np.testing.assert_allclose(toward[both], (place[:, 1] - place[:, 0])[both], atol=1e-4)
        dead = ~alive[:, :3]
        assert not seen.obs[dead].any() and not seen.full_obs[dead].any()
        assert (seen.avail_actions[dead] == (np.arange(8) == STOP)).all()
        dead_seen |= bool(dead.any())
    assert dead_seen


def test_the_state_is_normalised_and_shows_every_unit(env):
    rng = np.random.default_rng(3)
    env.reset(_everywhere(), np.arange(SLOTS) + 300)
    env.step(env.scripted_actions("random", rng), _everywhere())
    state = env.observe().state.reshape(SLOTS, 6, OWN_DIM)
    assert (state >= 0).all() and (state <= 1).all()
    np.testing.assert_array_equal(state[:, :3], env.observe().obs[:, :, -OWN_DIM:])
    assert (state[:, :3, 1] < state[:, 3:, 1]).all()  # allies start in the west


def test_wins_limits_and_the_order_of_scripts(env):
    """A win is a last reward of at least one (times the scale); the limit lies one step behind max_steps."""
    rng = np.random.default_rng(4)
    wins = {}
    for policy in ("random", "attack_nearest"):
        env.reset(_everywhere(), np.arange(SLOTS) + 400)
        active, length = _everywhere(), np.zeros(SLOTS, int)
        wins[policy] = 0.0
        while active.any():
            length += active
            result = env.step(env.scripted_actions(policy, rng), active)
            ended = result.terminated
            np.testing.assert_array_equal(result.info["battle_won"][ended] > 0, result.reward[ended] >= 10.0 - 1e-4)
            assert not result.truncated.any()
            wins[policy] += result.info["battle_won"].sum()
            active &= ~ended
        assert length.max() <= env.info.episode_limit == 26
    assert wins["random"] < wins["attack_nearest"]

    env.reset(_everywhere(), np.arange(SLOTS))
    for t in range(26):
        active = _everywhere()
        seen = env.observe()
        assert seen.avail_actions[:, :, STOP].all()
        # Walking west first keeps the armies apart for a while; what counts is the clock of those that live.
        result = env.step(np.full((SLOTS, 3), STOP), active)
        alive = env._view["alive"]
        fighting = alive[:, :3].any(1) & alive[:, 3:].any(1)
        np.testing.assert_array_equal(result.terminated[fighting], t == 25)


@pytest.mark.processes
def test_another_process_plays_the_same_battle_and_keeps_stdout(env):
    code = (
        "import sys, json, numpy as np\n"
        "from omagd.envs.factory import make_env\n"
        "streams = sys.stdout, sys.stderr\n"
        "env = make_env('smax', {'map_name': '3m', 'max_steps': 25}, 8, False)\n"
        "assert (sys.stdout, sys.stderr) == streams\n"
        "rng = np.random.default_rng(0)\n"
        "env.reset(np.ones(8, bool), np.arange(8))\n"
        "for _ in range(6): env.step(env.scripted_actions('random', rng), np.ones(8, bool))\n"
        "print(json.dumps(env.observe().state.astype(float).tolist()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    other = np.array(json.loads(done.stdout), np.float32)
    rng = np.random.default_rng(0)
    env.reset(_everywhere(), np.arange(SLOTS))
    for _ in range(6):
        env.step(env.scripted_actions("random", rng), _everywhere())
    np.testing.assert_array_equal(env.observe().state, other)
