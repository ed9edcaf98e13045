"""SMAX equals JaxMARL's own battles: observations (in another order), masks, rewards and ends."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from omagd.envs.smax import OWN_DIM, STOP, UNIT_DIM, SmaxArgs, SmaxEnv

ALL = np.ones(4, bool)


@pytest.fixture(scope="module")
def env() -> SmaxEnv:
    pytest.importorskip("jaxmarl", reason="the extra [smax] is not installed")
    return SmaxEnv(SmaxArgs(map_name="3m", max_steps=30), 4)  # as in test_env_protocol.py: compiled once


def test_python_collects_garbage_without_jax(env):
    """The exception of a signal that arrives in a callback of the collection would be lost."""
    assert not [call for call in gc.callbacks if getattr(call, "__module__", "").startswith("jax")]


def play(env, policy, seed):
    """Play one battle per slot; yield (results, observations, living units [B, 6])."""
    rng, active = np.random.default_rng(seed), ALL
    env.reset(ALL, np.arange(4) + seed)
    while active.any():
        result = env.step(env.scripted_actions(policy, rng), active)
        yield result, env.observe(full=True), env._view["alive"]
        active = active & ~result.terminated


def test_a_battle_is_jaxmarls_own_with_enemies_first(env):
    """Rewards, ends, observations and masks against the package's own step and reset, not batched."""
    jax, game, rng = env._program.jax, env._program.env, np.random.default_rng(1)
    env.reset(ALL, np.arange(4) + 100)
    first_key = jax.numpy.array([0, 100], dtype="uint32")
    own = jax.tree.map(lambda value: value.astype(value.dtype), game.reset(first_key)[1])  # types as after a step
    enemy_seen, over, t = set(), False, 0
    while not over:
        actions = env.scripted_actions("random" if t % 4 == 3 else "attack_nearest", rng)
        moves = {agent: jax.numpy.int32(actions[0, i]) for i, agent in enumerate(game.agents)}
        obs, own, rewards, dones, _ = game.step_env(jax.random.fold_in(first_key, t), own, moves)
        avail, over, t = game.get_avail_actions(own), bool(dones["__all__"]), t + 1
        result, seen = env.step(actions, ALL), env.observe()
        np.testing.assert_allclose(result.reward[0], 10 * float(rewards["ally_0"]), rtol=1e-5)
        assert result.terminated[0] == over
        for i, agent in enumerate(game.agents):
            allies, enemies, me = np.split(np.asarray(obs[agent]), [2 * UNIT_DIM, 5 * UNIT_DIM])
            np.testing.assert_allclose(seen.obs[0, i], [*enemies, *allies, *me], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(seen.avail_actions[0, i], np.asarray(avail[agent]).astype(bool))
            enemy_seen.add(bool(enemies.any()))
    assert enemy_seen == {True, False}


def test_full_observations_and_state_show_exactly_the_living_units(env):
    dead_seen = False
    for _, seen, alive in play(env, "attack_nearest", 200):
        blocks = seen.full_obs[:, :, : 5 * UNIT_DIM].reshape(4, 3, 5, UNIT_DIM)
        for i in range(3):
            others = [3, 4, 5, *[a for a in range(3) if a != i]]
            np.testing.assert_array_equal(blocks[:, i].any(-1), alive[:, [i]] & alive[:, others])
        # Positions are relative to the observer, in units of its sight: both ways of reading them agree.
        own = seen.full_obs[:, :, -OWN_DIM:]
        both = alive[:, 0] & alive[:, 1]
        way = 32 * (own[:, 1, 1:3] - own[:, 0, 1:3])
        np.testing.assert_allclose(9.0 * blocks[both, 0, 3, 1:3], way[both], atol=1e-4)
        dead = ~alive[:, :3]
        dead_seen |= bool(dead.any())
        assert not seen.obs[dead].any() and not seen.full_obs[dead].any()
        assert (seen.avail_actions[dead] == (np.arange(8) == STOP)).all()
        state = seen.state.reshape(4, 6, OWN_DIM)
        assert (state >= 0).all() and (state <= 1).all()
        np.testing.assert_array_equal(state[:, :3], own)
    assert dead_seen


def test_wins_limits_and_the_order_of_scripts(env):
    """A win is a last reward of at least one (times the scale); the limit lies one step behind max_steps."""
    wins = dict.fromkeys(("random", "attack_nearest"), 0.0)
    for policy in wins:
        results = [result for result, _, _ in play(env, policy, 400)]
        assert len(results) <= env.info.episode_limit == 31
        for result in results:
            ended = result.terminated
            np.testing.assert_array_equal(result.info["battle_won"][ended] > 0, result.reward[ended] >= 10.0 - 1e-4)
            assert not result.truncated.any()
            wins[policy] += result.info["battle_won"].sum()
    assert wins["random"] < wins["attack_nearest"]
    env.reset(ALL, np.arange(4))
    for t in range(31):
        result, alive = env.step(np.full((4, 3), STOP), ALL), env._view["alive"]
        fighting = alive[:, :3].any(1) & alive[:, 3:].any(1)
        np.testing.assert_array_equal(result.terminated[fighting], t == 30)
        assert not result.truncated.any()
