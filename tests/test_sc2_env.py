"""`sc2` on a stand-in for the game: equal to the simulator behind it; killed games, workers and commands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import shared_memory
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, children, left_behind, records, run_folders, summary_of
from runner_toys import runner_of
from sc2_stand_in import battle_seed, install, running, wait_for
from walk_env import is_running, pids_of

from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.battle.args import SkirmishArgs, SmacArgs, SmacV2Args
from omagd.envs.battle.skirmish_env import SkirmishEnv
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
ADDED = ("obs_pathing_grid", "obs_last_action", "obs_timestep_number", "state_timestep_number", "continuing_episode")
EVERY_FLAG = dict.fromkeys(ADDED, True) | {"reward_only_positive": False}


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


def files_in(folder: Path) -> list[Path]:
    """Return the temporary files there, without the lock and the logs in the common folder of all games."""
    common = folder / f"omagd-sc2-{os.getuid()}"
    return [path for path in folder.rglob("*") if path != common and (path.parent != common or path.is_dir())]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def play_on(env, rng, active=ONE):
    return env.step(random_actions(env.observe().avail_actions, rng), active)


@pytest.mark.parametrize(
    ("map_name", "version", "flags"),
    [("MMM2", "4.6.2", EVERY_FLAG), ("3s5z_vs_3s6z", "4.10", {})],
)
def test_battles_are_those_of_the_simulator_behind_the_game(game, map_name, version, flags):
    """Two battles: units keep their columns though the game lists them in other orders with other tags."""
    install(game, version)
    env = make_env("sc2", {"map_name": map_name, "game_version": version, **flags}, 1, processes=False)
    mirror, rng = SkirmishEnv(SkirmishArgs(map_name=map_name, **flags), 1), np.random.default_rng(1)
    for number in range(2):
        env.reset(ONE, np.array([5]))
        mirror.reset(ONE, np.array([battle_seed(5, number)]))
        for _ in range(40):
            seen, expected = env.observe(full=True), mirror.observe(full=True)
            for name in ("obs", "full_obs", "state", "avail_actions"):
                np.testing.assert_array_equal(getattr(seen, name), getattr(expected, name))
            actions = random_actions(expected.avail_actions, rng)
            result, expected = env.step(actions, ONE), mirror.step(actions, ONE)
            assert (result.reward, result.terminated) == (expected.reward, expected.terminated)
            if result.terminated[0]:
                assert all(result.info[name] == values for name, values in expected.info.items())
                break
    env.close()


@pytest.mark.parametrize("fault", ["DIE_AFTER", "HANG_AFTER", "ERROR_AFTER", "GARBLE_AFTER"])
def test_a_lost_game_voids_its_episode_only(game, monkeypatch, tmp_path, fault, caplog):
    monkeypatch.setenv(f"SC2_STAND_IN_{fault}", "5")  # of the second of the three requests that a step is
    monkeypatch.setenv("SC2_STAND_IN_ONCE", str(tmp_path / "once"))
    args = {"map_name": "3m", "game_timeout": 3.0 if fault == "HANG_AFTER" else 60.0}
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


@pytest.mark.parametrize(
    ("value", "seconds", "words"),
    [("exit", 60.0, ["asked not to start", "exit code 3"]), ("1", 0.5, ["did not listen within"])],
)
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


def test_the_script_plays_instead_of_the_agents(game):
    env = SC2Env(SmacArgs(map_name="8m", game_version="latest", heuristic_ai=True, heuristic_rest=True))
    env.reset(seed=3)
    rng, over, replaced = np.random.default_rng(0), False, 0
    while not over:
        actions = random_actions(env.get_avail_actions(), rng)
        asked = actions.copy()
        _, over, info = env.step(actions)
        replaced += bool((asked != actions).any())
    assert replaced > 5 and info["dead_enemies"] >= 4
    env.close()


def seen_in(env: SC2Env, seed: int) -> list[np.ndarray]:
    """Return what the agents see in 25 random steps, or until the end."""
    env.reset(seed=seed)
    rng, seen, over = np.random.default_rng(seed), [], False
    while not over and len(seen) < 75:
        seen += [env.get_obs(), env.get_obs(no_range_limit=True), env.get_state()]
        _, over, _ = env.step(random_actions(env.get_avail_actions(), rng))
    return seen


def test_smac_and_smacv2_run_side_by_side_and_follow_from_seeds(game):
    smac, conic = SC2Env(SmacArgs(map_name="3m")), SC2V2Env(SmacV2Args(conic_fov=True, obs_own_pos=True))
    smac.reset(seed=1)
    first, other, again = (seen_in(conic, seed) for seed in (7, 8, 7))
    assert smac.get_obs().shape == (3, 30) and (first[0] != other[0]).any()
    assert all((one == two).all() for one, two in zip(first, again, strict=True))
    facts = conic.get_env_info()
    assert facts["n_normal_actions"] == 18 and sum(facts["state_component"]) == conic.get_state().size
    smac.close()
    conic.close()


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


class Killer(ScriptedPolicy):
    """Plays at random and, before its ticks 4 and 9, kills the game of the first slot and the worker of the last."""

    def __init__(self, env, folder: Path) -> None:
        super().__init__(env, ("random",), 0.0, np.random.default_rng(0))
        self.env, self.folder, self.ticks = env, folder, 0

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        self.ticks += 1
        first, last = pids_of(self.env)
        if self.ticks == 4:
            assert tick.step[0] > 0
            os.kill(next(pid for pid in running(self.folder) if parent_of(pid) == first), signal.SIGKILL)
        if self.ticks == 9:
            assert tick.step[-1] > 0
            os.kill(last, signal.SIGKILL)
        return super().act(tick, explore)


def test_killed_games_and_workers_lose_only_their_episodes(killed_game):
    env = make_env("sc2", {"map_name": "3m"}, 2, processes=True)
    try:
        killer, runner = Killer(env, killed_game), runner_of(env, name="parallel")
        rollout = runner.run(killer, explore=None, episodes_per_slot=2, full_obs=True)
        assert rollout.n_episodes == len(rollout.episodes) == rollout.stats["battle_won"][1] == 4
        assert rollout.lost == runner.lost == 2
        lengths = [len(episode["reward"]) - 1 for episode in rollout.episodes]
        assert rollout.steps == rollout.stats["ep_length"][0] == sum(lengths)
        assert all(episode["terminated"].sum() == 1 for episode in rollout.episodes)
        stats = env.get_stats()
        assert (stats["worker_restarts"], stats["restarts"]) == (1, 1) and len(running(killed_game)) == 2
    finally:
        env.close()
    assert files_in(Path(os.environ["TMPDIR"])) == []


# --- whole commands


def start(cwd: Path, ranks: int, slots: int, **variables: str) -> Started:
    how = [f"world_size={ranks}", "run=ddp"] if ranks > 1 else ["run=default"]
    words = ["env_args.map_name=3m", *how, *BUDGETS, "save_model=False", f"batch_size_run={slots}", "max_restarts=0"]
    length = "t_max=120" if variables else "t_max=1000000"
    return Started([PYTHON, MAIN, "--config=qmix", "--env-config=sc2", "with", *words, length], cwd, **variables)


def wait_for_games(started: Started, folder: Path, n: int) -> list[int]:
    """Return the pids of games as soon as `n` play."""
    assert wait_for(lambda: len(running(folder)) >= n or started.process.poll() is not None, 240)
    assert started.process.poll() is None, started.wait(1).text
    return running(folder)


def test_two_ranks_continue_when_games_and_workers_are_killed(killed_game, tmp_path):
    """One game dies at its 40th step, and the worker of another one is killed; the run ends by itself."""
    once = tmp_path / "once"
    started = start(tmp_path, 2, 1, SC2_STAND_IN_DIE_AFTER="40", SC2_STAND_IN_ONCE=str(once))
    games = wait_for_games(started, killed_game, 2)
    assert wait_for(lambda: once.exists() and once.read_text())
    os.kill(parent_of(next(pid for pid in games if pid != int(once.read_text()))), signal.SIGKILL)
    ended = started.wait()
    assert ended.code == 0, ended.text
    assert left_behind(ended.group) == [] and files_in(tmp_path / "tmp") == []
    (folder,) = run_folders(tmp_path)
    summary = summary_of(folder)
    assert summary["card"]["compared"]["game"] == "StarCraft II 4.10 (75689)"
    reached = summary["stages"]["stage3"]
    values, clock = reached["values"], reached["clock"]
    assert values["worker_restarts"] == values["restarts"] == 1 and 1 <= values["lost_episodes"] <= 2
    assert clock["t_env"] >= 120 and clock["episodes"] % 2 == 0
    assert records(folder)[-1]["lost_episodes"] == values["lost_episodes"]
    assert "lost episodes" in ended.text and "workers restarted" in ended.text


@pytest.mark.parametrize(
    ("ranks", "receiver", "number", "code"),
    [(2, "launcher", signal.SIGKILL, -9), (2, "rank", signal.SIGKILL, 1), (1, "group", signal.SIGINT, 130)],
)
def test_no_game_outlives_the_command(killed_game, tmp_path, ranks, receiver, number, code):
    """A worker is killed first, so one of the games belongs to a worker that was started later."""
    started = start(tmp_path, ranks, 2 // ranks)
    first = wait_for_games(started, killed_game, 2)[0]
    os.kill(parent_of(first), signal.SIGKILL)
    assert wait_for(lambda: not is_running(first))
    wait_for_games(started, killed_game, 2)
    target = children(started.process.pid)[0] if receiver == "rank" else started.process.pid
    (os.killpg if receiver == "group" else os.kill)(target, number)
    ended = started.wait()
    assert ended.code == code, ended.text
    assert left_behind(ended.group, patience=60) == [] and wait_for(lambda: not running(killed_game))
