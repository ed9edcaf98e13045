"""The Python API: `run`, `load_policy`, `make` and `play`, their page, and runs over several seeds."""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import foreign_worlds
import numpy as np
import pytest
import torch
import yaml
from command_budgets import BUDGETS
from documented import questions
from interruption import json_of
from runner_toys import FakeEnv, LossyEnv, highest, length_of, reward_at, seen_at

import omagd
from omagd.config.env_info import EnvInfo
from omagd.config.loading import parse_value, resolve, validate
from omagd.config.schema import Config
from omagd.controllers.types import Decision, Tick
from omagd.envs import REGISTRY as ENVS
from omagd.envs.factory import make_env
from omagd.envs.parallel import ParallelBattle
from omagd.envs.protocol import BatchedEnv, random_actions
from omagd.run.api import LoadedPolicy
from omagd.run.checkpoint.weights import find_step_folder
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.training.build import build_mac, load_pretrained, of_checkpoint
from omagd.run.training.evaluate import evaluation_config
from omagd.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGE, CONFIGS = ROOT / "docs" / "python_api.md", ROOT / "src" / "config"
# Environments of this repository; installed packages may add others. JAX takes long to compile, and a game to start.
NOT_HERE = {"smax", "jaxmarl", "sc2", "sc2_v2"}
OWN_ENVS = sorted({name for name, where in ENVS._lazy.items() if where.startswith("omagd.")} - NOT_HERE)
SMALL = {key: parse_value(text) for key, text in (budget.split("=") for budget in BUDGETS)}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> dict:
    """Run the Python blocks of docs/python_api.md in their order, with small budgets; return what they define."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    folder = tmp_path_factory.mktemp("page")
    small = {**SMALL, "local_results_path": str(folder)}

    def budgeted(config: str, env_config: str, updates: dict) -> Config:
        return resolve(config, env_config, {**updates, **small})

    names: dict = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omagd.config.loading.resolve", budgeted)
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
    return names


@pytest.fixture(scope="module")
def trained(page) -> Path:
    """Return the folder of the page's run."""
    return Path(page["summary"]["folder"])


def test_the_page_runs_and_run_returns_what_the_summary_says(page, trained):
    result = page["summary"]
    assert json_of(trained / "summary.json") == json.loads(json.dumps(result))
    assert (result["exit_state"], result["seed"], result["name"]) == ("completed", 1, "qmix")
    assert result["stages"]["stage3"]["clock"]["t_env"] >= 150
    assert not (trained.parent / "sacred").exists()
    assert len(page["results"]["returns"]) == 8 and page["results"]["totals"]["episodes"] == 8


def test_evaluate_reads_the_runs_configuration_and_labels_what_it_writes(page, trained, tmp_path, capsys, monkeypatch):
    """The table of the same run: the numbers of a summary are those of the episodes' lines."""
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(trained / "models"), "-u", "test_nepisode=5", "local_results_path=results"]) == 0
    output = capsys.readouterr().out
    (folder,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"qmix_skirmish_3m_seed1_evaluation_\d{8}_\d{6}", folder.name)
    assert "skirmish 3m · qmix · evaluation · seed 1" in output and "Next" not in output
    summary, card, config = (json_of(folder / name) for name in ("summary.json", "card.json", "config.json"))
    assert (summary["kind"], card["kind"], page["summary"]["kind"]) == ("evaluation", "evaluation", "training")
    assert card["compared"]["trained"] == page["summary"]["card"]["id"]
    changed = {"evaluate", "checkpoint_path", "test_nepisode", "eval_report_episodes", "local_results_path"}
    before = json_of(trained / "config.json")
    assert {key for key in config if config[key] != before[key]} - {"buffer_cpu_only"} == changed
    lines = [json.loads(line) for line in (folder / "episodes" / "rank_0.jsonl").open()]
    assert len(lines) == card["compared"]["test_episodes"] == 6  # whole rounds of two battles
    values = summary["stages"]["stage3"]["values"]
    for name, key in (("return", "return"), ("ep_length", "length"), ("battle_won", "battle_won")):
        assert values[f"test_{name}_mean"] == pytest.approx(np.mean([line[key] for line in lines]))


