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
    """Play `policy` with some random actions; yield after each step what it brought."""
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


def test_the_random_script_draws_all_actions_anew_for_each_snake_board_and_step():
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


@pytest.mark.parametrize("name", ["26", "30", "35"])
@pytest.mark.parametrize("normalise", [True, False])
def test_flat_observations_are_those_of_plain_python_on_both_sides(name, normalise):
    env = _env(obs=name, normalise=normalise)
    assert env.info.obs_dim == int(name) and env.info.layout is None
    for step, _ in enumerate(_play(env, 60)):
        if step % 10:
            continue
        obs = env.observe().obs
        for row in range(SLOTS):
            board = slow.of_engine(env._engine, row)
            for agent in range(3):
                expected = np.array(slow.flat(name, board, row % 2, agent))  # even seeds are side a
                expected = expected / SCALE_OF[name] if normalise else expected
                np.testing.assert_allclose(obs[row, agent], expected, rtol=1e-5, atol=1e-6)


def test_raw_26_is_26_without_normalising():
    raw, plain = _env(obs="26_raw"), _env(obs=26, normalise=False)
    for env in (raw, plain):
        env.reset(EVERYONE, np.arange(SLOTS))
    np.testing.assert_array_equal(raw.observe().obs, plain.observe().obs)
    assert raw.observe().obs.max() > 2


@pytest.mark.parametrize("sight", [None, 4.0])
def test_entities_are_those_of_plain_python_and_full_obs_has_no_limit(sight):
    env = _env(obs="entities", sight=sight)
    layout = env.info.layout
    assert layout is not None and layout.obs_dim == env.info.obs_dim
    assert (layout.n_enemies, layout.n_allies, layout.sight) == (8, 2, sight or 10.0)
    assert EnvInfo.from_dict(json.loads(json.dumps(env.info.to_dict()))) == env.info
    hidden = 0
    for step, _ in enumerate(_play(env, 80)):
        if step % 10:
            continue
        seen = env.observe(full=True)
        for row in range(SLOTS):
            board, slots = slow.of_engine(env._engine, row), env._engine.board.bean_slots[row].tolist()
            for agent in range(3):
                expected = slow.entities(board, row % 2, agent, sight, slots)
                np.testing.assert_allclose(seen.obs[row, agent], expected, rtol=1e-5, atol=1e-6)
        if sight is None:
            np.testing.assert_array_equal(seen.obs, seen.full_obs)
            continue
        shown = seen.obs != 0
        np.testing.assert_array_equal(seen.obs[shown], seen.full_obs[shown])
        units = seen.full_obs[..., 4:100].reshape(SLOTS, 3, 8, 12)
        assert (units[..., 0] == 1).all()
        hidden += (units[..., 0] > seen.obs[..., 4:100].reshape(SLOTS, 3, 8, 12)[..., 0]).sum()
    assert hidden > 0 or sight is None


def test_near_is_that_of_plain_python_on_both_sides():
    env = _env(obs="near", opponent="evasion")
    assert env.info.obs_dim == 174 and env.info.layout is None
    told = []
    for step, _ in enumerate(_play(env, 199)):
        if step % 8:
            continue
        obs = env.observe().obs
        for row in range(SLOTS):
            board = slow.of_engine(env._engine, row)
            expected = [slow.near(board, row % 2, agent) for agent in range(3)]  # even seeds are side a
            np.testing.assert_allclose(obs[row], expected, rtol=1e-6, atol=1e-7)
        told.append(obs)
    told = np.stack(told)
    assert (told != told[0, 0, 0]).reshape(-1, 174).any(0).all()  # no column is the same all the time
    full = env.observe(full=True)
    np.testing.assert_array_equal(full.obs, full.full_obs)


