"""Task sets: each slot plays its map as the plain environment does, in columns of the common shape."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from q_toys import toy_config
from runner_toys import Game, assert_continues, nothing

from omagd.config.env_info import EnvInfo, map_label
from omagd.config.loading import resolve
from omagd.envs.factory import make_env
from omagd.envs.protocol import ManyTasks, random_actions
from omagd.envs.task_sets import NAMED, TaskSet, task_set
from omagd.run.cli.preflight import preflight
from omagd.runners import REGISTRY
from omagd.runners.runner import TaskStarts
from omagd.utils.errors import UserError

SLOTS = 5
MARINES = {"map_name": "3m,5m_vs_6m,1m,9m", "state_last_action": True, "state_timestep_number": True}
CASES = {
    "marines": MARINES,
    "stalkers and zealots": {"map_name": "1s3z,2s3z,3s5z_vs_3s6z", "obs_timestep_number": True},
    "healers": {"map_name": "2M3m1d,MMM,4m2d_vs_3m"},
}


@pytest.fixture(params=CASES)
def args(request) -> dict[str, Any]:
    return CASES[request.param]


def columns(info: EnvInfo, of_set: EnvInfo) -> tuple[list[int], list[int]]:
    """Return where each feature of a map's observation and of its state stands in the set's, written out one by one."""
    a, b = info.layout, of_set.layout
    obs = list(range(a.move_dim + a.n_enemies * a.enemy_dim))
    obs += [b.move_dim + b.n_enemies * b.enemy_dim + i for i in range(a.n_allies * a.ally_dim)]
    obs += [b.obs_dim - b.own_dim + i for i in range(a.own_dim)]
    s, t = info.state_layout, of_set.state_layout
    state = list(range(s.n_allies * s.ally_dim))
    state += [t.n_allies * t.ally_dim + i for i in range(s.n_enemies * s.enemy_dim)]
    for agent in range(s.n_allies if s.last_actions else 0):
        state += [t.units_dim + agent * t.last_actions + action for action in range(s.last_actions)]
    state += [of_set.state_dim - k for k in range(info.state_dim - s.width, 0, -1)]
    return obs, state


class Twins:
    """A set's environment, and an environment of each map, in whose slots the same episodes are played."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.env = make_env("skirmish", args, SLOTS, False)
        maps = self.env.info.tasks
        self.plain = [make_env("skirmish", {**args, "map_name": of_map}, SLOTS, False) for of_map in maps]
        self.task = np.zeros(SLOTS, int)
        self.rngs = [np.random.default_rng(slot) for slot in range(SLOTS)]

    def reset(self, which: np.ndarray, tasks: np.ndarray, seeds: np.ndarray) -> None:
        self.env.set_tasks(which, tasks)
        self.env.reset(which, seeds)
        self.task = np.where(which, tasks, self.task)
        for task, env in enumerate(self.plain):
            env.reset(which & (self.task == task), seeds)

    def play(self, steps: int) -> np.ndarray:
        """Play some steps, comparing everything; return which slots have ended."""
        over = np.zeros(SLOTS, bool)
        for _ in range(steps):
            actions = self._compare()
            whole = self.env.step(actions, ~over)
            for task, env in enumerate(self.plain):
                here = (self.task == task) & ~over
                own = env.step(actions[:, : env.info.n_agents], here)
                for name in ("reward", "terminated", "truncated", "lost"):
                    np.testing.assert_array_equal(getattr(whole, name)[here], getattr(own, name)[here], name)
                ended = here & own.terminated
                for name in own.info if ended.any() else ():
                    np.testing.assert_array_equal(whole.info[name][ended], own.info[name][ended])
            assert not whole.reward[over].any()
            over |= whole.terminated
            if over.all():
                break
        return over

    def _compare(self) -> np.ndarray:
        """Compare what is observed; return actions [B, n] that are available, 0 for absent agents."""
        seen, of_set = self.env.observe(full=True), self.env.info
        actions = np.zeros((SLOTS, of_set.n_agents), np.int64)
        each = [env.observe(full=True) if (self.task == task).any() else None for task, env in enumerate(self.plain)]
        name, rng = of_set.scripted_policies[-1], np.random.default_rng(0)
        scripted = self.env.scripted_actions(name, rng)
        pairs = zip(each, self.plain, strict=True)
        ruled = [None if own is None else env.scripted_actions(name, rng) for own, env in pairs]
        for slot, task in enumerate(self.task):
            info, own = self.plain[task].info, each[task]
            n, (obs, state) = info.n_agents, columns(info, of_set)
            for name in ("obs", "full_obs"):
                expected = np.zeros((of_set.n_agents, of_set.obs_dim), np.float32)
                expected[:n, obs] = getattr(own, name)[slot]
                np.testing.assert_array_equal(getattr(seen, name)[slot].view(np.int32), expected.view(np.int32))
            expected = np.zeros(of_set.state_dim, np.float32)
            expected[state] = own.state[slot]
            np.testing.assert_array_equal(seen.state[slot].view(np.int32), expected.view(np.int32))
            np.testing.assert_array_equal(scripted[slot, :n], ruled[task][slot])
            assert not scripted[slot, n:].any()
            mask = np.zeros((of_set.n_agents, of_set.n_actions), bool)
            mask[n:, 0], mask[:n, : info.n_actions] = True, own.avail_actions[slot]
            np.testing.assert_array_equal(seen.avail_actions[slot], mask)
            actions[slot] = random_actions(mask, self.rngs[slot])
        return actions

    def close(self) -> None:
        for env in (self.env, *self.plain):
            env.close()


