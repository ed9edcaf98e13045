"""Continuing and playing what was trained: nothing is lost between the file and the run, and runs repeat."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from command_harness import records, summary_of
from ddp_harness import run_ranks
from ddpg_toys import INFO as DDPG_INFO
from ddpg_toys import ddpg_config
from interruption import stage_of
from plugin_toys import own_names
from q_toys import GRAPH as GRAPH_KEYS
from q_toys import make_learner, toy_config
from run_equality import differences, leaves

import omagd
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.learners import REGISTRY as LEARNERS
from omagd.modules.agents.agent import AgentInputs
from omagd.run.checkpoint.resuming import identity_of
from omagd.run.checkpoint.store import folders as checkpoints
from omagd.run.checkpoint.store import read_checkpoint
from omagd.run.checkpoint.weights import checksum, find_step_folder, load_learner, save_learner
from omagd.run.cli.main import config_from, main
from omagd.run.cli.preflight import describe_env, preflight
from omagd.run.launch.launcher import launch
from omagd.run.reporting.metrics import Counters
from omagd.run.run_folder import RunFolder, write_json
from omagd.run.training import evaluate
from omagd.run.training.evaluate import load_mac
from omagd.run.training.loop import fit
from omagd.utils.dist_utils import Dist, Pending
from omagd.utils.errors import UserError, readable


def qmix(results: Path, *more: str) -> Config:
    return config_from(["--config=qmix", "with", *BUDGETS, f"local_results_path={results}", *more])


def test_a_newest_step_that_was_cut_short_is_named_and_not_passed_over(tmp_path, capsys):
    for step, whole in ((100, True), (2000, False)):
        (tmp_path / "models" / str(step)).mkdir(parents=True)
        (tmp_path / "models" / str(step) / ("agent.th" if whole else "opt.th")).write_bytes(b"")
    newest = re.escape(str(tmp_path / "models" / "2000"))
    with pytest.raises(UserError, match=f"{newest} holds no agent.th .*models/100"):
        omagd.load_policy(tmp_path)
    for command in ("evaluate", "watch"):
        assert main([command, str(tmp_path)]) == 2
        assert re.search(f"{newest} holds no agent.th", capsys.readouterr().err)
    assert find_step_folder(str(tmp_path), 101).name == "100"


@pytest.mark.parametrize("name", ["nowhere", "junk", "x" * 300, "\0", "~nobody_here/x"])
def test_a_folder_that_does_not_exist_is_named(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk").write_bytes(b"a file")
    with pytest.raises(UserError, match=re.escape(readable(f"path={name}: no such folder"))):
        omagd.load_policy(name)
    assert main(["evaluate", name]) == 2
    assert readable(f"evaluate {name}: no such folder. Give a run's folder") in capsys.readouterr().err
    assert main(["--config=qmix", "with", f"checkpoint_path={name}"]) == 2
    assert re.search("no such folder|invalid path", capsys.readouterr().err)


class PyMARLAgent(torch.nn.Module):
    """PyMARL's recurrent agent: its layers by their names, and its inputs, which are concatenated."""

    def __init__(self, n_inputs: int, hidden: int, n_actions: int) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(n_inputs, hidden)
        self.rnn = torch.nn.GRUCell(hidden, hidden)
        self.fc2 = torch.nn.Linear(hidden, n_actions)

    def values(self, obs: torch.Tensor, last_actions: torch.Tensor) -> torch.Tensor:
        """Return [T, n, A] of an episode: obs [T, n, obs_dim], last_actions [T, n], -1: a one-hot of zeros."""
        n, n_actions = last_actions.shape[1], self.fc2.out_features
        hidden, made = torch.zeros(n, self.rnn.hidden_size), []
        for seen, last in zip(obs, last_actions, strict=True):
            one_hot = torch.eye(n_actions + 1)[last][:, :n_actions]
            hidden = self.rnn(self.fc1(torch.cat([seen, one_hot, torch.eye(n)], dim=1)).relu(), hidden)
            made.append(self.fc2(hidden))
        return torch.stack(made)


