"""Plug-ins that do not fit, fail or train in part: what is wrong, where, and in which episode; nothing half-written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugin_toys import add_example
from pydantic import BaseModel
from torch import nn

import omagd
from omagd import controllers, envs, learners, runners
from omagd.components import action_selectors, opponent_schedules
from omagd.config.env_info import EnvInfo
from omagd.config.loading import config_names, resolve
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv, Observation, StepResult
from omagd.lab.studies import EXECUTORS
from omagd.learners.nq_learner import NQLearner, QLoss
from omagd.modules import agents, critics, mixers
from omagd.modules.agents.agent import RNNAgent
from omagd.run.cli import REGISTRY as COMMANDS
from omagd.run.cli.main import config_from, main
from omagd.run.cli.preflight import preflight
from omagd.run.cli.trial import build_learner_once
from omagd.utils.errors import UserError

SIZES = "t_max=60 batch_size=2 batch_size_run=2 test_nepisode=2 checkpoint_interval=0 use_cuda=False"
REGISTRIES = {
    "env": envs.REGISTRY, "learner": learners.REGISTRY, "agent": agents.REGISTRY, "mixer": mixers.REGISTRY,
    "mac": controllers.REGISTRY, "runner": runners.REGISTRY, "critic": critics.REGISTRY,
}  # fmt: skip


class Args(BaseModel):
    fails_in: str = ""


class Clock(MultiAgentEnv):
    """Five steps; fails in the method that its arguments name, in the third episode of an instance."""

    args_model = Args

    def __init__(self, args):
        self.fails_in, self.t, self.episodes = args.fails_in, 0, 0
        self.fail("init")

    def fail(self, where):
        if where == self.fails_in:
            raise LookupError(f"no luck in {where}")

    def reset(self, seed=None):
        self.t, self.episodes = 0, self.episodes + 1
        if self.episodes == 3:
            self.fail("reset")

    def step(self, actions):
        if self.episodes == 3 and self.t == 2:
            self.fail("step")
        self.t += 1
        return 1.0, self.t == 5, {}

    def get_obs(self, no_range_limit=False):
        return np.zeros((2, 3), np.float32)

    def get_state(self):
        return np.full(4, self.t, np.float32)

    def get_avail_actions(self):
        return np.ones((2, 3), bool)

    def get_env_info(self):
        self.fail("info")
        return {"n_agents": 2, "n_actions": 3, "obs_shape": 3, "state_shape": 4, "episode_limit": 5}


class Clocks(BatchedEnv):
    """The same, batched."""

    args_model = Args

    def __init__(self, args, n_slots):
        self.n_slots, self.t, self.fails = n_slots, np.zeros(n_slots, int), args.fails_in == "step"
        if args.fails_in != "nothing":
            self.info = EnvInfo("clocks", "", 2, 3, 3, 4, 5)

    def reset(self, which, seeds):
        self.t[which] = 0

    def step(self, actions, active):
        if self.fails and self.t.max() == 2:
            raise LookupError("no luck in step")
        self.t += active
        return StepResult(active.astype(np.float32), active & (self.t == 5), np.zeros(self.n_slots, bool), {})

    def observe(self, full=False):
        zeros = np.zeros((self.n_slots, 2, 3), np.float32)
        return Observation(zeros, np.zeros((self.n_slots, 4), np.float32), zeros == 0, zeros if full else None)


class PymarlEnv:
    """PyMARL's interface."""

    def __init__(self, **kwargs): ...
    def reset(self): ...
    def step(self, actions): ...
    def get_obs(self): ...
    def get_state(self): ...
    def get_avail_actions(self): ...
    def get_env_info(self): ...


class PymarlLearner:
    def __init__(self, mac, scheme, logger, args): ...
    def train(self, batch, t_env, episode_num): ...
    def update(self, batch): ...


class Formless(nn.Module):
    def __init__(self, config, info):
        super().__init__()


class ScalarLoss(QLoss):
    def error_loss(self, error, values):
        return error.square().mean()


class BareLoss(QLoss):
    def forward(self, *arguments):
        return super().forward(*arguments)[0]


MISFITS: dict[str, tuple[type, str]] = {
    "env": (PymarlEnv, "no subclass of omagd.envs.protocol.MultiAgentEnv; has no args_model; cannot be built .*; "
            "reset takes no seed; get_obs takes no no_range_limit"),
    "learner": (PymarlLearner, "has no .*warm_up.*load_state_dict; update takes no episodes"),
    "mixer": (Formless, "has no forward"),
}  # fmt: skip


class Spare(RNNAgent):
    """Has a head that no forward uses."""

    def __init__(self, config, info):
        super().__init__(config, info)
        self.head = nn.Linear(config.rnn_hidden_dim, 4)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


