"""Worker processes that are killed, crash or hang: deterministic episodes continue unchanged, others are lost."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from runner_toys import Game, assert_same
from walk_env import N, SteadyArgs, SteadyWalk, Walk, WalkArgs, all_slots, gone, pids_of

from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.envs.workers import pool as worker_pool
from omagd.envs.workers.process_envs import EnvWorkerError, ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.runners.rollout import Rollout
from omagd.utils.errors import RunFailed, UserError

SLOTS = 4


def scripted(env: BatchedEnv, calls: int = 8, name: str = "stream", before: Callable[[], Any] = str) -> list[Rollout]:
    """Play by scripts, with full observations; call `before` before each call of the environment."""
    policy = ScriptedPolicy(env, env.info.scripted_policies, 0.2, np.random.default_rng(5))
    game = Game(env, name, policy)
    game.runner.asked = lambda *_: before()
    return [*game.collect(calls, full_obs=True), game.drain()]


def undisturbed(n_slots: int, **options: Any) -> list[Rollout]:
    return scripted(SerialEnvs(SteadyWalk, SteadyArgs(), n_slots), **options)


@contextlib.contextmanager
def workers(env: ProcessEnvs) -> Iterator[ProcessEnvs]:
    """Close `env` at the end; no worker may be left."""
    try:
        yield env
        pids = pids_of(env)
    finally:
        env.close()
    assert gone(pids)


def kill(env: ProcessEnvs, number: int) -> int:
    pid = pids_of(env)[number]
    os.kill(pid, signal.SIGKILL)
    return pid


def restarts(env: ProcessEnvs) -> float:
    return env.get_stats()["worker_restarts"]


def test_an_environment_without_slots_of_their_own_cannot_have_processes():
    with pytest.raises(UserError, match="env_processes=True: env=smax .* use env_processes=False"):
        make_env("smax", {}, 2, processes=True)


@pytest.mark.processes
def test_killed_workers_change_no_result():
    """Workers are killed between calls, and by a thread while they step, start and replay."""
    expected, dice, stop = undisturbed(SLOTS), random.Random(3), threading.Event()
    env = ProcessEnvs(SteadyWalk, SteadyArgs(), SLOTS)
    killed: set[int] = set()

    def kill_some() -> None:
        for _ in range(3):
            if not stop.wait(dice.uniform(0.2, 0.8)):
                with contextlib.suppress(ProcessLookupError, ValueError, TypeError):  # it has just been replaced
                    kill(env, dice.randrange(len(env._workers.processes)))

    def sometimes() -> None:
        if len(killed) < 5 and dice.random() < 0.1:
            killed.add(kill(env, 0))
            assert dice.random() < 0.5 or gone(list(killed))

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        with workers(env):
            assert_same(scripted(env, before=sometimes), expected)
            stop.set()
            killer.join()
            assert restarts(env) >= len(killed) == 5
    finally:
        stop.set()
        killer.join()


def test_a_slot_that_has_not_begun_is_not_asked():
    """A map of a set may have more slots than it needs at first."""
    env = SerialEnvs(SteadyWalk, SteadyArgs(), 2)
    for slot in (1, 0):
        env.reset(np.arange(2) == slot, np.array([3, 3]))
        shown, choices = env.observe(full=True).full_obs, env.scripted_actions("wander", np.random.default_rng(1))
        assert shown[1].any() and shown[0].any() == (slot == 0) and choices.shape == (2, N)


@pytest.mark.processes
def test_a_batched_environment_plays_the_same_episodes_in_processes():
    """By scripts in rounds, with a kill in between, and as a stream that continues from a snapshot."""
    plain, env = (make_env("memory_game", {}, 2, processes=processes) for processes in (False, True))
    with workers(env):
        assert type(env) is ProcessEnvs and env.info == plain.info
        kill(env, 1)
        assert_same(scripted(env, 2, "parallel"), scripted(plain, 2, "parallel"))
        game, again = Game(env), Game(env)
        played = game.collect(1)
        again.restore(game.saved())
        kill(env, 0)
        assert_same(played + again.collect(2), Game(plain).collect(3))
        assert restarts(env) == 2


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["facts", "share"])
def test_a_worker_that_is_killed_while_it_starts_is_started_again(moment, monkeypatch):
    """Before it has sent its facts, and before it knows the shared arrays."""
    inner, killed = getattr(worker_pool.WorkerPool, moment), []

    def kill_first(self, *given):
        if not killed:
            killed.append(self.processes[1].pid)
            os.kill(killed[0], signal.SIGKILL)
            self.processes[1].join()
        return inner(self, *given)

    monkeypatch.setattr(worker_pool.WorkerPool, moment, kill_first)
    with workers(make_env("matrix_game", {}, 2, processes=True)) as env:
        env.reset(all_slots(env), np.arange(2))
        assert env.observe().obs.shape[0] == 2
        assert restarts(env) == 1 and killed[0] not in pids_of(env)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["stop", "hang"])
def test_a_hung_worker_is_reported_killed_and_replayed(how, tmp_path, caplog, capfd, monkeypatch):
    """Nothing is lost, the log names slots and seeds, and stderr the place."""
    logging.getLogger("omagd").propagate = True
    args = SteadyArgs(fail_in=["step 2"], marks=str(tmp_path), how=how)
    with workers(ProcessEnvs(SteadyWalk, args, 2)) as env:
        env.reset(all_slots(env), np.zeros(2, int))
        env.observe()  # the workers have started
        env.set_worker_timeout(1.0)
        kill_hung = env._workers._kill_hung_workers

        def once(seconds: float) -> None:
            kill_hung(seconds)
            env.set_worker_timeout(60.0)  # the one that replaces it has to start

        monkeypatch.setattr(env._workers, "_kill_hung_workers", once)
        assert_same(scripted(env, 1), undisturbed(2, calls=1))
        assert restarts(env) == 1
    (line,) = [record.getMessage() for record in caplog.records if "has not answered" in record.message]
    assert re.match(r"environment worker ([01]) \(process \d+, slot \1 from seed \d+\)", line)
    assert ("walk_env.py" in capfd.readouterr().err) == (how == "hang")


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "call", "how", "message"), [
    (Walk, "reset", "kill", "worker 0 died 3 times"), (SteadyWalk, "step 2", "kill", "worker 0 died 3 times"),
    (SteadyWalk, "step 2", "hang", "worker 0 hung repeatedly without"),
    (SteadyWalk, "step 2", "leave", r"(?s)worker 0 failed:.*sys\.exit\(0\).*SystemExit: 0"),
])  # fmt: skip
def test_a_worker_that_always_fails_is_an_error(kind, call, how, message, monkeypatch):
    monkeypatch.setattr(worker_pool, "DEATHS_IN_A_ROW", 3)
    monkeypatch.setattr(worker_pool, "DEATHS_OF_A_HANG", 3)
    env = ProcessEnvs(kind, kind.args_model(fail_in=[call], how=how), 1)
    env.set_worker_timeout(1.0 if how == "hang" else 60.0)
    env.reset(all_slots(env), np.zeros(1, int))
    with pytest.raises(EnvWorkerError, match=message) as caught:
        for _ in range(4):
            if env.step(np.zeros((1, N), int), all_slots(env)).lost.all():
                env.reset(all_slots(env), np.zeros(1, int))
    assert isinstance(caught.value, RunFailed) is (how != "leave"), "no line of Python says why"
    with pytest.raises(EnvWorkerError, match="closed"):
        env.observe()


@pytest.mark.processes
def test_a_dead_worker_costs_the_episode_of_its_slot_alone(tmp_path):
    """In each kind of call one dies, and one between calls; in a reset, which comes first, that costs no episode."""
    args = WalkArgs(shares=True, limit=3)
    failing = args.model_copy(update={"fail_in": ["reset", "step", "show", "stats", "replay"], "marks": str(tmp_path)})
    env, mirror = ProcessEnvs(Walk, failing, SLOTS), SerialEnvs(Walk, args, SLOTS)
    everyone, still, seeds = all_slots(env), np.zeros((SLOTS, N), int), np.arange(SLOTS)
    calls = [
        lambda: env.reset(everyone, seeds), lambda: env.observe(full=True), env.get_stats, lambda: env.save_replay(""),
        lambda: gone([kill(env, 0)]),
    ]  # fmt: skip
    mirror.reset(everyone, seeds)
    with workers(env):
        for number, call in enumerate(calls):
            with contextlib.suppress(NotImplementedError):  # a walk has no replays
                call()
            assert (env.observe().obs == mirror.observe().obs).all()
            result, expected = env.step(still, everyone), mirror.step(still, everyone)
            lost = result.lost
            assert lost.sum() == 1
            assert (result.reward == np.where(lost, 0, expected.reward)).all()
            assert (result.agent_reward == np.where(lost[:, None], 0, expected.agent_reward)).all()
            assert (result.terminated == expected.terminated | lost).all()
            assert (result.truncated == expected.truncated & ~lost).all()
            over = expected.terminated & ~lost
            for name in expected.info if over.any() else ():
                assert (result.info[name][over] == expected.info[name][over]).all()
            assert (env.step(still, lost).lost == lost).all()  # until its reset
            for one in (env, mirror):
                one.reset(result.terminated, seeds + 10 * number)
            if number > 0:
                assert (env.observe(full=True).full_obs == mirror.observe(full=True).full_obs).all()
        assert restarts(env) == len(calls) + 1


@pytest.mark.processes
def test_deaths_are_counted_since_the_last_completed_episode_and_restarts_survive_them(monkeypatch):
    monkeypatch.setattr(worker_pool, "DEATHS_IN_A_ROW", 2)
    with workers(ProcessEnvs(Walk, WalkArgs(limit=1), 2)) as env:
        for deaths in range(3):
            env.reset(all_slots(env), np.arange(2))
            assert not env.step(np.zeros((2, N), int), all_slots(env)).lost.any()
            # The first worker has played all episodes, and the second only the last one.
            counted = {"episodes": deaths + 2, "restarts": 2 * deaths + 2, "win_rate": 0.5, "worker_restarts": deaths}
            assert env.get_stats() == counted
            assert gone([kill(env, 1)])
