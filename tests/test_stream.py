"""Runners that keep episodes in flight, and single steps of them: the rows of whole episodes, none lost."""

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

import omagd
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.schedules import FactorSchedule, epsilon_schedule
from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.run.cli.main import config_from
from omagd.run.memory_budget import replay_bytes, replay_spec
from omagd.run.training.stages.rl import RLStage
from omagd.runners import REGISTRY
from omagd.runners.rollout import EpisodeSeeds, Rollout
from omagd.runners.stream_runner import StreamRunner
from omagd.utils.packing import Episode
from omagd.utils.seeding import seed_everything

torch.set_num_threads(1)


def same(one: Episode, other: Episode) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def played(env: FakeEnv, name: str, calls: int) -> list[Rollout]:
    """Return the rollouts of `calls` iterations and of the drain after them."""
    runner, probe = runner_of(env, name=name), Probe()
    rollouts = [runner.collect(probe, explore=None) for _ in range(calls)]
    return [*rollouts, runner.drain(probe, explore=None)]  # this environment cannot be saved: ticks are finished too


def test_a_stream_plays_the_episodes_of_rounds_in_the_order_of_ticks_and_slots_and_loses_none():
    env = FakeEnv(5)
    everything = played(env, "stream", 4)
    episodes = [episode for rollout in everything for episode in rollout.episodes]
    rounds = {e.meta: e for e in runner_of(FakeEnv(5)).run(Probe(), explore=None, episodes_per_slot=20).episodes}
    assert all(same(episode, rounds[episode.meta]) for episode in episodes)
    expected = []
    for slot in range(5):
        seeds = [seed for s, seed in env.begun if s == slot]
        ticks = np.cumsum([length_of(seed) + 1 for seed in seeds])  # one tick for the closing row
        expected += [(tick, slot, seed % 1000) for tick, seed in zip(ticks, seeds, strict=True)]
    assert list(map(identity, episodes)) == [number for _, _, number in sorted(expected)]
    assert all(5 <= rollout.n_episodes == len(rollout.episodes) < 10 for rollout in everything[:-1])
    assert sum(rollout.steps for rollout in everything) == len(env.log)
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


def test_acting_follows_what_is_learned_and_leaves_the_learner_in_training():
    env = make_env("skirmish", {"map_name": "3m"}, 2, processes=False)
    env.reset(np.ones(2, bool), np.arange(2))
    mac = _mac(env)

    def acted(one: BasicMAC) -> torch.Tensor:
        one.begin(2)
        one.act(Tick(env.observe(), np.zeros(2, np.int64), np.ones(2, bool)), None)
        return one.snapshot()["hidden"]

    for _ in range(3):
        fresh = _mac(env)
        fresh.agent.load_state_dict(mac.agent.state_dict())
        hidden = acted(mac)
        assert torch.equal(hidden, acted(fresh)) and mac.agent.training
        with torch.no_grad():
            for parameter in mac.agent.parameters():
                parameter.add_(0.1)
        assert not torch.equal(acted(mac), hidden)


def test_stage_3_keeps_and_counts_every_episode_of_a_stream(tmp_path, monkeypatch):
    kept: list[int] = []
    add = EpisodeBuffer.add

    def watch(buffer: EpisodeBuffer, episodes: list[Episode]) -> None:
        kept.extend(len(episode["reward"]) - 1 for episode in episodes)
        add(buffer, episodes)

    monkeypatch.setattr(EpisodeBuffer, "add", watch)
    words = ["--config=vdn", "with", *BUDGETS, f"local_results_path={tmp_path}", "runner=stream", "test_interval=60"]
    learned, update = [], RLStage.update
    monkeypatch.setattr(RLStage, "update", lambda stage: (learned.append(stage), update(stage)))
    result = omagd.run(config_from([*words, "epsilon_anneal_time=200", "updates_per_iteration=3"]))
    lines = [json.loads(line) for line in (Path(result["folder"]) / "metrics.jsonl").read_text().splitlines()]
    assert result["stages"]["stage3"]["clock"]["updates"] == 3 * len(learned) > 0
    epsilons = [line["epsilon"] for line in lines if "epsilon" in line]
    assert epsilons == sorted(set(epsilons), reverse=True), "it follows the clock"
    assert epsilons[-1] < 0.7
    clock = result["stages"]["stage3"]["clock"]
    assert (clock["t_env"], clock["episodes"]) == (sum(kept), len(kept))
    begun = learned[-1].session.runners["train"].stream.state_dict()["played"]
    assert sum(begun) == len(kept), "episodes that a test has finished are stored too"
    assert clock["t_env"] >= 150


