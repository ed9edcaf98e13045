"""`snakes_3v3` as runners have it: opponents, observations and rewards as in plain Python, sides, pools, replays."""

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
from omagd.envs.snakes.replay import RecordedGame, write_gif
from omagd.envs.snakes.snakes_env import Snakes3v3
from omagd.utils.errors import UserError

SLOTS = 6
EVERYONE = np.ones(SLOTS, bool)


def _env(n: int = SLOTS, **env_args) -> Snakes3v3:
    env = make_env("snakes_3v3", env_args, n, processes=False)
    assert isinstance(env, Snakes3v3)
    return env


def _play(env, steps, seeds=None, policy="greedy", reset=True):
    """Play `policy` with some random actions; yield the result of each step."""
    rng, active = np.random.default_rng(5), np.ones(env.n_slots, bool)
    if reset:
        env.reset(active, np.arange(env.n_slots) if seeds is None else seeds)
    for _ in range(steps):
        actions = env.scripted_actions(policy, rng)
        chance = rng.random(actions.shape) < 0.05
        actions = np.where(chance, rng.integers(0, 4, actions.shape), actions)
        result = env.step(actions, active)
        active = active & ~result.terminated
        yield result


def _finish(env, **how):
    """Play to the end; return the results of each slot."""
    info = {}
    for result in _play(env, 200, **how):
        for name, values in result.info.items():
            info[name] = info.get(name, 0) + values
    return info


@pytest.mark.parametrize("name", ["l1", "l3", "l4", "evasion", "greedy"])
def test_scripts_choose_as_one_board_in_plain_python_does(name):
    env = _env(opponent="greedy", side="b")
    checked = 0
    for step, _ in enumerate(_play(env, 120, policy="evasion")):
        if step % 6:
            continue
        chosen = [SCRIPTS[name].act(env._engine.board, np.full(SLOTS, team)) for team in (0, 1)]
        mine = env.scripted_actions(name, np.random.default_rng(0))
        for row in range(SLOTS):
            board = slow.of_engine(env._engine, row)
            for team in (0, 1):
                expected = slow.play(name, board, [3 * team, 3 * team + 1, 3 * team + 2])
                assert chosen[team][row].tolist() == expected
            assert mine[row].tolist() == expected  # the agents are team b
            checked += 1
    assert checked == 120


def test_the_random_script_draws_all_actions_for_each_snake_board_and_step():
    env, seen = _env(), []
    for _ in _play(env, 100):
        seen.append(np.concatenate([SCRIPTS["random"].act(env._engine.board, np.full(SLOTS, t)) for t in (0, 1)], 1))
    actions = np.stack(seen)
    counts = np.bincount(actions.reshape(-1), minlength=4)
    assert counts.sum() == 3600 and (np.abs(counts - 900) < 120).all()
    for axis in range(3):
        same = (actions == np.roll(actions, 1, axis)).mean()
        assert abs(same - 0.25) < 0.04


SCALE_OF = {
    "26": [10, 20, *[7] * 4, *[10, 20] * 10],
    "30": [10, 20, *[7] * 4, *[10, 5, 125**0.5] * 2, 1, 1, *[10, 20] * 5, 1, 1, *[10, 20] * 2],
    "35": [10, 20, *[7] * 4, *[10, 20] * 5, *[10, 5, 125**0.5] * 2, 1, *[10, 20] * 5, 1, 1],
}


def _expected_obs(env, row, agent, name, normalise=True, centred=True, sight=None):
    """Return the observation in plain Python; even seeds are side a."""
    board, team = slow.of_engine(env._engine, row), row % 2
    if name == "entities":
        return slow.entities(board, team, agent, sight, env._engine.board.bean_slots[row].tolist())
    if name == "near":
        return slow.near(board, team, agent)
    if name == "planes":
        planes = np.zeros((11, 10, 20))
        planes[4] = 1 - board.steps / 200
        for plane, r, c in slow.planes(board, team, agent, centred):
            planes[plane, r, c] = 1
        return planes.reshape(-1)
    flat = np.array(slow.flat(name.removesuffix("_raw"), board, team, agent))
    return flat / SCALE_OF[name] if normalise and name in SCALE_OF else flat


