"""Killed games, workers and commands: losses are counted and nothing remains."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import sc2_stand_in
import shared_memory
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, children, left_behind, records, run_folders, summary_of
from runner_toys import runner_of

from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.factory import make_env

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them"),
]
# A package beside omagd: battles that go wrong in the environment's own code.
PLUGIN = """
from omagd.envs.sc2.sc2_env import SC2Env


class Broken(SC2Env):
    steps = 0

    def step(self, actions):
        self.steps += 1
        if self.steps == 30:
            raise ZeroDivisionError("on purpose")
        return super().step(actions)
"""


@pytest.fixture
def game(tmp_path, monkeypatch):
    """The folder of an installed stand-in, which lives on without its client; nothing may be left at the end."""
    folder, place = sc2_stand_in.install(tmp_path / "StarCraftII"), tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # kept by torch
    monkeypatch.setenv("SC2_STAND_IN_STAY", "1")
    monkeypatch.setattr("tempfile.tempdir", None)
    shared = shared_memory.names()
    yield folder
    assert wait_until(lambda: not sc2_stand_in.running(folder))
    assert shared_memory.left_since(shared) == []


def wait_until(true, seconds: float = 60.0) -> bool:
    """Return whether something becomes true in time."""
    deadline = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found)


def left_in(place: Path) -> list[str]:
    """Return the temporary files there, but for what is kept in games' common folder: logs of the dead, and a lock."""
    kept = place / f"omagd-sc2-{os.getuid()}"
    return [str(path) for path in place.rglob("*") if path != kept and not (path.parent == kept and path.is_file())]


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie; one that becomes another program has no command line either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Killer(ScriptedPolicy):
    """Plays at random and, before its ticks 4 and 9, kills the game of the first slot and the worker of the last."""

    def __init__(self, env, folder: Path) -> None:
        super().__init__(env, ("random",), 0.0, np.random.default_rng(0))
        self.env, self.folder, self.ticks = env, folder, 0

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        self.ticks += 1
        workers = [process.pid for process in self.env._workers.processes]
        if self.ticks == 4:
            assert tick.step[0] > 0
            victims = [pid for pid in sc2_stand_in.running(self.folder) if parent_of(pid) == workers[0]]
            os.kill(victims[0], signal.SIGKILL)
        if self.ticks == 9:
            assert tick.step[-1] > 0
            os.kill(workers[-1], signal.SIGKILL)
        return super().act(tick, explore)


@pytest.mark.parametrize("way", ["rounds", "stream"])
def test_killed_games_and_workers_lose_only_their_episodes(game, way):
    env = make_env("sc2", {"map_name": "3m"}, 2, processes=True)
    try:
        killer = Killer(env, game)
        runner = runner_of(env, name="stream" if way == "stream" else "parallel")
        if way == "stream":
            rollouts = [runner.collect(killer, explore=None), runner.drain(killer, explore=None)]
        else:
            rollouts = [runner.run(killer, explore=None, episodes_per_slot=2, full_obs=True)]
        n_episodes = sum(rollout.n_episodes for rollout in rollouts)
        assert n_episodes >= 3 if way == "stream" else n_episodes == 4
        assert sum(rollout.lost for rollout in rollouts) == runner.lost == 2
        lengths = sum(rollout.stats["ep_length"][0] for rollout in rollouts)
        assert sum(rollout.steps for rollout in rollouts) == lengths
        assert sum(rollout.stats["battle_won"][1] for rollout in rollouts) == n_episodes
        episodes = [episode for rollout in rollouts for episode in rollout.episodes]
        assert len(episodes) == n_episodes
        assert sum(len(episode["reward"]) - 1 for episode in episodes) == lengths
        assert all(episode["terminated"].sum() == 1 for episode in episodes)
        stats = env.get_stats()
        assert (stats["worker_restarts"], stats["restarts"]) == (1, 1)
        assert len(sc2_stand_in.running(game)) == 2
    finally:
        env.close()
    assert left_in(Path(os.environ["TMPDIR"])) == []


# --- whole commands


def start(cwd: Path, ranks: int, slots: int, *more: str, env: str = "sc2", **variables: str) -> Started:
    how = [f"world_size={ranks}", "run=ddp"] if ranks > 1 else ["run=default"]
    length = ["t_max=1000000", "save_model=False", f"batch_size_run={slots}", "max_restarts=0"]
    words = ["env_args.map_name=3m", *how, *BUDGETS, *length, *more]
    return Started([PYTHON, MAIN, "--config=qmix", f"--env-config={env}", "with", *words], cwd, **variables)


