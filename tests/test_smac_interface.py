"""SMAC's class interface: the methods that its users call, without the game (`test_smac_parity` compares values)."""

from __future__ import annotations

import numpy as np
import pytest

from omagd.envs.smac import make_smac
from omagd.utils.errors import UserError


def test_a_loop_written_for_smac_plays_skirmish():
    """The loop of SMAC's own example, by its calls: sizes, one agent at a time, until the episode ends."""
    env = make_smac("skirmish", map_name="2s3z", obs_timestep_number=True, state_timestep_number=True)
    info, rng = env.get_env_info(), np.random.default_rng(0)
    assert env.seed() is None
    obs, state = env.reset(seed=7)
    np.testing.assert_array_equal(obs, env.get_obs())
    np.testing.assert_array_equal(state, env.get_state())
    assert env.seed() == 7
    terminated, steps = False, 0
    while not terminated:
        actions = []
        for agent_id in range(info["n_agents"]):
            assert env.get_obs_agent(agent_id).shape == (env.get_obs_size(),) == (info["obs_shape"],)
            available = env.get_avail_agent_actions(agent_id)
            assert available.shape == (env.get_total_actions(),)
            actions.append(int(rng.choice(np.nonzero(available)[0])))
        reward, terminated, more = env.step(actions)
        steps += 1
        parts = env.get_state_dict()
        np.testing.assert_array_equal(np.concatenate([np.ravel(part) for part in parts.values()]), env.get_state())
        assert parts["timestep"] == np.float32(steps / env.episode_limit)
        assert parts["last_action"].argmax(axis=1).tolist() == actions
        assert isinstance(reward, float) and {"battle_won", "dead_allies", "dead_enemies"} <= set(more)
    enemies, allies = env.get_obs_enemy_feats_size(), env.get_obs_ally_feats_size()
    parts = env.get_obs_move_feats_size() + np.prod(enemies) + np.prod(allies) + env.get_obs_own_feats_size()
    assert parts == env.get_obs_size() and (enemies[0], allies[0]) == (5, 4)
    assert info["agent_features"] == ["health", "energy/cooldown", "rel_x", "rel_y", "shield", "type_0", "type_1"]
    assert info["enemy_features"] == ["health", "rel_x", "rel_y", "shield", "type_0", "type_1"]
    assert (env.n_agents, env.n_enemies, env.map_type) == (5, 5, "stalkers_and_zealots")
    env.close()


def test_the_state_comes_in_parts_whatever_the_state_is():
    plain, joined = (make_smac("skirmish", obs_instead_of_state=joined) for joined in (False, True))
    plain.reset(seed=1)
    _, state = joined.reset(seed=1)
    assert state.size == 3 * joined.get_obs_size()
    for name, part in plain.get_state_dict().items():
        np.testing.assert_array_equal(joined.get_state_dict()[name], part)


def test_one_agent_can_be_asked_without_its_range():
    env = make_smac("skirmish", map_name="3m")
    env.reset(seed=1)
    assert not env.get_visibility_matrix()[:, 3:].any()
    own, enemies = env.get_obs_move_feats_size(), slice(4, 4 + 15)
    assert own == 4 and not env.get_obs_agent(0)[enemies].any()
    assert env.get_obs_agent(0, fully_observable=True)[enemies].reshape(3, 5)[:, 1].all()


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [("smax", {}, "sc2, sc2_v2, skirmish"), ("skirmish", {"map_nam": "3m"}, "env_args.map_nam .*map_name")],
)
def test_what_cannot_be_made_is_one_line(name, keys, words):
    with pytest.raises(UserError, match=words):
        make_smac(name, **keys)
