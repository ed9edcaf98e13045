"""`sc2` on a stand-in for the game: equal to the simulator behind it, and robust when processes die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import sc2_stand_in

from omagd.envs.actions import random_actions
from omagd.envs.battle.args import SkirmishArgs, SmacArgs
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.factory import make_env
from omagd.envs.sc2.sc2_env import SC2Env
from omagd.utils.errors import UserError

pytestmark = pytest.mark.processes
EVERY_FLAG = {
    "obs_pathing_grid": True,
    "obs_last_action": True,
    "obs_timestep_number": True,
    "state_timestep_number": True,
    "reward_only_positive": False,
    "continuing_episode": True,
}


@pytest.fixture
def game(tmp_path, monkeypatch):
    """The folder of an installed stand-in; no process of it may be left at the end."""
    folder = sc2_stand_in.install(tmp_path / "StarCraftII")
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert gone(folder)


def gone(folder, seconds: float = 60.0) -> bool:
    """Return whether no game of `folder` runs any more, waiting a little for it."""
    deadline = time.monotonic() + seconds
    while sc2_stand_in.running(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sc2_stand_in.running(folder) == []


def shown(env: SC2Env) -> list[np.ndarray]:
    return [env.get_obs(), env.get_obs(no_range_limit=True), env.get_state(), env.get_avail_actions()]


@pytest.mark.parametrize(
    ("map_name", "version", "flags"),
    [("MMM2", "4.6.2", EVERY_FLAG), ("3s5z_vs_3s6z", "4.10", EVERY_FLAG), ("2c_vs_64zg", "4.10", {})],
)
def test_battles_are_those_of_the_simulator_behind_the_game(game, map_name, version, flags):
    """Two battles: units keep their columns though the game lists them in other orders with other tags."""
    sc2_stand_in.install(game, version)
    env = SC2Env(SmacArgs(map_name=map_name, game_version=version, **flags))
    mirror = SkirmishEnv(SkirmishArgs(map_name=map_name, **flags), 1)
    rng, one = np.random.default_rng(1), np.ones(1, bool)
    try:
        for number in range(2):
            env.reset(seed=5)
            mirror.reset(one, np.array([sc2_stand_in.battle_seed(5, number)]))
            for _ in range(40):
                seen = mirror.observe(full=True)
                expected = [seen.obs[0], seen.full_obs[0], seen.state[0], seen.avail_actions[0]]
                assert all((a == b).all() for a, b in zip(shown(env), expected, strict=True))
                actions = random_actions(seen.avail_actions, rng)
                reward, over, info = env.step(actions[0])
                result = mirror.step(actions, one)
                assert (reward, over) == (float(result.reward[0]), bool(result.terminated[0]))
                assert info["dead_allies"] == result.info["dead_allies"][0]
                assert info["battle_won"] == result.info["battle_won"][0]
                if over:
                    break
    finally:
        env.close()


def play(env, rng, steps=1000):
    """Play on until the episode's end and return its last result, the number of steps and the return."""
    one, total = np.ones(env.n_slots, bool), 0.0
    for step in range(1, steps + 1):
        result = env.step(random_actions(env.observe().avail_actions, rng), one)
        total += float(result.reward[0])
        if result.terminated[0]:
            return result, step, total
    return result, steps, total


@pytest.mark.parametrize("fault", ["DIE_AFTER", "HANG_AFTER", "ERROR_AFTER", "GARBLE_AFTER"])
def test_a_lost_game_voids_its_episode_only(game, monkeypatch, tmp_path, fault, caplog):
    monkeypatch.setenv(f"SC2_STAND_IN_{fault}", "5")  # of the second of the three requests that a step is
    monkeypatch.setenv("SC2_STAND_IN_ONCE", str(tmp_path / "once"))
    env = make_env("sc2", {"map_name": "3m", "game_timeout": 1.5}, 1, processes=False)
    rng, one = np.random.default_rng(0), np.ones(1, bool)
    env.reset(one, np.array([1]))
    before = None
    for _ in range(4):
        before = env.observe().obs
        env.step(random_actions(env.observe().avail_actions, rng), one)
        before = env.observe().obs
    result, steps, total = play(env, rng)
    assert (steps, total) == (1, 0.0) and result.lost[0] and result.terminated[0] and not result.truncated[0]
    assert not any(values[0] for values in result.info.values())
    assert (env.observe().obs == before).all()
    assert "was lost" in caplog.text
    stats = env.get_stats()
    assert (stats["lost_episodes"], stats["battles_game"], stats["restarts"]) == (1, 0, 0)
    env.reset(one, np.array([2]))
    result, steps, _ = play(env, rng)
    assert steps > 5 and not result.lost[0]
    stats = env.get_stats()
    assert (stats["lost_episodes"], stats["battles_game"], stats["restarts"]) == (1, 1, 1)
    env.close()


def test_a_game_that_dies_between_battles_loses_no_episode(game):
    env = SC2Env(SmacArgs())
    env.reset(seed=1)
    os.kill(sc2_stand_in.running(game)[0], signal.SIGKILL)
    env.reset(seed=2)
    stats = env.get_stats()
    assert (stats["restarts"], stats["lost_episodes"]) == (1, 0)
    assert env.get_obs().any()
    env.close()


