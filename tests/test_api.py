"""The Python API: `run`, `load_policy`, `make` and `play`, their page, and runs over several seeds."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import sc2_stand_in
import torch
import yaml
from command_budgets import BUDGETS
from documented import questions

import omagd
from omagd.config.env_info import EnvInfo
from omagd.config.loading import parse_value, resolve, validate
from omagd.config.schema import Config
from omagd.controllers.types import Tick
from omagd.envs import REGISTRY as ENVS
from omagd.envs.actions import random_actions
from omagd.envs.factory import make_env
from omagd.envs.parallel import ParallelBattle
from omagd.envs.protocol import BatchedEnv
from omagd.run.checkpoint.weights import find_step_folder
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.training.build import build_mac, load_products, of_checkpoint
from omagd.utils.errors import UserError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python_api.md"
# Every environment of this repository, by a name that has its arguments; installed packages may add others.
OWN_ENVS = sorted(name for name, where in ENVS._lazy.items() if where.startswith("omagd."))
SMALL = {key: parse_value(text) for key, text in (budget.split("=") for budget in BUDGETS)}
WITH_ARGS = {"sc2_v2": "sc2_v2_terran"}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


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


def test_the_page_runs_and_run_returns_what_the_summary_says(page):
    result = page["summary"]
    folder = Path(result["folder"])
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(result))
    assert (result["exit_state"], result["seed"], result["name"]) == ("completed", 1, "qmix")
    assert result["stages"]["stage3"]["clock"]["t_env"] >= 150
    assert not (folder.parent / "sacred").exists()
    assert len(page["results"]["returns"]) == 8 and page["results"]["totals"]["episodes"] == 8


def test_play_gives_what_evaluation_of_the_run_gives(page):
    """The same seeds in one battle slot, counted by the runner there and by `play` here."""
    folder = page["summary"]["folder"]
    updates = {"evaluate": True, "checkpoint_path": folder, "batch_size_run": 1, "eval_report_episodes": 3}
    config = page["config"].model_copy(update={**updates, "local_results_path": str(Path(folder).parent)})
    values = omagd.run(config)["stages"]["stage3"]["values"]
    env = omagd.make("skirmish", map_name="3m")
    results = omagd.play(omagd.load_policy(folder), env, episodes=3)
    totals = results["totals"]
    assert {name: totals[name.removeprefix("test_")] for name in values} == pytest.approx(values)
    assert totals["steps"] == sum(results["lengths"]) and totals["return_mean"] == np.mean(results["returns"])
    assert results["battle_won"] == [False] * 3 or totals["battle_won_mean"] > 0


def test_evaluate_reads_the_runs_configuration_and_labels_what_it_writes(page, tmp_path, capsys, monkeypatch):
    """The table of the same run: the numbers of a summary are those of the episodes' lines."""
    monkeypatch.chdir(tmp_path)
    trained, where = Path(page["summary"]["folder"]), f"local_results_path={tmp_path / 'results'}"
    assert main(["evaluate", str(trained / "models"), "-u", "test_nepisode=5", where]) == 0
    output = capsys.readouterr().out
    (folder,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"qmix_skirmish_3m_seed1_evaluation_\d{8}_\d{6}", folder.name)
    assert "skirmish 3m · qmix · evaluation · seed 1" in output and "Next" not in output
    summary, card = (json.loads((folder / name).read_text()) for name in ("summary.json", "card.json"))
    assert (summary["kind"], card["kind"], page["summary"]["kind"]) == ("evaluation", "evaluation", "training")
    assert card["compared"]["trained"] == page["summary"]["card"]["id"]
    assert [path.name for path in (folder / "plots").iterdir()] == ["evaluation.png"]
    config, before = (json.loads((path / "config.json").read_text()) for path in (folder, trained))
    differ = {key for key in config if config[key] != before[key]}
    assert differ == {
        "evaluate", "checkpoint_path", "test_nepisode", "eval_report_episodes", "local_results_path", "buffer_cpu_only",
    } - {key for key in ("buffer_cpu_only",) if before[key]}  # fmt: skip
    lines = [json.loads(line) for line in (folder / "episodes" / "rank_0.jsonl").read_text().splitlines()]
    assert len(lines) == card["compared"]["test_episodes"] == 6  # whole rounds of two battles
    values = summary["stages"]["stage3"]["values"]
    for name, key in (("return", "return"), ("ep_length", "length"), ("battle_won", "battle_won")):
        assert values[f"test_{name}_mean"] == pytest.approx(np.mean([line[key] for line in lines]))


