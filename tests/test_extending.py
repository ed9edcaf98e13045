"""docs/extending.md is true: each line of its table in a copy of the tree, and packages installed beside omagd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import plugin_toys
import pytest
from command_harness import records

import omagd
from omagd.config.env_info import EnvInfo
from omagd.controllers import REGISTRY as CONTROLLERS
from omagd.envs import REGISTRY as ENVS
from omagd.learners import REGISTRY as LEARNERS
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.run.cli.main import config_from
from omagd.runners.rollout import row_fields

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")

# A mixer that scales the sum; a learner that reports a key of the run and its own key; an on-policy learner that
# must see each episode once; a sink that counts what is logged.
MIXER = """from torch import nn
class MyMixer(nn.Module):
    def __init__(self, config, info):
        super().__init__()
        self.scale = nn.Linear(1, 1)
    def forward(self, agent_qs, state):
        return self.scale(agent_qs.sum(-1, keepdim=True)).squeeze(-1)
"""
AGENT = """from omagd.modules.agents.agent import RNNAgent
class MyAgent(RNNAgent): ...
"""
LEARNER = """import torch
from pydantic import BaseModel
from omagd.learners.nq_learner import NQLearner
class MyArgs(BaseModel, extra="forbid"):
    my_share: float = 0.5
class MyLearner(NQLearner):
    args_model = MyArgs
    def update(self, batch, *, episodes):
        one = torch.ones(())
        mine = {"my_stat": self.config.my_key, "my_share": self.config.learner_args["my_share"]}
        stats = super().update(batch, episodes=episodes)
        return {**stats, **{name: (one * value, one) for name, value in mine.items()}}
"""
ON_POLICY = """from omagd.learners.nq_learner import NQLearner
class MyOnPolicyLearner(NQLearner):
    data = "on_policy"
    seen = set()
    @staticmethod
    def steps_per_batch(config):
        return 1
    def update(self, batch, *, episodes):
        new = {(meta.slot, meta.seed) for meta in batch.meta}
        assert len(new) == batch.packing.n_episodes >= self.config.batch_size and not new & self.seen
        self.seen |= new
        return super().update(batch, episodes=episodes)
"""
ENVIRONMENT = """from omagd.envs.sanity import MatrixGame
class MyEnv(MatrixGame): ...
"""
SINK = """from omagd.utils.logging import Sink
class MySink(Sink):
    name = "mine"
    def _open(self, facts):
        self.path, self.seen = facts.folder / "mine.txt", 0
    def _log(self, record):
        self.seen += 1
    def _close(self, exit_state):
        self.path.write_text(f"{self.seen} {exit_state}")
"""
Edits = dict[str, str | tuple[str, str]]


def component(package: str, code: str, before: str, table: str = "__init__", name: str = "") -> Edits:
    """Return a new file with `code`, and the line of its class in a package's table, before the entry `before`."""
    kind = re.search(r"class (My\w+)\((?!BaseModel)", code)[1]
    module = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
    entry = f'"{name or module}": "omagd.{package.replace("/", ".")}.{module}:{kind}",\n'
    line = f'"{before}": "omagd'
    return {f"src/{package}/{module}.py": code, f"src/{package}/{table}.py": (line, entry + line)}


# The edits for each line of the table: file -> text of a new one, or (old, new) in one that exists.
EDITS: dict[str, Edits] = {
    "mixer": component("modules/mixers", MIXER, "qmix"),
    "agent": component("modules/agents", AGENT, "rnn"),
    "learner": component("learners", LEARNER, "nq_learner"),
    "on-policy learner": component("learners", ON_POLICY, "nq_learner"),
    "environment": {
        **component("envs", ENVIRONMENT, "matrix_game"),
        "src/config/envs/my_env.yaml": "env: my_env\nenv_args:\n  payoff: monotonic\n",
    },
    "key of a component": {},
    "key of the configuration": {
        "src/config/default.yaml": ("\nseed: 1\n", "\nseed: 1\nmy_key: 1\n"),
        "src/config/schema.py": (
            "\n    seed: Whole", "\n    my_key: int  # a number that my_learner reports\n    seed: Whole"
        ),
    },
    "log sink": {
        **component("run/reporting", SINK, "console", table="log_sinks", name="mine"),
        "src/run/training/experiment.py": ('sinks = ["console", "jsonl"', 'sinks = ["mine", "console", "jsonl"'),
    },
}  # fmt: skip


