"""Runners that keep episodes in flight: snapshots of them, whole runs, and single steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import records
from runner_toys import FakeEnv, Game, assert_continues, nothing, rounds
from walk_env import SteadyArgs, SteadyWalk, Walk, WalkArgs

import omagd
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.envs.workers.vector import SerialEnvs
from omagd.run.cli.main import config_from
from omagd.run.training.stages.rl import RLStage
from omagd.utils.packing import Episode
from omagd.utils.seeding import seed_everything

SLOTS = 3


def skirmish(slots: int = 4) -> BatchedEnv:
    return make_env("skirmish", {"map_name": "3m"}, slots, processes=False)


def steady() -> BatchedEnv:
    return SerialEnvs(SteadyWalk, SteadyArgs(), 4)


def play_a_test(game: Game) -> None:
    """Play a test in the environment of a game."""
    assert not game.drain().episodes
    assert not game.runner.in_flight
    Game(game.env, "parallel", game.policy, game.runner.config).runner.run(game.policy, explore=None, keep=False)


@pytest.mark.parametrize("before", [nothing, play_a_test])
@pytest.mark.parametrize("make", [skirmish, steady])
def test_a_stream_continues_bit_for_bit_after_tests_and_from_a_snapshot(make, before):
    assert_continues(lambda: Game(make()), 1, 3, before)


def test_episodes_that_cannot_be_saved_are_lost_and_counted():
    game, again = (Game(SerialEnvs(Walk, WalkArgs(limit=5), 4)) for _ in range(2))
    game.collect(1)
    again.runner.restore(game.runner.snapshot())
    assert not again.runner.in_flight and (game.runner.lost, again.runner.lost) == (0, 4)
    (one,), (other,) = game.collect(1), again.collect(1)
    assert other.n_episodes >= 4
    assert not {entry["seed"] for entry in one.log} & {entry["seed"] for entry in other.log}
    with pytest.raises(NotImplementedError, match="cannot be restored"):
        SerialEnvs(Walk, WalkArgs(), 1).restore({})


def test_training_keeps_and_counts_every_episode_of_a_stream(tmp_path, monkeypatch):
    kept: list[int] = []
    learned: list[RLStage] = []
    add, update = EpisodeBuffer.add, RLStage.update

    def watch(buffer: EpisodeBuffer, episodes: list[Episode]) -> None:
        kept.extend(len(episode["reward"]) - 1 for episode in episodes)
        add(buffer, episodes)

    monkeypatch.setattr(EpisodeBuffer, "add", watch)
    monkeypatch.setattr(RLStage, "update", lambda stage: (learned.append(stage), update(stage)))
    words = ["--config=vdn", "with", *BUDGETS, f"local_results_path={tmp_path}", "runner=stream", "test_interval=60"]
    result = omagd.run(config_from([*words, "epsilon_anneal_time=200", "updates_per_iteration=3"]))
    clock = result["stages"]["stage3"]["clock"]
    assert clock["updates"] == 3 * len(learned) > 0
    epsilons = [line["epsilon"] for line in records(Path(result["folder"])) if "epsilon" in line]
    assert epsilons == sorted(set(epsilons), reverse=True) and epsilons[-1] < 0.7
    assert (clock["t_env"], clock["episodes"]) == (sum(kept), len(kept)) and clock["t_env"] >= 150
    begun = learned[-1].session.runners["train"].stream.state_dict()["played"]
    assert sum(begun) == len(kept) + 2, "the last test begins with one unfinished episode in each slot"


def snakes(ticks: int = 3) -> Game:
    """Return a game of DDPG's untrained agent, by single steps."""
    updates = {"rnn_hidden_dim": 8, "ticks_per_iteration": ticks, "batch_size_run": SLOTS}
    config = resolve("snakes_ddpg", "snakes", updates)
    env = make_env("snakes_3v3", dict(config.env_args), SLOTS, processes=False)
    seed_everything(1, "agent")
    return Game(env, "ticks", MACS.get("ddpg_mac")(config, env.info, torch.device("cpu"), None), config)


@pytest.mark.parametrize("before", [nothing, play_a_test])
def test_steps_continue_bit_for_bit_after_tests_and_from_a_snapshot(before):
    assert_continues(snakes, 20, 55, before)


@pytest.fixture(scope="module")
def steps() -> list[Episode]:
    played = [step for rollout in snakes().collect(75) for step in rollout.episodes]
    assert len(played) == 75 * 3 * SLOTS - 3 - 3  # the first look at each game brings no step: two games each
    return played


def test_rewards_and_returns_of_agents_are_stored_and_logged_where_the_environment_has_them(steps):
    reward, each = (torch.stack([step[name][0] for step in steps]) for name in ("reward", "agent_reward"))
    torch.testing.assert_close(each.sum(1), reward)
    assert (each[:, 0] != each[:, 1]).any()
    assert all((step["agent_reward"][1] == 0).all() for step in steps)
    game = snakes()
    played = game.runner.run(game.policy, explore=game.explore, episodes_per_slot=2)
    earned = torch.stack([episode["agent_reward"].double().sum(0) for episode in played.episodes])
    assert len(earned) == 2 * SLOTS
    for i in range(3):
        expected = earned[:, i].tolist()
        assert played.stats[f"return_agent_{i}"] == (pytest.approx(sum(expected), rel=1e-6), len(earned))
        assert [entry[f"return_agent_{i}"] for entry in played.log] == pytest.approx(expected, rel=1e-6)
    plain = rounds(FakeEnv(2))
    assert all("agent_reward" not in episode for episode in plain.episodes)
    assert not any("return_agent" in name for name in plain.stats)


def test_games_saved_before_returns_of_agents_were_kept_continue_without_them():
    game = snakes(ticks=190)
    game.collect(1)
    saved = game.runner.snapshot()
    del saved["flying"]["play"]["clock"]["agent_reward"]
    game.runner.restore(saved)
    (rest, next_games) = game.collect(2)
    assert rest.n_episodes == SLOTS
    assert "return" in rest.stats and "return_agent_0" not in rest.stats
    assert "return_agent_0" in next_games.stats
