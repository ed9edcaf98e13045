"""`env` and `env_args` become an environment; single ones become batched, in this process and in workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shared_memory
from walk_env import CRASH, END, N, SteadyArgs, SteadyWalk, Walk, WalkArgs, all_slots, gone, is_running, pids_of

from omagd.config.env_info import EntityLayout
from omagd.envs import REGISTRY
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.factory import make_env, validate_env_args
from omagd.envs.sanity import MemoryGame, MemoryGameArgs
from omagd.envs.single import BatchedAsSingle, env_info_from_dict
from omagd.envs.snakes.snakes_env import Snakes3v3, SnakesArgs
from omagd.envs.workers.process_envs import EnvWorkerError, ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.utils.errors import UserError


def test_environments_are_built_as_they_are_or_with_an_adapter(monkeypatch):
    class Required(WalkArgs):
        size: int

    batched = make_env("memory_game", {"n_cues": 4}, 5, processes=False)
    assert type(batched) is MemoryGame and (batched.n_slots, batched.info.n_actions) == (5, 5)
    monkeypatch.setitem(REGISTRY._objects, "walk", Walk)
    monkeypatch.setattr(Walk, "args_model", Required)
    env = make_env("walk", {"size": 7}, 3, processes=False)
    assert type(env) is SerialEnvs and (env.info.name, env.info.obs_dim, env.n_slots) == ("walk", 2, 3)
    with pytest.raises(UserError, match="env_args.size"):
        validate_env_args("walk", {})
    assert validate_env_args("skirmish", {"difficulty": 3}) == validate_env_args("skirmish", {"difficulty": "3"})


def test_serial_envs_return_everything_that_the_single_environment_returns():
    env = SerialEnvs(Walk, WalkArgs(limit=2), 3, name="walk")
    assert env.info.name == "walk" and env.info.obs_dim == 2 and env.info.layout is None
    env.reset(all_slots(env), np.array([5, 6, 7]))
    alone = Walk(WalkArgs(limit=2))
    alone.reset(seed=6)
    np.testing.assert_array_equal(env.observe().obs[1], alone.get_obs())
    np.testing.assert_array_equal(env.observe(full=True).full_obs[1], alone.get_obs(no_range_limit=True))
    first = env.step(np.zeros((3, N), int), np.array([True, True, False]))
    assert first.reward[1] == np.float32(alone.step(np.zeros(N, int))[0])
    assert first.reward[2] == 0 and not first.terminated.any()
    second = env.step(np.array([[0, 0], [0, END], [0, 0]]), all_slots(env))
    assert second.terminated.tolist() == [True, True, False]
    assert second.truncated.tolist() == [True, False, False]
    assert second.info["battle_won"].tolist() == [0, 1, 0]
    assert second.info["steps"].tolist() == [2, 2, 0]
    assert "comment" not in second.info
    stats = env.get_stats()
    assert (stats["episodes"], stats["win_rate"]) == (2.0, 0.5)
    with pytest.raises(NotImplementedError):
        env.save_replay("somewhere")


def test_scripts_choose_anew_after_each_step_and_reset():
    env, rng = SerialEnvs(SteadyWalk, SteadyArgs(), 9), np.random.default_rng(0)
    for _ in range(2):
        env.reset(all_slots(env), np.arange(9))
        assert not env.scripted_actions("wander", rng).any()
        env.step(np.zeros((9, N), int), all_slots(env))
        assert env.scripted_actions("wander", rng).any()


def test_serial_envs_return_agent_rewards():
    env, rng = SerialEnvs(Walk, WalkArgs(shares=True), 3), np.random.default_rng(0)
    assert env.info.agent_rewards and not SerialEnvs(Walk, WalkArgs(), 3).info.agent_rewards
    env.reset(all_slots(env), np.arange(3))
    for active in rng.random((30, 3)) < 0.8:
        result = env.step(env.scripted_actions("random", rng), active)
        assert result.agent_reward.shape == (3, N) and result.agent_reward.dtype == np.float32
        np.testing.assert_allclose(result.agent_reward.sum(1), result.reward, rtol=1e-6)
        assert "agent_reward" not in result.info
        env.reset(result.terminated, np.arange(3))
    wrong = SerialEnvs(Walk, WalkArgs(shares=True, broken="shares"), 1)
    wrong.reset(all_slots(wrong), np.zeros(1, np.int64))
    with pytest.raises(UserError, match=r"env=Walk, slot 0, seed 0, step 1: info\['agent_reward'\] has shape \(1,\)"):
        wrong.step(np.zeros((1, N), int), all_slots(wrong))


@pytest.mark.parametrize(("env_cls", "args"), [(MemoryGame, MemoryGameArgs()), (Snakes3v3, SnakesArgs())])
def test_one_slot_as_a_single_environment_returns_the_same(env_cls, args):
    batched, single = env_cls(args, 1), BatchedAsSingle(env_cls(args, 1), {"map_type": "none"})
    facts, info, rng = single.get_env_info(), batched.info, np.random.default_rng(0)
    rebuilt = env_info_from_dict(info.name, info.map_name, facts)
    assert (rebuilt.obs_dim, rebuilt.agent_rewards, facts["map_type"]) == (info.obs_dim, info.agent_rewards, "none")
    for seed in range(4):
        single.reset(seed=seed)
        batched.reset(np.ones(1, bool), np.array([seed]))
        terminated = False
        while not terminated:
            seen = batched.observe(full=True)
            np.testing.assert_array_equal(single.get_obs(), seen.obs[0])
            np.testing.assert_array_equal(single.get_obs(no_range_limit=True), seen.full_obs[0])
            np.testing.assert_array_equal(single.get_state(), seen.state[0])
            np.testing.assert_array_equal(single.get_avail_actions(), seen.avail_actions[0])
            actions = batched.scripted_actions("random", rng)
            result = batched.step(actions, np.ones(1, bool))
            reward, terminated, found = single.step(actions[0])
            assert (reward, terminated) == (result.reward[0], result.terminated[0])
            if info.agent_rewards:
                np.testing.assert_array_equal(found.pop("agent_reward"), result.agent_reward[0])
            expected = {name: values[0] for name, values in result.info.items()}
            assert found == {**expected, "episode_limit": result.truncated[0]}
    with pytest.raises(ValueError, match="one slot"):
        BatchedAsSingle(env_cls(args, 2))


def test_the_published_component_tuple_becomes_a_layout():
    facts = {"n_agents": 5, "n_actions": 12, "obs_shape": 55, "state_shape": 98, "episode_limit": 70}
    facts |= {"obs_component": [4, (6, 5), (4, 5), 1], "n_normal_actions": 6}
    info = env_info_from_dict("sc2", "5m_vs_6m", facts)
    assert info.layout == EntityLayout(4, 6, 5, 4, 5, 1)
    assert info.layout.obs_dim == info.obs_dim
    smax = EntityLayout(0, 3, 13, 2, 13, 10, position=(1, 2), health=0)
    facts |= {"obs_component": smax.obs_component, "entity_position": (1, 2), "entity_health": 0}
    assert env_info_from_dict("smax", "3m", facts).layout == smax
    healers = BatchedAsSingle(SkirmishEnv(SkirmishArgs(map_name="MMM_sight6"), 1))
    assert env_info_from_dict("skirmish", "MMM", healers.get_env_info()).layout == healers.env.info.layout


# --- what follows starts processes


@pytest.mark.processes
def test_a_workers_error_is_raised_with_its_traceback_and_ends_the_others():
    env = ProcessEnvs(Walk, WalkArgs(), 2)
    pids = pids_of(env)
    env.reset(all_slots(env), np.arange(2))
    with pytest.raises(EnvWorkerError, match=r"(?s)worker 1 failed.*in step.*the ground gave way"):
        env.step(np.array([[0, 0], [CRASH, 0]]), all_slots(env))
    assert gone(pids)
    with pytest.raises(UserError, match="env_args.broken=user"):
        ProcessEnvs(Walk, WalkArgs(broken="user"), 1)


HOST = """
import numpy as np
from omagd.envs.workers.process_envs import ProcessEnvs
from walk_env import Walk, WalkArgs, pids_of

if __name__ == "__main__":
    env, everywhere = ProcessEnvs(Walk, WalkArgs(limit=10**9), 2), np.ones(2, bool)
    env.reset(everywhere, np.arange(2))
    print(*pids_of(env), flush=True)
    try:
        while True:
            env.step(np.zeros((2, 2), int), everywhere)
    finally:
        env.close()
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the death signal of a parent is Linux's")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path, how):
    script, before = tmp_path / "host.py", shared_memory.names()
    script.write_text(HOST)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    host = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    pids = [int(word) for word in host.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    # Ctrl-C reaches all processes of the terminal, a kill the parent only.
    (os.killpg if how == signal.SIGINT else os.kill)(host.pid, how)
    _, complaints = host.communicate(timeout=20)
    assert gone(pids)
    assert shared_memory.left_since(before) == []
    assert complaints.count("Traceback") == (1 if how == signal.SIGINT else 0), complaints