@pytest.mark.parametrize(("agent", "as_zip"), [("n_rnn", True), ("rnn", False)])
def test_agents_of_pymarl_load_and_have_their_values(agent, as_zip, tmp_path):
    config = resolve("pymarl_qmix", "matrix_game", {"agent": agent, "use_cuda": False})
    info = describe_env(config)
    torch.manual_seed(0)
    theirs = PyMARLAgent(info.obs_dim + info.n_actions + info.n_agents, config.rnn_hidden_dim, info.n_actions)
    torch.save(theirs.state_dict(), tmp_path / "agent.th", _use_new_zipfile_serialization=as_zip)
    mac = load_mac(config, info, torch.device("cpu"), tmp_path, "checkpoint_path")
    obs = torch.randn(6, info.n_agents, info.obs_dim)
    last = torch.cat([torch.full((1, info.n_agents), -1), torch.randint(info.n_actions, (5, info.n_agents))])
    with torch.inference_mode():
        hidden, ours = mac.actor.init_hidden(1), []
        for seen, taken in zip(obs.split(1), last.split(1), strict=True):
            values, hidden = mac.actor.step(AgentInputs(seen, taken), hidden)
            ours.append(values[0])
    torch.testing.assert_close(torch.stack(ours), theirs.values(obs, last), atol=1e-6, rtol=1e-5)
    paths = {"checkpoint_path": str(tmp_path), "local_results_path": str(tmp_path / "results")}
    given = config.model_copy(update=paths)
    played = launch(given.model_copy(update={"evaluate": True, "test_nepisode": 2}), "played")
    assert played["stages"]["stage3"]["clock"] == {"t_env": 0}
    with pytest.raises(UserError, match=r"^checkpoint_path=.*mixer.th does not exist"):
        preflight(given)
    torch.save({"hyper_w_1.0.weight": torch.zeros(64, info.state_dim)}, tmp_path / "mixer.th")
    with pytest.raises(UserError, match=r"^checkpoint_path=.*mixer.th does not fit: 'first.weight' is absent"):
        preflight(given)


@pytest.mark.processes
def test_a_loaded_run_holds_what_was_saved_and_goes_on(qmix_run, tmp_path):
    """Weights, targets, Adam's moments and counters are those of the file, bit for bit; then the clock goes on.

    The loaded run has no absolute metric, the one that goes on has.
    """
    step = find_step_folder(str(qmix_run))
    t_env = int(step.name)
    words = (f"load_step={t_env}", f"t_max={t_env + 100}", "target_update_interval=1000", "absolute_episodes=2")
    config = qmix(tmp_path, f"checkpoint_path={qmix_run}", *words)
    stage = stage_of(config, tmp_path / "again")
    fresh = checksum(stage.mac.agent.state_dict())
    stage.prepare()
    stage.start()
    agent, mixer, saved = (torch.load(step / name, weights_only=True) for name in ("agent.th", "mixer.th", "opt.th"))
    now, kept = stage.learner.state_dict(), saved["learner"]
    assert checksum(stage.mac.agent.state_dict()) == checksum(agent) != fresh
    assert checksum(stage.learner.mixer.state_dict()) == checksum(mixer)
    for name in ("target_agent", "target_mixer"):
        assert checksum(now[name]) == checksum(kept[name])
    assert checksum(now["target_agent"]) != checksum(agent), "the targets lag behind: another file than the agent's"
    moments = kept["optimizer"]["state"]
    assert len(moments) == len(agent) + len(mixer)
    assert dict(leaves(now["optimizer"])) == dict(leaves(kept["optimizer"]))
    assert any(moment["exp_avg"].abs().sum() > 0 for moment in moments.values())
    assert stage.clock.state_dict() == saved["clock"]
    assert (stage.clock.t_env, now["updates"]) == (t_env, kept["updates"])
    stage.session.close()
    summary = launch(config, "on")
    clock, absolute = (summary["stages"]["stage3"][part] for part in ("clock", "absolute"))
    assert clock["t_env"] >= t_env + 100
    assert clock["episodes"] > saved["clock"]["episodes"] and clock["updates"] > saved["clock"]["updates"]
    assert min(line["t_env"] for line in records(Path(summary["folder"]))) > t_env
    assert absolute["t_env"] > t_env and len(absolute["return"]) == 2


