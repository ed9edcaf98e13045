"""Opponents that change: functions of the global clock, part of every checkpoint, refused where they cannot be."""

from __future__ import annotations

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
from omagd.envs.factory import make_env
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.training.opponents import Opponents, check_opponents
from omagd.runners.rollout import EpisodeSeeds
from omagd.runners.runner import Runner
from omagd.utils.clock import Counters
from omagd.utils.errors import UserError
from omagd.utils.seeding import seed_everything

torch.set_num_threads(1)
SMALL = ("rnn_hidden_dim=8", "batch_size_run=2", "batch_size=4", "buffer_size=300", "test_nepisode=2", "use_cuda=False")
RUN = ("--config=snakes_ddpg", "--env-config=snakes", "with", *SMALL, "env_args.opponent=random")


def levels(name, shares):
    schedule = REGISTRY.get(name)()
    return [schedule.level(share) for share in shares]


def test_schedules_are_the_published_functions_of_the_share_of_training():
    assert levels("linear", [0, 0.249, 0.25, 0.5, 0.75, 0.999, 1.0]) == [0, 0, 1, 2, 3, 3, 4]
    assert levels("exponential", [0, 0.39, 0.4, 0.62, 0.63, 0.82, 0.83, 1.0]) == [0, 0, 1, 1, 2, 2, 3, 4]
    shares = [0, 0.099, 0.1, 0.299, 0.3, 0.599, 0.6, 0.849, 0.85, 2]
    assert levels("curriculum", shares) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert levels("none", [0, 1]) == levels("self_play", [0, 1]) == [None, None]
    for name in ("linear", "exponential", "curriculum"):
        everywhere = levels(name, np.linspace(0, 1, 500))
        assert everywhere == sorted(everywhere)
        assert everywhere[-1] == 4


class FakeSession:
    """What `Opponents` asks of a session."""

    def __init__(self, **updates):
        values = {"rnn_hidden_dim": 8, "t_max": 100_000, "env_args.opponent": "l4", **updates}
        self.config = resolve("snakes_ddpg", "snakes", values)
        self.env = make_env("snakes_3v3", dict(self.config.env_args), 4, processes=False)
        self.info = self.env.info
        self.logger = SimpleNamespace(info=str)
        self.runners = {
            purpose: Runner(self.env, self.config, self.info, EpisodeSeeds(1, purpose)) for purpose in ("train", "test")
        }

    def begun(self, purpose):
        """Return the opponents of episodes that this runner would begin now."""
        self.runners[purpose].prepare()
        everyone = np.ones(4, bool)
        self.env.reset(everyone, np.arange(4) + 5)
        return self.env.opponents


class Policy:
    """Has an agent, which a factor changes."""

    def __init__(self, session):
        from omagd.controllers import REGISTRY as MACS

        seed_everything(1, "agent")
        self.agent = MACS.get(session.config.mac)(session.config, session.info, torch.device("cpu"), None).agent


def followed(session, clock, moments):
    """Return whom training plays at each (t_env, episodes, updates)."""
    opponents = Opponents(session, Policy(session), clock)
    out = []
    for clock.t_env, clock.episodes, clock.updates in moments:
        if opponents.due():
            opponents.run()
        out.append(opponents.playing)
    return out, opponents


def test_training_climbs_the_ladder_and_tests_play_whom_env_args_name():
    session, clock = FakeSession(), Counters()
    before = session.runners["train"].prepare
    opponents = Opponents(session, Policy(session), clock)
    assert session.runners["train"].prepare is before and not opponents.due() and opponents.stats() == {}
    plain = resolve("qmix", "skirmish", {"opponent_difficulty_strategy": "linear"})
    with pytest.raises(UserError, match="env=skirmish has no opponents"):
        check_opponents(plain, session.info)
    session = FakeSession(opponent_difficulty_strategy="curriculum")
    moments = [(t, 0, 0) for t in (0, 9_999, 10_000, 30_000, 60_000, 85_000, 100_000)]
    playing, opponents = followed(session, clock, moments)
    assert playing == [[name] for name in ("random", "random", "l1", "l3", "l4", "greedy", "greedy")]
    assert session.begun("train") == ["greedy"] * 4
    assert session.begun("test") == ["l4"] * 4
    assert session.begun("train") == ["greedy"] * 4
    assert opponents.stats() == {"opponent_level": (4.0, 1.0)}
    published, _ = followed(
        FakeSession(opponent_difficulty_strategy="linear", opponent_order="published"), Counters(), [(50_000, 0, 0)]
    )
    assert published == [["greedy"]]