OBSERVATIONS = [
    *({"obs": name, "normalise": normalise} for name in ("26", "30", "35") for normalise in (True, False)),
    {"obs": "26_raw"}, {"obs": "near"}, {"obs": "planes", "centred": True}, {"obs": "planes", "centred": False},
    {"obs": "entities"}, {"obs": "entities", "sight": 4.0},
]  # fmt: skip


@pytest.mark.parametrize("args", OBSERVATIONS, ids=str)
def test_observations_are_those_of_plain_python_on_both_sides(args):
    env = _env(**args, opponent="evasion")
    shown = []
    for step, _ in enumerate(_play(env, 199)):
        if step % 20:
            continue
        shown.append(env.observe().obs)
        assert shown[-1].shape[-1] == env.info.obs_dim
        for row in range(SLOTS):
            expected = [
                _expected_obs(env, row, agent, args["obs"], **{k: args[k] for k in args if k != "obs"})
                for agent in range(3)
            ]
            np.testing.assert_allclose(shown[-1][row], expected, rtol=1e-5, atol=1e-6)
    if args["obs"] == "near":
        assert (np.stack(shown) != shown[0][0, 0]).reshape(-1, 174).any(0).all()  # no column is always the same
    if "sight" not in args:
        full = env.observe(full=True)
        np.testing.assert_array_equal(full.obs, full.full_obs)


def test_entities_have_a_layout_and_full_obs_no_limit():
    env = _env(obs="entities", sight=4.0)
    layout = env.info.layout
    assert layout is not None and layout.obs_dim == env.info.obs_dim
    assert (layout.n_enemies, layout.n_allies, layout.sight) == (8, 2, 4.0)
    assert _env(obs="entities").info.layout.sight == 10.0 and _env(obs="near").info.layout is None
    assert EnvInfo.from_dict(json.loads(json.dumps(env.info.to_dict()))) == env.info
    env.reset(EVERYONE, np.arange(SLOTS))
    seen = env.observe(full=True)
    shown = seen.obs != 0
    np.testing.assert_array_equal(seen.obs[shown], seen.full_obs[shown])
    visible, of_all = (obs[..., 4:100].reshape(SLOTS, 3, 8, 12)[..., 0] for obs in (seen.obs, seen.full_obs))
    assert (of_all == 1).all() and visible.sum() < of_all.sum()


def test_the_state_is_alike_for_both_sides():
    """Seen from the other side, the teams' blocks change places and the rest stays."""
    env = _env(side="a")
    list(_play(env, 50))
    a = env.observe().state
    env._team[:] = 1
    b = env.observe().state
    np.testing.assert_array_equal(np.roll(a[:, :54].reshape(-1, 2, 27), 1, axis=1).reshape(-1, 54), b[:, :54])
    np.testing.assert_array_equal(a[:, 54:64], b[:, 54:64])
    np.testing.assert_array_equal(a[:, 64], -b[:, 64])
    assert (np.abs(a) <= 2).all() and (a[:, 65] == np.float32(0.25)).all()


@pytest.mark.parametrize("reward", ["score", "potential", "baseline"])
def test_rewards_are_those_of_plain_python(reward):
    env = _env(reward=reward, side="both", opponent="evasion", **({"reward_win": 2} if reward == "score" else {}))
    env.reset(EVERYONE, np.arange(SLOTS))
    before = [slow.of_engine(env._engine, row) for row in range(SLOTS)]
    sums = np.zeros((SLOTS, 2))
    for step, result in enumerate(_play(env, 200, reset=False)):
        over = step == 199
        assert result.terminated.all() == over and not result.truncated.any()
        assert result.agent_reward.shape == (SLOTS, 3)
        np.testing.assert_allclose(result.agent_reward.sum(1), result.reward, rtol=1e-5, atol=1e-5)
        for row in range(SLOTS):
            now, was = slow.of_engine(env._engine, row), before[row]
            order = slow.order_of(row % 2)
            raw = [len(now.bodies[i]) - len(was.bodies[i]) for i in order]
            sums[row] += sum(raw[:3]), sum(raw[3:])
            lead = np.sign(sums[row, 0] - sums[row, 1])
            for agent in range(3):
                i = order[agent]
                expected = _expected(reward, raw, agent, was, now, i, lead, over)
                assert result.agent_reward[row, agent] == pytest.approx(expected, abs=1e-4)
            before[row] = now


