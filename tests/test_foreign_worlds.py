"""Environments of Gymnasium, PettingZoo and PyMARL play here what they play on their own."""

import json
import sys
from importlib.machinery import PathFinder

import gymnasium
import mpe2.simple_speaker_listener_v4 as speaker_listener
import mpe2.simple_spread_v3 as simple_spread
import numpy as np
import pytest
from command_harness import train
from lbforaging.foraging import ForagingEnv

from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.envs.worlds import Lbf, LbfArgs
from omagd.run.cli.main import main
from omagd.utils.errors import UserError

IN_PROCESSES = {"lbf", "mpe", "rware", "gymma lbforaging:Foraging-8x8-2p-3f-v3", "pymarl foreign_worlds:Seeded"}
WORLDS = {
    "gymma lbforaging:Foraging-8x8-2p-3f-v3": {"time_limit": 12}, "gymma rware:rware-tiny-2ag-v2": {"time_limit": 12},
    "gymma pz-mpe-simple-spread-v3": {"common_reward": False, "pretrained_wrapper": None},
    "pettingzoo mpe2.simple_speaker_listener_v4": {"reward_scalarisation": "mean", "max_cycles": 7},
    "pettingzoo foreign_worlds:Leaving": {}, "pettingzoo foreign_worlds:Figures": {},
    "pymarl foreign_worlds:Pursuit": {"size": 500}, "pymarl foreign_worlds:Seeded": {},
    "pymarl foreign_worlds:Passed": {}, "pymarl foreign_worlds:Given": {},
    "lbf": {"map_name": "2s-8x8-2p-2f-coop", "time_limit": 12}, "mpe": {"num_agent_neighbors": 1, "max_cycles": 9},
    "rware": {"map_name": "tiny-2ag", "time_limit": 12},
}  # fmt: skip


def made(name, n_slots=1, processes=False, **args):
    env, _, key = name.partition(" ")
    return make_env(env, {"key": key, **args} if key else args, n_slots, processes)


def played(env, seed, script=None):
    """Return all that an episode shows; actions are `script`, else drawn from the available ones."""
    which, rng, log = np.zeros(env.n_slots, bool), np.random.default_rng(seed), []
    which[0] = True
    env.reset(which, np.full(env.n_slots, seed))
    for t in range(env.info.episode_limit + 1):
        seen = env.observe()
        log += [seen.obs[0].copy(), seen.state[0].copy(), seen.avail_actions[0].copy()]
        actions = random_actions(seen.avail_actions[0], rng) if script is None else np.array(script[t])
        result = env.step(np.repeat(actions[None], env.n_slots, 0), which)
        log += [result.reward[0], result.terminated[0], result.truncated[0]]
        if result.agent_reward is not None:
            log.append(result.agent_reward[0])
        if result.terminated[0]:
            return [*log, {name: float(values[0]) for name, values in result.info.items()}]
    raise AssertionError("it went on after its limit")


def test_every_episode_is_a_function_of_its_seed_and_actions():
    """In a used environment, beside others, and in another process."""
    for name, args in WORLDS.items():
        first, others = made(name, **args), [many := made(name, 3, **args)]
        if name in IN_PROCESSES:
            others.append(made(name, 1, processes=True, **args))
        wanted = [played(first, seed) for seed in (3, 4)]
        played(many, 9)
        for env in others:
            for seed, log in zip((3, 4), wanted, strict=True):
                np.testing.assert_equal(played(env, seed), log, err_msg=name)
            env.close()
        first.close()


def test_foraging_is_gymnasiums_own():
    key, script = "lbforaging:Foraging-8x8-2p-3f-v3", np.random.default_rng(0).integers(0, 6, (12, 2))
    log, own = played(made(f"gymma {key}", time_limit=12), 5, script), gymnasium.make(key)
    seen, _ = own.reset(seed=5)
    for t in range(12):
        obs, state, avail, reward, ended, truncated = log[6 * t : 6 * t + 6]
        np.testing.assert_array_equal(obs, seen)
        np.testing.assert_array_equal(state, np.concatenate(seen))
        seen, rewards, done, _, _ = own.step(script[t].tolist())
        assert (reward, ended, truncated, avail.all()) == (pytest.approx(sum(rewards)), t == 11, t == 11, True)
        assert not done


