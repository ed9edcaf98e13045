"""Battles that go on from one iteration to the next, and slots that take turns: the same episodes, none lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from q_toys import toy_config
from runner_toys import FakeEnv, Probe, identity, length_of, runner_of
from walk_env import Walk, WalkArgs

import omagd
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.envs.workers.process_envs import ProcessEnvs
from omagd.envs.workers.vector import SerialEnvs
from omagd.run.cli.main import config_from
from omagd.run.training.stages.rl import RLStage
from omagd.runners.rollout import EpisodeSeeds, Rollout
from omagd.runners.stream_runner import StreamRunner
from omagd.utils.packing import Episode

torch.set_num_threads(1)


def same(one: Episode, other: Episode) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def streamed(env: FakeEnv, calls: int, probe: Probe | None = None) -> list[Rollout]:
    """Return what `calls` iterations and the drain after them brought."""
    runner, probe = runner_of(env, name="stream"), probe or Probe()
    rollouts = [runner.collect(probe, explore=None) for _ in range(calls)]
    return [*rollouts, runner.drain(probe, explore=None)]


def test_a_stream_plays_the_episodes_that_rounds_play_bit_for_bit():
    rounds = runner_of(FakeEnv(4)).run(Probe(), explore=None, episodes_per_slot=20).episodes
    played = [episode for rollout in streamed(FakeEnv(4), 6) for episode in rollout.episodes]
    assert len(played) >= 24
    assert all(any(same(episode, other) for other in rounds) for episode in played)


def test_a_stream_is_a_function_of_its_seed_and_its_order_is_that_of_ticks_and_slots():
    env = FakeEnv(5)
    order = [identity(episode) for rollout in streamed(env, 4) for episode in rollout.episodes]
    again = [identity(episode) for rollout in streamed(FakeEnv(5), 4) for episode in rollout.episodes]
    assert order == again
    expected = []
    for slot in range(5):
        tick = 0
        for seed in [seed for s, seed in env.begun if s == slot]:
            tick += length_of(seed) + 1  # one tick to look at the last moment
            expected.append((tick, slot, seed % 1000))
    assert order == [number for _, _, number in sorted(expected)]


def test_every_iteration_brings_as_many_episodes_as_slots_and_the_drain_loses_none():
    env = FakeEnv(6)
    *rollouts, rest = streamed(env, 5)
    assert all(6 <= rollout.n_episodes < 12 for rollout in rollouts)
    everything = [*rollouts, rest]
    assert all(rollout.n_episodes == len(rollout.episodes) for rollout in everything)
    found = sorted(identity(episode) for rollout in everything for episode in rollout.episodes)
    assert found == sorted(seed % 1000 for _, seed in env.begun)
    assert sum(rollout.steps for rollout in everything) == len(env.log) == sum(length_of(s) for _, s in env.begun)
    assert sum(rollout.stats["ep_length"][0] for rollout in everything) == len(env.log)


def test_nobody_else_plays_while_battles_are_in_flight():
    env = FakeEnv(3)
    runner, probe = runner_of(env, name="stream"), Probe()
    assert not runner.in_flight
    runner.collect(probe, explore=None)
    assert runner.in_flight
    with pytest.raises(RuntimeError, match="drain"):
        runner.renew(1)
    with pytest.raises(RuntimeError, match="drain"):
        runner.run(probe, explore=None)
    with pytest.raises(RuntimeError, match="another policy"):
        runner.collect(Probe(), explore=None)
    runner.drain(probe, explore=None)
    assert not runner.in_flight and runner.drain(probe, explore=None).n_episodes == 0
    runner_of(env, "test", "stream").run(probe, explore=None, episodes_per_slot=2, keep=False)
    assert runner.collect(probe, explore=None).n_episodes >= 3


def _mac(env: BatchedEnv, **updates: Any) -> BasicMAC:
    torch.manual_seed(0)
    return BasicMAC(toy_config(**{"mac": "n_mac", **updates}), env.info, torch.device("cpu"))


def test_a_stream_continues_from_a_snapshot_in_the_middle_of_its_battles():
    def begin() -> tuple[StreamRunner, BasicMAC, Exploration]:
        env = make_env("skirmish", {"map_name": "3m"}, 4, processes=False)
        runner = StreamRunner(env, toy_config(), env.info, EpisodeSeeds(1, "train"))
        return runner, _mac(env), Exploration(0.3, np.random.default_rng(2))

    runner, mac, explore = begin()
    runner.collect(mac, explore=explore)
    snapshot, state = runner.snapshot(), explore.rng.bit_generator.state
    expected = [runner.collect(mac, explore=explore) for _ in range(2)]
    runner, mac, explore = begin()
    explore.rng.bit_generator.state = state
    runner.restore(snapshot, mac)
    assert runner.in_flight
    for rollout in expected:
        found = runner.collect(mac, explore=explore)
        assert (found.steps, found.stats, found.log) == (rollout.steps, rollout.stats, rollout.log)
        assert all(same(one, other) for one, other in zip(found.episodes, rollout.episodes, strict=True))


def _tick(env: BatchedEnv, active: np.ndarray) -> Tick:
    return Tick(env.observe(), np.zeros(env.n_slots, np.int64), active)


def test_acting_for_some_slots_is_acting_for_them_alone():
    """Values agree to the last bits, which depend on how many rows a matrix product has; other slots keep theirs."""
    env = make_env("skirmish", {"map_name": "3m"}, 4, processes=False)
    env.reset(np.ones(4, bool), np.arange(4))
    whole, parts = _mac(env), _mac(env)
    first = np.array([True, False, True, False])
    for mac in (whole, parts):
        mac.begin(4)
    for _ in range(3):
        together = whole.act(_tick(env, np.ones(4, bool)), None).actions
        before = parts.snapshot()
        one = parts.act(_tick(env, first), None).actions
        assert torch.equal(parts.snapshot()["hidden"][~first], before["hidden"][~first])
        assert torch.equal(parts.snapshot()["last_action"][~first], before["last_action"][~first])
        other = parts.act(_tick(env, ~first), None).actions
        assert (np.where(first[:, None], one, other) == together).all()
        torch.testing.assert_close(parts.snapshot()["hidden"], whole.snapshot()["hidden"], rtol=0, atol=1e-6)
        env.step(together, np.ones(4, bool))


def test_acting_follows_what_is_learned_and_leaves_the_learner_in_training():
    env = make_env("skirmish", {"map_name": "3m"}, 2, processes=False)
    env.reset(np.ones(2, bool), np.arange(2))
    mac = _mac(env)
    optimizer = torch.optim.Adam(mac.agent.parameters(), lr=0.1)
    for _ in range(3):
        mac.begin(2)
        mac.act(_tick(env, np.ones(2, bool)), None)
        fresh = _mac(env)
        fresh.agent.load_state_dict(mac.agent.state_dict())
        fresh.begin(2)
        fresh.act(_tick(env, np.ones(2, bool)), None)
        assert torch.equal(mac.snapshot()["hidden"], fresh.snapshot()["hidden"])
        assert mac.agent.training
        hidden = mac.snapshot()["hidden"]
        loss = sum(parameter.square().sum() + parameter.sum() for parameter in mac.agent.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mac.begin(2)
        mac.act(_tick(env, np.ones(2, bool)), None)
        assert not torch.equal(mac.snapshot()["hidden"], hidden)


def test_stage_3_keeps_and_counts_every_episode_of_a_stream(tmp_path, monkeypatch):
    kept: list[int] = []
    add = EpisodeBuffer.add

    def watch(buffer: EpisodeBuffer, episodes: list[Episode]) -> None:
        kept.extend(len(episode["reward"]) - 1 for episode in episodes)
        add(buffer, episodes)

    monkeypatch.setattr(EpisodeBuffer, "add", watch)
    words = ["--config=vdn", "with", *BUDGETS, f"local_results_path={tmp_path}", "runner=stream", "test_interval=60"]
    learned, update = [], RLStage.update
    monkeypatch.setattr(RLStage, "update", lambda stage: (learned.append(1), update(stage)))
    result = omagd.run(config_from([*words, "epsilon_anneal_time=200", "updates_per_iteration=3"]))
    lines = [json.loads(line) for line in (Path(result["folder"]) / "metrics.jsonl").read_text().splitlines()]
    assert result["stages"]["stage3"]["clock"]["updates"] == 3 * len(learned) > 0
    epsilons = [line["epsilon"] for line in lines if "epsilon" in line]
    assert epsilons == sorted(set(epsilons), reverse=True), "it follows the clock"
    assert epsilons[-1] < 0.7
    clock = result["stages"]["stage3"]["clock"]
    assert (clock["t_env"], clock["episodes"]) == (sum(kept), len(kept))
    assert clock["t_env"] >= 150


# --- what follows starts processes


@pytest.mark.processes
@pytest.mark.parametrize("per_process", [1, 2])
def test_workers_that_step_apart_tell_what_this_process_would(per_process):
    env = ProcessEnvs(Walk, WalkArgs(limit=3), 5, per_process=per_process)
    try:
        assert len(env._workers.processes) == -(-5 // per_process)
        serial, rng = SerialEnvs(Walk, WalkArgs(limit=3), 5), np.random.default_rng(0)
        halves = [np.arange(5) < 2, np.arange(5) >= 2]
        for one in (env, serial):
            one.reset(np.ones(5, bool), np.arange(5))
        for _ in range(12):
            actions = serial.scripted_actions("random", rng)
            expected = serial.step(actions, np.ones(5, bool))
            for half in halves:
                env.step_start(actions, half)
            for half in halves:
                told = env.step_finish(half)
                assert (told.reward == np.where(half, expected.reward, 0)).all()
                assert (told.terminated == (expected.terminated & half)).all()
                assert (told.truncated == (expected.truncated & half)).all()
                for name, values in told.info.items():
                    assert (values[told.terminated] == expected.info[name][told.terminated]).all()
            seeds = rng.integers(2**60, size=5)
            for one in (env, serial):
                one.reset(expected.terminated, seeds)
            assert (env.observe().obs == serial.observe().obs).all()
    finally:
        env.close()