def test_each_slot_plays_its_map_as_the_plain_environment_does(args):
    """Also after a change of maps in the midst of others' episodes, and on maps that no slot had at the start."""
    twins, everyone = Twins(args), np.ones(SLOTS, bool)
    info, n = twins.env.info, len(twins.env.info.tasks)
    assert isinstance(twins.env, ManyTasks) and info.padded
    assert (twins.env.n_slots, info.map_name) == (SLOTS, "+".join(info.tasks))
    assert info.episode_limit == max(env.info.episode_limit for env in twins.plain)
    twins.reset(everyone, np.arange(SLOTS) % n, np.arange(SLOTS) + 10)
    twins.play(3)
    for turn, which in enumerate(([True, False, True, False, True], [False, True, True, True, False])):
        tasks = (np.arange(SLOTS) * 2 + turn + 1) % n
        twins.reset(np.array(which), tasks, np.arange(SLOTS) + 100 * turn)
        twins.play(2)
    for task in (n - 1, 0):  # all slots on one map, as in tests
        twins.reset(everyone, np.full(SLOTS, task), np.arange(SLOTS))
        assert twins.play(info.episode_limit).all()
    twins.close()
    twins.close()


class SetGame(Game):
    """Battles on three maps; the second one is played twice as often, the third one never."""

    def __init__(self) -> None:
        super().__init__(make_env("skirmish", {"map_name": "1m,2m_vs_1m,3m"}, SLOTS, processes=False))
        starts = TaskStarts(1, "train", weights=[1, 2, 0])
        self.runner = REGISTRY.get("stream")(self.env, toy_config(), self.env.info, starts)


def play_the_third_map(game: Game) -> None:
    """Play a test in all slots, which needs more battles of the third map than the set has."""
    game.drain()
    tests = REGISTRY.get("parallel")(game.env, toy_config(), game.env.info, TaskStarts(1, "test", weights=[0, 0, 1]))
    assert len(tests.run(game.policy, explore=None, keep=False).log) == SLOTS


@pytest.mark.parametrize("before", [nothing, play_the_third_map])
def test_training_on_a_set_continues_in_mid_battle(before):
    assert_continues(SetGame, 3, 3, before)


def test_tests_make_the_environments_that_they_need_once():
    game, made = SetGame(), []
    for _ in range(3):
        game.collect(1)
        play_the_third_map(game)
        made.append([pool for pool in game.env._pools if pool.task == 2])
    assert len(made[0]) == 2 and made[0] == made[1] == made[2]


def test_training_on_a_set_plays_by_weights():
    log = [entry["task"] for rollout in SetGame().collect(30) for entry in rollout.log]
    assert len(log) > 60 and log.count("3m") == 0
    assert abs(log.count("2m_vs_1m") - 2 * log.count("1m")) <= 3 * SLOTS


def test_a_map_whose_game_dies_is_played_as_often_as_others():
    starts, rng = TaskStarts(1, "train", weights=(1.0, 1.0)), np.random.default_rng(0)
    each, played = np.ones(4, bool), np.zeros(2)
    for _ in range(500):
        tasks = starts.origins(each).task
        while (lost := (tasks == 0) & (rng.random(4) < 0.3)).any():
            tasks = np.where(lost, starts.origins(lost, lost=True).task, tasks)
        played += np.bincount(tasks, minlength=2)
    assert played.tolist() == [1000, 1000]


@pytest.mark.parametrize(
    ("name", "allies", "enemies"), [("marine-easy", 12, 12), ("marine-hard", 13, 15), ("stalker-zealot", 10, 10)]
)
def test_named_sets_play_on_skirmish(name, allies, enemies):
    env = make_env("skirmish", {"map_name": name}, 1, processes=False)
    info, each = env.info, {m: make_env("skirmish", {"map_name": m}, 1, False).info for m in NAMED[name].maps}
    assert (info.n_agents, info.layout.n_enemies, info.n_training) == (allies, enemies, 3)
    assert info.tasks == NAMED[name].maps and info.map_name == name and info.name == "skirmish"
    assert info.obs_dim == info.layout.obs_dim == max(of_map.obs_dim for of_map in each.values())
    assert info.n_actions == max(of_map.n_actions for of_map in each.values())
    assert EnvInfo.from_dict(info.to_dict()) == info


