"""Deterministic episodes survive the death of their worker unchanged. Snapshots of such episodes."""

from __future__ import annotations

import io
import logging
import os
import random
import re
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from q_toys import toy_config
from steady_walk import SteadyArgs, SteadyWalk
from walk_env import N, Walk, WalkArgs, gone, pids_of

from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.controllers.types import Exploration
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.envs.workers import pool as worker_pool
from omagd.envs.workers.process_envs import EnvWorkerError, ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.envs.workers.worker import NOTE
from omagd.run.checkpoint.serialization import pack, unpack
from omagd.runners import REGISTRY
from omagd.runners.rollout import EpisodeSeeds, Rollout
from omagd.runners.runner import Runner
from omagd.utils.errors import UserError

torch.set_num_threads(1)
SLOTS = 4


def filed(tree: Any) -> Any:
    """Return `tree` after saving and loading it with `weights_only`."""
    file = io.BytesIO()
    torch.save(pack(tree), file)
    file.seek(0)
    return unpack(torch.load(file, weights_only=True))


def story(env: BatchedEnv, rounds: int, meddle: Callable[[str], None], seed: int = 0) -> list[Any]:
    """Play in halves and whole, with every call of the protocol; return all results."""
    rng = np.random.default_rng(seed)
    b, out = env.n_slots, []
    everyone, first = np.ones(b, bool), np.arange(b) < b // 2
    env.reset(everyone, np.arange(b) + seed)
    for t in range(rounds):
        meddle("idle")
        seen = env.observe(full=t % 4 > 1)
        out += [seen.obs.copy(), seen.state.copy(), seen.avail_actions.copy()]
        out += [] if seen.full_obs is None else [seen.full_obs.copy()]
        policy = env.info.scripted_policies[t % len(env.info.scripted_policies)]
        meddle("choose")
        actions = env.scripted_actions(policy, rng)
        active = (rng.random(b) < 0.8) if t % 3 else everyone
        over = np.zeros(b, bool)
        for half in (first, ~first) if t % 2 else (everyone,):
            env.step_start(np.where(active[:, None], actions, 0), active & half)
        for half in (first, ~first) if t % 2 else (everyone,):
            meddle("step")
            result = env.step_finish(active & half)
            assert not result.lost.any()
            out += [result.reward.copy(), result.terminated.copy(), result.truncated.copy()]
            over |= result.terminated
            ended = np.flatnonzero(result.terminated)
            out += [(name, values[ended].tolist()) for name, values in result.info.items() if len(ended)]
        env.reset(over, rng.integers(2**60, size=b))
        meddle("reset")
    return out


def same_story(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in zip(one, other, strict=True)
    )


def peace(where: str) -> None:
    """Kill nobody."""


def rounds_of(env: BatchedEnv, name: str, calls: int, snapshots: bool = False, scripted: bool = False) -> list[Rollout]:
    """Return the rollouts of some calls of a runner over `env`, and of its drain."""
    runner, policy, explore = cast(env, name, scripted)
    rollouts = []
    for _ in range(calls):
        rollouts.append(runner.collect(policy, explore=explore))
        if snapshots:
            runner.snapshot()
    return [*rollouts, runner.drain(policy, explore=explore)]


def cast(env: BatchedEnv, name: str, scripted: bool = False) -> tuple[Runner, Any, Exploration]:
    runner = REGISTRY.get(name)(env, toy_config(), env.info, EpisodeSeeds(1, "train"))
    torch.manual_seed(0)
    policy: Any = BasicMAC(toy_config(mac="n_mac"), env.info, torch.device("cpu"))
    if scripted:
        policy = ScriptedPolicy(env, env.info.scripted_policies, 0.2, np.random.default_rng(5))
    return runner, policy, Exploration(0.3, np.random.default_rng(2))