SLOTS = 3


def test_steps_are_the_rows_of_the_episodes_that_rounds_play():
    rounds = runner_of(FakeEnv(4)).run(Probe(), explore=None, episodes_per_slot=12).episodes
    expected: dict[tuple[int, float], list[Episode]] = {}
    for episode in rounds:
        for t in range(len(episode["reward"]) - 1):
            step = {name: value[t : t + 2].clone() for name, value in episode.items()}
            for name in ("actions", "reward", "terminated"):
                step[name][1] = 0
            expected.setdefault((identity(step), float(step["state"][0, 1])), []).append(step)
    steps = [step for rollout in played(FakeEnv(4), "ticks", 25) for step in rollout.episodes]
    assert len(steps) > 60
    for step in steps:
        assert any(same(step, other) for other in expected[identity(step), float(step["state"][0, 1])])


def test_every_step_is_counted_once_and_episodes_where_they_end():
    env = FakeEnv(5)
    rollouts = played(env, "ticks", 30)
    assert all(rollout.steps == len(rollout.episodes) <= 5 for rollout in rollouts[:-1])
    assert sum(rollout.steps for rollout in rollouts) == len(env.log) == sum(length_of(seed) for _, seed in env.begun)
    logged = [entry["seed"] for rollout in rollouts for entry in rollout.log]
    assert sorted(logged) == sorted(seed for _, seed in env.begun)
    assert sum(rollout.n_episodes for rollout in rollouts) == len(logged)
    assert sum(rollout.stats["ep_length"][0] for rollout in rollouts if rollout.stats) == len(env.log)
    # Other purposes play whole episodes.
    rollout = runner_of(FakeEnv(3), "beliefs", "ticks").run(Probe(), explore=None, episodes_per_slot=2)
    assert rollout.n_episodes == len(rollout.episodes) == 6
    assert rollout.steps == sum(len(episode["reward"]) - 1 for episode in rollout.episodes)


class Snakes:
    """A game of DDPG's untrained agent in some slots."""

    def __init__(self, ticks: int = 3) -> None:
        updates = {"rnn_hidden_dim": 8, "ticks_per_iteration": ticks, "batch_size_run": SLOTS}
        self.config = resolve("snakes_ddpg", "snakes", updates)
        self.env = make_env("snakes_3v3", dict(self.config.env_args), SLOTS, processes=False)
        seed_everything(1, "agent")
        self.mac = MACS.get("ddpg_mac")(self.config, self.env.info, torch.device("cpu"), None)
        made = REGISTRY.get("ticks")
        self.runner, self.test = (
            made(self.env, self.config, self.env.info, EpisodeSeeds(1, purpose)) for purpose in ("train", "test")
        )
        self.explore = Exploration(0.5, np.random.default_rng(3))

    def collect(self, calls: int) -> list[Episode]:
        """Return the steps of so many iterations."""
        return [step for _ in range(calls) for step in self.runner.collect(self.mac, explore=self.explore).episodes]

    def interrupt(self) -> None:
        """Play a test in the same environment."""
        rest = self.runner.drain(self.mac, explore=self.explore)
        assert not rest.episodes
        assert not self.runner.in_flight
        self.test.run(self.mac, explore=None, keep=False)


@pytest.fixture(scope="module")
def undisturbed() -> list[Episode]:
    return Snakes().collect(75)


def test_battles_are_put_aside_for_tests_and_go_on_bit_for_bit(undisturbed):
    game = Snakes()
    steps = game.collect(20)
    game.interrupt()
    assert len(undisturbed) == 75 * 3 * SLOTS - 3 - 3  # the first look at each game brings no step: two games each
    assert all(same(*pair) for pair in zip(undisturbed, steps + game.collect(55), strict=True))