def test_evasion_comes_in_by_the_number_of_games_over_all_ranks():
    session = FakeSession(enable_opponent_evasion=True, opponent_evasion_start_episode=100)
    playing, _ = followed(session, Counters(), [(0, 0, 0), (19_000, 99, 0), (20_000, 100, 0)])
    assert playing == [["l4"], ["l4"], ["l4", "evasion"]]
    assert set(session.begun("train")) == {"l4", "evasion"}
    assert set(session.begun("test")) == {"l4"}


def test_the_pool_holds_the_newest_selves_and_comes_back_from_its_state():
    session = FakeSession(opponent_difficulty_strategy="self_play", opponent_pool_size=2, opponent_pool_interval=10)
    clock = Counters()
    playing, opponents = followed(session, clock, [(0, 0, u) for u in (0, 9, 10, 15, 27, 31)])
    pool = [["self_10"], ["self_10"], ["self_10", "self_27"], ["self_27", "self_31"]]
    assert playing == [["random"], ["random"], *pool]
    assert set(session.begun("train")) <= {"self_27", "self_31"}
    saved = opponents.state_dict()
    other = FakeSession(opponent_difficulty_strategy="self_play", opponent_pool_size=2, opponent_pool_interval=10)
    again = Opponents(other, Policy(other), clock)
    again.load_state_dict(saved)
    assert again.playing == opponents.playing
    assert not again.due()
    assert session.begun("train") == other.begun("train")
    other.env.restore(session.env.snapshot())  # with opponents of the same names that are other objects
    assert other.begun("train") == session.begun("train")
    clock.updates = 40
    assert again.due()
    assert opponents.due()


@pytest.mark.parametrize("kind", ["ddpg", "ff"])
def test_a_frozen_self_plays_as_its_kind_of_agent_does(kind):
    """An actor's copy draws, one that tells values takes the best."""
    updates = {"opponent_difficulty_strategy": "self_play", "opponent_pool_interval": 10, "agent": kind}
    session = FakeSession(**updates, **({} if kind == "ddpg" else {"mac": "n_mac", "learner": "nq_learner"}))
    clock = Counters(updates=10)
    policy = Policy(session)
    opponents = Opponents(session, policy, clock)
    assert opponents.due()
    opponents.run()
    session.begun("train")
    board, team = session.env._engine.board, np.ones(4, np.int64)
    (frozen,) = opponents._made.values()
    agreed = []
    for _ in range(30):
        look = torch.from_numpy(session.env._observer.observe(board, team)[0])
        best = policy.agent.trunk(look, torch.full((4, 3), -1)).argmax(-1).numpy()
        agreed.append((frozen.act(board, team) == best).mean())
        session.env.step(np.zeros((4, 3), np.int64), np.ones(4, bool))
    assert np.mean(agreed) < 0.9 if kind == "ddpg" else np.mean(agreed) == 1.0


