"""`sc2` on a stand-in for the game: killed games, workers and commands; `test_smac_parity` compares battles."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import shared_memory
from command_budgets import BUDGETS
from command_harness import FORKED, MAIN, PYTHON, Started, left_behind, records, run_folders, summary_of
from sc2_stand_in import running
from sockets import living, wait_until
from walk_env import is_running

from omagd.envs.battle.args import SmacArgs, SmacV2Args
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.envs.sc2 import backend, v2_backend
from omagd.envs.sc2.sc2_env import SC2Env, SC2V2Env
from omagd.utils.errors import UserError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's list of processes"),
]
ONE = np.ones(1, bool)


@pytest.fixture
def game(sc2_game, monkeypatch):
    """The folder of a game that outlives its connection, as the real one may."""
    monkeypatch.setenv("SC2_STAND_IN_STAY", "1")
    return sc2_game


@pytest.fixture
def killed_game(game, tmp_path, monkeypatch):
    """The folder of a game; its tests kill workers, and no shared memory may be left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # torch leaves it there
    before = shared_memory.names()
    yield game
    assert shared_memory.left_since(before) == []


def play_on(env, rng, active=ONE):
    return env.step(random_actions(env.observe().avail_actions, rng), active)


@pytest.mark.parametrize("fault", ["DIE_AFTER", "HANG_AFTER", "ERROR_AFTER", "GARBLE_AFTER"])
def test_a_lost_game_voids_its_episode_only(game, monkeypatch, tmp_path, fault, caplog):
    monkeypatch.setenv(f"SC2_STAND_IN_{fault}", "5")  # of the second of the three requests that a step is
    monkeypatch.setenv("SC2_STAND_IN_ONCE", str(tmp_path / "once"))
    args = {"map_name": "3m", "game_timeout": 10.0 if fault == "HANG_AFTER" else 60.0}
    env, rng = make_env("sc2", args, 1, processes=False), np.random.default_rng(0)

    def counters():
        return tuple(env.get_stats()[name] for name in ("lost_episodes", "battles_game", "restarts"))

    env.reset(ONE, np.array([1]))
    for _ in range(4):
        assert not play_on(env, rng).terminated[0]
    before = env.observe().obs
    result = play_on(env, rng)
    assert result.lost[0] and result.terminated[0] and not result.truncated[0] and result.reward[0] == 0
    assert not any(values[0] for values in result.info.values())
    assert (env.observe().obs == before).all()
    assert "was lost" in caplog.text and counters() == (1, 0, 0)
    env.reset(ONE, np.array([2]))
    while not (result := play_on(env, rng)).terminated[0]:
        pass
    assert not result.lost[0] and counters() == (1, 1, 1)
    env.close()


@pytest.mark.parametrize(("value", "seconds", "words"), [
    ("exit", 60.0, ["asked not to start", "exit code 3"]), ("1", 0.5, ["did not listen within"]),
])  # fmt: skip
def test_a_game_that_never_starts_is_reported_in_one_line(game, monkeypatch, value, seconds, words):
    monkeypatch.setenv("SC2_STAND_IN_REFUSE", value)
    with pytest.raises(UserError) as caught:
        SC2Env(SmacArgs(game_timeout=seconds)).reset(seed=1)
    text = caught.value.render()
    assert [word for word in ("5 attempts", *words) if word not in text] == [] and "\n" not in text


def test_slow_starts_are_waited_for_and_failed_ones_repeated(game, monkeypatch, tmp_path):
    """A game that dies between two battles loses no episode."""
    env = SC2Env(SmacArgs())
    for restarts, faults in enumerate(({"DELAY": "0.6", "LATE_UNITS": "7"}, {"REFUSE": "exit"})):
        for name, value in {**faults, "ONCE": str(tmp_path / f"once{restarts}")}.items():
            monkeypatch.setenv(f"SC2_STAND_IN_{name}", value)
        env.reset(seed=1)
        assert env.get_state().any() and env.get_stats()["restarts"] == restarts
        os.kill(running(game)[0], signal.SIGKILL)
    assert env.get_stats()["lost_episodes"] == 0
    env.close()