@pytest.mark.parametrize("aside", [False, True])
def test_a_snapshot_goes_on_in_another_process_bit_for_bit(undisturbed, aside):
    game = Snakes()
    steps = game.collect(20)
    if aside:
        game.interrupt()
    saved, chance = game.runner.snapshot(), game.explore.rng.bit_generator.state
    steps += game.collect(1)  # what is saved is not touched by what comes after
    other = Snakes()
    other.runner.restore(saved, None)
    other.explore.rng.bit_generator.state = chance
    assert all(same(*pair) for pair in zip(undisturbed[len(steps) - 9 :], other.collect(55), strict=True))


def test_what_each_agent_earned_is_stored_where_the_environment_tells(undisturbed):
    reward = torch.stack([step["reward"][0] for step in undisturbed])
    each = torch.stack([step["agent_reward"][0] for step in undisturbed])
    torch.testing.assert_close(each.sum(1), reward)
    assert (each[:, 0] != each[:, 1]).any()
    assert all((step["agent_reward"][1] == 0).all() for step in undisturbed)
    plain = runner_of(FakeEnv(2)).run(Probe(), explore=None)
    assert all("agent_reward" not in episode for episode in plain.episodes)
    assert not any("return_agent" in name for name in plain.stats)


def test_returns_of_single_agents_are_told_beside_the_teams():
    game = Snakes()
    played = game.test.run(game.mac, explore=game.explore, episodes_per_slot=2)
    earned = torch.stack([episode["agent_reward"].double().sum(0) for episode in played.episodes])
    assert len(earned) == 2 * SLOTS
    for i in range(3):
        total, count = played.stats[f"return_agent_{i}"]
        assert count == len(earned)
        assert total == pytest.approx(float(earned[:, i].sum()), rel=1e-6)
        logged = [entry[f"return_agent_{i}"] for entry in played.log]
        assert sorted(logged) == pytest.approx(sorted(earned[:, i].tolist()), rel=1e-6)


def test_games_saved_before_single_returns_were_kept_go_on_without_them():
    game = Snakes(ticks=190)
    game.collect(1)
    saved = game.runner.snapshot()
    del saved["flying"]["play"]["clock"]["agent_reward"]
    game.runner.restore(saved, None)
    rest = game.runner.collect(game.mac, explore=game.explore)
    assert rest.n_episodes == SLOTS
    assert "return" in rest.stats
    assert "return_agent_0" not in rest.stats
    assert "return_agent_0" in game.runner.collect(game.mac, explore=game.explore).stats


def test_the_replay_is_as_large_as_is_said_before(undisturbed):
    game = Snakes()
    spec = {name: (value.dtype, tuple(value.shape[1:])) for name, value in undisturbed[0].items()}
    assert spec == replay_spec(game.config, game.env.info)
    rounds = game.config.model_copy(update={"runner": "parallel"})
    assert replay_bytes(rounds, game.env.info) == 201 / 2 * replay_bytes(game.config, game.env.info)


def test_epsilon_falls_by_a_factor_for_each_step_where_one_is_given():
    epsilon = 0.5
    schedule = FactorSchedule(0.5, 0.01, 0.99)
    for t in range(1000):
        assert schedule.value(t) == pytest.approx(max(epsilon, 0.01))
        epsilon *= 0.99
    config = resolve("snakes_ddpg", "snakes")
    assert epsilon_schedule(config).value(34657) == pytest.approx(0.25, rel=1e-4)
    line = epsilon_schedule(config.model_copy(update={"epsilon_speed": None, "epsilon_anneal_time": 100}))
    assert line.value(50) == 0.25


def test_steps_that_are_encoded_together_are_stored_as_single_ones_are(undisturbed):
    steps = [dict(step) for step in undisturbed[:20]]
    steps[7]["avail_actions"] = steps[7]["avail_actions"] + 1  # no mask: the field is stored as it is from here on
    together, apart = EpisodeBuffer(15), EpisodeBuffer(15)
    together.add(iter(steps))
    for step in steps:
        apart.add([step])
    assert together.added == apart.added == 20
    assert together.nbytes == apart.nbytes
    for stored, step in zip(together.episodes, steps[5:], strict=True):
        assert same(stored, step)
    assert len({records.data_ptr() for records in together.since(0).records}) == 15
    assert all(records.untyped_storage().nbytes() == records.nbytes for records in together.since(0).records)