@pytest.mark.parametrize("centred", [True, False])
def test_planes_are_those_of_plain_python(centred):
    env = _env(obs="planes", centred=centred)
    for step, _ in enumerate(_play(env, 40)):
        if step % 10:
            continue
        obs = env.observe().obs.reshape(SLOTS, 3, 11, 10, 20)
        assert np.allclose(obs[:, :, 4], 1 - (step + 1) / 200)
        for row in range(SLOTS):
            board = slow.of_engine(env._engine, row)
            for agent in range(3):
                planes = obs[row, agent].copy()
                planes[4] = 0
                marked = {tuple(map(int, at)) for at in np.argwhere(planes)}
                assert marked == set(slow.planes(board, row % 2, agent, centred))
                assert planes.max() == 1


def test_the_state_tells_both_sides_alike():
    """The same boards, told from side a and from side b: the teams' blocks change places, the rest stays."""
    env = _env(side="a")
    for _ in _play(env, 50):
        pass
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


def test_potentials_cancel_over_an_episode_without_discount():
    plain, shaped = _env(reward="score"), _env(reward="potential", potential_gamma=1.0)
    returns = [sum(result.agent_reward.astype(float) for result in _play(env, 200)) for env in (plain, shaped)]
    shaped.reset(EVERYONE, np.arange(SLOTS))
    first = np.array(
        [
            [-0.1 * _steps_to_bean(slow.of_engine(shaped._engine, row), i) for i in slow.order_of(row % 2)[:3]]
            for row in range(SLOTS)
        ]
    )
    np.testing.assert_allclose(returns[1] - returns[0], -first, atol=1e-3)


def test_results_are_those_of_the_game_and_counted_by_opponent():
    env = _env(12, opponent="l4", side="b")
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


def test_strength_is_ordered_and_greedy_beats_random_as_measured():
    won = {}
    for mine, theirs in (("greedy", "random"), ("l1", "greedy"), ("evasion", "l1")):
        env, rng, active = _env(64, opponent=theirs), np.random.default_rng(1), np.ones(64, bool)
        env.reset(active, np.arange(64))
        for _ in range(200):
            result = env.step(env.scripted_actions(mine, rng), active)
        won[mine, theirs] = result.info["battle_won"].mean()
        assert result.terminated.all()
    assert won["greedy", "random"] > 0.9 and won["l1", "greedy"] < 0.25 and won["evasion", "l1"] > 0.6


def test_sides_follow_from_the_argument_or_from_the_seed():
    even = np.arange(SLOTS) % 2 == 0
    for side, expected in (("a", np.zeros(SLOTS)), ("b", np.ones(SLOTS)), ("both", ~even)):
        env = _env(side=side)
        env.reset(EVERYONE, np.arange(SLOTS))
        np.testing.assert_array_equal(env._team, expected)


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
        (["greedyy"], None, "opponent=greedyy: no such opponent. Did you mean 'greedy'"),
        (["greedy", "l1"], [1, -1], "no shares"),
        (["greedy", "l1"], [0, 0], "no shares"),
        (["greedy"], [1, 1], "no shares"),
        ([], None, "no shares"),
        ([Fixed("greedy", 1), "greedy"], None, "one name for two opponents"),
    ],
)
def test_what_is_no_pool_is_told_in_one_line(opponents, weights, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        _env().set_opponents(opponents, weights)


def _network(name="frozen", obs="26", sample=False, seed=0) -> NetworkOpponent:
    rng, observer = np.random.default_rng(seed), Observer(obs)
    sizes = [observer.obs_dim, 16, 4]
    layers = [(rng.normal(size=(o, i)), rng.normal(size=o)) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]
    return NetworkOpponent(name, layers, observer, sample)


def test_a_frozen_network_acts_on_what_its_team_sees():
    env = _env(side="a")
    for _ in _play(env, 30):
        pass
    board, network = env._engine.board, _network()
    for team in (0, 1):
        acts = network.act(board, np.full(SLOTS, team))
        env._team[:] = team
        hidden = np.maximum(env.observe().obs @ network.layers[0][0].T + network.layers[0][1], 0)
        np.testing.assert_array_equal(acts, (hidden @ network.layers[1][0].T + network.layers[1][1]).argmax(2))
    with pytest.raises(ValueError, match="do not lead from 26 features to 4"):
        NetworkOpponent("x", [(np.zeros((4, 25)), np.zeros(4))], Observer())


def test_a_sampling_network_draws_from_its_softmax():
    env, logits = _env(400), np.log([0.1, 0.2, 0.3, 0.4])
    env.reset(np.ones(400, bool), np.arange(400))
    network = NetworkOpponent("soft", [(np.zeros((4, 26)), logits)], Observer(), sample=True)
    counts = np.bincount(network.act(env._engine.board, np.zeros(400, int)).reshape(-1), minlength=4) / 1200
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.3, 0.4], atol=0.05)