def assert_same(one: list[Rollout], other: list[Rollout]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.steps, a.lost, a.stats, a.log) == (b.steps, b.lost, b.stats, b.log)
        for x, y in zip(a.episodes, b.episodes, strict=True):
            assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def test_own_scripts_follow_from_seed_and_step_and_do_not_use_the_generator():
    env = SerialEnvs(SteadyWalk, SteadyArgs(), SLOTS)
    assert env.info.scripted_policies == ("random", "wander")
    everyone, rng, chosen = np.ones(SLOTS, bool), np.random.default_rng(0), []
    for seeds in (np.arange(SLOTS), np.arange(SLOTS), np.arange(SLOTS) + 50):
        env.reset(everyone, seeds)
        for _ in range(5):
            actions = env.scripted_actions("wander", rng)
            assert (actions == env.scripted_actions("wander", rng)).all()
            chosen.append(actions)
            env.step(np.zeros((SLOTS, N), int), everyone)
    played = np.array(chosen).reshape(3, 5, SLOTS, N)
    assert (played[0] == played[1]).all() and (played[0] != played[2]).any() and (played[0, 1] != played[0, 2]).any()
    assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("name", ["parallel", "stream"])
def test_a_snapshot_has_no_side_effect(name):
    def played(snapshots: bool) -> list[Rollout]:
        return rounds_of(make_env("skirmish", {"map_name": "3m"}, SLOTS, processes=False), name, 3, snapshots)

    assert_same(played(True), played(False))


def test_a_stream_over_single_environments_continues_from_a_file():
    runner, mac, explore = cast(SerialEnvs(SteadyWalk, SteadyArgs(), SLOTS), "stream")
    runner.collect(mac, explore=explore)
    snapshot, state = filed(runner.snapshot()), explore.rng.bit_generator.state
    expected = [runner.collect(mac, explore=explore) for _ in range(3)]
    runner, mac, explore = cast(SerialEnvs(SteadyWalk, SteadyArgs(), SLOTS), "stream")
    explore.rng.bit_generator.state = state
    with pytest.raises(ValueError, match="who plays them"):
        runner.restore(snapshot, None)
    runner.restore(snapshot, mac)
    assert_same([runner.collect(mac, explore=explore) for _ in range(3)], expected)
    with pytest.raises(ValueError, match="2 agents in 4 slots, not 2 in 3"):
        SerialEnvs(SteadyWalk, SteadyArgs(), 3).restore(snapshot["flying"]["env"])


def test_episodes_that_cannot_be_saved_are_lost_and_counted():
    runner, mac, explore = cast(SerialEnvs(Walk, WalkArgs(limit=5), SLOTS), "stream")
    runner.collect(mac, explore=explore)
    snapshot = filed(runner.snapshot())
    begun = {entry["seed"] for entry in runner.collect(mac, explore=explore).log}
    again, mac, explore = cast(SerialEnvs(Walk, WalkArgs(limit=5), SLOTS), "stream")
    again.restore(snapshot, None)
    assert not again.in_flight and (runner.lost, again.lost) == (0, SLOTS)
    rollout = again.collect(mac, explore=explore)
    assert rollout.n_episodes >= SLOTS and not begun & {entry["seed"] for entry in rollout.log}
    with pytest.raises(NotImplementedError, match="cannot be restored"):
        SerialEnvs(Walk, WalkArgs(), 1).restore({})


def test_an_indivisible_environment_is_rejected():
    with pytest.raises(UserError, match="env_processes=True: env=smax .* use env_processes=False"):
        make_env("smax", {}, 2, processes=True)


# --- what follows starts processes