def learner_of(name: str, lr: float) -> Any:
    more: dict[str, Any] = {"lr": lr, "critic_lr": 3 * lr}
    if name.startswith("ddpg"):
        return make_learner(ddpg_config(learner=name, **more), info=DDPG_INFO)
    if name.removesuffix("_ddp") in {"ppo_learner", "rloo_learner"}:
        more |= {"action_selector": "softmax", "mixer": "none"}
    return make_learner(
        toy_config(**(GRAPH_KEYS | {"mac": "n_graph_mac"} if "graph" in name else {}) | more | {"learner": name})
    )


def optimizers_of(learner: Any) -> dict[str, torch.optim.Optimizer]:
    return {name: value for name, value in vars(learner).items() if isinstance(value, torch.optim.Optimizer)}


def trained_learner(name: str, lr: float) -> Any:
    """Return a learner whose optimizers have moments of random gradients."""
    learner = learner_of(name, lr)
    for optimizer in optimizers_of(learner).values():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return learner


@pytest.mark.parametrize(
    ("saved", "name"), [*((name, name) for name in own_names(LEARNERS)), ("ppo_learner", "rloo_learner")]
)
def test_a_new_run_from_weights_keeps_the_moments_and_uses_its_own_learning_rates(saved, name, tmp_path):
    """And a resumed run, which loads the learner's state as it is, goes on with the saved ones."""
    before = trained_learner(saved, 0.01)
    save_learner(before, Counters(), tmp_path)
    begun, resumed = learner_of(name, 0.25), learner_of(saved, 0.25)
    load_learner(begun, tmp_path)
    resumed.load_state_dict(copy.deepcopy(before.state_dict()))
    assert optimizers_of(begun)
    for key, optimizer in optimizers_of(begun).items():
        old = optimizers_of(before)[key].state_dict()
        now, continued = optimizer.state_dict(), optimizers_of(resumed)[key].state_dict()
        assert now["param_groups"][0]["lr"] == (0.75 if key == "critic_optimizer" else 0.25)
        count = len(now["param_groups"][0]["params"])
        assert count and dict(leaves(now["state"])) == dict(leaves({i: old["state"][i] for i in range(count)}))
        assert dict(leaves(continued)) == dict(leaves(old))


def test_moments_of_other_parameters_are_rejected(tmp_path):
    before = learner_of("nq_learner", 0.01)
    before.optimizer = torch.optim.Adam(list(before.mac.agent.parameters())[:2])
    save_learner(before, Counters(), tmp_path)
    with pytest.raises(UserError, match=r"opt\.th does not fit this learner \(its optimizer is of other parameters\)"):
        load_learner(learner_of("nq_learner", 0.01), tmp_path)


def test_nothing_is_played_where_t_max_has_been_reached(qmix_run, tmp_path):
    step = int(find_step_folder(str(qmix_run)).name)
    reached = f"t_max={step}: already reached, checkpoint_path=.* is at {step:,} steps. Give a larger t_max"
    episodes = r"max_episodes=2: already reached, .* is at \d+ episodes. Give a larger max_ep"
    whole, weights = f"checkpoint_path={qmix_run}", f"checkpoint_path={qmix_run / 'models'}"
    for message, *words in (
        (reached, whole, f"t_max={step}"),
        (reached, whole, f"t_max={step}", "auto_resume=True"),
        (reached, weights, f"t_max={step}"),
        (reached, weights, f"t_max={step}", "auto_resume=True"),
        (episodes, whole, "t_max=100000", "max_episodes=2"),
    ):
        with pytest.raises(UserError, match=message):
            preflight(qmix(tmp_path, *words))
    assert list(tmp_path.iterdir()) == []
    config = qmix(tmp_path, weights, f"t_max={step}", "auto_resume=True")
    summary = launch(config, "begun")
    assert summary["stages"]["stage3"]["clock"]["t_env"] == step
    write_json(tmp_path / "begun" / "run.json", {"identity": identity_of(config)})  # killed before it was finished
    assert preflight(config).stages == ("stage3",), "an unfinished run may have its last files to write"


