"""Single environments as batched ones, in this process and in workers; nothing remains however workers end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import shared_memory
from walk_env import CRASH, END, N, Walk, WalkArgs, all_slots, gone, is_running, pids_of

from omagd.config.env_info import EntityLayout
from omagd.envs.protocol import BatchedEnv
from omagd.envs.sanity import MatrixGame, MatrixGameArgs, MemoryGame, MemoryGameArgs
from omagd.envs.single import BatchedAsSingle, env_info_from_dict
from omagd.envs.snakes.snakes_env import Snakes3v3, SnakesArgs
from omagd.envs.workers.process_envs import EnvWorkerError, ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.utils.errors import UserError


def _record(env: BatchedEnv, rounds: int) -> list[dict[str, np.ndarray]]:
    """Play `rounds` steps with resets as episodes end, and return all results."""
    rng = np.random.default_rng(0)
    env.reset(all_slots(env), np.arange(env.n_slots) + 10)
    records = []
    for t in range(rounds):
        active = rng.random(env.n_slots) < 0.8
        actions = env.scripted_actions("random", rng)
        result = env.step(actions, active)
        seen = env.observe(full=t % 3 > 0)
        record = {"reward": result.reward, "terminated": result.terminated, "truncated": result.truncated}
        record |= {"obs": seen.obs, "state": seen.state, "avail": seen.avail_actions}
        record |= {"full_obs": seen.full_obs} if seen.full_obs is not None else {}
        record |= {"agent_reward": result.agent_reward} if result.agent_reward is not None else {}
        records.append(record | {f"info {name}": values for name, values in result.info.items()})
        if result.terminated.any():
            env.reset(result.terminated, rng.integers(2**60, size=env.n_slots))
    return records


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
    assert env.get_stats() == {"episodes": 2.0, "win_rate": 0.5}
    with pytest.raises(NotImplementedError):
        env.save_replay("somewhere")


def test_serial_envs_return_agent_rewards():
    env, silent = SerialEnvs(Walk, WalkArgs(shares=True), 3), SerialEnvs(Walk, WalkArgs(), 3)
    assert env.info.agent_rewards and not silent.info.agent_rewards
    for one, other in zip(_record(env, 30), _record(silent, 30), strict=True):
        each = one.pop("agent_reward")
        assert each.shape == (3, N) and each.dtype == np.float32
        np.testing.assert_allclose(each.sum(1), one["reward"], rtol=1e-6)
        assert one.keys() == other.keys()  # and no result in the info is named like it
    wrong = SerialEnvs(Walk, WalkArgs(shares=True, broken="shares"), 1)
    wrong.reset(all_slots(wrong), np.zeros(1, np.int64))
    with pytest.raises(UserError, match=r"env=Walk, slot 0, seed 0, step 1: info\['agent_reward'\] has shape \(1,\)"):
        wrong.step(np.zeros((1, N), int), all_slots(wrong))


def test_one_slot_as_a_single_environment_returns_the_same():
    batched = MemoryGame(MemoryGameArgs(), 1)
    single = BatchedAsSingle(MemoryGame(MemoryGameArgs(), 1), {"map_type": "none"})
    facts = single.get_env_info()
    assert env_info_from_dict("memory_game", "2x2", facts) == batched.info
    assert facts["map_type"] == "none"
    for seed in range(4):
        single.reset(seed=seed)
        batched.reset(np.ones(1, bool), np.array([seed]))
        for actions in ([0, 0], [1, 2]):
            seen = batched.observe(full=True)
            np.testing.assert_array_equal(single.get_obs(), seen.obs[0])
            np.testing.assert_array_equal(single.get_obs(no_range_limit=True), seen.full_obs[0])
            np.testing.assert_array_equal(single.get_state(), seen.state[0])
            np.testing.assert_array_equal(single.get_avail_actions(), seen.avail_actions[0])
            result = batched.step(np.array([actions]), np.ones(1, bool))
            reward, terminated, info = single.step(np.array(actions))
            assert (reward, terminated) == (result.reward[0], result.terminated[0])
            assert info == {"battle_won": result.info["battle_won"][0], "episode_limit": False}
    with pytest.raises(ValueError, match="one slot"):
        BatchedAsSingle(MatrixGame(MatrixGameArgs(), 2))
    single, snakes = BatchedAsSingle(Snakes3v3(SnakesArgs(), 1)), Snakes3v3(SnakesArgs(), 1)
    assert env_info_from_dict("snakes_3v3", "", single.get_env_info()).agent_rewards
    single.reset(seed=3)
    snakes.reset(all_slots(snakes), np.array([3]))
    for _ in range(20):
        actions = snakes.scripted_actions("l1", np.random.default_rng(0))
        expected = snakes.step(actions, all_slots(snakes)).agent_reward[0]
        np.testing.assert_array_equal(single.step(actions[0])[2]["agent_reward"], expected)


def test_the_published_component_tuple_becomes_a_layout():
    facts = {"n_agents": 5, "n_actions": 12, "obs_shape": 55, "state_shape": 98, "episode_limit": 70}
    facts |= {"obs_component": [4, (6, 5), (4, 5), 1], "n_normal_actions": 6}
    info = env_info_from_dict("sc2", "5m_vs_6m", facts)
    assert info.layout == EntityLayout(4, 6, 5, 4, 5, 1)
    assert info.layout.obs_dim == info.obs_dim
    smax = EntityLayout(0, 3, 13, 2, 13, 10, position=(1, 2), health=0)
    facts |= {"obs_component": smax.obs_component, "entity_position": (1, 2), "entity_health": 0}
    assert env_info_from_dict("smax", "3m", facts).layout == smax


# --- what follows starts processes


@pytest.mark.processes
def test_workers_return_what_this_process_would_and_leave_nothing():
    before = shared_memory.names()
    env = ProcessEnvs(Walk, WalkArgs(), 3, name="walk")
    try:
        pids = pids_of(env)
        assert shared_memory.left_since(before) == []
        serial = SerialEnvs(Walk, WalkArgs(), 3, name="walk")
        assert env.info == serial.info
        records, expected = _record(env, 30), _record(serial, 30)
        assert any(record["truncated"].any() for record in records)
        for one, other in zip(records, expected, strict=True):
            assert one.keys() == other.keys()
            for key in one:
                np.testing.assert_array_equal(one[key], other[key], err_msg=key)
        assert env.get_stats() == {**serial.get_stats(), "worker_restarts": 0}
        with pytest.raises(NotImplementedError):
            env.save_replay("somewhere")
    finally:
        env.close()
        env.close()
    assert gone(pids)
    for call in (lambda: env.reset(all_slots(env), np.arange(3)), env.observe, env.get_stats):
        with pytest.raises(EnvWorkerError, match="closed"):
            call()


@pytest.mark.processes
def test_workers_return_agent_rewards_even_when_one_dies():
    args = SnakesArgs(opponent="l1", reward="potential")
    here, env = Snakes3v3(args, 3), ProcessEnvs(Snakes3v3, args, 3, name="snakes_3v3", per_process=2)
    try:
        assert env.info == here.info and env.info.agent_rewards
        rng, active = np.random.default_rng(0), all_slots(env)
        for each in (here, env):
            each.reset(all_slots(env), np.arange(3) + 10)
        for t in range(200):
            actions = here.scripted_actions("greedy", rng)
            if t == 60:
                os.kill(pids_of(env)[0], signal.SIGKILL)
            active = rng.random(3) < 0.95
            one, other = env.step(actions, active), here.step(actions, active)
            for name in ("agent_reward", "reward", "terminated"):
                assert getattr(one, name).dtype == getattr(other, name).dtype
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=f"{name}, step {t}")
            assert (one.agent_reward[~active] == 0).all() and (one.agent_reward[active] != 0).any(1).mean() > 0.2
        np.testing.assert_array_equal(env.observe().obs, here.observe().obs)
    finally:
        env.close()


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
    import sys, time
    import numpy as np
    from omagd.envs.workers.process_envs import ProcessEnvs
    from walk_env import Walk, WalkArgs

    if __name__ == "__main__":
        env = ProcessEnvs(Walk, WalkArgs(limit=10**9), 2)
        everywhere = np.ones(2, bool)
        env.reset(everywhere, np.arange(2))
        print(*[process.pid for process in env._workers.processes], flush=True)
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
    script = tmp_path / "host.py"
    script.write_text(textwrap.dedent(HOST))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    before = shared_memory.names()
    host = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    pids = [int(word) for word in host.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    # Ctrl-C reaches everyone in the terminal; a kill reaches the parent only.
    (os.killpg if how == signal.SIGINT else os.kill)(host.pid, how)
    _, complaints = host.communicate(timeout=20)
    assert gone(pids)
    assert shared_memory.left_since(before) == []
    assert complaints.count("Traceback") == (1 if how == signal.SIGINT else 0), complaints