class SpareMixer(mixers.REGISTRY.get("vdn")):
    def __init__(self, config, info):
        super().__init__(config, info)
        self.unused = nn.Parameter(torch.ones(1))


class SpareLoss(QLoss):
    def __init__(self, agent, mixer, bf16=False):
        super().__init__(agent, mixer, bf16)
        self.temperature = nn.Parameter(torch.ones(1))


class SpareLearner(NQLearner):
    loss_class = SpareLoss


class Narrow(RNNAgent):
    def values(self, hidden):
        return super().values(hidden)[..., :2]


class ColumnMixer(nn.Module):
    def __init__(self, config, info):
        super().__init__()
        self.layer = nn.Linear(info.n_agents, 1)

    def forward(self, agent_qs, state):
        return self.layer(agent_qs)


@pytest.fixture
def plug(monkeypatch):
    """Return a function that registers classes under the names of their keys, for one test."""

    def register(**classes: type) -> None:
        for key, kind in classes.items():
            monkeypatch.setitem(REGISTRIES[key]._objects, f"my_{key}", kind)

    return register


def words(results: Path, *more: str, config: str = "qmix", env: str = "matrix_game") -> list[str]:
    sizes = [*SIZES.split(), f"local_results_path={results}"]
    return [f"--config={config}", f"--env-config={env}", "with", *sizes, *more]


def clock(tmp_path: Path, fails_in: str) -> str:
    """Return a file of `--env-config` for an environment called my_env."""
    (tmp_path / "clock.yaml").write_text(f"env: my_env\nenv_args:\n  fails_in: {fails_in}\n")
    return str(tmp_path / "clock.yaml")


@pytest.mark.parametrize("key", MISFITS)
def test_a_class_that_does_not_fit_is_told_all_it_lacks_in_one_line(key, plug, tmp_path, capsys):
    kind, message = MISFITS[key]
    plug(**{key: kind})
    more = ["env_args={}"] if key == "env" else []
    assert main(words(tmp_path / "results", f"{key}=my_{key}", *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"{key}=my_{key}: {kind.__name__} \({re.escape(__file__)}:\d+\).*{message}", line), line
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("loss", "message"), [
    (ScalarLoss, r"error_loss returned \[\], not a loss of each error"),
    (BareLoss, r"BareLoss .*: forward must return"),
    (None, r"error: learner=my_learner cannot be built: TypeError: 'NoneType' .* \(Own \("),
])  # fmt: skip
def test_a_loss_of_a_wrong_shape_is_told_before_training(loss, message, plug, tmp_path, capsys):
    plug(learner=type("Own", (NQLearner,), {"loss_class": loss}))
    assert main(words(tmp_path / "results", "learner=my_learner")) != 0
    assert re.search(message, capsys.readouterr().err)


def test_all_that_this_repository_and_the_example_register_fits():
    add_example()
    others = (critics.REGISTRY, action_selectors.REGISTRY, opponent_schedules.REGISTRY, learners.PREDICTORS, EXECUTORS)
    for registry in (*REGISTRIES.values(), *others):
        assert registry.protocol and all(registry.get(name) for name in registry.names())


@pytest.mark.parametrize(("env", "fails_in", "message"), [
    (Clock, "init", "env=my_env cannot be built: LookupError: no luck in init"),
    (Clock, "info", "no luck in info"), (Clocks, "nothing", "Clocks .* sets no info"),
])  # fmt: skip
def test_an_environment_that_cannot_be_built_is_one_line(env, fails_in, message, plug, tmp_path, capsys):
    plug(env=env)
    command = words(tmp_path / "results", config="vdn", env=clock(tmp_path, fails_in))
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line) and f"{__file__}:" in line and not (tmp_path / "results").exists()
    if env is Clock:
        assert main(["--loglevel=DEBUG", *command]) == 2
        assert "Traceback" in (shown := capsys.readouterr().err) and shown.endswith(line + "\n")


@pytest.mark.parametrize(("method", "returned", "message"), [
    ("get_env_info", None, "env=my_env: .*NoneType, not a dictionary"),
    ("get_env_info", {"n_agents": 2, "obs_shape": 3}, "env=my_env: .* holds no n_actions, state_shape, episode_limit"),
    ("step", (None, 1.0, False, False, {}), r"env=my_env, slot 0, seed \d+, step 1: .* tuple of 5, not \(reward"),
])  # fmt: skip
def test_what_an_environment_returns_instead_is_one_line(
    method, returned, message, plug, tmp_path, monkeypatch, capsys
):
    plug(env=Clock)
    monkeypatch.setattr(Clock, method, lambda self, actions=None: returned)
    assert main(["--unobserved", *words(tmp_path, config="vdn", env=clock(tmp_path, "''"))]) == 2
    assert re.match(f"error: {message}", capsys.readouterr().err.splitlines()[-1])