@pytest.mark.processes
@pytest.mark.parametrize("per_process", [1, 3])
def test_killed_workers_change_no_result(per_process):
    """Workers are killed between calls, and by a thread while they step, start and replay."""
    expected = story(SerialEnvs(SteadyWalk, SteadyArgs(), SLOTS), 40, peace)
    env, dice, over = ProcessEnvs(SteadyWalk, SteadyArgs(), SLOTS, per_process=per_process), random.Random(3), []
    kills: list[str] = []
    killed: set[int] = set()

    def kill(number: int) -> None:
        try:
            os.kill(pids_of(env)[number], signal.SIGKILL)
        except (ProcessLookupError, ValueError, TypeError):
            pass  # it has just been replaced

    def haunt() -> None:
        for _ in range(3):
            if not stop.wait(dice.uniform(0.2, 0.8)):
                kill(dice.randrange(len(env._workers.processes)))

    def meddle(where: str) -> None:
        if kills.count(where) < 1 and dice.random() < 0.2:
            kills.append(where)
            pid = pids_of(env)[0]
            killed.add(pid)  # once, where one that has just died has not been replaced yet
            kill(0)
            assert where != "idle" or gone([pid])

    stop = threading.Event()
    ghost = threading.Thread(target=haunt)
    ghost.start()
    try:
        found = story(env, 40, meddle)
        stop.set()
        ghost.join()
        assert same_story(found, expected)
        assert set(kills) == {"idle", "choose", "step", "reset"}
        assert env.get_stats()["worker_restarts"] >= len(killed)
    finally:
        stop.set()
        ghost.join()
        over = [process.pid for process in env._workers.processes if not process._closed]
        env.close()
    assert gone(over)


@pytest.mark.processes
def test_a_worker_that_dies_in_the_replay_is_replaced_again(tmp_path, monkeypatch):
    args = SteadyArgs(limit=9, marks=str(tmp_path), die_at=[4, 2, 3])
    expected = story(SerialEnvs(SteadyWalk, SteadyArgs(limit=9), 1), 12, peace)
    env = ProcessEnvs(SteadyWalk, args, 1)
    try:
        assert same_story(story(env, 12, peace), expected)
        stats = env.get_stats()
        assert stats["worker_restarts"] == 3 and sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
    finally:
        env.close()
    monkeypatch.setattr(worker_pool, "DEATHS_IN_A_ROW", 2)
    for mark in tmp_path.iterdir():
        mark.unlink()
    env = ProcessEnvs(SteadyWalk, args, 1)
    with pytest.raises(EnvWorkerError, match="worker 0 died 2 times"):
        story(env, 12, peace)


@pytest.mark.processes
def test_a_battle_in_a_process_of_its_own_is_the_same_battle():
    """Rounds by scripts, with a kill in between, and a stream that continues from a snapshot."""
    plain = make_env("skirmish", {"map_name": "3m"}, SLOTS, processes=False)
    env = make_env("skirmish", {"map_name": "3m"}, SLOTS, processes=True)
    try:
        assert type(env) is ProcessEnvs and env.info == plain.info
        assert same_story(story(env, 25, peace), story(plain, 25, peace))
        timer = threading.Timer(0.05, os.kill, (pids_of(env)[1], signal.SIGKILL))
        timer.start()
        found = rounds_of(env, "parallel", 2, scripted=True)
        timer.join()
        assert_same(found, rounds_of(plain, "parallel", 2, scripted=True))
        played = rounds_of(env, "stream", 3)
        assert_same(played, rounds_of(plain, "stream", 3))
        assert env.get_stats()["worker_restarts"] == 1
        _continue_mid_battle(env)
    finally:
        env.close()


def _continue_mid_battle(env: ProcessEnvs) -> None:
    runner, mac, explore = cast(env, "stream")
    runner.collect(mac, explore=explore)
    snapshot, state = filed(runner.snapshot()), explore.rng.bit_generator.state
    expected = [runner.collect(mac, explore=explore) for _ in range(2)]
    again, mac, other = cast(env, "stream")
    other.rng.bit_generator.state = state
    again.restore(snapshot, mac)
    os.kill(pids_of(env)[0], signal.SIGKILL)
    found = [again.collect(mac, explore=other) for _ in range(2)]
    assert_same(found, expected)
    undisturbed, mac, explore = cast(env, "stream")
    assert_same([undisturbed.collect(mac, explore=explore) for _ in range(3)][1:], expected)


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["facts", "share"])
def test_a_worker_that_is_killed_while_it_starts_is_started_again(moment, monkeypatch):
    """Before it has sent its facts, and before it has the shared arrays."""
    inner, killed = getattr(worker_pool.WorkerPool, moment), []

    def kill_first(self, *given):
        if not killed:
            killed.append(self.processes[1].pid)
            os.kill(killed[0], signal.SIGKILL)
            self.processes[1].join()
        return inner(self, *given)

    monkeypatch.setattr(worker_pool.WorkerPool, moment, kill_first)
    env = make_env("matrix_game", {}, 2, processes=True)
    try:
        env.reset(np.ones(2, bool), np.arange(2))
        assert env.observe().obs.shape[0] == 2
        assert env.get_stats()["worker_restarts"] == 1
        assert killed[0] not in [process.pid for process in env._workers.processes]
    finally:
        env.close()


