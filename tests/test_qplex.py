"""QPLEX, a mixer of the example package with keys of its own that reads all values (ranks: test_ddp_q.py)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from example_plugins import CONFIGS, add_example
from interruption import interrupted_run
from q_toys import INFO, toy_config
from run_equality import differences

import omagd
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.modules.mixers.mixer import MixerInputs, mix
from omagd.run.cli.main import config_from, main
from omagd.run.cli.preflight import preflight

QPLEX = {"mixer": "qplex", "mixer_args": {"n_heads": 2, "hidden_dim": 8}, "target_update_updates": 3}
WORDS = (
    f"--config={CONFIGS}/algs/qplex.yaml",
    f"--env-config={CONFIGS}/envs/crossroads.yaml",
    *"with t_max=120 batch_size_run=2 batch_size=4 test_nepisode=2 test_interval=1000 log_interval=24".split(),
    *"learner_log_interval=24 checkpoint_interval=0 rnn_hidden_dim=8 use_cuda=False seed=3".split(),
)


add_example()


def test_the_greedy_joint_action_is_made_of_the_agents_greedy_actions():
    torch.manual_seed(0)
    mixer = MIXERS.get("qplex")(toy_config(**QPLEX), INFO).double()
    joint_actions = torch.tensor(list(itertools.product(range(INFO.n_actions), repeat=INFO.n_agents)))
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


def climbing_error(mixer: str) -> float:
    """Return the mean squared error of the joint values of a game that no monotonic mixer can represent."""
    payoff = torch.tensor([[11.0, -30.0, 0.0], [-30.0, 7.0, 6.0], [0.0, 0.0, 5.0]])  # Claus and Boutilier 1998
    torch.manual_seed(1)
    info = type(INFO)("climbing", "", 2, 3, 2, 1, 1)
    mixing = MIXERS.get(mixer)(toy_config(mixer=mixer, mixing_embed_dim=8), info)
    q = torch.zeros(2, 3, requires_grad=True)
    actions = torch.tensor(list(itertools.product(range(3), repeat=2)))
    optimizer = torch.optim.Adam([q, *mixing.parameters()], lr=0.02)
    for _ in range(1500):
        joint = mix(mixing, MixerInputs(q.expand(9, -1, -1), actions, torch.ones(9, 2, 3), torch.ones(9, 1)))
        error = (joint - payoff[actions[:, 0], actions[:, 1]]).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return error.item()


def test_it_represents_a_game_that_qmix_cannot():
    assert climbing_error("qplex") < 1.0 < 10.0 < climbing_error("qmix")


def test_it_trains_and_resumes_bit_for_bit(tmp_path, capsys):
    whole, cut = (config_from([*WORDS, "auto_resume=True", f"local_results_path={tmp_path}/{n}"]) for n in "ab")
    summary = omagd.run(whole)
    assert summary["exit_state"] == "completed"
    interrupted_run(preflight(cut).config, 3)
    folders = [Path(one["folder"]) for one in (summary, omagd.run(cut))]
    assert differences(*folders) == []
    assert json.loads((folders[0] / "config.json").read_text())["mixer_args"] == {"n_heads": 4, "hidden_dim": 64}
    assert any(json.loads(line).get("loss_td") for line in (folders[0] / "metrics.jsonl").open())
    assert len(list((tmp_path / "b").glob("*"))) == 1, "continued, not begun again"
    assert main([*WORDS, "mixer_args.n_head=8"]) == 2
    assert "'n_heads'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "word", "message"),
    [
        ("soft_qmix", "mixer=none", None),
        ("soft_qmix", "mixer=qplex", "mixer=qplex"),
        ("soft_qmix", "mac=mappo_mac", "learner=mappo"),
    ],
)
def test_parts_of_the_example_package_work_together_or_say_why_not(config, word, message, tmp_path, capsys):
    path = f"--config={CONFIGS}/algs/{config}.yaml"
    code = main([path, "--env-config=matrix_game", "with", *BUDGETS, word, f"local_results_path={tmp_path}"])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == (2 if message else 0) and (message is None or message in errors[0])