def test_sets_are_lists_or_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("training: [3m, 2s3z]\nheld_out: [4m]\n")
    assert task_set(str(path)) == TaskSet("mine", ("3m", "2s3z"), ("4m",))
    for given in ("3m,5m", "[3m, 5m]", "['3m','5m']", "('3m', '5m')", "3m,5m,", ["3m", "5m"], ("3m", "5m")):
        assert map_label(given) == "3m+5m"
        assert task_set(given) == TaskSet("3m+5m", ("3m", "5m"))
    assert task_set([f"{n}m" for n in range(1, 40)]).label == "1m+38_maps"
    values = task_set(str(path)).as_values()
    assert task_set(values) == task_set(str(path)) and json.loads(json.dumps(values)) == values
    assert task_set({"training": ["3m", "5m"]}) == TaskSet("3m+5m", ("3m", "5m"))
    assert task_set("3m") is None and task_set(None) is None
    config = resolve("hpn_mappo", "skirmish", {"env_args.map_name": ["3m", "5m"]})
    assert preflight(config).info.tasks == ("3m", "5m")


@pytest.mark.parametrize(("map_name", "words"), [
    ("marine-eazy", ["marine-eazy", "Did you mean 'marine-easy'", "4m, 9m_vs_10m"]),
    ("3m,5m,3m", ["map 3m is named twice"]), ([3, "5m"], ["must hold their names"]),
    ("3m,3n", ["env_args.map_name=3m,3n: map_name=3n is not known. Did you mean '3m'?"]),
    ("marine-easy,3m", ["map_name=marine-easy,3m: marine-easy is a set of maps. Give its maps, or the set alone"]),
    ("[,]", ["map_name=[,]: is no list of maps", "[3m,5m]"]),
    ("3m,2s3z", ["2s3z and 3m cannot be in one set", "enemy_dim is 8 and 5"]),
    ("3m3s", ["3m3s mixes races", "m marine"]), ("65m", ["65m has 65 units; at most 64"]),
    ("pipe.yaml", ["map_name=pipe.yaml", "not a regular file"]),
    ("bad.yaml", ["map_name=bad.yaml", "cannot be read as YAML", "the keys training and held_out"]),
    ("laughs.yaml", ["map_name=laughs.yaml", "aliases stand for too many values"]),
    ("extra.yaml", ["extra.yaml", "heldout"]),
])  # fmt: skip
def test_wrong_maps_and_sets_are_rejected_at_the_start(map_name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "bad": "{", "extra": "training: [3m]\nheldout: [4m]",
        "laughs": "0: &0 [x]\n" + "".join(f"{n + 1}: &{n + 1} [{f'*{n},' * 9}]\n" for n in range(10)) + "training: *10",
    }  # fmt: skip
    os.mkfifo("pipe.yaml")
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    rejected({"env_args.map_name": map_name}, words)


@pytest.mark.parametrize(("updates", "words"), [
    ({"agent": "n_rnn"}, ["agent=n_rnn", "Use agent=attention_rnn or hpn_rnn"]),
    ({"obs_agent_id": True}, ["obs_agent_id=True", "obs_agent_id=False"]),
    ({"share_parameters": False}, ["share_parameters=False", "share_parameters=True"]),
    ({"env_args.obs_last_action": True}, ["cannot be in one set", "ally_dim"]),
    ({"env_args.obs_instead_of_state": True}, ["a state without units"]),
    ({"task_weights.3m": 1e308}, ["task_weights.3m=1e+308", "at most 1000000000"]),
])  # fmt: skip
def test_what_cannot_play_a_set_is_rejected_at_the_start(updates, words):
    rejected({"env_args.map_name": "3m,5m", **updates}, words)


def test_maps_of_one_shape_are_a_set_for_any_agent():
    updates = {"env_args.map_name": "3s_vs_3z,3z_vs_3s", "agent": "n_rnn", "obs_agent_id": True, "t_max": 100}
    assert not preflight(resolve("qmix", "skirmish", updates)).info.padded


def rejected(updates: dict[str, Any], words: list[str]) -> None:
    """Check that a configuration is rejected, in one line with these words."""
    with pytest.raises(UserError) as caught:
        preflight(resolve("hpn_mappo", updates.get("env", "skirmish"), updates))
    text = caught.value.render()
    assert "\n" not in text.strip() and [word for word in words if word not in text] == [], text


def test_maps_of_the_game_are_looked_for_before_training(sc2_game):
    """The second map's file is missing: neither a game starts nor a folder is made."""
    folder = sc2_game / "Maps" / "SMAC_Maps"
    (folder / "8m.SC2Map").unlink()
    with pytest.raises(UserError, match=r"map_name=8m: the game has no file .*install_sc2.sh --maps-only"):
        preflight(resolve("hpn_mappo", "sc2", {"env_args.map_name": "3m,8m"}))
    with pytest.raises(UserError, match=r"map_name=5m is not known"):
        preflight(resolve("hpn_mappo", "sc2", {"env_args.map_name": "marine-easy"}))
    assert preflight(resolve("hpn_mappo", "sc2", {"env_args.map_name": "3m,25m"})).info.n_agents == 25