@pytest.mark.parametrize(("sight", "name"), [(2, "2s-8x8-2p-3f"), (8, "8x8-2p-3f"), (15, "15x15-2p-7f")])
def test_foraging_shows_what_lbforaging_shows(sight, name):
    """Whoever plays `lbf` sees the units of lbforaging's observation, at their places, and earns its rewards."""
    size, foods = int(name.split("x")[-2].split("-")[-1]), int(name[-2])
    scale = sight if sight < size else 1
    assert made("lbf", map_name=name).info.state_layout.n_allies == 2
    for seed in range(6):
        script = np.random.default_rng(seed).integers(0, 6, (25, 2))
        own = ForagingEnv(2, 1, 2, 1, None, (size, size), foods, sight, 25, False)
        log, (seen, _) = played(made("lbf", map_name=name, time_limit=25), seed, script), own.reset(seed=seed)
        for t in range(len(log) // 6):
            obs, state, _, reward, ended, truncated = log[6 * t : 6 * t + 6]
            there, *_ = state.reshape(-1, 4).T
            assert (there == state.reshape(-1, 4).any(1)).all(), "a food that is gone is zeros"
            for i, player in enumerate(own.players):
                row, column = player.position
                *units, last = np.split(obs[i], range(4, 4 * foods + 5, 4))
                shown = [(row - u[2] * scale, column + u[1] * scale, u[3]) for u in units if u[0]]
                left = [u[0] for u in units[:foods]]
                assert sight < size or left == sorted(left, reverse=True), "foods that are left come first"
                shown = [(y - max(row - sight, 0), x - max(column - sight, 0), level) for y, x, level in shown]
                theirs = [each for each in seen[i].reshape(-1, 3).tolist() if each[2]]
                of_self = theirs.pop(sum(each[2] > 0 for each in seen[i][: 3 * foods].reshape(-1, 3).tolist()))
                assert np.round(sorted(shown), 3).tolist() == sorted(theirs) and last[2] == of_self[2] == player.level
                assert last[:2].tolist() == [column, size - 1 - row]
            seen, rewards, done, _, _ = own.step(script[t].tolist())
            assert (reward, ended, truncated) == (pytest.approx(sum(rewards)), done, False)
        assert done


@pytest.mark.parametrize(
    ("name", "wanted"), [("8x8-2p-2f", (False, 0, [0, 0])), ("-coop-ind-pen", (True, 0.1, [1, 1]))]
)
def test_words_after_the_size_change_foraging(name, wanted):
    env = Lbf(LbfArgs(map_name="8x8-2p-2f".removesuffix(name) + name)).env
    levels = [0, 0] if env.max_food_level is None else np.ravel(env.max_food_level).tolist()
    assert (env.force_coop, env.penalty, levels) == wanted


def test_particles_and_the_warehouse_are_their_packages_own():
    script, spread = np.random.default_rng(10).integers(0, 5, (25, 3)), simple_spread.parallel_env()
    log, (seen, _) = played(made("mpe", common_reward=False), 10, script), spread.reset(seed=10)
    for t in range(25):  # agents collide in some
        obs, state, avail, reward, ended, truncated, each = log[7 * t : 7 * t + 7]
        assert ended == truncated == (t == 24)
        np.testing.assert_array_equal(state.reshape(6, 5)[:3, [3, 4, 1, 2]], obs[:, 15:])
        for one, theirs in zip(obs, seen.values(), strict=True):
            units = one[:15].reshape(5, 3)
            np.testing.assert_allclose(np.concatenate([one[15:], units[:, 1:].ravel()]), theirs[:14], atol=1e-6)
            assert units[:, 0].all() and avail.all()
        seen, rewards, _, _, _ = spread.step(dict(zip(spread.possible_agents, script[t].tolist(), strict=True)))
        assert reward == pytest.approx(sum(rewards.values()), rel=1e-6)
        np.testing.assert_allclose(each, list(rewards.values()), rtol=1e-6)
    near = made("mpe", num_agent_neighbors=1)
    near.reset(np.ones(1, bool), np.array([6]))
    shown = near.observe(full=True)
    assert [np.count_nonzero(array[0, :, 9:15:3]) for array in (shown.obs, shown.full_obs)] == [3, 6]
    away = [np.linalg.norm(a[0, :, 9:15].reshape(3, 2, 3)[..., 1:], axis=-1) for a in (shown.obs, shown.full_obs)]
    np.testing.assert_array_equal(away[0].max(1), away[1].min(1))
    named, by_id = (made(name, time_limit=9) for name in ("rware", "gymma rware:rware-tiny-2ag-v2"))
    np.testing.assert_equal(played(named, 2), played(by_id, 2))


def test_observations_and_actions_of_different_sizes_are_padded():
    script = np.random.default_rng(1).integers(0, 3, (7, 2))
    env = made("pettingzoo mpe2.simple_speaker_listener_v4", max_cycles=7, reward_scalarisation="mean")
    own = speaker_listener.parallel_env(max_cycles=7)
    log, (seen, _) = played(env, 2, script), own.reset(seed=2)
    counts = [own.action_space(name).n for name in own.possible_agents]
    for t in range(7):
        obs, state, avail, reward, ended, truncated = log[6 * t : 6 * t + 6]
        for i, name in enumerate(own.possible_agents):
            assert obs[i, : len(seen[name])].tolist() == seen[name].tolist() and not obs[i, len(seen[name]) :].any()
        assert avail.sum(1).tolist() == counts and state.tolist() == own.state().tolist()
        seen, rewards, _, _, _ = own.step(dict(zip(own.possible_agents, script[t].tolist(), strict=True)))
        assert reward == pytest.approx(np.mean(list(rewards.values())), rel=1e-6)
    assert (ended, truncated) == (True, True)


@pytest.mark.parametrize("masks", ["observation", "infos"])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_agents_that_leave_see_nothing_and_play_nothing(end, masks):
    env = made("pettingzoo foreign_worlds:Leaving", end=end, masks=masks, common_reward=False)
    log = played(env, 8, [(0, 1), (2, 0), (0, 1), (0, 0)])
    obs, avail, rewards = log[0::7], log[2::7], log[6::7]
    assert [rows[0].tolist() for rows in obs[:4]] == [[3.0] * 4, [4.0] * 4, [0.0] * 4, [0.0] * 4], "no value to go on"
    assert [rows[1].tolist() for rows in obs[:2]] == [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert [rows[0].tolist() for rows in avail[:3]] == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert [row.tolist() for row in rewards] == [[1, 2], [3, 1], [0, 2], [0, 1]]
    assert log[5::7][3] == (end == "truncated") and [row.tolist() for row in log[1:14:7]] == [[0, 3], [1, 3]]
    ends = made("pettingzoo foreign_worlds:Leaving", end=end, masks=masks, continuing_episode=False)
    assert not played(ends, 8, [(0, 1), (2, 0), (0, 1), (0, 0)])[5::6][3], "it ends as in EPyMARL"
    last, own = env.observe(), ([1, 1, 0], [4, 3]) if end == "truncated" else ([1, 0, 0], [0, 0])
    assert (last.avail_actions[0, 1].tolist(), last.state[0].tolist()) == own, "a target that bootstraps needs both"
    assert log[-1]["score"] == 7.0 and log[-1]["env_return"] == 1.0 and log[-1]["steps"] == 2


def test_the_last_step_has_the_last_word_on_the_numbers_of_an_episode(monkeypatch):
    monkeypatch.setattr("foreign_worlds.Leaving.possible_agents", ("kind", "tall"))
    assert played(made("pettingzoo foreign_worlds:Leaving"), 8, [(0, 1)] * 4)[-1]["score"] == 7.0


def test_ends_infos_and_observations_are_read_as_pettingzoo_means_them():
    script = [(0, 1), (2, 0), (0, 1), (0, 0)]
    for how in ("stays", "both", "stale"):
        log = played(made("pettingzoo foreign_worlds:Sloppy", how=how), 8, script)
        ends = log[4::6][3], log[5::6][3]
        assert (log[3::6], *ends) == ([2.0] * 4, True, False), "what terminates does not bootstrap"
    gone = played(made("pettingzoo foreign_worlds:Sloppy", how="stays", common_reward=False), 8, script)
    assert [row.tolist() for row in gone[6::7]] == [[1, 1], [1, 1], [0, 1], [0, 1]], "who has left earns nothing"
    assert played(made("pettingzoo foreign_worlds:Sloppy", how="lost"), 8, script)[-1]["env_lost"] == 1.0
    assert played(made("pettingzoo foreign_worlds:Sloppy", how="no infos"), 8, script)[-1] == {}
    cut = made("pettingzoo foreign_worlds:Sloppy", how="all cut", end="truncated")
    assert played(cut, 8, script)[5::6][3] and cut.observe().avail_actions[0].tolist() == [[1, 0, 0], [1, 1, 0]]
    plain = made("pettingzoo foreign_worlds:Sloppy", how="plain")
    assert played(plain, 8, script)[2].tolist() == [[1, 1, 0], [1, 1, 0]], "a mask that the space does not declare"
    assert made("pettingzoo foreign_worlds:Leaving", max_cycles=3).info.episode_limit == 3
    for name, limit in (("mpe", 30), ("rware", 501)):  # beyond what the package says by itself
        log = played(env := made(name, time_limit=limit), 8, [(0,) * env.info.n_agents] * limit)
        assert len(log) == 6 * limit + 1 and log[-3:-1] == [True, True], name
    goal = made("pettingzoo foreign_worlds:Sloppy", how="goal")
    assert goal.info.obs_dim == 3 + 4 + 2, "its mask, a part of it here, and the goal"


@pytest.mark.parametrize(("how", "words"), [
    ("four values", "step() returned 4 values, not 5"),
    ("rewards", "what step() returned does not fit: ValueError"),
    ("nothing", "what step() returned does not fit: TypeError: 'NoneType' object is not iterable"),
    ("unseen", "kind plays on, and has no observation"), ("unpaid", "kind took part, and has no reward"),
    ("mask", "agent 1's action_mask has the shape (1,), not (2,)"),
    ("logits", "avail_actions holds -inf, not 0 or 1; correct the environment"),
])  # fmt: skip
def test_what_a_step_returns_and_nobody_can_read_is_one_line(how, words):
    with pytest.raises(UserError) as caught:
        played(made("pettingzoo foreign_worlds:Sloppy", how=how), 8, [(0, 1)])
    place = "env=pettingzoo, slot 0, seed 8, step 1: " if how == "logits" else "env_args.key=foreign_worlds:Sloppy: "
    assert f"{place}{words}" in str(caught.value)


def test_a_class_of_pymarl_plays_with_three_values_and_with_five():
    for five in (False, True):
        env = made("pymarl foreign_worlds:Pursuit", size=5, five=five, new_each_episode=five)
        log = played(env, 3)
        place = int(log[0][0, 0])
        assert log[1].tolist() == [place, 0.0] and log[2].shape == (2, 5) and env.info.has_win is not five
        won = played(env, 3, [(place, place)])
        lost = played(env, 3, [((place + 1) % 5,) * 2] * 3)
        assert (won[3:6], lost[-4:-1]) == ([1.0, True, False], [0.0, True, True])
        last = played(env, 3, [((place + 1) % 5,) * 2] * 2 + [(place, place)])
        assert last[-4:-1] == [1.0, True, False], "a win at the limit is an end"
    given = [played(made("pymarl foreign_worlds:Given"), seed, [(0, 0)] * 3) for seed in (7, 8, 7)]
    assert given[0][-1] == given[2][-1] != given[1][-1], "NumPy's numbers, too"
    assert [log[1][0] for log in given] == [7, 8, 7] and given[0][-4:-1] == [given[2][3], True, True] != given[1][-4:-1]
    starts = {played(made("pymarl foreign_worlds:Seeded"), seed, [(0, 0)] * 3)[1][0] for seed in (7, 8, 1007)}
    assert starts == {7.0, 8.0}
    for name, given, words in (
        ("get_avail_actions", [[1, 0.5, 1, 1]] * 2, "avail_actions holds 0.5, not 0 or 1"),
        ("get_obs", [[1, 2, 3], [1]], r"what get_obs\(\) returned does not fit: ValueError"),
        ("get_state", None, r"state has shape \(1,\), not \(2,\)"),
        ("get_env_info", None, r"what get_env_info\(\) returned does not fit: TypeError"),
    ):
        with pytest.raises(UserError, match=words), pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"foreign_worlds.Pursuit.{name}", lambda self, given=given: given)
            played(made("pymarl foreign_worlds:Pursuit", new_each_episode=False), 3)
    kept = made("pymarl foreign_worlds:Seeded", new_each_episode=False)
    assert not (kept.deterministic or made("pettingzoo foreign_worlds:Leaving", new_each_episode=False).deterministic)
    assert [played(kept, seed, [(0, 0)] * 3)[1][0] for seed in (7, 8)] == [7.0, 7.0], "one object, seeded once"


def test_episodes_that_do_not_follow_from_their_seeds_are_said(caplog):
    for name in ("Unseeded", "Seeded", "Unseeded"):
        made(f"pymarl foreign_worlds:{name}")
    (once,) = caplog.records
    assert "its episodes do not follow from their seeds. Take" in once.getMessage()


@pytest.mark.parametrize(("name", "args", "words"), [
    ("gymma lbforaging:Foraging-15x15-4p-5f-v3", {}, "Did you mean"),
    ("gymma lbforaging:Foraging-8x8-2p-3f-v3", {}, "Give env_args.time_limit="),
    ("gymma rwear:rware-tiny-2ag-v2", {}, "No module named 'rwear'"),
    ("gymma CartPole-v1", {}, "it is for one agent"), ("gymma pz-mpe", {}, "invalid format: 'pz-mpe:'"),
    ("pettingzoo foreign_worlds:Leaving", {"start": 1}, "only Discrete actions from 0 on"),
    ("pettingzoo foreign_worlds:Nobody", {}, "no fixed possible_agents"),
    ("pettingzoo foreign_worlds:Newcomer", {}, "stranger is not in possible_agents"),
    ("pettingzoo mpe2.simple_spread_v2", {}, "Did you mean 'mpe2.simple_spread_v3'?"),
    ("pettingzoo foreign_worlds:raises", {}, "the simulator is not there ("),
    ("pettingzoo foreign_worlds:Sloppy", {"how": "bare"}, "reset() returned a dict, not observations and infos"),
    ("pettingzoo foreign_worlds:Leavign", {}, "Give a module with parallel_env, or module:function"),
    ("gymma Forage-v0", {}, "or give package:Name-v0"),
    ("pettingzoo foreign_worlds:needs", {}, "No module named 'gone' (/"),
    ("rware", {"map_name": "tiny"}, "Give <size>-<agents>ag"), ("pymarl collections:Counter", {}, "it has no reset"),
    ("pymarl foreign_worlds:Pursuit", {"common_reward": False}, "Leave out common_reward"),
    ("pymarl foreign_worlds:Seeded", {"seed": 3}, "every episode starts alike. Leave it out"),
    ("pymarl foreign_worlds", {}, "has no class ''. Give module:Class"),
    ("pymarl foreign_worlds:Pursiut", {}, "Did you mean 'Pursuit'?"),
    ("pymarl foreign_worlds.py:Pursuit", {}, "Give module:Class"),
    ("pettingzoo foreign_worlds:exits", {}, "SystemExit: usage"),
    ("gymma lbforaging:Foraging-8x8-2p-3f-v3", {"time_limt": 50}, "'time_limt'. Did you mean 'time_limit'?"),
    ("lbf", {"map_name": "8x9-2p-3f"}, "must be of the form 8x8-2p-3f"),
    ("lbf", {"map_name": "8x8-0p-3f"}, "must be of the form 8x8-2p-3f"),
    ("lbf", {"field_size": [8]}, "field_size=[8] must be rows and columns"),
    ("lbf", {"observe_agent_levels": False}, "which only --env-config=gymma reads"),
    ("rware", {"map_name": "huge-2ag"}, "`rware-huge-2ag` doesn't exist"),
    ("mpe", {"M": 3}, "unexpected keyword argument 'M'"),
])  # fmt: skip
def test_what_cannot_be_played_is_one_line(name, args, words):
    with pytest.raises(UserError) as caught:
        made(name, **args)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    key = name.partition(" ")[2]
    assert str(caught.value).startswith(f"env_args.key={key}: " if key else "env_args.map_name=")


@pytest.mark.parametrize(("hidden", "name", "extra"), [
    ("lbforaging", "gymma lbforaging:Foraging-8x8-2p-3f-v3", "lbf"),
    ("gymnasium", "gymma lbforaging:Foraging-8x8-2p-3f-v3", "gymnasium"),
    ("gymnasium", "pettingzoo foreign_worlds:Leaving", "gymnasium"),
    ("mpe2", "gymma pz-mpe-simple-spread-v3", "mpe"), ("lbforaging", "lbf", "lbf"), ("mpe2", "mpe", "mpe"),
    ("rware", "rware", "rware"),
])  # fmt: skip
def test_a_package_that_an_extra_installs_is_named(monkeypatch, hidden, name, extra):
    for module in [module for module in sys.modules if module.split(".")[0] == hidden]:
        monkeypatch.delitem(sys.modules, module)
    real = PathFinder.find_spec
    monkeypatch.setattr(PathFinder, "find_spec", lambda name, *at: None if name == hidden else real(name, *at))
    with pytest.raises(UserError, match=rf'pip install "omagd\[{extra}\]"'):
        made(name)


def test_rewards_of_single_agents_need_a_learner_that_reads_them(capsys):
    words = (
        "--env-config=gymma --dry-run with env_args.key=pz-mpe-simple-spread-v3 env_args.common_reward=False".split()
    )
    for name, given in (("vdn", ""), ("pqn_vdn", ""), ("vdn", "no")):
        assert main([f"--config={name}", *words, *[f"env_args.common_reward={given}"] * bool(given)]) == 2
        assert "mixer=vdn learns from one reward. Use --config=iql" in capsys.readouterr().err
    assert [main([f"--config={name}", *words]) for name in ("iql", "ippo", "mappo")] == [0, 0, 0]
    assert main(["--config=vdn", *words[:-2], "env_args.key=CartPole-v1", "env_args.time_limit=0"]) == 2
    assert capsys.readouterr().err == "error: env_args.time_limit=0: must be at least 1\n"
    assert main(["--config=rloo", *words, "learner_args.score=return"]) == 2


def test_a_file_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_world.py").write_text("from foreign_worlds import Leaving as parallel_env\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert made("pettingzoo my_world").info.n_agents == 2


@pytest.mark.processes
def test_commands_of_epymarl_run_as_typed(tmp_path):
    words = "--config=vdn --env-config=gymma with env_args.time_limit=50 env_args.key=lbforaging:Foraging-8x8-2p-3f-v3"
    folder = train(tmp_path, *words.split(), "env_processes=True")
    assert "Foraging-8x8-2p-3f-v3" in folder.name
    words = "--config=iql --env-config=gymma with env_args.time_limit=25 env_args.key=pz-mpe-simple-spread-v3"
    folder = train(tmp_path, *words.split(), "common_reward=False")
    assert json.loads((folder / "config.json").read_text())["env_args"]["common_reward"] is False