def wait_for_games(started: Started, folder: Path, n: int) -> list[int]:
    """Return the pids of games as soon as `n` play."""
    playing: list[int] = []

    def there() -> bool:
        playing[:] = sc2_stand_in.running(folder)
        return len(playing) >= n or started.process.poll() is not None

    if not wait_until(there, 240):
        os.killpg(started.group, signal.SIGKILL)
        raise AssertionError(f"{len(playing)} games play, not {n}\n{started.wait(5).text}")
    assert started.process.poll() is None, started.wait(1).text
    return playing


def test_two_ranks_continue_when_games_and_workers_are_killed(game, tmp_path):
    """One game dies at its 40th step, and the worker of another one is killed; the run ends by itself."""
    once = tmp_path / "once"
    started = start(tmp_path, 2, 2, "t_max=400", SC2_STAND_IN_DIE_AFTER="40", SC2_STAND_IN_ONCE=str(once))
    games = wait_for_games(started, game, 4)
    assert wait_until(lambda: once.exists() and once.read_text())
    others = [pid for pid in games if pid != int(once.read_text())]
    os.kill(parent_of(others[0]), signal.SIGKILL)
    ended = started.wait()
    assert ended.code == 0, ended.text
    assert left_behind(ended.group) == [] and left_in(tmp_path / "tmp") == []
    (folder,) = run_folders(tmp_path)
    summary = summary_of(folder)
    reached = summary["stages"]["stage3"]
    assert reached["values"]["worker_restarts"] == 1 and reached["values"]["restarts"] == 1
    assert 1 <= reached["values"]["lost_episodes"] <= 2
    assert reached["clock"]["t_env"] >= 400 and reached["clock"]["episodes"] % 4 == 0
    assert records(folder)[-1]["lost_episodes"] == reached["values"]["lost_episodes"]
    assert "lost episodes" in ended.text and "workers restarted" in ended.text


ENDS = {
    # name: ranks, receiver of the signal, signal, exit code
    "ctrl-c": (2, "group", signal.SIGINT, 130),
    "launcher killed": (2, "launcher", signal.SIGKILL, -9),
    "rank killed": (2, "rank", signal.SIGKILL, 1),
    "terminated": (1, "launcher", signal.SIGTERM, 143),
    "exception": (1, "nobody", None, 1),
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Add the environment `broken_sc2`."""
    folder = tmp_path / "plugin"
    facts, configs = folder / "omagd_broken-1.0.dist-info", folder / "configs" / "envs"
    facts.mkdir(parents=True)
    configs.mkdir(parents=True)
    (folder / "omagd_broken.py").write_text(f"{PLUGIN}\n\nCONFIGS = {str(folder / 'configs')!r}\n")
    (configs / "broken_sc2.yaml").write_text("env: broken_sc2\nenv_processes: True\nenv_args: {map_name: 3m}\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: omagd-broken\nVersion: 1.0\n")
    points = "[omagd.envs]\nbroken_sc2 = omagd_broken:Broken\n[omagd.config_dirs]\nbroken = omagd_broken:CONFIGS\n"
    (facts / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))


@pytest.mark.parametrize("way", ENDS)
def test_no_game_outlives_the_command(game, broken, tmp_path, way):
    """A worker is killed first, so that one of the games belongs to a worker that was started later."""
    ranks, whom, number, code = ENDS[way]
    started = start(tmp_path, ranks, 2 // ranks, env="broken_sc2" if way == "exception" else "sc2")
    if number is not None:
        first = wait_for_games(started, game, 2)
        os.kill(parent_of(first[0]), signal.SIGKILL)
        assert wait_until(lambda: has_ended(first[0]))
        wait_for_games(started, game, 2)
        target = children(started.process.pid)[0] if whom == "rank" else started.process.pid
        (os.killpg if whom == "group" else os.kill)(target, number)
    ended = started.wait()
    assert ended.code == code, ended.text
    assert left_behind(ended.group, patience=60) == []
    assert wait_until(lambda: not sc2_stand_in.running(game))
    assert ("ZeroDivisionError" in ended.text) == (way == "exception")