def test_a_snapshot_holds_opponents_networks_and_sums():
    env = _env(opponent="l4", reward="baseline")
    env.set_opponents(["greedy", "random", _network(sample=True)])
    for _ in _play(env, 60):
        pass
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
        each.reset(EVERYONE, np.arange(SLOTS) + 500)
    assert env.opponents == other.opponents and one.terminated.all()


def test_a_snapshot_with_an_opponent_of_ones_own_needs_it_there():
    env = _env()
    env.set_opponents([Fixed("up", 0)])
    env.reset(EVERYONE, np.arange(SLOTS))
    other = _env()
    with pytest.raises(ValueError, match="'up'"):
        other.restore(env.snapshot())
    other.set_opponents([Fixed("up", 0)])
    other.restore(env.snapshot())
    assert other.opponents == ["up"] * SLOTS


@pytest.mark.parametrize(
    ("env_args", "words"),
    [
        ({"obs": "27"}, "env_args.obs=27: .*26"),
        ({"obs": "nearr"}, "env_args.obs=nearr: .*near.*Did you mean 'near'"),
        ({"opponent": "greed"}, "Did you mean 'greedy'"),
        ({"side": "c"}, "env_args.side=c: .*a, b, both"),
        ({"sight": 5}, "env_args.sight=5 needs obs=entities"),
        ({"obs": "near", "sight": 5}, "env_args.sight=5 needs obs=entities, but obs=near"),
        ({"potential_scale": -0.1}, "env_args.potential_scale=-0.1: must be at least 0"),
        ({"obs": "entities", "sight": -1}, "env_args.sight=-1: must be more than 0"),
        ({"reward": "baseline", "reward_win": 1}, "env_args.reward_win=1 is not for reward=baseline"),
        ({"opponents": "greedy"}, "env_args.opponents is not an argument.*Did you mean 'opponent'"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(env_args, words):
    with pytest.raises(UserError, match=words) as error:
        validate_env_args("snakes_3v3", env_args)
    assert "\n" not in error.value.message


def test_an_action_that_does_not_exist_is_refused():
    env = _env()
    env.reset(EVERYONE, np.arange(SLOTS))
    with pytest.raises(ValueError, match="slot 2, agent 1: action 4"):
        env.step(np.array([[0, 4 * (row == 2), 0] for row in range(SLOTS)]), EVERYONE)


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


@pytest.mark.parametrize(("team", "result"), [(0, "agents lost"), (1, "agents won")])
def test_a_snake_without_room_to_return_counts_nothing_in_a_replay(team, result):
    bodies = [[], [42, 41, 40], [62, 61, 60], [5, 4, 3, 2], [102, 101, 100], [122, 121, 120]]
    game = RecordedGame(team, "l1", [{"bodies": bodies, "beans": [], "died": [0]}])
    assert game.scores(game.frames[0]) == ((0, 1) if team == 0 else (1, 0)) and game.result == result


def test_a_snake_that_crosses_the_edge_is_drawn_up_to_it(tmp_path):
    from PIL import Image

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
