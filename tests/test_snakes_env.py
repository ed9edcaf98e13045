"""`snakes_3v3` as runners use it: opponents, observations and rewards as in plain Python, sides, pools, replays."""

from __future__ import annotations

import json

import numpy as np
import pytest
import snakes_reference as slow

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.envs.factory import make_env, validate_env_args
from omagd.envs.snakes.observer import Observer
from omagd.envs.snakes.opponents import SCRIPTS, NetworkOpponent, Opponent
from omagd.envs.snakes.snakes_env import Snakes3v3
from omagd.utils.errors import UserError

SLOTS = 6


def new_env(n: int = SLOTS, **env_args) -> Snakes3v3:
    return make_env("snakes_3v3", env_args, n, processes=False)


def begun(n: int = SLOTS, first_seed: int = 0, **env_args) -> Snakes3v3:
    env = new_env(n, **env_args)
    env.reset(np.ones(n, bool), np.arange(n) + first_seed)
    return env


def played(env: Snakes3v3, steps: int, policy: str = "greedy"):
    """Continue with `policy` and some random actions; yield the result of each step."""
    rng, active = np.random.default_rng(5), np.ones(env.n_slots, bool)
    for _ in range(steps):
        actions = env.scripted_actions(policy, rng)
        chance = rng.random(actions.shape) < 0.05
        result = env.step(np.where(chance, rng.integers(0, 4, actions.shape), actions), active)
        active = active & ~result.terminated
        yield result


def boards(env: Snakes3v3, teams=None) -> list[slow.Slow]:
    """Return the boards as `teams` see them, by default the agents."""
    return [slow.of_engine(env._engine, row, team) for row, team in enumerate(env._team if teams is None else teams)]


@pytest.mark.parametrize("name", ["l1", "l3", "l4", "evasion", "greedy"])
def test_scripts_choose_as_one_board_in_plain_python_does(name):
    env = begun(opponent="greedy", side="b")
    for step, _ in enumerate(played(env, 120, policy="evasion")):
        if step % 6:
            continue
        chosen = [SCRIPTS[name].act(env._engine.board, np.full(SLOTS, team)) for team in (0, 1)]
        expected = [[slow.play(name, board) for board in boards(env, [team] * SLOTS)] for team in (0, 1)]
        assert np.array_equal(chosen, expected)
        assert np.array_equal(env.scripted_actions(name, np.random.default_rng(0)), expected[1]), "agents are team b"


OBSERVATIONS = [
    *({"obs": name, "normalise": normalise} for name in ("26", "30", "35") for normalise in (True, False)),
    {"obs": "26_raw"}, {"obs": "near"}, {"obs": "entities"}, {"obs": "entities", "sight": 4.0},
]  # fmt: skip