def test_documented_evaluations_are_understood_also_of_a_run_without_todays_keys(page, tmp_path, capsys):
    trained = Path(page["summary"]["folder"])
    commands = [words for words in questions() if words[0] == "evaluate"]
    assert len(commands) >= 2
    for _, run, *words in commands:
        assert main(["evaluate", run.replace("results/<run>", str(trained)), *words, "--dry-run"]) == 0
    config = json.loads((trained / "config.json").read_text())
    shutil.copytree(trained, tmp_path / "older", ignore=shutil.ignore_patterns("checkpoints"))
    older = {key: value for key, value in config.items() if key not in {"resume", "torch_threads"}}
    older |= {"local_results_path": "/nowhere", "use_wandb": True, "unique_token": "../x"}  # not taken from the file
    (tmp_path / "older" / "config.json").write_text(json.dumps(older))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "older"), "--dry-run", "torch_threads=2"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    kept = ("torch_threads", "local_results_path", "use_wandb", "unique_token")
    assert [resolved[key] for key in kept] == [2, str(tmp_path), False, ""]
    (tmp_path / "older" / "config.json").write_text(json.dumps({**older, "unique_token": ""}))
    assert omagd.load_policy(tmp_path / "older").config.torch_threads == 1


def test_evaluate_rejects_another_map_replays_and_a_taken_name(page, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = Path(page["summary"]["folder"])
    (tmp_path / "results" / "mine").mkdir(parents=True)
    where, taken = "local_results_path=results", tmp_path / "results" / "mine"
    old_form = ["--config=qmix", "with", *BUDGETS, "evaluate=True", f"checkpoint_path={trained}", where]
    asked = {
        "env_args.map_name=8m": ["trained on skirmish 3m, not on skirmish 8m"],
        "save_replay=True": ["save_replay=True: env=skirmish writes no replays"],
        "unique_token=mine": [f"unique_token=mine: {taken} exists already", "Give another one"],
    }
    for words, parts in asked.items():
        for command in (["evaluate", str(trained), where], old_form):
            assert main([*command, words]) == 2
            output = capsys.readouterr()
            assert output.out == "" and len(output.err.splitlines()) == 1
            assert [part for part in parts if part not in output.err] == []
    config = resolve("qmix", None, {**SMALL, "local_results_path": str(taken.parent), "unique_token": "mine"})
    with pytest.raises(UserError, match=f"unique_token=mine: {taken} exists already"):
        launch(config.model_copy(update={"auto_resume": True}), "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["results", "mine"]


def test_a_policy_rejects_other_shapes_and_maps(page, tmp_path):
    policy = omagd.load_policy(Path(page["summary"]["folder"]) / "models")
    info = policy.info
    with pytest.raises(ValueError, match="must be"):
        policy.act(np.zeros((1, info.obs_dim)), np.ones((info.n_agents, info.n_actions)))
    with pytest.raises(UserError, match=r"agent\.th"):
        omagd.load_policy(tmp_path)
    with pytest.raises(UserError, match="trained on skirmish 3m, not on skirmish 8m"):
        omagd.play(policy, omagd.make("skirmish", map_name="8m"), episodes=1)


def test_acting_uses_the_runs_threads_and_leaves_the_callers(page, monkeypatch):
    policy = omagd.load_policy(page["summary"]["folder"])
    used, act = [], policy._mac.act
    monkeypatch.setattr(policy._mac, "act", lambda *given: used.append(torch.get_num_threads()) or act(*given))
    mask = np.ones((policy.info.n_agents, policy.info.n_actions), bool)
    try:
        torch.set_num_threads(3)
        policy.act(np.zeros((policy.info.n_agents, policy.info.obs_dim)), mask)
        omagd.load_policy(page["summary"]["folder"])
        assert (used, torch.get_num_threads()) == ([1], 3)
        monkeypatch.setattr(policy._mac, "act", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            policy.act(np.zeros((policy.info.n_agents, policy.info.obs_dim)), mask)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


class Random:
    """Plays what the mask allows, by chance."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def reset(self) -> None:
        """Remember nothing."""

    def act(self, obs: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return random_actions(mask, self.rng)


@pytest.mark.processes
@pytest.mark.parametrize("name", OWN_ENVS)
def test_every_environment_plays_by_the_parallel_interface(name, tmp_path, monkeypatch):
    """What PettingZoo's own test asks for, and the same numbers as the batched environment, step by step."""
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "StarCraftII")))
    given = WITH_ARGS.get(name, name)
    env = omagd.make(given)
    other = env if env._env.deterministic else omagd.make(given)  # a game continues with other battles
    assert env.info.name == name
    try:
        _same_as_batched(env, other._env)
        totals = omagd.play(Random(), env, episodes=1)["totals"]
        assert totals["episodes"] == 1 and 1 <= totals["steps"] <= env.info.episode_limit + 1
    finally:
        env.close()
        other.close()
    assert env.agents == []