def test_the_last_note_of_a_dead_worker_is_read_first():
    """Otherwise it would count as a note of the worker that replaces it."""

    class Looks:
        """A poll between whose two calls a worker writes a note and dies."""

        def __init__(self, workers: worker_pool.WorkerPool) -> None:
            self.workers, self.before = workers, False

        def poll(self, timeout: int | None = None) -> list[tuple[int, int]]:
            noted = [(self.workers._done.fileno(), select.POLLIN)] * self.before
            if not self.before:
                os.write(self.workers._note.fileno(), NOTE.pack(0, 2))
            self.before = True
            return [*noted, (-7, select.POLLHUP)]

    workers = worker_pool.WorkerPool()
    workers.owed, workers._number = [1], {-7: 0}
    workers._poll = Looks(workers)
    try:
        assert workers.notes() == ([(0, 2)], [])
        assert workers.owed == [0]
    finally:
        workers.close()


@pytest.mark.processes
def test_a_hung_worker_is_reported_killed_and_replayed(tmp_path, caplog, monkeypatch):
    """Stopped, or in an endless loop: nothing is lost, and the log names slots, seeds and the place. Then always."""
    logging.getLogger("omagd").propagate = True
    plain = story(SerialEnvs(SteadyWalk, SteadyArgs(), 2), 3, peace)
    for how, says in (("stop", "; stopped)"), ("hang", "; waiting)")):
        caplog.clear()
        marks = tmp_path / how
        marks.mkdir()
        args = SteadyArgs(die_at=[2], marks=str(marks), how=how)
        env = ProcessEnvs(SteadyWalk, args, 2, per_process=2)
        try:
            env.set_worker_timeout(1.0)
            kill = env._workers._kill_hung_workers

            def once(seconds: float, env: ProcessEnvs = env, kill: Callable[[float], None] = kill) -> None:
                kill(seconds)
                env.set_worker_timeout(60.0)  # the one that replaces it has to start

            monkeypatch.setattr(env._workers, "_kill_hung_workers", once)
            assert same_story(story(env, 3, peace), plain)
            assert env.get_stats()["worker_restarts"] == 1
        finally:
            env.close()
        (line,) = [record.getMessage() for record in caplog.records if "has not answered" in record.message]
        assert re.match(r"environment worker 0 \(process \d+, slot 0 from seed 0, slot 1 from seed 1; ", line)
        assert says in line and ("steady_walk.py" in line) == (how == "hang")
    env = ProcessEnvs(SteadyWalk, SteadyArgs(die_at=[2], marks=str(tmp_path), how="always"), 1)
    env.set_worker_timeout(1.0)
    monkeypatch.setattr(worker_pool, "DEATHS_OF_A_HANG", worker_pool.DEATHS_IN_A_ROW)
    with pytest.raises(EnvWorkerError, match="environment worker 0 hung repeatedly without"):
        story(env, 3, peace)
    (tmp_path / "0").unlink()
    env = ProcessEnvs(SteadyWalk, SteadyArgs(die_at=[2], marks=str(tmp_path), how="leave"), 1)
    with pytest.raises(EnvWorkerError, match=r"(?s)environment worker 0 failed:.*sys\.exit\(0\).*SystemExit: 0"):
        story(env, 3, peace)