def _steps_to_bean(board, i):
    return min(sum(map(abs, slow.difference(board.bodies[i][0], bean))) for bean in board.beans)


def _expected(reward, raw, agent, was, now, i, lead, over):
    score = raw[agent] - sum(raw[3:]) / 3
    if reward == "score":
        return score + 2 * lead * over
    if reward == "potential":
        after = 0 if over else -0.1 * _steps_to_bean(now, i)
        return score + 0.99 * after + 0.1 * _steps_to_bean(was, i)
    standing = {1: 50, -1: -25, 0: 0} if over else {1: 10, -1: -5, 0: 0}
    distance = min(slow.plain(now.bodies[i][0], bean) for bean in now.beans)
    return standing[int(lead)] + (20 if raw[agent] > 0 else -distance - 10 * (raw[agent] < 0))


def test_results_are_those_of_the_game_and_counted_by_opponent():
    for side, teams in (("a", [0, 0]), ("both", [0, 1]), ("b", [1, 1])):
        env = _env(12, opponent="l4", side=side)
        env.reset(np.ones(12, bool), np.arange(12))
        assert env._team[:2].tolist() == teams
    info = _finish(env)
    engine_scores = (env._engine.board.lengths - 3).reshape(12, 2, 3).sum(2)
    np.testing.assert_array_equal(info["score_own"], engine_scores[:, 1])
    np.testing.assert_array_equal(info["score_opponent"], engine_scores[:, 0])
    np.testing.assert_array_equal(info["battle_won"], engine_scores[:, 1] > engine_scores[:, 0])
    np.testing.assert_array_equal(info["draw"], engine_scores[:, 1] == engine_scores[:, 0])
    assert (info["beans"] >= info["score_own"]).all() and info["deaths"].sum() > 0
    stats = env.get_stats()
    assert stats["games"] == stats["games_against_l4"] == 12
    assert stats["won"] == stats["won_against_l4"] == info["battle_won"].sum()


