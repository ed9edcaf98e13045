"""Opponents that change: functions of the global clock, part of every checkpoint, rejected where they cannot be."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_harness import summary_of
from interruption import interrupted_run
from run_equality import differences, reproducible_lines

from omagd.components.opponent_schedules import REGISTRY
from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.envs.factory import make_env
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import preflight
from omagd.run.launch.launcher import launch
from omagd.run.reporting.metrics import Counters
from omagd.run.training.collection import shapers
from omagd.runners.runner import Runner
from omagd.utils.errors import UserError
from omagd.utils.seeding import EpisodeSeeds, seed_everything

SMALL = ("rnn_hidden_dim=8", "batch_size_run=2", "batch_size=4", "buffer_size=300", "test_nepisode=2", "use_cuda=False")
DDPG = ("--config=snakes_ddpg", "--env-config=snakes", "with", *SMALL)
RUN = (*DDPG, "env_args.opponent=random")


@pytest.mark.parametrize(("name", "shares", "levels"), [
    ("linear", [0, 0.249, 0.25, 0.5, 0.75, 0.999, 1.0], [0, 0, 1, 2, 3, 3, 4]),
    ("exponential", [0, 0.39, 0.4, 0.62, 0.63, 0.82, 0.83, 1.0], [0, 0, 1, 1, 2, 2, 3, 4]),
    ("curriculum", [0, 0.099, 0.1, 0.299, 0.3, 0.599, 0.6, 0.849, 0.85, 2], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    ("none", [0, 1], [None, None]), ("self_play", [0, 1], [None, None]),
])  # fmt: skip
def test_schedules_are_the_published_functions_of_the_share_of_training(name, shares, levels):
    assert [REGISTRY.get(name)().level(share) for share in shares] == levels


class Training:
    """A session of four snakes boards with small networks, and what it says about its opponents."""

    def __init__(self, **updates):
        values = {"rnn_hidden_dim": 8, "t_max": 100_000, "env_args.opponent": "l4", **updates}
        self.config = resolve("snakes_ddpg", "snakes", values)
        self.env = make_env("snakes_3v3", dict(self.config.env_args), 4, processes=False)
        self.info, self.logger, self.clock = self.env.info, SimpleNamespace(info=str), Counters()
        self.runners = {
            purpose: Runner(self.env, self.config, self.info, EpisodeSeeds(1, purpose)) for purpose in ("train", "test")
        }
        self.usual = self.runners["train"].prepare
        seed_everything(1, "agent")
        self.agent = MACS.get(self.config.mac)(self.config, self.info, torch.device("cpu"), None).agent
        found = shapers(self, SimpleNamespace(agent=self.agent), self.clock, None)
        self.opponents = found[0] if found else None

    def playing(self, *moments):
        """Return the opponents of training at each (t_env, episodes, updates)."""
        out = []
        for self.clock.t_env, self.clock.episodes, self.clock.updates in moments:
            self.opponents.deal(None)
            out.append(self.opponents.playing)
        return out

    def begun(self, purpose):
        """Return the opponents of episodes that this runner would begin now."""
        self.runners[purpose].prepare()
        self.env.reset(np.ones(4, bool), np.arange(4) + 5)
        return self.env.opponents


def test_training_climbs_the_ladder_and_tests_play_the_opponents_of_env_args():
    plain = Training()
    assert plain.opponents is None and plain.runners["train"].prepare == plain.usual
    training = Training(opponent_difficulty_strategy="curriculum")
    playing = training.playing(*((t, 0, 0) for t in (0, 9_999, 10_000, 30_000, 60_000, 85_000, 100_000)))
    assert playing == [[name] for name in ("random", "random", "l1", "l3", "l4", "greedy", "greedy")]
    for purpose, name in (("train", "greedy"), ("test", "l4"), ("train", "greedy")):
        assert training.begun(purpose) == [name] * 4
    assert training.opponents.stats() == {"opponent_level": (4.0, 1.0)}
    by_games = Training(opponent_difficulty_strategy="curriculum", max_episodes=1000)
    assert by_games.playing(*((20 * n, n, 0) for n in (99, 100, 850))) == [["random"], ["l1"], ["greedy"]]
    published = Training(opponent_difficulty_strategy="linear", opponent_order="published")
    assert published.playing((50_000, 0, 0)) == [["greedy"]]


def test_evasion_comes_in_by_the_number_of_games_over_all_ranks():
    training = Training(enable_opponent_evasion=True, opponent_evasion_start_episode=100)
    playing = training.playing((0, 0, 0), (19_000, 99, 0), (20_000, 100, 0))
    assert playing == [["l4"], ["l4"], ["l4", "evasion"]]
    assert set(training.begun("train")) == {"l4", "evasion"} and set(training.begun("test")) == {"l4"}


def test_the_pool_holds_the_newest_selves_and_comes_back_from_its_state():
    updates = {"opponent_difficulty_strategy": "self_play", "opponent_pool_size": 2, "opponent_pool_interval": 10}
    one, other = Training(**updates), Training(**updates)
    playing = one.playing(*((0, 0, u) for u in (0, 9, 10, 15, 27, 31)))
    pool = [["self_10"], ["self_10"], ["self_10", "self_27"], ["self_27", "self_31"]]
    assert playing == [["random"], ["random"], *pool]
    assert set(one.begun("train")) <= {"self_27", "self_31"}
    other.clock.updates = 31
    other.opponents.load_state_dict(one.opponents.state_dict())
    assert other.opponents.playing == one.opponents.playing == other.playing((0, 0, 31))[0]
    assert one.begun("train") == other.begun("train")
    other.env.restore(one.env.snapshot())  # with opponents of the same names that are other objects
    assert other.begun("train") == one.begun("train")
    assert one.playing((0, 0, 40)) == other.playing((0, 0, 40)) == [["self_31", "self_40"]]


@pytest.mark.parametrize("kind", ["ddpg", "ff"])
def test_a_frozen_self_plays_as_its_kind_of_agent_does(kind):
    """A copy of an actor draws from its policy; a copy of a value network takes the best action."""
    q_learning = {} if kind == "ddpg" else {"mac": "n_mac", "learner": "nq_learner"}
    updates = {"opponent_difficulty_strategy": "self_play", "opponent_pool_interval": 10, "agent": kind}
    training = Training(**updates, **q_learning)
    assert training.playing((0, 0, 10)) == [["self_10"]]
    training.begun("train")
    env, team, agreed = training.env, np.arange(4) % 2, []
    (frozen,) = training.opponents._made.values()
    assert type(frozen).from_snapshot(frozen.snapshot()) == frozen
    greedy = type(frozen)("greedy", training.agent.layers(), frozen.observer)
    for _ in range(30):
        look = torch.from_numpy(frozen.observer.observe(env._engine.board, team)[0])
        best = training.agent.trunk(look, torch.full((4, 3), -1)).argmax(-1).numpy()
        agreed.append((frozen.act(env._engine.board, team) == best).mean())
        np.testing.assert_array_equal(greedy.act(env._engine.board, team), best)
        env.step(np.zeros((4, 3), np.int64), np.ones(4, bool))
    assert np.mean(agreed) < 0.9 if kind == "ddpg" else np.mean(agreed) == 1.0
    greedy.layers[0][0][0, 0] += 1
    assert greedy != type(frozen)("greedy", training.agent.layers(), frozen.observer)


SELVES, LEARN = "opponent_difficulty_strategy=self_play", "learner=nq_learner mac=n_mac"


@pytest.mark.parametrize(("updates", "words"), [
    ("opponent_difficulty_strategy=liner", ["opponent_difficulty_strategy=liner", "linear"]),
    ("enable_opponent_evasion=True opponent_evasion_start_episode=5 t_max=1000", ["start_episode=5", "t_max=1000"]),
    (f"{SELVES} obs_agent_id=True use_full_obs=True", ["agent=ddpg", "obs_agent_id=False, use_full_obs=False"]),
    (f"{SELVES} {LEARN} agent=n_rnn", ["agent=n_rnn", "agent=ddpg", "agent=ff"]),
    ("mac=n_mac", ["learner=ddpg_learner", "mac=ddpg_mac", "mac=n_mac"]),
    ("agent=ff", ["learner=ddpg_learner", "agent=ddpg", "agent=bicnet", "agent=ff"]),
    ("opponent_difficulty_strategy=linear env_processes=True", ["env_processes=False"]),
    ("--config=qmix --env-config=matrix_game opponent_difficulty_strategy=linear", ["env=matrix_game", "no opponents"]),
])  # fmt: skip
def test_wrong_combinations_are_rejected(updates, words):
    with pytest.raises(UserError) as caught:
        preflight(config_from([*DDPG, *updates.split()]))
    assert [word for word in words if word not in caught.value.render()] == []


LONG = ("t_max=820", "ticks_per_iteration=20", "updates_per_iteration=2", "checkpoint_interval=0", "test_interval=500")
LOGS = ("log_interval=200", "runner_log_interval=200", "learner_log_interval=200", "opponent_pool_interval=5")
ALONE = ("learner=nq_learner", "mac=n_mac", "agent=ff", "mixer=none", "epsilon_speed=None")


def test_a_run_with_changing_opponents_is_resumed_bit_for_bit(tmp_path):
    """Games, tests and opponents in flight, frozen policies among them: interrupted, the run ends the same."""
    words = (*RUN, *LONG, *LOGS, *ALONE, "auto_resume=True", SELVES, "opponent_pool_size=2")
    whole_config, given = (config_from([*words, f"local_results_path={tmp_path}/{name}"]) for name in "ab")
    whole = Path(launch(whole_config, "whole")["folder"])
    folder, _ = interrupted_run(given, 12)
    launch(given, "another")
    assert differences(whole, folder.path) == []
    lines = reproducible_lines(whole)
    values = [record["opponent_selves"] for record in lines if "opponent_selves" in record]
    assert values[0] < 1 and values[-1] == 2
    for purpose in ("", "test_"):
        each = [record for record in lines if f"{purpose}return_agent_0_mean" in record]
        assert each, "each snake's return stands beside the team's"
        for record in each:
            total = sum(record[f"{purpose}return_agent_{i}_mean"] for i in range(3))
            assert total == pytest.approx(record[f"{purpose}return_mean"], rel=1e-4)
    clock = summary_of(whole)["stages"]["stage3"]["clock"]
    assert clock["episodes"] == 4 and 820 <= clock["t_env"] < 860