def test_learning_rates_fit_the_ranks_that_go_on(tmp_path):
    stage = stage_of(qmix(tmp_path, "lr_scaling=linear"), tmp_path / "run")
    stage.fit_rates(4)
    assert stage.learner.optimizer.param_groups[0]["lr"] == stage.session.config.lr / 4
    stage.session.close()


def _train(rank: int, dist: Dist, folder: str) -> tuple[dict, dict[str, int], np.ndarray, list[int]]:
    """Train QMIX for some updates.

    Returns the bits of all that is trained, the clock, what this rank observed, and the lengths of its episodes.
    """
    updates = {"t_max": 300, "batch_size": 4, "batch_size_run": 2, "buffer_size": 8, "test_nepisode": 4}
    config = resolve("qmix", "skirmish", {**updates, "use_cuda": False, "local_results_path": folder})
    stage = stage_of(config, Path(folder) / "run", dist)
    fit(stage)
    trained = {name: module.state_dict() for name, module in stage.learner.modules().items()}
    bits = dict(leaves({**trained, "learner": stage.learner.state_dict()}))
    played = stage.data.buffer.batch([0])["obs"].numpy()
    stage.session.close()
    return bits, stage.clock.state_dict(), played, lengths(folder, rank)


def lengths(place: str | Path, rank: int = 0) -> list[int]:
    lines = RunFolder(Path(place) / "run").episode_log(rank).read_text().splitlines()
    return [json.loads(line)["length"] for line in lines]


@pytest.mark.processes
def test_two_ranks_hold_the_same_and_play_their_own(tmp_path):
    (bits, clock, played, mine), other = run_ranks(_train, str(tmp_path))
    assert (bits, clock) == other[:2]
    assert (clock["t_env"], clock["episodes"]) == (sum(mine + other[3]), len(mine + other[3]))
    assert clock["updates"] > 1
    assert played.shape != other[2].shape or not np.array_equal(played, other[2])


@pytest.mark.processes
def test_the_state_of_two_ranks_is_distributed_to_one_and_nothing_that_is_counted_is_lost(published_run, tmp_path):
    """Clocks, weights and the episodes of both are there; the random streams are new ones, and repeat."""
    before = summary_of(published_run)
    step = before["stages"]["stage3"]["clock"]["t_env"]
    folders = []
    for name in ("one", "another"):
        words = ["--config=omagd", "with", *BUDGETS, "env_args.map_name=5m_vs_6m", "buffer_size=100"]
        words += [f"local_results_path={tmp_path / name}", f"checkpoint_path={published_run}", f"t_max={step + 60}"]
        assert main(words) == 0
        folders += [path.parent for path in tmp_path.glob(f"{name}/*/summary.json")]
    after = summary_of(folders[0])
    for stage in ("stage1", "stage2"):
        assert after["stages"][stage] == before["stages"][stage], "a finished stage is not run twice"
    was, now = (summary["stages"]["stage3"]["clock"] for summary in (before, after))
    assert was["t_env"] < step + 60 <= now["t_env"]
    assert now["episodes"] > was["episodes"] and now["updates"] > was["updates"]
    log = (folders[0] / "logs" / "rank_0.log").read_text()
    assert "it was written by 2 rank(s), now there are 1: episodes are redistributed" in log
    assert "the effective batch is 4 episodes" in log
    assert differences(*folders) == []
    paths = [checkpoints(run / "checkpoints")[0] for run in (folders[0], published_run)]
    (log,), written_by_two = (read_checkpoint(path).manifest["logs"] for path in paths)
    kept = sum(each["replay"]["kept"] for each in written_by_two)
    assert log["replay"]["added"] == kept + now["episodes"] - was["episodes"]