def _same_as_batched(env: ParallelBattle, batched: BatchedEnv) -> None:
    """Play an episode with the batched environment, then the same one by the interface."""
    one, policy = np.ones(1, bool), Random()
    batched.reset(one, np.array([7]))
    shown, played, done = [], [], False
    while not done:
        seen = batched.observe()
        shown.append((seen.obs[0].copy(), seen.avail_actions[0].copy(), seen.state[0].copy()))
        actions = policy.act(*shown[-1][:2])
        result = batched.step(actions[None], one)
        done = result.terminated.item(0)
        played.append((actions, result.reward.item(0), done, result.truncated.item(0)))
    observations, infos = env.reset(seed=7)
    agents = list(env.agents)
    assert agents == env.possible_agents == list(observations) == list(infos)
    for (obs, mask, state), (actions, reward, done, truncated) in zip(shown, played, strict=True):
        for i, agent in enumerate(agents):
            assert env.observation_space(agent).contains(observations[agent])
            assert env.observation_space(agent) is env.observation_space(agent)
            assert np.array_equal(observations[agent]["observation"], obs[i])
            assert np.array_equal(observations[agent]["action_mask"], mask[i])
            assert env.action_space(agent).contains(actions[i])
        assert np.array_equal(env.state(), state) and env.state_space.contains(env.state())
        observations, *parts = env.step(dict(zip(agents, actions.tolist(), strict=True)))
        assert all(list(part) == agents for part in (observations, *parts))
        values = [set(part.values()) for part in parts[:3]]
        assert values == [{reward}, {done and not truncated}, {truncated}]
        assert env.agents == ([] if done else agents)
    for name, final in result.info.items():
        assert {info[name] for info in parts[3].values()} == {final.item(0)}