def test_evaluations_of_a_studys_runs_are_not_among_its_runs(trained, tmp_path):
    study = tmp_path / "toy"
    run = shutil.copytree(trained, study / "runs" / "a-3m-seed1")
    assert evaluation_config(str(run), {}).local_results_path == str(run.parent)
    (study / "study.json").write_text("{}")
    assert evaluation_config(str(run), {}).local_results_path == str(study / "evaluations")
    assert evaluation_config(str(run), {"local_results_path": "x"}).local_results_path == "x"
    (run / "config.json").write_text(json.dumps({**json_of(run / "config.json"), "max_memory_per_gpu_gb": 20.0}))
    assert evaluation_config(str(run), {}).max_memory_per_gpu_gb is None, "of the machine that trained"


def test_documented_evaluations_are_understood_also_of_a_run_without_todays_keys(trained, tmp_path, capsys):
    # Those on other maps need agents of units: tests/test_many_maps.py.
    commands = [words for words in questions() if words[0] == "evaluate" and "map_name" not in "".join(words)]
    assert len(commands) >= 2
    for _, run, *words in commands:
        assert main(["evaluate", run.replace("results/<run>", str(trained)), *words, "--dry-run"]) == 0
    older = tmp_path / "older"
    shutil.copytree(trained, older, ignore=shutil.ignore_patterns("checkpoints"))
    config = json_of(trained / "config.json") | {"local_results_path": "/nowhere", "use_wandb": True}
    del config["resume"], config["torch_threads"]
    (older / "config.json").write_text(json.dumps(config | {"unique_token": "../x"}))  # not taken from the file
    capsys.readouterr()
    assert main(["evaluate", str(older), "--dry-run", "torch_threads=2"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    kept = ("torch_threads", "local_results_path", "use_wandb", "unique_token")
    assert [resolved[key] for key in kept] == [2, str(tmp_path), False, ""]
    (older / "config.json").write_text(json.dumps(config))
    assert omagd.load_policy(older).config.torch_threads == 1
    assert main(["evaluate", str(older), "--dry-run", "learner=nq_learnr"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "learner=nq_learnr is not known" in line


def test_evaluate_rejects_another_map_and_a_taken_name(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken = tmp_path / "results" / "mine"
    taken.mkdir(parents=True)
    old_form = ["--config=qmix", "with", *BUDGETS, "evaluate=True", f"checkpoint_path={trained}"]
    for word, part in (
        ("env_args.map_name=8m", "trained on skirmish 3m, not on skirmish 8m"),
        ("unique_token=mine", f"unique_token=mine: {taken} exists already. Give another unique_token"),
    ):
        for command in (["evaluate", str(trained)], old_form):
            assert main([*command, "local_results_path=results", word]) == 2
            output = capsys.readouterr()
            assert output.out == "" and len(output.err.splitlines()) == 1 and part in output.err
    (taken / "notes.txt").write_text("somebody's")  # an empty folder is what a killed start leaves: it would be used
    given = {**SMALL, "local_results_path": str(taken.parent), "unique_token": "mine", "auto_resume": True}
    with pytest.raises(UserError, match=f"unique_token=mine: {taken} exists already"):
        launch(resolve("qmix", None, given), "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["results", "mine", "notes.txt"]


class Random:
    """Plays what the mask allows, by chance."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def reset(self) -> None:
        """Remember nothing."""

    def act(self, obs: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return random_actions(mask, self.rng)


class Losing(LossyEnv):
    """Episodes whose number is in `lost` are void after their first step."""

    def __init__(self, lost: set[int]) -> None:
        super().__init__(1)
        self.lost = lost

    def losing(self) -> np.ndarray:
        return np.full(1, len(self.begun) - 1 in self.lost)


class Highest:
    """Takes the highest action that is available; notes when it forgets and what it sees."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def reset(self) -> None:
        self.seen.append([])

    def act(self, obs: np.ndarray, mask: np.ndarray) -> np.ndarray:
        self.seen[-1].append(obs[0, 0])
        return highest(mask)


def test_lost_episodes_are_played_again_until_ten_in_a_row_are_lost():
    """Nine, one that counts, nine more: the results are those of the episodes that were not lost alone."""
    env, policy = Losing({*range(9), *range(10, 19)}), Highest()
    results = omagd.play(policy, ParallelBattle(env), episodes=2, seed=5)
    assert len(env.begun) == len(policy.seen) == 20 and len({seed for _, seed in env.begun}) == 20
    seeds = [seed for number, (_, seed) in enumerate(env.begun) if number not in env.lost]
    lengths = [length_of(seed) for seed in seeds]
    returns = [
        sum(reward_at(seed, t, np.full(2, 3 if t % 2 == 0 else 1)) for t in range(length_of(seed))) for seed in seeds
    ]
    assert results["lengths"] == lengths and results["returns"] == pytest.approx(returns)
    assert results["battle_won"] == [seed % 3 == 0 for seed in seeds]
    totals = results["totals"]
    assert (totals["episodes"], totals["lost_episodes"], totals["steps"]) == (2, 18, sum(lengths))
    assert totals["return_mean"] == pytest.approx(np.mean(returns))
    assert totals["battle_won_mean"] == np.mean([seed % 3 == 0 for seed in seeds]) and "lost_mean" not in totals
    hopeless = Losing({*range(1, 100)})
    with pytest.raises(UserError, match="env=fake: 10 episodes in a row were lost; correct the environment"):
        omagd.play(Highest(), ParallelBattle(hopeless), episodes=2)
    assert len(hopeless.begun) == 11


@pytest.mark.parametrize("wrong", ["reward is nan", "goes on after its limit of 1 steps"])
def test_play_rejects_what_no_run_would_take(monkeypatch, wrong):
    env, step = FakeEnv(1), FakeEnv.step
    if "nan" in wrong:
        monkeypatch.setattr(FakeEnv, "step", lambda *args: replace(step(*args), reward=np.full(1, np.nan)))
    else:
        env.info = replace(env.info, episode_limit=1)
    with pytest.raises(UserError, match=f"env=fake, slot 0, seed .*, step .*: .*{wrong}"):
        omagd.play(Highest(), ParallelBattle(env), episodes=9)


class Controller:
    """A controller that takes the highest action and notes what it is shown."""

    agent = None

    def __init__(self, wants_full_obs: bool = False) -> None:
        self.wants_full_obs, self.calls, self.ticks = wants_full_obs, [], []

    def begin(self, n_slots: int) -> None:
        self.calls.append(("begin", n_slots))

    def reset(self, which: np.ndarray) -> None:
        self.calls.append(("reset", which.tolist()))

    def act(self, tick: Tick, explore: object) -> Decision:
        assert explore is None, "a loaded policy is greedy"
        self.ticks.append(tick)
        return Decision(highest(tick.observation.avail_actions), {})


@pytest.mark.parametrize("full", [False, True])
def test_a_loaded_policy_counts_its_steps_and_sees_what_it_was_trained_on(full):
    env, mac = FakeEnv(1), Controller(full)
    policy = LoadedPolicy(resolve("qmix", None, {"use_full_obs": full}), env.info, mac)
    assert policy.wants_full_obs == full
    omagd.play(policy, ParallelBattle(env), episodes=3)
    assert mac.calls == [("begin", 1), ("reset", [True])] * 4, "when it is made and for each episode"
    lengths = [length_of(seed) for _, seed in env.begun]
    assert [int(tick.step[0]) for tick in mac.ticks] == [step for length in lengths for step in range(length)]
    shown = [tick.observation for tick in mac.ticks]
    expected = [seen_at(seed, step) for _, seed, step, _ in env.log]
    if full:  # the toy's view without range limit is the negative of its usual one
        assert [float(seen.full_obs[0, 0, 0]) for seen in shown] == [-value for value in expected]
    else:
        assert [float(seen.obs[0, 0, 0]) for seen in shown] == expected
        assert all(seen.full_obs is None for seen in shown)
    assert all(seen.obs.shape == (1, 2, 3) and seen.avail_actions.dtype == bool for seen in shown)


def test_a_policy_that_reconstructs_plays_its_own_map_only(monkeypatch):
    """Its agent might read other maps' units; its tokenizer and its predictor cannot."""
    monkeypatch.setattr("omagd.run.api.require_same_map", lambda *_: None)
    own = omagd.make("skirmish", map_name="3m").info
    policy = LoadedPolicy(resolve("omagd_small", None, {}), own, Controller())
    assert policy.on(own) is policy
    for other in ("5m", "3m_vs_4m"):
        with pytest.raises(UserError, match=f"policy: reconstructs observations of 3m; it cannot play {other}. Give"):
            policy.on(replace(own, map_name=other, n_actions=own.n_actions + 1))


def test_the_step_asked_for_is_loaded(trained, tmp_path):
    """Weights of three steps: the one that is nearest to the step asked for, the last one without it."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (only,) = (folder / "models").glob("[0-9]*")
    steps = {only.name: 0.0, "90000": 1.0, "200000": 2.0}
    for name, value in steps.items():
        if value:
            shutil.copytree(only, folder / "models" / name)
            weights = torch.load(folder / "models" / name / "agent.th", weights_only=True)
            torch.save({key: torch.full_like(weight, value) for key, weight in weights.items()},
                       folder / "models" / name / "agent.th")  # fmt: skip

    def loaded(*step) -> float:
        weights = omagd.load_policy(folder, *step)._mac.agent.state_dict().values()
        values = {float(weight.flatten()[0]) for weight in weights}
        return values.pop() if len(values) == 1 else 0.0

    assert [loaded(), loaded(0), loaded(90_000), loaded(130_000), loaded(10**9), loaded(1)] == [2, 2, 1, 1, 2, 0]


def test_make_gives_one_battle_with_the_arguments_of_its_file(monkeypatch):
    for given in ("marine-easy", "3m,5m"):
        with pytest.raises(UserError, match=f"^env_args.map_name={given}: make one battle of 3m, 5m"):
            omagd.make("skirmish", map_name=given)
    made = []

    def make_env(name, values, slots, processes):
        made.append((name, values, slots, processes))
        return FakeEnv(1)

    monkeypatch.setattr("omagd.run.api.make_env", make_env)
    file = yaml.safe_load((CONFIGS / "envs" / "sc2_v2_terran.yaml").read_text())
    omagd.make("sc2_v2_terran")
    omagd.make("sc2_v2_terran", difficulty="3")
    omagd.make("sc2_v2", difficulty="3")
    assert made == [
        ("sc2_v2", file["env_args"], 1, False), ("sc2_v2", {**file["env_args"], "difficulty": "3"}, 1, False),
        ("sc2_v2", {"difficulty": "3"}, 1, False),
    ]  # fmt: skip


@pytest.mark.parametrize("name", OWN_ENVS)
def test_every_environment_plays_by_the_parallel_interface(name):
    """What PettingZoo's own test asks for, and the same numbers as the batched environment, step by step."""
    args = foreign_worlds.SMALL.get(name, {})
    env, other = omagd.make(name, **args), omagd.make(name, **args)
    assert env.info.name == name
    assert_same_as_batched(env, other._env)
    totals = omagd.play(Random(), env, episodes=1)["totals"]
    assert totals["episodes"] == 1 and 1 <= totals["steps"] <= env.info.episode_limit + 1
    env.close()
    other.close()
    assert env.agents == []


def assert_same_as_batched(env: ParallelBattle, batched: BatchedEnv) -> None:
    """Play an episode with the batched environment, then the same one by the interface."""
    one, policy = np.ones(1, bool), Random()
    batched.reset(one, np.array([7]))
    played, done = [], False
    while not done:
        seen = copy.deepcopy(batched.observe())
        actions = policy.act(seen.obs[0], seen.avail_actions[0])
        result = copy.deepcopy(batched.step(actions[None], one))
        done = result.terminated.item(0)
        played.append((seen, actions, result))
    observations, infos = env.reset(seed=7)
    agents = list(env.agents)
    assert agents == env.possible_agents == list(observations) == list(infos)
    for seen, actions, result in played:
        for i, agent in enumerate(agents):
            assert env.observation_space(agent).contains(observations[agent])
            assert env.observation_space(agent) is env.observation_spaces[agent]
            assert np.array_equal(observations[agent]["observation"], seen.obs[0, i])
            assert np.array_equal(observations[agent]["action_mask"], seen.avail_actions[0, i])
            assert env.action_space(agent).contains(actions[i])
        assert np.array_equal(env.state(), seen.state[0]) and env.state_space.contains(env.state())
        done, truncated = result.terminated.item(0), result.truncated.item(0)
        observations, *parts = env.step(dict(zip(agents, actions.tolist(), strict=True)))
        assert all(list(part) == agents for part in (observations, *parts))
        values = [set(part.values()) for part in parts[:3]]
        assert values == [{result.reward.item(0)}, {done and not truncated}, {truncated}]
        assert env.agents == ([] if done else agents)
    for name, final in result.info.items():
        assert {info[name] for info in parts[3].values()} == {final.item(0)}


def test_errors_name_what_is_wrong(trained, tmp_path):
    assert {"run", "load_policy", "make", "play"} <= set(dir(omagd)) & set(omagd.__all__)
    env, closed = omagd.make("skirmish", map_name="3m"), omagd.make("matrix_game")
    assert omagd.play(Random(), closed, 1)["totals"]["episodes"] == 1
    closed.close()
    closed.close()
    config = config_from(["--config=qmix", "with", f"local_results_path={tmp_path}/new", "env_args.map_name=3m"])
    policy, larger = omagd.load_policy(trained / "models"), omagd.make("skirmish", map_name="8m")
    is_closed = "the environment matrix_game.* is closed: make another one"
    for call, kind, words in (
        (lambda: omagd.play(None, env, 1), TypeError, r"policy=None: give .*load_policy.* reset\(\)"),
        (lambda: omagd.play(Random(), None, 1), TypeError, "env=None: give .*omagd.make"),
        (closed.reset, ValueError, is_closed),
        (lambda: closed.step({}), ValueError, is_closed),
        (lambda: omagd.play(Random(), closed, 1), ValueError, is_closed),
        (lambda: env.step({}), RuntimeError, "call reset"),
        (lambda: env.reset(seed=1) and env.step({"agent_0": 1}), ValueError, "give one to each"),
        (lambda: env.step({"agent_0": 1, "agent_1": 0, "agent_2": 1}), ValueError,
         r"agent_1: action 0 is not available now; available: \[1, "),
        (lambda: omagd.make("skirmsh"), UserError, r"env=skirmsh is not known. Did you mean 'skirmish'?"),
        (lambda: omagd.play(Random(), env, episodes=0), UserError, "episodes=0"),
        (lambda: omagd.run(config.model_copy(update={"mixer": "qmx"})), UserError, "mixer=qmx"),
        (lambda: omagd.load_policy(tmp_path), UserError, r"agent\.th"),
        (lambda: omagd.play(policy, larger, 1), UserError, "trained on skirmish 3m, not on skirmish 8m"),
        (lambda: policy.act(np.zeros((1, env.info.obs_dim)), np.ones((3, env.info.n_actions))), ValueError, "must be"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


def test_pettingzoo_takes_it():
    pettingzoo = pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    for name in ("skirmish", "snakes", "memory_game"):
        env = omagd.make(name)
        assert isinstance(env, pettingzoo.ParallelEnv)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel_api_test(env, num_cycles=60)


def test_a_moment_is_a_picture_of_its_units():
    env = omagd.make("skirmish", render_mode="rgb_array", map_name="3m")
    env.reset(seed=1)
    first = env.render()
    assert first.dtype == np.uint8 and first.ndim == 3 and env.render_mode in env.metadata["render_modes"]
    shown = [(abs(first.astype(int) - colour).sum(-1) < 30).sum() for colour in ((76, 201, 192), (255, 138, 92))]
    assert min(shown) > 300, "both teams"
    env.step(dict.fromkeys(env.agents, 2))
    assert env.render().shape == first.shape and (env.render() != first).any()
    assert omagd.make("skirmish", map_name="3m").render_mode is None
    with pytest.raises(UserError, match="render_mode=human.*rgb_array"):
        omagd.make("skirmish", render_mode="human")


@pytest.mark.processes
@pytest.mark.parametrize("run", ["qmix_run", "small_run", "published_run"])
def test_a_loaded_policy_acts_as_the_runs_own_controller(run, request):
    """Over whole episodes, history and hidden state included; and again after `reset`, and from any step elsewhere."""
    folder = request.getfixturevalue(run)
    config, info = validate(json_of(folder / "config.json")), EnvInfo.from_dict(json_of(folder / "env_info.json"))
    step = find_step_folder(str(folder))
    pretrained = load_pretrained(of_checkpoint(config, step), info, torch.device("cpu"))
    mac = build_mac(config, info, torch.device("cpu"), pretrained)
    mac.agent.load_state_dict(torch.load(step / "agent.th", weights_only=True))
    policy, other, everyone = omagd.load_policy(folder), omagd.load_policy(folder), np.ones(1, bool)
    assert policy.values is None and policy.beliefs() is None
    env = make_env(config.env, dict(config.env_args), 1, processes=False)
    for seed in (1, 2):
        policy.reset()
        env.reset(everyone, np.array([seed]))
        mac.begin(1)
        mac.reset(everyone)
        step, done = 0, False
        while not done:
            seen = env.observe()
            decided = mac.act(Tick(seen, np.array([step]), everyone), None)
            other.load_snapshot(policy.snapshot())
            actions = policy.act(seen.obs[0], seen.avail_actions[0])
            assert actions.tolist() == decided.actions[0].tolist()
            assert np.array_equal(policy.values, decided.values[0])
            other.act(seen.obs[0], seen.avail_actions[0])
            assert np.array_equal(other.values, policy.values)
            assert (policy.beliefs() is not None) == config.use_graph_reconstruction
            assert seen.avail_actions[0][np.arange(len(actions)), actions].all()
            done, step = bool(env.step(actions[None], everyone).terminated[0]), step + 1
        assert step > 5
    env.close()