def test_learning_waits_until_every_rank_can_give_a_batch(tmp_path):
    stage = stage_of(qmix(tmp_path), tmp_path / "run")
    stage.session.dist = Dist(0, 2)
    for ranks, ready in ((1, False), (2, True), (1, True)):  # one that can give a batch can do so for good
        stage._counts = Pending(torch.tensor([9, 1, ranks]), None)
        assert stage.ready() is ready
    stage.session.dist = Dist()
    stage.session.close()


@pytest.mark.processes
def test_stage3_ends_after_the_episodes_asked_for(tmp_path):
    """Not after as many steps as the longest episodes would have; until then the end is estimated from their mean."""
    words = ["max_episodes=7", "batch_size_run=2", "test_interval=1000000", "log_interval=1000000"]
    config = preflight(qmix(tmp_path, *words, "t_max=100000")).config
    stage = stage_of(config, tmp_path / "run")
    assert (config.t_max, stage.done(), stage._end()) == (7 * 60, False, 7 * 60)
    stage.clock.t_env, stage.clock.episodes = 40, 2
    assert stage._end() == 140
    stage.clock.t_env, stage.clock.episodes = 0, 0
    fit(stage)
    stage.session.close()
    played = lengths(tmp_path)
    assert len(played) == stage.clock.episodes == 8, "whole rounds of two slots"
    assert stage.clock.t_env == stage._end() == sum(played) < 6 * 60, "the loop did not end by its steps"
    stage.clock.t_env, stage.clock.episodes = config.t_max, 6
    assert stage.done(), "t_max ends it too"


def test_the_best_test_is_kept_and_worth_a_checkpoint(tmp_path, monkeypatch):
    stage = stage_of(qmix(tmp_path), tmp_path / "run")
    assert stage.dues["test"].due(1), "the first iteration is tested"
    won = iter((0.0, 0.9, 0.2))
    tested = lambda *_, **__: {"test_battle_won_mean": next(won), "test_return_mean": 3.0}  # noqa: E731
    monkeypatch.setattr(evaluate, "play_tests", tested)
    urgent = []
    for _ in range(3):
        stage.test()
        urgent.append(stage.urgent())
    assert urgent == [True, True, False]
    assert stage.score() == 0.2, "of the weights as they are"
    assert stage.tests.best["best_test_battle_won_mean"] == 0.9
    stage.session.close()


def test_a_best_test_during_a_save_is_saved_after_it(tmp_path, monkeypatch):
    stage = stage_of(qmix(tmp_path, "checkpoint_interval=1000"), tmp_path / "run")
    checkpointer, busy, begun = stage.session.checkpointer, [True, False], []
    monkeypatch.setattr(type(checkpointer), "_busy", property(lambda _: busy[0]))
    monkeypatch.setattr(checkpointer, "_begin", lambda *_: begun.append(checkpointer.iteration))
    for improved in (True, False):
        stage.tests.improved = improved
        checkpointer.ask()
        checkpointer.boundary(stage)
        busy.pop(0)
    assert begun == [2]
    stage.session.close()


def test_lost_episodes_of_all_ranks_are_counted_on_by_another_number_of_ranks(tmp_path):
    stage = stage_of(qmix(tmp_path), tmp_path / "run")
    ranks = [{"past": {"restarts": 1.0}, "runners": {"train": {"lost": lost}}} for lost in (2, 3)]
    drawn = stage.rng("replay").bit_generator.state
    stage.session.checkpointer.iteration = 7
    stage.session.checkpointer._merge_ranks(stage, ranks, inside=False)
    assert stage.session.failure_counts() == {"restarts": 2.0, "lost_episodes": 5.0}
    assert stage.rng("replay").bit_generator.state != drawn, "a new stream"
    stage.session.checkpointer._restore_rank(stage, {"past": {"restarts": 4.0}, "runners": {}}, inside=False)
    assert stage.session.failure_counts()["restarts"] == 4.0
    stage.session.close()