@pytest.mark.parametrize(
    ("fault", "value", "seconds", "words"),
    [("REFUSE", "exit", 60.0, ["asked not to start", "exit code 3"]), ("REFUSE", "1", 0.7, ["did not listen within"]),
     ("DIE_ON", "join_game", 60.0, ["exit code 1"])],
)  # fmt: skip
def test_a_game_that_never_starts_is_reported_in_one_line(game, monkeypatch, fault, value, seconds, words):
    monkeypatch.setenv(f"SC2_STAND_IN_{fault}", value)
    env = SC2Env(SmacArgs(game_timeout=seconds))
    with pytest.raises(UserError) as caught:
        env.reset(seed=1)
    text = caught.value.render()
    assert "5 attempts" in text and [word for word in words if word not in text] == []
    assert len(text.splitlines()) == 1
    env.close()


def test_slow_starts_are_waited_for_and_failed_ones_repeated(game, monkeypatch, tmp_path):
    monkeypatch.setenv("SC2_STAND_IN_DELAY", "0.6")
    monkeypatch.setenv("SC2_STAND_IN_LATE_UNITS", "7")
    env = SC2Env(SmacArgs())
    env.reset(seed=1)
    assert env.get_state().any()
    env.close()
    monkeypatch.setenv("SC2_STAND_IN_REFUSE", "exit")
    monkeypatch.setenv("SC2_STAND_IN_ONCE", str(tmp_path / "once"))
    env.reset(seed=1)
    assert env.get_stats()["restarts"] == 1 and env.get_obs().any()
    env.close()


def test_each_worker_has_its_own_game_and_replay(game, tmp_path):
    env = make_env("sc2", {"map_name": "3m"}, 3, processes=True)
    everyone, rng = np.ones(3, bool), np.random.default_rng(0)
    env.reset(everyone, np.arange(3))
    assert len(np.unique(env.observe().obs.reshape(3, -1), axis=0)) == 3
    assert len(sc2_stand_in.running(game)) == 3
    os.kill(sc2_stand_in.running(game)[0], signal.SIGKILL)
    result = env.step(random_actions(env.observe().avail_actions, rng), everyone)
    assert result.lost.sum() == 1 and (result.terminated == result.lost).all()
    env.reset(result.lost, np.arange(3))
    result = env.step(random_actions(env.observe().avail_actions, rng), everyone)
    assert not result.lost.any()
    env.save_replay(str(tmp_path / "replays"))
    replays = list((tmp_path / "replays").glob("3m_*.SC2Replay"))
    assert len(replays) == 3
    assert {json.loads(path.read_bytes())["map"] for path in replays} == {"3m"}
    stats = env.get_stats()
    assert (stats["restarts"], stats["lost_episodes"]) == (1, 1)
    env.close()


def test_replay_dir_and_prefix(game, tmp_path):
    args = {"map_name": "3m", "replay_dir": "mine", "replay_prefix": "best"}
    env = make_env("sc2", args, 1, processes=False)
    env.reset(np.ones(1, bool), np.zeros(1, np.int64))
    env.save_replay(str(tmp_path / "elsewhere"))
    env.close()
    (replay,) = (game / "Replays" / "mine").iterdir()
    assert replay.name.startswith("best_") and not (tmp_path / "elsewhere").exists()


OWNER = """
import sys, time, numpy as np
from omagd.envs.factory import make_env
if __name__ == "__main__":
    env = make_env("sc2", {}, 2, processes=sys.argv[1] == "workers")
    env.reset(np.ones(2, bool), np.arange(2))
    env.observe()
    print("playing", flush=True)
    if sys.argv[2] == "exception":
        raise RuntimeError("on purpose")
    while sys.argv[2] != "end":
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("where", "how"), [("here", "exception"), ("here", "SIGKILL"), ("workers", "end"), ("workers", "SIGKILL")]
)
def test_games_end_with_the_process_that_plays_them(game, monkeypatch, tmp_path, where, how):
    monkeypatch.setenv("SC2_STAND_IN_STAY", "1")  # as the game itself may, it outlives its connection
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), where, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout.readline() == "playing\n"
    if how.startswith("SIG"):
        assert len(sc2_stand_in.running(game)) == 2
        owner.send_signal(getattr(signal, how))
    owner.wait(120)
    owner.stdout.close()
    assert gone(game)


def test_the_script_plays_instead_of_the_agents(game):
    env = SC2Env(SmacArgs(map_name="8m", game_version="latest", heuristic_ai=True, heuristic_rest=True))
    env.reset(seed=3)
    rng, over, steps = np.random.default_rng(0), False, 0
    while not over:
        actions = random_actions(env.get_avail_actions()[None], rng)[0]
        asked = actions.copy()
        _, over, info = env.step(actions)
        steps += bool((asked != actions).any())
    assert steps > 5 and info["dead_enemies"] >= 4
    env.close()