def test_errors_name_what_is_wrong(tmp_path):
    assert {"run", "load_policy", "make", "play"} <= set(dir(omagd)) & set(omagd.__all__)
    env, closed = omagd.make("skirmish", map_name="3m"), omagd.make("matrix_game")
    assert omagd.play(Random(), closed, 1)["totals"]["episodes"] == 1
    closed.close()
    closed.close()
    config = config_from(["--config=qmix", "with", f"local_results_path={tmp_path}/new", "env_args.map_name=3m"])
    is_closed = "the environment matrix_game.* is closed: make another one"
    for call, kind, words in (
        (lambda: omagd.play(None, env, 1), TypeError, r"policy=None: give .*load_policy.* reset\(\)"),
        (lambda: omagd.play(Random(), None, 1), TypeError, "env=None: give .*omagd.make"),
        (lambda: omagd.play(Random(), "matrix_game", 1), TypeError, "env='matrix_game': give .*omagd.make"),
        (closed.reset, ValueError, is_closed),
        (lambda: closed.step({}), ValueError, is_closed),
        (closed.full_observations, ValueError, is_closed),
        (lambda: omagd.play(Random(), closed, 1), ValueError, is_closed),
        (lambda: env.step({}), RuntimeError, "call reset"),
        (lambda: env.reset(seed=1) and env.step({"agent_0": 1}), ValueError, "give one to each"),
        (lambda: env.step({"agent_0": 1, "agent_1": 0, "agent_2": 1}), ValueError,
         r"agent_1: action 0 is not available now; available: \[1, "),
        (lambda: omagd.make("skirmsh"), UserError, r"env=skirmsh is not known. Did you mean 'skirmish'?"),
        (lambda: omagd.make("skirmish", map_nam="3m"), UserError, r"env_args.map_nam is not an argument"),
        (lambda: omagd.play(Random(), env, episodes=0), UserError, "episodes=0"),
        (lambda: omagd.run(config.model_copy(update={"mixer": "qmx"})), UserError, "mixer=qmx"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


def test_seeds_of_the_parallel_interface():
    """The same seed gives the same episodes; a reset without a seed starts another one."""
    env, again = (omagd.make("skirmish", map_name="2s3z") for _ in range(2))
    streams = []
    for each in (env, again):
        starts = [each.reset(seed=5)] + [each.reset() for _ in range(2)]
        streams.append([np.concatenate([seen[a]["observation"] for a in each.agents]) for seen, _ in starts])
    assert all(np.array_equal(one, other) for one, other in zip(*streams, strict=True))
    assert not np.array_equal(streams[0][0], streams[0][1])


def test_pettingzoo_takes_it():
    pettingzoo = pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    for name in ("skirmish", "snakes", "memory_game"):
        env = omagd.make(name)
        assert isinstance(env, pettingzoo.ParallelEnv)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel_api_test(env, num_cycles=60)


@pytest.mark.processes
@pytest.mark.parametrize("run", ["qmix_run", "small_run", "published_run"])
def test_a_loaded_policy_acts_as_the_runs_own_controller(run, request):
    """Over whole episodes, history and hidden state included; and again after `reset`."""
    folder = request.getfixturevalue(run)
    config = validate(json.loads((folder / "config.json").read_text()))
    info = EnvInfo.from_dict(json.loads((folder / "env_info.json").read_text()))
    step = find_step_folder(str(folder))
    products = load_products(of_checkpoint(config, step), info, torch.device("cpu"))
    mac = build_mac(config, info, torch.device("cpu"), products)
    mac.agent.load_state_dict(torch.load(step / "agent.th", weights_only=True))
    policy = omagd.load_policy(folder)
    for seed in (1, 2):
        policy.reset()
        assert _same_episode(policy, mac, config, seed) > 5


def _same_episode(policy: omagd.run.api.LoadedPolicy, mac: object, config: object, seed: int) -> int:
    """Play an episode by the policy, with the controller looking on; return its length."""
    env = make_env(config.env, dict(config.env_args), 1, processes=False)
    everyone = np.ones(1, bool)
    env.reset(everyone, np.array([seed]))
    mac.begin(1)
    mac.reset(everyone)
    step, done = 0, False
    while not done:
        observation = env.observe()
        wanted = mac.act(Tick(observation, np.array([step]), everyone), None).actions[0]
        actions = policy.act(observation.obs[0], observation.avail_actions[0])
        assert actions.tolist() == wanted.tolist()
        assert observation.avail_actions[0][np.arange(len(actions)), actions].all()
        done, step = bool(env.step(actions[None], everyone).terminated[0]), step + 1
    env.close()
    return step


@pytest.mark.processes
def test_seeds_end_in_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "t_max=20", "seeds=1,2"]) == 0
    out = capsys.readouterr().out
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("results/*/summary.json")]
    assert sorted(summary["seed"] for summary in summaries) == [1, 2]
    table = out[out.rindex("2 seeds") :].splitlines()[1:]
    assert [line.split()[0] for line in table if line[:1].isdigit()] == ["1", "2"]
    assert out.count("2 seeds") == 1
    assert any(line.startswith("median") for line in table)
