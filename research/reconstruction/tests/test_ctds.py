"""The comparators of `research/`: a teacher that sees everything and students that imitate it (CTDS)."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from ddp_harness import run_ranks
from plugin_toys import RESEARCH, add_example
from q_toys import INFO, copy_learner, equal, gradients_of, make_learner, random_episode, state_of, toy_config

import omagd
from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.learners.synced_optimizer import SKIPPED
from omagd.modules.agents.agent import AgentInputs
from omagd.run.cli.main import config_from, main
from omagd.run.memory_budget import replay_spec
from omagd.run.training.build import read_env_info
from omagd.run.training.stages.base import check_replicas
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
add_example(RESEARCH)
CTDS = {"learner": "ctds", "mac": "n_graph_mac", "target_update_updates": 2, "grad_norm_clip": 1e9}
SEEN = ("obs", "state", "avail_actions")
LENGTHS = [[9, 4, 1, 7], [2]]  # of the episodes of two ranks


def episodes_of(rank, update=0):
    """Return episodes in which agents see a part of what `full_obs` shows."""
    made = [random_episode(1000 * update + 100 * rank + i, k, i % 2 == 1) for i, k in enumerate(LENGTHS[rank])]
    return [{**episode, "full_obs": episode["obs"], "obs": episode["obs"] * (episode["obs"] > 0)} for episode in made]


def make(dist=None, seed=0, dtype=torch.float64, **more):
    return make_learner(toy_config(**{**CTDS, **more}), dist, dtype, seed)


def train(learner, batches):
    """Update on each batch; return the learner's state after each."""
    states = []
    for episodes in batches:
        learner.update(pack_episodes(episodes), episodes=0)
        states.append(state_of(learner))
    return states


def gradients(learner, episodes):
    """Do one update; return the gradients of the teacher with its mixer, those of the student, and the stats."""
    of_student = []
    handle = learner.student_optimizer.register_step_pre_hook(
        lambda optimizer, *_: of_student.extend(p.grad.clone() for p in optimizer.param_groups[0]["params"])
    )
    of_teacher, stats = gradients_of(learner, episodes)
    handle.remove()
    return of_teacher, of_student, stats


def distance(student, teacher, episodes):
    """Return half the summed squared distance of the two agents' values, step by step in one episode after another."""
    total = torch.zeros((), dtype=torch.float64)
    for episode in episodes:
        hidden, last = [agent.init_hidden(1) for agent in (student, teacher)], torch.full((1, INFO.n_agents), -1)
        for t in range(len(episode["obs"]) - 1):  # the last row has no step
            seen = [AgentInputs(episode[name][t : t + 1].double(), last) for name in ("obs", "full_obs")]
            q, hidden[0] = student.step(seen[0], hidden[0])
            with torch.no_grad():
                taught, hidden[1] = teacher.step(seen[1], hidden[1])
            for i, action in episode["avail_actions"][t].nonzero():
                total = total + 0.5 * (q[0, i, action] - taught[0, i, action]) ** 2
            last = episode["actions"][t : t + 1].long()
    return total


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"accumulate": 2, "grad_norm_clip": 0.5},
        {"share_parameters": False, "mixer": "vdn"},
        {"mac": "gnn_graph_mac", "agent": "gnn_rnn"},
    ],
)
def test_the_teacher_learns_like_agents_that_see_everything_and_the_student_learns_its_values(more):
    learner, episodes = make(**more), episodes_of(0)
    train(learner, [episodes_of(0, 1)])  # so that the teacher's targets have other weights
    upper = make(learner="nq_learner", use_full_obs=True, **more)
    copy_learner(learner.teacher, upper)
    student, teacher = copy.deepcopy(learner.mac.agent), copy.deepcopy(learner.teacher.mac.agent)
    of_teacher, of_student, stats = gradients(learner, episodes)
    wanted, upper_stats = gradients_of(upper, episodes)
    assert len(of_teacher) == len(wanted) and all(map(torch.equal, of_teacher, wanted))
    assert all(torch.equal(stats[name][0], value) for name, (value, _) in upper_stats.items() if name != SKIPPED)
    loss = distance(student, teacher, episodes)
    torch.testing.assert_close(stats["loss_student"], (loss.detach(), torch.tensor(21.0, dtype=torch.float64)))
    alone = torch.autograd.grad(loss / 21, list(student.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in alone]).norm()
    factor = min(1.0, learner.config.grad_norm_clip / (float(norm) + 1e-6))
    assert (factor < 1) == ("grad_norm_clip" in more)
    torch.testing.assert_close(of_student, [gradient * factor for gradient in alone])
    assert all(gradient.any() for gradient in of_student)