def failed_run(results: Path, capsys: Any, *more: str, env: str = "matrix_game") -> tuple[list[str], str]:
    """Run a training that fails; return the lines of its error, and its log."""
    code = main(["--unobserved", *words(results, *more, config="vdn", env=env)])
    (log,) = results.glob("*/logs/rank_0.log")
    lines = capsys.readouterr().err.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  File"))
    assert code == 1 and (log.parents[1] / "summary.json").exists()
    return lines[first:], log.read_text()


@pytest.mark.parametrize(("env", "fails_in", "processes", "where"), [
    (Clock, "reset", False, r"slot [01], seed \d+, step 0: "),
    (Clocks, "step", False, r"one of slot 0, seed \d+, step 2; slot 1, seed \d+, step 2: "),
    pytest.param(Clock, "step", True, r"slot [01], seed \d+, step 2: ", marks=pytest.mark.processes),
])  # fmt: skip
def test_an_error_of_an_environment_shows_its_own_lines_and_the_episode(
    env, fails_in, processes, where, plug, tmp_path, capsys
):
    plug(env=env)
    given = ("env_processes=True", "batch_size_run=1") if processes else ()
    shown, log = failed_run(tmp_path / "results", capsys, *given, env=clock(tmp_path, fails_in))
    assert re.match(rf"error: env=my_env, {where}LookupError: no luck in {fails_in} \(.*rank_0.log\)", shown[-1]), shown
    files = {line.split('"')[1] for line in shown if line.startswith("  File")}
    assert files == {__file__}
    assert "Traceback" in log and "rollout.py" in log


@pytest.mark.parametrize(("key", "kind", "share", "message"), [
    ("agent", Spare, False, r"agent=my_agent: head\.weight, head\.bias: "),
    ("mixer", SpareMixer, True, "mixer=my_mixer: unused: "),
    ("learner", SpareLearner, True, r"SpareLoss \(.*test_plugins.py:\d+\): temperature: "),
    ("agent", Narrow, True, r"agent=my_agent: forward returned \[5, \d+, 2\], not \[5, "),
    ("mixer", ColumnMixer, True, r"mixer=my_mixer: forward returned \[5, 1\], not \[5\] or "),
])  # fmt: skip
def test_parameters_without_a_gradient_and_values_to_broadcast_are_named_before_a_run_has_files(
    key, kind, share, message, plug, tmp_path
):
    plug(**{key: kind})
    with pytest.raises(UserError, match=message) as error:
        preflight(config_from(words(tmp_path / "results", f"{key}=my_{key}", f"share_parameters={share}")))
    assert "fixed" not in error.value.message and not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", [name for name in config_names("algs") if "omagd" not in name])
def test_every_parameter_of_a_preset_takes_part(name):
    """As `_require_gradients` finds in the discarded passes before training."""
    env, args = "snakes" if "snakes" in name else "skirmish", {}
    if name in {"maddpg", "matd3"}:
        env, args = "pettingzoo", {"env_args": {"key": "foreign_worlds:Reach"}}
    config = resolve(name, env, {"world_size": 1, "use_cuda": False, **args})
    learner, _ = build_learner_once(config, preflight(config).info, torch.device("cpu"))
    learner.warm_up()


@pytest.mark.parametrize("env", [Clock, Clocks])
def test_a_run_with_nothing_optional(env, plug, tmp_path):
    """Neither snapshots nor results; saved in every iteration."""
    plug(env=env)
    config = config_from(words(tmp_path / "results", config="vdn", env=clock(tmp_path, "''")))
    assert omagd.run(config)["exit_state"] == "completed"


def test_a_package_adds_a_command_that_help_shows(tmp_path, capsys, monkeypatch):
    files = {
        "my_tool.py": "from omagd.run.cli import Command\nfrom omagd.utils.errors import print_out\n"
        "GREET = Command('greet NAME', 'greets somebody', __name__)\n"
        "def arguments(parser): parser.add_argument('name')\n"
        "def main(options): print_out(f'Hello {options.name}\\n'); return 3\n",
        "my_tool-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-tool\nVersion: 1.0\n",
        "my_tool-1.0.dist-info/entry_points.txt": "[omagd.commands]\ngreet = my_tool:GREET\n"
        "broken = my_lost_tool:X\nwrong = my_tool:main\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(COMMANDS, "_lazy", dict(COMMANDS._lazy))
    monkeypatch.setattr(COMMANDS, "_plugins_read", False)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "\n  greet NAME           greets somebody\n" in shown and "there is no my_lost_tool" in shown
    assert main(["greet", "you"]) == 3 and capsys.readouterr().out == "Hello you\n"
    for name, message in (("broken", "there is no my_lost_tool"), ("wrong", "is no Command with a module")):
        assert main([name]) == 2 and message in capsys.readouterr().err