@pytest.mark.parametrize("args", OBSERVATIONS, ids=str)
def test_observations_are_those_of_plain_python_on_both_sides(args):
    env, shown = begun(**args, opponent="evasion"), []
    assert env._team.tolist() == [0, 1] * 3
    for step, _ in enumerate(played(env, 199)):
        if step % 20:
            continue
        seen = env.observe()
        shown.append(seen.obs)
        expected = [[slow.observation(board, agent, args) for agent in range(3)] for board in boards(env)]
        np.testing.assert_allclose(shown[-1], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(seen.state, list(map(slow.state, boards(env))), rtol=1e-6)
    assert shown[-1].shape[-1] == env.info.obs_dim
    if args["obs"] == "near":
        assert (np.stack(shown) != shown[0][0, 0]).reshape(-1, 174).any(0).all()  # no column is always the same
    if "sight" not in args:
        full = env.observe(full=True)
        np.testing.assert_array_equal(full.obs, full.full_obs)


def test_entities_have_a_layout_and_full_obs_no_limit():
    env = begun(obs="entities", sight=4.0)
    layout = env.info.layout
    assert (layout.obs_dim, layout.n_enemies, layout.n_allies, layout.sight) == (env.info.obs_dim, 8, 2, 4.0)
    assert new_env(obs="entities").info.layout.sight == 10.0 and new_env(obs="near").info.layout is None
    assert EnvInfo.from_dict(json.loads(json.dumps(env.info.to_dict()))) == env.info
    seen = env.observe(full=True)
    shown = seen.obs != 0
    np.testing.assert_array_equal(seen.obs[shown], seen.full_obs[shown])
    visible, of_all = (obs[..., 4:100].reshape(SLOTS, 3, 8, 12)[..., 0] for obs in (seen.obs, seen.full_obs))
    assert (of_all == 1).all() and visible.sum() < of_all.sum()


@pytest.mark.parametrize("reward", ["score", "potential", "baseline"])
def test_rewards_are_those_of_plain_python(reward):
    env = begun(reward=reward, side="both", opponent="evasion", reward_win=2 * (reward == "score"))
    before, lead = boards(env), np.zeros(SLOTS)
    for step, result in enumerate(played(env, 200)):
        over, now = step == 199, boards(env)
        assert result.terminated.all() == over and not result.truncated.any()
        np.testing.assert_allclose(result.agent_reward.sum(1), result.reward, rtol=1e-5, atol=1e-5)
        for row, (was, board) in enumerate(zip(before, now, strict=True)):
            gains = np.subtract(board.lengths, was.lengths)
            lead[row] += gains[:3].sum() - gains[3:].sum()
            expected = slow.rewards(reward, was, board, np.sign(lead[row]), over)
            np.testing.assert_allclose(result.agent_reward[row], expected, atol=1e-4)
        before = now


def test_results_are_those_of_the_game():
    for side, teams in (("a", [0, 0]), ("both", [0, 1]), ("b", [1, 1])):
        env = begun(12, opponent="l4", side=side)
        assert env._team[:2].tolist() == teams
    info = list(played(env, 200))[-1].info
    other, own = (env._engine.board.lengths - 3).reshape(12, 2, 3).sum(2).T
    expected = {"score_own": own, "score_opponent": other, "battle_won": own > other, "draw": own == other}
    for name, values in expected.items():
        np.testing.assert_array_equal(info[name], values)
    assert (info["beans"] >= info["score_own"]).all() and info["deaths"].sum() > 0


class Fixed:
    """Always the same action."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def act(self, board, team):
        return np.full((len(board), 3), self.action)


def test_the_next_episodes_draw_from_the_new_opponents_and_running_ones_keep_theirs():
    env, up = begun(600, opponent="l1", side="a"), Fixed("up", 0)
    assert isinstance(up, Opponent)
    env.set_opponents(["greedy", up])
    assert set(env.opponents) == {"l1"}
    env.reset(np.arange(600) < 300, np.arange(600))
    names = np.array(env.opponents)
    assert set(names[300:]) == {"l1"} and set(names[:300]) == {"greedy", "up"}
    assert abs((names[:300] == "up").mean() - 1 / 2) < 0.1
    before = env._engine.board.directions[:, 3:].copy()
    env.step(np.zeros((600, 3), int), np.ones(600, bool))
    died = (env._engine.board.lengths == 3)[:, 3:]
    follows = (env._engine.board.directions[:, 3:] == 0) | (before == 1) | died
    assert follows[names == "up"].all() and not follows[names == "greedy"].all()
    env.set_opponents(["l3"])
    assert env.opponents == names.tolist()
    alone = new_env(1, opponent="l1", side="a")
    alone.set_opponents(["greedy", up])
    for slot in (0, 7, 123):
        alone.reset(np.ones(1, bool), np.array([slot]))
        assert alone.opponents == [names[slot]]


def test_a_network_draws_from_the_softmax_of_its_outputs_and_must_fit_the_observation():
    with pytest.raises(ValueError, match="26 features to 4"):
        NetworkOpponent("x", [(np.zeros((4, 25)), np.zeros(4))], Observer())
    share = np.array([0.1, 0.2, 0.3, 0.4])
    sampling = NetworkOpponent("soft", [(np.zeros((4, 26)), np.log(share))], Observer(), sample=True)
    drawn = sampling.act(begun(400)._engine.board, np.zeros(400, int))
    np.testing.assert_allclose(np.bincount(drawn.reshape(-1)) / 1200, share, atol=0.05)


def test_a_snapshot_holds_opponents_networks_and_sums():
    env, other = new_env(opponent="l4", reward="baseline"), begun(first_seed=70, opponent="l1", reward="baseline")
    weights = np.random.default_rng(0).normal(size=(4, 26))
    env.set_opponents(["greedy", "random", NetworkOpponent("soft", [(weights, np.zeros(4))], Observer(), sample=True)])
    everyone = np.ones(SLOTS, bool)
    env.reset(everyone, np.arange(SLOTS))
    list(played(env, 60))
    list(played(other, 3))
    assert set(env.opponents) == {"greedy", "random", "soft"}
    other.restore(env.snapshot())
    assert other.opponents == env.opponents
    for one, two in zip(played(env, 140), played(other, 140), strict=True):
        np.testing.assert_array_equal(one.agent_reward, two.agent_reward)
        assert all(np.array_equal(one.info[name], two.info[name]) for name in one.info)
    assert one.terminated.all()
    for each in (env, other):
        with pytest.raises(ValueError, match="slot 2, agent 1: action 4"):
            each.step(np.array([[0, 4 * (row == 2), 0] for row in range(SLOTS)]), everyone)
        each.reset(everyone, np.arange(SLOTS) + 500)
    assert env.opponents == other.opponents
    env.set_opponents([Fixed("up", 0)])  # neither script nor network: not part of a snapshot
    env.reset(everyone, np.arange(SLOTS))
    with pytest.raises(ValueError, match="'up'"):
        other.restore(env.snapshot())
    other.set_opponents([Fixed("up", 0)])
    other.restore(env.snapshot())
    assert other.opponents == ["up"] * SLOTS


@pytest.mark.parametrize(("make", "words"), [
    (lambda: new_env(opponent="greed"), "'greedy'"),
    (lambda: new_env(obs="near", sight=5), "env_args.sight=5 .*obs=entities.*obs=near"),
    (lambda: new_env(reward="baseline", reward_win=1), "env_args.reward_win=1 .*reward=baseline"),
    (lambda: new_env().set_opponents([]), "give one at least"),
    (lambda: new_env().set_opponents([Fixed("greedy", 1), "greedy"]), "greedy.*same name"),
])  # fmt: skip
def test_wrong_arguments_and_opponents_are_rejected(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_the_file_names_every_argument_with_its_default_but_shows_entities():
    written = resolve("qmix", "snakes").env_args
    assert {**written, "obs": "26"} == validate_env_args("snakes_3v3", {"obs": 26}).model_dump()


def test_a_frame_shows_both_teams_bodies_beans_scores_and_deaths():
    env = begun(2, side="b", opponent="l4")
    deaths = 0
    for result in played(env, 200):  # noqa: B007 (the last one counts)
        frame = env.frame(1)
        deaths += sum(i < 3 for i in frame.marked)
        board = env._engine.board
        heads = [(cell % 20 + 0.5, 10 - cell // 20 - 0.5) for cell in board.heads[1].tolist()]
        assert [*zip(frame.x, frame.y, strict=True)][:6] == heads[3:] + heads[:3], "team b is shown first"
        assert [len(body) / 2 for body in frame.bodies[:6]] == [*board.lengths[1, 3:], *board.lengths[1, :3]]
    assert frame.score == [result.info["score_own"][1], result.info["score_opponent"][1]]
    assert deaths == result.info["deaths"][1] and frame.scene.team_names == ("agents", "l4", "beans")