def test_each_worker_has_its_own_game_and_replay(game, tmp_path):
    env, everyone = make_env("sc2", {"map_name": "3m"}, 2, processes=True), np.ones(2, bool)
    env.reset(everyone, np.arange(2))
    assert len(np.unique(env.observe().obs.reshape(2, -1), axis=0)) == len(running(game)) == 2
    env.save_replay(str(tmp_path / "replays"))
    replays = list((tmp_path / "replays").glob("3m_*.SC2Replay"))
    assert [json.loads(path.read_bytes())["map"] for path in replays] == ["3m"] * 2
    env.close()
    args = {"map_name": "3m", "replay_dir": "mine", "replay_prefix": "best"}
    env = make_env("sc2", args, 1, processes=False)
    env.reset(ONE, np.zeros(1, np.int64))
    env.save_replay(str(tmp_path / "elsewhere"))
    env.close()
    (replay,) = (game / "Replays" / "mine").iterdir()
    assert replay.name.startswith("best_") and not (tmp_path / "elsewhere").exists()


def test_late_units_are_waited_for_and_missing_ones_drawn_again(game, monkeypatch):
    attempts, draw = [], v2_backend.draw_lineup
    monkeypatch.setattr(v2_backend, "draw_lineup", lambda *args: attempts.append(args[2]) or draw(*args))
    monkeypatch.setenv("SC2_STAND_IN_LATE_UNITS", "3")
    env = SC2V2Env(SmacV2Args())
    env.reset(seed=1)
    assert attempts == [0] and env.get_obs().any()
    monkeypatch.setattr(backend, "PATIENCE", 2)
    monkeypatch.setattr(backend, "ATTEMPTS", 2)
    with pytest.raises(UserError, match="0 of 5 enemies"):
        env.reset(seed=1)
    assert attempts[1:] == 2 * list(range(v2_backend.DRAWS))


# --- whole commands


def start(cwd: Path, ranks: int, slots: int, **variables: str) -> Started:
    how = [f"world_size={ranks}", "run=ddp"] if ranks > 1 else ["run=default"]
    words = ["env_args.map_name=3m", *how, *BUDGETS, "save_model=False", f"batch_size_run={slots}", "max_restarts=0"]
    length = "t_max=120" if variables else "t_max=1000000"
    command = [PYTHON, MAIN, "--config=qmix", "--env-config=sc2", "with", *words, length]
    return Started(command, cwd, **variables, **FORKED)


def wait_for_games(started: Started, folder: Path, n: int) -> list[int]:
    """Return the pids of games as soon as `n` play."""
    wait_until(lambda: len(running(folder)) >= n or started.process.poll() is not None, 240)
    assert started.process.poll() is None, started.wait(1).text
    return running(folder)


def test_two_ranks_continue_when_games_and_workers_are_killed(killed_game, tmp_path):
    """One game dies at its 40th step, and the worker of another one is killed; the run ends by itself."""
    once = tmp_path / "once"
    started = start(tmp_path, 2, 1, SC2_STAND_IN_DIE_AFTER="40", SC2_STAND_IN_ONCE=str(once))
    games = wait_for_games(started, killed_game, 2)
    wait_until(lambda: once.exists() and once.read_text())
    os.kill(living()[next(pid for pid in games if pid != int(once.read_text()))].parent, signal.SIGKILL)
    ended = started.wait()
    assert ended.code == 0, ended.text
    assert left_behind(ended.group) == [] and list((tmp_path / "tmp").rglob("*")) == []
    (folder,) = run_folders(tmp_path)
    summary = summary_of(folder)
    assert summary["card"]["compared"]["game"] == "StarCraft II 4.10 (75689)"
    reached = summary["stages"]["stage3"]
    values, clock = reached["values"], reached["clock"]
    assert values["worker_restarts"] == values["restarts"] == 1 and 1 <= values["lost_episodes"] <= 2
    assert clock["t_env"] >= 120 and clock["episodes"] % 2 == 0
    assert records(folder)[-1]["lost_episodes"] == values["lost_episodes"]
    assert "lost episodes" in ended.text and "workers restarted" in ended.text


@pytest.mark.parametrize(("ranks", "receiver", "number", "code"), [
    (2, "launcher", signal.SIGKILL, -9), (1, "group", signal.SIGINT, 130),
])  # fmt: skip
def test_no_game_outlives_the_command(killed_game, tmp_path, ranks, receiver, number, code):
    """A worker is killed first, so one of the games belongs to a worker that was started later."""
    started = start(tmp_path, ranks, 2 // ranks)
    first = wait_for_games(started, killed_game, 2)[0]
    os.kill(living()[first].parent, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    wait_for_games(started, killed_game, 2)
    (os.killpg if receiver == "group" else os.kill)(started.process.pid, number)
    ended = started.wait()
    assert ended.code == code, ended.text
    assert left_behind(ended.group, patience=60) == [] and wait_until(lambda: not running(killed_game))
