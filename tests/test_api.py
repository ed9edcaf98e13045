"""From Python: `omagd.run`, `omagd.load_policy`, and several seeds from one command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS

import omagd
from omagd.config.env_info import EnvInfo
from omagd.config.loading import validate
from omagd.controllers.types import Tick
from omagd.envs.factory import make_env
from omagd.run.build import build_mac, load_products, of_checkpoint
from omagd.run.command_line import config_from, main
from omagd.utils.checkpoint import find_step_folder
from omagd.utils.errors import UserError


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_run_returns_what_the_summary_says(tmp_path):
    config = config_from(["--config=vdn", "with", *BUDGETS, f"local_results_path={tmp_path}", "seed=5"])
    result = omagd.run(config)
    stored = json.loads((Path(result["folder"]) / "summary.json").read_text())
    assert stored == json.loads(json.dumps(result))
    assert (result["exit_state"], result["seed"], result["name"]) == ("completed", 5, "vdn")
    assert result["stages"]["stage3"]["clock"]["t_env"] >= 150
    assert not (tmp_path / "sacred").exists()


def test_run_refuses_what_the_command_line_refuses(tmp_path):
    config = config_from(["--config=qmix", "with", f"local_results_path={tmp_path}/new", "env_args.map_name=3m"])
    with pytest.raises(UserError, match="mixer=qmx"):
        omagd.run(config.model_copy(update={"mixer": "qmx"}))
    assert list(tmp_path.iterdir()) == []


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
def test_a_loaded_policy_says_what_it_needs(qmix_run, tmp_path):
    policy = omagd.load_policy(qmix_run / "models")
    info = policy.info
    with pytest.raises(ValueError, match="must be"):
        policy.act(np.zeros((1, info.obs_dim)), np.ones((info.n_agents, info.n_actions)))
    with pytest.raises(UserError, match=r"agent\.th"):
        omagd.load_policy(tmp_path)


@pytest.mark.processes
def test_seeds_end_in_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--config=qmix", "with", *BUDGETS, "seeds=1,2"]) == 0
    out = capsys.readouterr().out
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("results/*/summary.json")]
    assert sorted(summary["seed"] for summary in summaries) == [1, 2]
    table = out[out.rindex("2 seeds") :].splitlines()[1:]
    assert [line.split()[0] for line in table if line[:1].isdigit()] == ["1", "2"]
    assert out.count("2 seeds") == 1
    assert any(line.startswith("median") for line in table)
