"""The two tiny environments give the documented rewards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from omagd.envs.sanity import MatrixGame, MatrixGameArgs, MemoryGame, MemoryGameArgs


@pytest.mark.parametrize(
    ("payoff", "best", "best_reward", "miss", "miss_reward"),
    [
        ("climbing", {(0, 0)}, 11.0, (0, 1), -30.0),
        ("penalty", {(0, 0), (2, 2)}, 10.0, (0, 2), -7.5),
        ("monotonic", {(2, 2)}, 8.0, (0, 2), 2.0),
    ],
)
def test_matrix_game_pays_every_pair_of_actions_in_one_step(payoff, best, best_reward, miss, miss_reward):
    pairs = np.array(list(itertools.product(range(3), repeat=2)))
    env = MatrixGame(MatrixGameArgs(payoff=payoff, penalty=-7.5), len(pairs))
    everywhere = np.ones(len(pairs), bool)
    env.reset(everywhere, np.arange(len(pairs)))
    result = env.step(pairs, everywhere)
    assert result.terminated.all() and not result.truncated.any()
    won = {tuple(pair) for pair in pairs[result.info["battle_won"] > 0].tolist()}
    assert won == best
    rewards = {tuple(pair): reward for pair, reward in zip(pairs.tolist(), result.reward.tolist(), strict=True)}
    assert all(rewards[pair] == best_reward for pair in best)
    assert rewards[miss] == miss_reward


def test_averaging_over_the_partner_is_wrong_in_risky_games():
    for payoff, safe in (("climbing", 2), ("penalty", 1)):
        table = MatrixGame(MatrixGameArgs(payoff=payoff), 1).payoff
        assert table.mean(1).argmax() == safe
        assert table.max() not in table[safe]


def _play_memory(env: MemoryGame, answers) -> tuple[float, float]:
    everywhere = np.ones(env.n_slots, bool)
    first = env.observe().obs
    result = env.step(np.zeros((env.n_slots, env.info.n_agents), int), everywhere)
    assert not result.terminated.any() and not result.reward.any()
    result = env.step(answers(first), everywhere)
    assert result.terminated.all()
    np.testing.assert_array_equal(result.reward, result.info["battle_won"])
    return float(result.reward.mean()), float(result.reward.std())


def test_memory_game_rewards_memory_and_only_memory():
    env = MemoryGame(MemoryGameArgs(n_cues=3), 600)
    env.reset(np.ones(600, bool), np.arange(600))
    remembered = _play_memory(env, lambda first: first[:, :, :3].argmax(-1) + 1)
    assert remembered == (1.0, 0.0)
    env.reset(np.ones(600, bool), np.arange(600))
    blind, _ = _play_memory(env, lambda first: np.ones((600, 2), int))
    assert abs(blind - 1 / 9) < 0.05


def test_memory_game_hides_the_cue_when_it_must_be_named():
    env = MemoryGame(MemoryGameArgs(n_cues=2), 32)
    env.reset(np.ones(32, bool), np.arange(32))
    shown = env.observe()
    assert (shown.obs[:, :, :2].sum(-1) == 1).all()
    assert len(np.unique(shown.obs[:, 1], axis=0)) == 2
    assert (shown.avail_actions == [True, False, False]).all()
    env.step(np.zeros((32, 2), int), np.ones(32, bool))
    hidden = env.observe()
    assert len(np.unique(hidden.obs.reshape(-1, env.info.obs_dim), axis=0)) == 1
    assert (hidden.avail_actions == [False, True, True]).all()
    np.testing.assert_array_equal(hidden.state[:, :4].reshape(32, 2, 2), shown.obs[:, :, :2])


def test_an_unavailable_action_is_rejected_with_slot_and_agent():
    env = MemoryGame(MemoryGameArgs(), 2)
    env.reset(np.ones(2, bool), np.arange(2))
    with pytest.raises(ValueError, match="slot 1, agent 0: action 2"):
        env.step(np.array([[0, 0], [2, 0]]), np.ones(2, bool))
    env.step(np.array([[0, 0], [2, 0]]), np.array([True, False]))