def test_acting_reads_no_full_obs():
    learner = make(dtype=torch.float32)
    learner.update(pack_episodes(episodes_of(0)), episodes=0)
    assert not learner.mac.wants_full_obs and learner.teacher.mac.wants_full_obs
    acted = []
    for fill in (None, math.nan):
        learner.mac.begin(4)
        for t in range(4):
            shown = [[episode[name][min(t, len(episode[name]) - 1)] for episode in episodes_of(0)] for name in SEEN]
            obs, state, available = (np.stack(rows) for rows in shown)
            full = None if fill is None else np.full_like(obs, fill)
            seen = Observation(obs, state, available.astype(bool), full)
            decision = learner.mac.act(Tick(seen, np.full(4, t), np.ones(4, bool)), None)
            acted.append((decision.actions.tobytes(), decision.values.tobytes()))
    assert acted[:4] == acted[4:] and len(set(acted)) == 4


def of_ranks(rank, dist, payload):
    """Train on three batches, and once more from a checkpoint after the first."""
    add_example(RESEARCH)
    learner, resumed = (make(dist, seed=seed, lr_scaling="linear") for seed in (rank, 7))
    batches = [episodes_of(rank, update) for update in range(3)]
    states = train(learner, batches[:1])
    copy_learner(learner, resumed)
    states += train(learner, batches[1:])
    check_replicas(dist, learner, "in the test")
    return states, train(resumed, batches[1:])


@pytest.mark.processes
def test_two_ranks_train_and_resume_like_one_process():
    (states, resumed), (others, _) = run_ranks(of_ranks)
    assert all(map(equal, states, others)) and all(map(equal, states[1:], resumed))
    one = train(
        make(lr=2 * toy_config().lr), [[*episodes_of(0, update), *episodes_of(1, update)] for update in range(3)]
    )[-1]
    assert {name.partition(".")[0] for name in one} >= {"agent", "teacher", "mixer", "target_agent", "target_mixer"}
    for name, value in one.items():
        torch.testing.assert_close(states[-1][name], value, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize("part", ["teacher", "mixer", "agent"])
def test_an_overflow_of_any_network_keeps_the_student_as_it_was_and_is_counted(part):
    learner, episodes = make(), episodes_of(0)
    train(learner, [episodes])
    before, weight = state_of(learner), next(learner.modules()[part].parameters())
    kept = weight.detach().clone()
    weight.data.fill_(math.nan)
    assert learner.update(pack_episodes(episodes), episodes=0)[SKIPPED][0] == 1
    weight.data.copy_(kept)
    changed = {name for name, value in state_of(learner).items() if not torch.equal(value, before[name])}
    assert {name for name in changed if name.startswith(("agent.", "student_optimizer"))} == set()
    assert bool(changed) == (part == "agent")  # of which the teacher does not depend


def test_a_run_records_full_obs_saves_the_teacher_and_its_student_plays_alone(tmp_path, monkeypatch):
    words = ["--config=ctds", "--env-config=skirmish", "with", "env_args.map_name=2s3z_mixed_sight4", *BUDGETS]
    words += ["run=default", "rnn_hidden_dim=8", "updates_per_iteration=1", "batch_size=2", "t_max=300"]
    assert main([*words, f"local_results_path={tmp_path}"]) == 0
    (folder,) = tmp_path.glob("*/metrics.jsonl")
    folder = folder.parent
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("loss_student" in row for row in rows), rows
    assert {path.name for path in folder.glob("models/*/*.th")} >= {"agent.th", "teacher.th", "mixer.th"}
    assert not omagd.load_policy(folder).wants_full_obs
    config, info = config_from(words), read_env_info(folder / "env_info.json", "the run")
    assert "full_obs" in replay_spec(config, info)
    assert "full_obs" not in replay_spec(config_from(["--config=fog_baseline", *words[1:]]), info)


def test_a_student_that_sees_everything_is_rejected():
    with pytest.raises(UserError, match="use_full_obs=True: learner=ctds"):
        make(use_full_obs=True)
