"""The agent that reads what the belief head says: acting and learning see the same, and the head learns alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from command_budgets import BUDGETS
from plugin_toys import RESEARCH, add_example

from omagd import controllers
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.graph_reconstructers.belief_head import new_head
from omagd.run.cli.main import config_from, main
from omagd.run.training.build import read_env_info
from omagd.utils.packing import Packing

add_example(RESEARCH)
WORDS = ["--config=fed_back", "--env-config=skirmish", "with", "env_args.map_name=2s3z_mixed_sight4", *BUDGETS]
WORDS += ["run=default", "rnn_hidden_dim=8", "updates_per_iteration=1", "batch_size=2", "t_max=300"]


def test_agents_learn_from_what_they_have_acted_on(tmp_path):
    assert main([*WORDS, f"local_results_path={tmp_path}"]) == 0
    (folder,) = (path.parent for path in tmp_path.glob("*/metrics.jsonl"))
    assert "loss_belief" in (folder / "metrics.jsonl").read_text()
    config, info = config_from(WORDS), read_env_info(folder / "env_info.json", "the run")
    mac = controllers.REGISTRY.build(config.mac, config, info, torch.device("cpu"))
    agent, mac.head = mac.agent, new_head(config, info, torch.zeros(1))
    assert mac.actor.shared.head is agent.shared.head is copy.deepcopy(agent).shared.head is mac.head
    inputs = AgentInputs.blank(6, info, torch.zeros(1))
    inputs = replace(inputs, features=torch.rand_like(inputs.features))
    values, hidden = agent.unroll(inputs, Packing((4, 2)))[0], agent.init_hidden(2)
    for first, k in ((0, 2), (2, 2), (4, 1), (5, 1)):
        q, hidden = agent.step(inputs.rows(slice(first, first + k)), hidden[:k])
        torch.testing.assert_close(values[first : first + k], q)
    values.sum().backward()
    assert agent.told.weight.grad.any() and mac.head.hidden.weight.grad is None
    with torch.no_grad():
        mac.head.hidden.weight.add_(1.0)
    assert not torch.allclose(agent.unroll(inputs, Packing((4, 2)))[0], values)
