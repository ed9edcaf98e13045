"""Keys of learners, agents and mixers (`mixer_args`, ...); QPLEX and PPO have some."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import yaml
from command_budgets import BUDGETS
from plugin_toys import CONFIGS, add_example
from pydantic import BaseModel
from q_toys import INFO, toy_config

import omagd
from omagd.config import loading
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.agents.agent import NRNNAgent
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.modules.mixers.mixer import MixerInputs, mix
from omagd.run.cli.main import config_from, main
from omagd.run.cli.preflight import preflight

add_example()
SIZES = "batch_size_run=2 batch_size=4 test_nepisode=2 rnn_hidden_dim=8 use_cuda=False".split()


class NamesArgs(BaseModel, extra="forbid"):
    """Keys of the agent below."""

    names: list[str] = []
    scale: float = 1.0


@pytest.fixture
def words(monkeypatch):
    """Return the beginning of a command; the example's presets are known by name, and so is the toy above."""
    monkeypatch.setattr(
        AGENTS, "_objects", {**AGENTS._objects, "named": type("Named", (NRNNAgent,), {"args_model": NamesArgs})}
    )
    monkeypatch.setattr(loading, "config_dirs", lambda: [loading.HERE, CONFIGS])
    return ["--config=qplex", "--env-config=matrix_game", "with", *SIZES]


def test_keys_of_components_reach_them_from_files_and_commands(words, capsys, tmp_path):
    given = [*words, "mixer_args.n_heads=2", "agent=named", "agent_args={'names': ['a', 'b']}"]
    assert main([*given, "--dry-run"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["mixer_args"] == {"n_heads": 2}
    assert shown["agent_args"] == {"names": ["a", "b"], "scale": 1.0}
    assert main([*given, "-F", f"{tmp_path}/sacred", *BUDGETS, f"local_results_path={tmp_path}/runs"]) == 0
    (folder,) = (tmp_path / "runs").glob("*")
    saved, card = (json.loads((folder / name).read_text()) for name in ("config.json", "card.json"))
    assert saved["mixer_args"] == card["recorded"]["mixer_args"] == shown["mixer_args"]
    assert omagd.load_policy(folder)
    assert main(["evaluate", str(folder), "test_nepisode=2", "use_cuda=False"]) == 0
    mappo = preflight(config_from(["--config=mappo", *words[1:], "learner_args.clip=5e-1"])).config
    assert [mappo.learner_args[key] for key in ("clip", "epochs", "gae_lambda")] == [0.5, 4, 0.95]


@pytest.mark.parametrize(("given", "parts"), [
    ("mixer_args.n_head=3", ["mixer_args.n_head", "mixer=qplex", "3", "'n_heads'?"]),
    ("mixer_args.n_heads='3'", ["mixer_args.n_heads=3", "a whole number", "without quotes"]),
    ("agent=named agent_args={'names':['\\ud800']}", ["agent_args: a value cannot be saved as JSON"]),
    ("agent=named agent_args.scale=1e999", ["agent_args.scale=inf", "finite"]),
    ("mixer_args={n_heads:8}", ["mixer_args={n_heads:8}", "mixer_args.n_heads=8"]),
    ("mixer=qmix", ["mixer_args.n_heads", "mixer=qmix", "qplex.yaml", "--config"]),
    ("--config=qmix learner=ppo_learner", ["has no meaning", "qmix.yaml", "--config with learner=ppo_learner"]),
    ("--config=snakes_ddpg", ["env_args.obs", "snakes_ddpg.yaml is for env=snakes_3v3: add --env-config=snakes"]),
    ("--config=qmix runner=ticks obs_last_action=False", ["runner=ticks", "agent=ff"]),
])  # fmt: skip
def test_wrong_keys_of_components_are_rejected_in_one_line(words, capsys, tmp_path, given, parts):
    assert main(["--dry-run", *words, *given.split(), f"local_results_path={tmp_path}/runs"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(all(part in line for part in parts) for line in lines), lines
    assert not (tmp_path / "runs").exists()


def test_qplex_is_maximal_only_at_the_agents_greedy_actions():
    torch.manual_seed(0)
    config = toy_config(mixer="qplex", mixer_args={"n_heads": 2})
    mixer = MIXERS.get("qplex")(config, INFO).double()
    q, state = torch.randn(9, 3, INFO.n_actions).double().requires_grad_(), torch.randn(9, INFO.state_dim).double()
    joint = mix(mixer, MixerInputs(q, torch.zeros(9, 3).long(), torch.ones_like(q), state))
    slopes = torch.autograd.grad(joint.sum(), q)[0][..., 0]
    torch.testing.assert_close(slopes, mixer.weight(state).abs() + 1e-10)  # agents learn from the plain sum
    joint_actions = torch.tensor(list(itertools.product(range(INFO.n_actions), repeat=INFO.n_agents)))
    rows, a = len(joint_actions), INFO.n_actions
    every = MixerInputs(
        q[:1].detach().expand(rows, -1, -1), joint_actions, torch.ones(rows, 3, a), state[:1].expand(rows, -1)
    )
    values = mix(mixer, every).view(a, a, a)
    assert not torch.allclose(values[0, 0] - values[0, 1], values[1, 0] - values[1, 1], rtol=1e-6)  # no plain sum
    for _ in range(20):
        q, state = torch.randn(INFO.n_agents, INFO.n_actions).double(), torch.randn(INFO.state_dim).double()
        available = torch.rand(INFO.n_agents, INFO.n_actions) < 0.6
        available[:, 0] = True
        allowed = joint_actions[available.gather(1, joint_actions.t()).all(0)]
        rows = len(allowed)
        inputs = (q.expand(rows, -1, -1), allowed, available.expand(rows, -1, -1), state.expand(rows, -1))
        joint = mix(mixer, MixerInputs(*inputs))
        best = q.masked_fill(~available, -torch.inf).argmax(-1)
        assert torch.equal(allowed[joint.argmax()], best) and (joint == joint.max()).sum() == 1
    for weight in mixer.key[-1].parameters():
        weight.data.zero_()
    torch.testing.assert_close(mix(mixer, every).max(), mix(mixer, every).min())  # without importance a plain maximum
