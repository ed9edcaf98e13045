"""Episodes whose world has died: dropped, replaced and counted; workers that die are replaced."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fragile_walk import Fragile, FragileArgs
from runner_toys import FakeEnv, Probe, length_of, runner_of
from walk_env import N, Walk, WalkArgs, all_slots, gone, pids_of

from omagd.envs.parallel import ParallelBattle
from omagd.envs.protocol import LOST_IN_A_ROW, StepResult
from omagd.envs.workers import pool as worker_pool
from omagd.envs.workers.process_envs import EnvWorkerError, ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.run import api
from omagd.run.training.session import Session
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

torch.set_num_threads(1)
PLACES = ("reset", "step", "replay", "show", "stats")


def is_lost(seed: int) -> bool:
    return seed % 4 == 0


class LossyEnv(FakeEnv):
    """Every episode whose seed can be divided by four is lost in its middle, with a result that must not be counted."""

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        lost = active & (self.seed % 4 == 0) & (self.t >= (2 + self.seed % 9) // 2)
        self.over |= lost
        result.info["battle_won"][lost] = 1000.0
        return StepResult(result.reward, result.terminated | lost, result.truncated & ~lost, result.info, lost)


def begun(env: FakeEnv, lost: bool) -> list[int]:
    return [seed for _, seed in env.begun if is_lost(seed) == lost]


def test_rounds_replace_what_is_lost_until_every_slot_has_its_quota():
    env, quota = LossyEnv(4), 12
    runner = runner_of(env)
    rollout = runner.run(Probe(), explore=None, episodes_per_slot=quota)
    for slot in range(4):
        assert sum(not is_lost(seed) for s, seed in env.begun if s == slot) == quota
    assert rollout.stats["battle_won"] == (sum(seed % 3 == 0 for seed in begun(env, lost=False)), 4 * quota)
    assert rollout.stats["return"][1] == 4 * quota
    without = runner_of(FakeEnv(4)).run(Probe(), explore=None, episodes_per_slot=50).episodes
    found = {episode.meta: episode for episode in without}
    for episode in rollout.episodes:  # as it would be played without losses
        assert all(torch.equal(values, found[episode.meta][name]) for name, values in episode.items())


@pytest.mark.parametrize("name", ["parallel", "stream", "episode"])
def test_every_runner_counts_what_is_kept_and_what_is_lost(name):
    env, probe = LossyEnv(1 if name == "episode" else 5), Probe()
    runner = runner_of(env, name=name)
    rollouts = [runner.collect(probe, explore=None) for _ in range(6)]
    rollouts.append(runner.drain(probe, explore=None))
    kept = begun(env, lost=False)
    assert sum(rollout.n_episodes for rollout in rollouts) == len(kept) >= 6 * env.n_slots
    assert sorted(e.meta.seed for rollout in rollouts for e in rollout.episodes) == sorted(kept)
    assert sum(rollout.steps for rollout in rollouts) == sum(map(length_of, kept)) < len(env.log)
    assert all(rollout.steps == rollout.stats["ep_length"][0] for rollout in rollouts if rollout.n_episodes)
    assert sum(rollout.lost for rollout in rollouts) == runner.lost == len(begun(env, lost=True)) > 0


class Hopeless(FakeEnv):
    """One slot loses all its episodes, or all but every tenth."""

    def __init__(self, n_slots: int, kept: int = 0) -> None:
        super().__init__(n_slots)
        self.kept = kept

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        number = sum(slot == 1 for slot, _ in self.begun)
        lost = active & (np.arange(self.n_slots) == 1) & (self.kept == 0 or number % self.kept != 0)
        self.over |= lost
        return StepResult(result.reward, result.terminated | lost, result.truncated & ~lost, result.info, lost)


@pytest.mark.parametrize("name", ["parallel", "stream", "ticks"])
def test_a_slot_that_loses_every_episode_ends_the_run_after_ten(name):
    env = Hopeless(3)
    runner, probe = runner_of(env, name=name), Probe()
    with pytest.raises(UserError, match=r"^env=fake, slot 1, seed \d+, step 1: .*lost, as the 9 episodes of the slot"):
        for _ in range(100):
            runner.collect(probe, explore=None)
    assert sum(slot == 1 for slot, _ in env.begun) == LOST_IN_A_ROW == 10


def test_nine_lost_episodes_in_a_row_are_replaced_again_and_again():
    rollout = runner_of(Hopeless(3, kept=10)).run(Probe(), explore=None, episodes_per_slot=3)
    assert (rollout.n_episodes, rollout.lost) == (9, 27)


@pytest.mark.parametrize("known", [True, False])
def test_lost_episodes_in_a_row_are_counted_over_a_restart(known):
    env, probe = Hopeless(3), Probe()
    play = runner_of(env)._loop(probe, False, True)
    play.begin(10**6)
    for _ in range(7):
        play.tick(None)
    state = play.snapshot()
    if not known:
        del state["clock"]["lost"]  # as it was saved before these were counted
    again = runner_of(env)._loop(probe, False, True)
    again.restore(state)
    with pytest.raises(UserError, match="this was lost"):
        for _ in range(100):
            again.tick(None)
    assert sum(slot == 1 for slot, _ in env.begun) == 10 + (0 if known else 7)


def test_the_python_interface_gives_up_as_well(monkeypatch):
    env, policy = ParallelBattle(FakeEnv(1)), SimpleNamespace(reset=print, act=print)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UserError, match="env=fake: 10 episodes in a row were lost"),
    ):
        patch.setattr(api, "_play_one", lambda *_: {"lost": True})
        api.play(policy, env, 1)


# --- what follows starts processes


def kill(env: ProcessEnvs, number: int) -> None:
    pid = pids_of(env)[number]
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])


@pytest.mark.processes
@pytest.mark.parametrize("per_process", [1, 2])
def test_a_killed_worker_costs_the_episodes_of_its_slots_and_nothing_else(per_process):
    env, mirror = ProcessEnvs(Walk, WalkArgs(), 4, per_process=per_process), SerialEnvs(Walk, WalkArgs(), 4)
    still, everyone = np.zeros((4, N), int), all_slots(env)
    hers = np.arange(4) < per_process
    try:
        for world in (env, mirror):
            world.reset(everyone, np.arange(4))
            world.step(still, everyone)
        assert env.get_stats()["worker_restarts"] == 0
        before = env.observe().obs
        kill(env, 0)
        assert (env.observe().obs == before).all()  # nobody asks the dead: what was seen is still there
        begin = time.monotonic()
        result, expected = env.step(still, everyone), mirror.step(still, everyone)
        assert time.monotonic() - begin < 5
        assert (result.lost == hers).all() and (result.terminated == hers).all() and not result.truncated.any()
        assert (result.reward == np.where(hers, 0, expected.reward)).all()
        # Until its reset, the new one has nothing to show.
        assert (env.observe(full=True).obs[hers] == before[hers]).all()
        assert env.get_stats()["worker_restarts"] == 1
        assert (env.step(still, hers).lost == hers).all()
        for world in (env, mirror):
            world.reset(hers, np.arange(10, 14))
        for _ in range(3):
            one, other = env.observe(full=True), mirror.observe(full=True)
            assert (one.obs == other.obs).all() and (one.full_obs == other.full_obs).all()
            result, expected = env.step(still, everyone), mirror.step(still, everyone)
            assert not result.lost.any() and (result.reward == expected.reward).all()
            assert (result.truncated == expected.truncated).all()
            over = result.terminated
            assert (over == expected.terminated).all()
            assert all((result.info[name][over] == expected.info[name][over]).all() for name in result.info)
            if over.any():
                for world in (env, mirror):
                    world.reset(over, np.arange(20, 24))
        assert env.get_stats()["worker_restarts"] == 1
        pids = pids_of(env)
    finally:
        env.close()
    assert gone(pids)


@pytest.mark.processes
def test_whenever_a_worker_dies_it_is_replaced(tmp_path):
    """One of the two dies once in every call. In a reset that costs no episode: the new worker starts it instead."""
    env = ProcessEnvs(Fragile, FragileArgs(die_on=list(PLACES), once=str(tmp_path), shares=True), 2)
    mirror = SerialEnvs(Walk, WalkArgs(), 2)
    everyone, still, seeds = all_slots(env), np.zeros((2, N), int), np.array([3, 4])
    calls = {
        "reset": lambda: env.reset(everyone, seeds),
        "show": lambda: env.observe(full=True),
        "stats": lambda: env.get_stats(),
        "replay": lambda: env.save_replay(""),
        "step": lambda: None,
    }
    mirror.reset(everyone, seeds)
    start = mirror.observe().obs
    try:
        for where in PLACES:
            calls[where]()
            assert (env.observe().obs == start).all(), where
            if where != "reset":
                result = env.step(still, everyone)
                assert result.lost.sum() == 1 and (result.terminated == result.lost).all(), where
                assert ((result.agent_reward != 0) == ~result.lost[:, None]).all(), where
                env.reset(everyone, seeds)
        assert not env.step(still, everyone).lost.any()
        assert env.get_stats()["worker_restarts"] == len(PLACES)
    finally:
        env.close()


@pytest.mark.processes
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_worker_that_dies_again_and_again_is_an_error(where, monkeypatch):
    monkeypatch.setattr(worker_pool, "DEATHS_IN_A_ROW", 3)
    env = ProcessEnvs(Fragile, FragileArgs(die_on=[where]), 1)
    everyone, still = all_slots(env), np.zeros((1, N), int)
    with pytest.raises(EnvWorkerError, match="worker 0 died 3 times"):
        for _ in range(3):
            env.reset(everyone, np.zeros(1, int))
            assert env.step(still, everyone).lost.all()
    with pytest.raises(EnvWorkerError, match="closed"):
        env.observe()


@pytest.mark.processes
def test_a_worker_that_ends_episodes_between_its_deaths_goes_on_and_counters_outlive_it(monkeypatch):
    monkeypatch.setattr(worker_pool, "DEATHS_IN_A_ROW", 2)
    env = ProcessEnvs(Walk, WalkArgs(limit=1), 2)
    everyone, still = all_slots(env), np.zeros((2, N), int)
    try:
        for deaths in range(3):
            env.reset(everyone, np.arange(2))
            assert not env.step(still, everyone).lost.any()
            assert env.get_stats() == {"episodes": 2 * deaths + 2, "win_rate": 0.5, "worker_restarts": deaths}
            kill(env, 1)
    finally:
        env.close()


def test_what_has_gone_wrong_is_counted_over_runners_and_starts():
    env = SimpleNamespace(get_stats=lambda: {"restarts": 3.0})
    runners = {"train": SimpleNamespace(lost=2), "test": SimpleNamespace(lost=1)}
    session = Session(None, Dist(), env, None, None, None, runners, None, None)
    assert session.failure_counts() == {"restarts": 3, "lost_episodes": 3}
    session.resume_counting({"restarts": 2.0})  # of an earlier start
    assert session.failure_counts() == {"restarts": 5, "lost_episodes": 3}
    assert session.logged_failures["restarts"] == 5