def test_the_table_names_the_files_that_are_edited_here():
    section = PAGE.split("## To add something, edit these files", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (?!To add|---)([^|]+?) \| ([^|]+) \|", section, re.MULTILINE)
    named = {what: {path for path in re.findall(r"`(src/[\w./]+)`", files) if "." in path} for what, files in rows}
    assert named == {what: set(edits) for what, edits in EDITS.items()}


def python(cwd: Path, *words: str, path: Path) -> None:
    """Run Python in `cwd` with `path` before the usual packages."""
    search = os.pathsep.join(part for part in (str(path), os.environ.get("PYTHONPATH", "")) if part)
    env = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the source and the documents, with every line of the table done."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("src", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "images"))
    (copy / ".package").mkdir()
    (copy / ".package" / "omagd").symlink_to(copy / "src")
    for name, edit in ((name, edit) for edits in EDITS.values() for name, edit in edits.items()):
        path = copy / name
        if isinstance(edit, tuple):
            assert path.read_text().count(edit[0]) == 1, f"{name}: {edit[0]}"
            edit = path.read_text().replace(*edit)
        path.write_text(edit)
    return copy


@pytest.mark.processes
def test_what_was_added_trains(tree):
    """The on-policy learner in one run, everything else in another."""
    sizes = "batch_size=4 batch_size_run=4 t_max=40 test_interval=20 test_nepisode=4 log_interval=8"
    run = f"--config=qmix --env-config=my_env with {sizes} agent=my_agent enable_checkpointing=False"
    replay = "mixer=my_mixer learner=my_learner my_key=7 learner_args.my_share=0.25 buffer_size=8"
    on_policy = "learner=my_on_policy_learner updates_per_iteration=1 epsilon_anneal_time=100000"
    program = "import sys, omagd\nfrom omagd.run.cli.main import config_from\nfor line in sys.argv[1:]:\n"
    program += "    assert omagd.run(config_from(line.split()))['exit_state'] == 'completed'"
    commands = [f"{run} {more} local_results_path={i}" for i, more in enumerate((replay, on_policy))]
    python(tree, "-c", program, *commands, path=tree / ".package")
    folders = [next((tree / str(i)).glob("*/config.json")).parent for i in range(2)]
    for folder, learner in zip(folders, ("my_learner", "my_on_policy_learner"), strict=True):
        config = json.loads((folder / "config.json").read_text())
        assert (config["learner"], config["agent"], config["env"]) == (learner, "my_agent", "my_env")
        logged, state = (folder / "mine.txt").read_text().split()
        assert int(logged) > 0 and state == "completed"
    lines = [line for line in records(folders[0]) if "my_stat" in line]
    assert {(line["my_stat"], line["my_share"]) for line in lines} == {(7.0, 0.25)}
    assert list(folders[0].glob("models/*/mixer.th"))


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """Return the folder into which the example package was installed from a copy of its source."""
    folder = tmp_path_factory.mktemp("example")
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    shutil.copytree(plugin_toys.EXAMPLE, folder / "source", ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    python(folder, "-m", "pip", "install", *options, "--target", "site", "./source", path=folder / "site")
    return folder / "site"


@pytest.mark.processes
@pytest.mark.parametrize("env", ["my_env", "my_batched"])
def test_a_run_with_nothing_optional(env, tmp_path, monkeypatch):
    plugin_toys.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for registry in (ENVS, LEARNERS):
        monkeypatch.setattr(registry, "_plugins_read", False)
        monkeypatch.setattr(registry, "_lazy", dict(registry._lazy))
        monkeypatch.setattr(registry, "_objects", dict(registry._objects))
    updates = ["t_max=40", "batch_size=4", "batch_size_run=2", "test_nepisode=2", f"local_results_path={tmp_path}"]
    words = ["--config=mine", "--env-config=ring", "with", f"env={env}", *updates, "checkpoint_interval=0"]
    assert omagd.run(config_from(words))["exit_state"] == "completed"


def test_the_table_of_a_batch_has_all_fields():
    info = EnvInfo("game", "", 2, 3, 2, 3, 4, agent_rewards=True)
    assert re.findall(r'^\| `batch\["(\w+)"\]`', PAGE, re.MULTILINE) == list(row_fields(info, full_obs=True))


def test_the_complete_examples_of_the_page_learn_to_remember(tmp_path, monkeypatch):
    """The agent of the page, trained by its REINFORCE in two parts per batch."""
    for registry in (AGENTS, CONTROLLERS, LEARNERS):
        monkeypatch.setattr(registry, "_objects", dict(registry._objects))
    for name in ("gru_cell", "reinforce"):
        (code,) = [
            block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f'register("{name}")' in block
        ]
        exec(compile(code, name, "exec"), {"__name__": name})
    words = "--config=qmix --env-config=memory_game with learner=reinforce mac=reinforce_mac agent=gru_cell"
    words += " updates_per_iteration=1 epsilon_anneal_time=100000 batch_size=32 batch_size_run=32 accumulate=2 lr=0.02"
    words += f" t_max=2400 test_nepisode=32 checkpoint_interval=0 local_results_path={tmp_path}"
    assert omagd.run(config_from(words.split()))["return"] == 1.0


@pytest.mark.processes
def test_environment_and_learner_of_another_package_train_in_two_workers(example, tmp_path):
    updates = "run=ddp world_size=2 use_cuda=False seed=3 t_max=240 test_interval=240 batch_size_run=1 batch_size=2"
    updates += " test_nepisode=2 log_interval=80 save_model=True env_processes=True use_wandb=False"
    command = [str(ROOT / "src" / "main.py"), "--env-config=crossroads", "--config=soft_qmix", "with", *updates.split()]
    python(tmp_path, *command, f"local_results_path={tmp_path}", path=example)
    (summary,) = tmp_path.glob("*/summary.json")
    assert json.loads(summary.read_text())["world_size"] == 2
    lines = records(summary.parent)
    losses = [line["loss_td"] for line in lines if line.get("loss_td") is not None]
    assert losses and all(loss > 0 for loss in losses)
    assert lines[-1]["t_env"] >= 240 and list(summary.parent.glob("models/*/agent.th"))