LEARN = "learner=nq_learner mac=n_mac"


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ("opponent_difficulty_strategy=liner", "opponent_difficulty_strategy=liner is not known"),
        ("opponent_order=mesured", "opponent_order=mesured is not known"),
        ("env_args.opponent=greddy", "env_args.opponent=greddy: must be one of random"),
        (
            "enable_opponent_evasion=True opponent_evasion_start_episode=5 t_max=1000",
            "opponent_evasion_start_episode=5: is after the end",
        ),
        ("opponent_difficulty_strategy=self_play agent=bicnet", "only with an agent that does not talk"),
        (
            "opponent_difficulty_strategy=self_play obs_agent_id=True use_full_obs=True",
            "agent=ddpg can be frozen as an opponent only with obs_agent_id=False, use_full_obs=False",
        ),
        (
            f"opponent_difficulty_strategy=self_play {LEARN} agent=n_rnn",
            "agent=n_rnn cannot be frozen as an opponent. Use an agent without memory: agent=ddpg for DDPG, agent=ff",
        ),
        (
            "use_graph_reconstruction=True env_args.obs=entities learner=nq_graph_learner",
            "mac=ddpg_mac: reads no reconstruction",
        ),
        (
            "opponent_difficulty_strategy=self_play mark_guesses=True env_args.obs=entities",
            "agent=ddpg can be frozen as an opponent only with mark_guesses=False",
        ),
        ("mac=n_mac", "learner=ddpg_learner needs mac=ddpg_mac, not mac=n_mac"),
        ("agent=ff", "learner=ddpg_learner needs agent=ddpg or agent=bicnet, not agent=ff"),
        (f"{LEARN} agent=gnn_rnn", "agent=gnn_rnn needs an environment with an entity"),
        ("opponent_difficulty_strategy=linear env_processes=True", "needs env_processes=False"),
    ],
)
def test_wrong_combinations_are_rejected_in_one_line(updates, words, tmp_path, capsys):
    assert main([*RUN, f"local_results_path={tmp_path}", *updates.split()]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and words in errors[0]
    assert list(tmp_path.iterdir()) == []


LONG = ("t_max=820", "ticks_per_iteration=20", "updates_per_iteration=2", "checkpoint_interval=0", "test_interval=500")
LOGS = ("log_interval=200", "runner_log_interval=200", "learner_log_interval=200", "opponent_pool_interval=5")


def config(results, *more):
    return config_from([*RUN, *LONG, *LOGS, "auto_resume=True", f"local_results_path={results}", *more])


ALONE = ("learner=nq_learner", "mac=n_mac", "agent=ff", "mixer=none", "epsilon_speed=None")


@pytest.mark.parametrize(
    ("strategy", "learns", "cuts"),
    [("curriculum", (), (0, 15)), ("self_play", (), (12,)), ("self_play", ALONE, (12,))],
)
def test_a_run_with_changing_opponents_is_resumed_bit_for_bit(strategy, learns, cuts, tmp_path):
    """Games, tests and opponents in flight: cut off in the first games, before and after tests, ends the same."""
    chosen = (f"opponent_difficulty_strategy={strategy}", "opponent_pool_size=2", *learns)
    whole = Path(launch(config(tmp_path / "whole", *chosen), "whole")["folder"])
    given = config(tmp_path / "cut", *chosen)
    for cut in cuts:
        folder, _ = interrupted_run(given, cut)
    launch(given, "another")
    assert differences(whole, folder.path) == []
    key = "opponent_level" if strategy == "curriculum" else "opponent_selves"
    values = [record[key] for record in reproducible_lines(whole) if key in record]
    assert values[0] < 1
    assert values[-1] == 2 if strategy == "self_play" else values[-1] > 3
    for purpose in ("", "test_"):
        each = [record for record in reproducible_lines(whole) if f"{purpose}return_agent_0_mean" in record]
        assert each, "each snake's return stands beside the team's"
        for record in each:
            total = sum(record[f"{purpose}return_agent_{i}_mean"] for i in range(3))
            assert total == pytest.approx(record[f"{purpose}return_mean"], rel=1e-4)
    clock = summary_of(whole)["stages"]["stage3"]["clock"]
    assert clock["episodes"] == 4
    assert 820 <= clock["t_env"] < 860


def test_another_observation_than_the_checkpoints_is_refused_in_one_line(tmp_path, capsys):
    short = ("t_max=60", "ticks_per_iteration=20", "test_interval=900", "save_model_interval=1000")
    folder = launch(config_from([*RUN, *short, f"local_results_path={tmp_path / 'a'}"]), "run")["folder"]
    models = f"{folder}/models"
    cases = ((folder, "30", False), (models, "35", False), (folder, "near", True), (models, "near", True))
    for where, obs, evaluate in cases:
        update = [f"checkpoint_path={where}", f"env_args.obs={obs}", f"evaluate={evaluate}"]
        assert main([*RUN, *short, "t_max=120", *update, f"local_results_path={tmp_path / 'b'}"]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1
        assert "does not fit" in errors[0]
        assert "26" in errors[0]
    assert not (tmp_path / "b").exists()
    # With the same observation it goes on, though its first tick only looks and a log is due then.
    assert main([*RUN, *short, "t_max=120", f"checkpoint_path={folder}/models", f"local_results_path={tmp_path}"]) == 0


def test_a_test_is_told_once_where_a_tick_brings_no_step(tmp_path):
    """After 200 ticks both games have ended, and the next tick only looks: the clock stands still."""
    short = ("t_max=420", "ticks_per_iteration=1", "test_interval=400", "log_interval=1000", "runner_log_interval=1000")
    folder = launch(config_from([*RUN, *short, "learner_log_interval=1000", f"local_results_path={tmp_path}"]), "run")
    times = [record["t_env"] for record in reproducible_lines(Path(folder["folder"])) if "test_return_mean" in record]
    assert times == [0, 400, 420]