class Fixed:
    """Always the same action."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def act(self, board, team):
        return np.full((len(board), 3), self.action)


def test_the_next_episodes_draw_from_the_new_opponents_and_running_ones_keep_theirs():
    env = _env(600, opponent="l1", side="a")
    everyone = np.ones(600, bool)
    env.reset(everyone, np.arange(600))
    up = Fixed("up", 0)
    assert isinstance(up, Opponent)
    env.set_opponents(["greedy", up, "l3"], [1, 2, 0])
    assert set(env.opponents) == {"l1"}
    half = np.arange(600) < 300
    env.reset(half, np.arange(600))
    names = np.array(env.opponents)
    assert set(names[300:]) == {"l1"} and set(names[:300]) == {"greedy", "up"}
    assert abs((names[:300] == "up").mean() - 2 / 3) < 0.1
    before = env._engine.board.directions[:, 3:].copy()
    env.step(np.zeros((600, 3), int), everyone)
    after = env._engine.board.directions[:, 3:]
    died = (env._engine.board.lengths == 3)[:, 3:]
    follows = (after == 0) | (before == 1) | died
    assert follows[names == "up"].all() and not follows[names == "greedy"].all()
    env.set_opponents(["l3"])
    assert (np.array(env.opponents) == names).all()
    alone = _env(1, opponent="l1", side="a")
    alone.set_opponents(["greedy", up, "l3"], [1, 2, 0])
    for slot in (0, 7, 123):
        alone.reset(np.ones(1, bool), np.array([slot]))
        assert alone.opponents == [names[slot]]


@pytest.mark.parametrize(
    ("opponents", "weights", "words"),
    [
        (["greedyy"], None, "opponent=greedyy is not known. Did you mean 'greedy'"),
        (["greedy", "l1"], [1, -1], "weights="),
        (["greedy", "l1"], [0, 0], "weights="),
        ([], None, "weights="),
        ([Fixed("greedy", 1), "greedy"], None, "greedy.*same name"),
    ],
)
def test_an_invalid_pool_is_rejected(opponents, weights, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        _env().set_opponents(opponents, weights)


def _network(name="frozen", obs="26", sample=False, seed=0) -> NetworkOpponent:
    rng, observer = np.random.default_rng(seed), Observer(obs)
    sizes = [observer.obs_dim, 16, 4]
    layers = [(rng.normal(size=(o, i)), rng.normal(size=o)) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]
    return NetworkOpponent(name, layers, observer, sample)


def test_a_network_acts_on_its_teams_observation_by_the_largest_output_or_by_the_softmax():
    env = _env(side="a")
    list(_play(env, 30))
    board, network = env._engine.board, _network()
    for team in (0, 1):
        acts = network.act(board, np.full(SLOTS, team))
        env._team[:] = team
        hidden = np.maximum(env.observe().obs @ network.layers[0][0].T + network.layers[0][1], 0)
        np.testing.assert_array_equal(acts, (hidden @ network.layers[1][0].T + network.layers[1][1]).argmax(2))
    with pytest.raises(ValueError, match="26 features to 4"):
        NetworkOpponent("x", [(np.zeros((4, 25)), np.zeros(4))], Observer())
    share, many = np.array([0.1, 0.2, 0.3, 0.4]), _env(400)
    many.reset(np.ones(400, bool), np.arange(400))
    sampling = NetworkOpponent("soft", [(np.zeros((4, 26)), np.log(share))], Observer(), sample=True)
    drawn = sampling.act(many._engine.board, np.zeros(400, int))
    np.testing.assert_allclose(np.bincount(drawn.reshape(-1), minlength=4) / 1200, share, atol=0.05)


def test_a_snapshot_holds_opponents_networks_and_sums():
    env = _env(opponent="l4", reward="baseline")
    env.set_opponents(["greedy", "random", _network(sample=True)])
    list(_play(env, 60))
    assert len(set(env.opponents)) > 1
    kept, other = env.snapshot(), _env(opponent="l1", reward="baseline")
    list(_play(other, 3, seeds=np.arange(SLOTS) + 70))
    other.restore(kept)
    assert other.opponents == env.opponents
    for one, two in zip(_play(env, 140, reset=False), _play(other, 140, reset=False), strict=True):
        np.testing.assert_array_equal(one.agent_reward, two.agent_reward)
        for name in one.info:
            np.testing.assert_array_equal(one.info[name], two.info[name])
    for each in (env, other):
        with pytest.raises(ValueError, match="slot 2, agent 1: action 4"):
            each.step(np.array([[0, 4 * (row == 2), 0] for row in range(SLOTS)]), EVERYONE)
        each.reset(EVERYONE, np.arange(SLOTS) + 500)
    assert env.opponents == other.opponents and one.terminated.all()
    env.set_opponents([Fixed("up", 0)])  # neither script nor network: not part of a snapshot
    env.reset(EVERYONE, np.arange(SLOTS))
    with pytest.raises(ValueError, match="'up'"):
        other.restore(env.snapshot())
    other.set_opponents([Fixed("up", 0)])
    other.restore(env.snapshot())
    assert other.opponents == ["up"] * SLOTS


@pytest.mark.parametrize(
    ("env_args", "words"),
    [
        ({"obs": "nearr"}, "env_args.obs=nearr: .*Did you mean 'near'"),
        ({"opponent": "greed"}, "Did you mean 'greedy'"),
        ({"obs": "near", "sight": 5}, "env_args.sight=5 needs obs=entities, but obs=near"),
        ({"obs": "entities", "sight": -1}, "env_args.sight=-1: "),
        ({"reward": "baseline", "reward_win": 1}, "env_args.reward_win=1 is not for reward=baseline"),
        ({"opponents": "greedy"}, "env_args.opponents is not an argument.*Did you mean 'opponent'"),
    ],
)
def test_wrong_arguments_are_rejected_in_one_line(env_args, words):
    with pytest.raises(UserError, match=words) as error:
        validate_env_args("snakes_3v3", env_args)
    assert "\n" not in error.value.message


def test_the_file_names_every_argument_with_its_default_but_shows_entities():
    written = resolve("qmix", "snakes").env_args
    model = validate_env_args("snakes_3v3", {})
    assert set(written) == set(type(model).model_fields)
    assert validate_env_args("snakes_3v3", {**written, "obs": "26"}) == model


def test_a_replay_is_the_last_game_of_the_first_slot(tmp_path):
    from PIL import Image

    env = _env(2, side="b", opponent="l4")
    with pytest.raises(UserError, match="no game"):
        env.save_replay(str(tmp_path))
    info = _finish(env)
    scores = (int(info["score_own"][0]), int(info["score_opponent"][0]))
    env.save_replay(str(tmp_path / "replays"))
    assert {path.name for path in (tmp_path / "replays").iterdir()} == {"snakes.gif", "snakes.html"}
    page = (tmp_path / "replays" / "snakes.html").read_text()
    data = json.loads(page.split("const game = ")[1].split(", [rows, cols]")[0])
    frames = [{"bodies": bodies, "beans": beans, "died": died} for bodies, beans, died in data["frames"]]
    assert len(frames) == 201 and (data["team"], data["opponent"]) == (1, "l4")
    assert RecordedGame(1, "l4").scores(frames[-1]) == scores
    expected = "a draw" if scores[0] == scores[1] else "agents won" if scores[0] > scores[1] else "agents lost"
    assert data["result"] == expected
    assert sum(i >= 3 for frame in frames for i in frame["died"]) == info["deaths"][0]
    assert "http" not in page
    with Image.open(tmp_path / "replays" / "snakes.gif") as gif:
        assert gif.n_frames == 201 and gif.size == (520, 304)
        gif.seek(200)
        head = frames[-1]["bodies"][0][0]
        pixel = gif.convert("RGB").getpixel((head % 20 * 26 + 13, head // 20 * 26 + 44 + 22))
        assert np.abs(np.array(pixel) - (0x4C, 0xC9, 0xC0)).max() < 30


def test_replays_draw_a_snake_up_to_the_edge_and_count_nothing_for_one_without_room(tmp_path):
    from PIL import Image

    bodies = [[], [42, 41, 40], [62, 61, 60], [5, 4, 3, 2], [102, 101, 100], [122, 121, 120]]
    for team, scores, result in ((0, (0, 1), "agents lost"), (1, (1, 0), "agents won")):
        game = RecordedGame(team, "l1", [{"bodies": bodies, "beans": [], "died": [0]}])
        assert game.scores(game.frames[0]) == scores and game.result == result
    bodies = [[20, 39, 38], [5, 185, 165], [103, 102, 101], [110, 109, 108], [123, 122, 121], [130, 129, 128]]
    write_gif(RecordedGame(0, "l1", [{"bodies": bodies, "beans": [], "died": []}]), tmp_path / "edge.gif")
    with Image.open(tmp_path / "edge.gif") as gif:
        picture = gif.convert("RGB")
    first, second = ((0x4C, 0xC9, 0xC0), (0x37, 0xA8, 0xCE))
    row = 44 + 26 + 13
    for x, y, colour in ((519, row, first), (0, row, first), (5 * 26 + 13, 303, second), (5 * 26 + 13, 44, second)):
        assert picture.getpixel((x, y)) == colour
    assert picture.getpixel((260, row)) != first  # not across the board
    assert (np.asarray(picture)[40:44] == (0x10, 0x16, 0x1F)).all()  # nor into the header
