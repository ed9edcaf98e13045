"""The table of docs/extending.md, "to add X, edit these files": each line is done in a copy of the tree, and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")

MIXER = '''"""A mixer that scales the sum."""
from torch import nn
class MyMixer(nn.Module):
    def __init__(self, config, info):
        super().__init__()
        self.scale = nn.Linear(1, 1)
    def forward(self, agent_qs, state):
        return self.scale(agent_qs.sum(-1, keepdim=True)).squeeze(-1)
'''
AGENT = '''"""An agent with another name."""
from omagd.modules.agents.rnn_agent import RNNAgent
class MyAgent(RNNAgent):
    pass
'''
LEARNER = '''"""A learner that reports a key of the run and one of its own."""
import torch
from pydantic import BaseModel
from omagd.learners.nq_learner import NQLearner
class MyArgs(BaseModel, extra="forbid"):
    my_share: float = 0.5
class MyLearner(NQLearner):
    args_model = MyArgs
    def update(self, batch, *, episodes):
        one = torch.ones(())
        args = self.config.learner_args
        mine = {"my_stat": (one * self.config.my_key, one), "my_share": (one * args["my_share"], one)}
        return {**super().update(batch, episodes=episodes), **mine}
'''
ON_POLICY = '''"""A learner that sees each episode once."""
from omagd.learners.nq_learner import NQLearner
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
'''
ENVIRONMENT = '''"""A game of one step."""
from omagd.envs.sanity import MatrixGame
class MyEnv(MatrixGame):
    pass
'''
SINK = '''"""A sink that counts what is logged."""
from omagd.utils.logging import Sink
class MySink(Sink):
    name = "mine"
    def _open(self, facts):
        self.path, self.seen = facts.folder / "mine.txt", 0
    def _log(self, record):
        self.seen += 1
    def _close(self, exit_state):
        self.path.write_text(f"{self.seen} {exit_state}")
'''


def registered(name: str, module: str, kind: str, before: str) -> tuple[str, str]:
    """Return the line of a registry's table before which a name is added, and both lines."""
    return before, f'"{name}": "omagd.{module}:{kind}",\n{before}'


# What is done for each line of the table: file -> text of a new one, or (old, new) in one that exists.
EDITS: dict[str, dict[str, str | tuple[str, str]]] = {
    "mixer": {
        "src/modules/mixers/my_mixer.py": MIXER,
        "src/modules/mixers/__init__.py": registered(
            "my_mixer", "modules.mixers.my_mixer", "MyMixer", '"qmix": "omagd'
        ),
    },
    "agent": {
        "src/modules/agents/my_agent.py": AGENT,
        "src/modules/agents/__init__.py": registered("my_agent", "modules.agents.my_agent", "MyAgent", '"rnn": "omagd'),
    },
    "learner": {
        "src/learners/my_learner.py": LEARNER,
        "src/learners/__init__.py": registered(
            "my_learner", "learners.my_learner", "MyLearner", '"nq_learner": "omagd'
        ),
    },
    "on-policy learner": {
        "src/learners/my_on_policy_learner.py": ON_POLICY,
        "src/learners/__init__.py": registered(
            "my_on_policy_learner", "learners.my_on_policy_learner", "MyOnPolicyLearner", '"nq_learner": "omagd'
        ),
    },
    "environment": {
        "src/envs/my_env.py": ENVIRONMENT,
        "src/envs/__init__.py": registered("my_env", "envs.my_env", "MyEnv", '"matrix_game": "omagd'),
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
        "src/run/reporting/my_sink.py": SINK,
        "src/run/reporting/log_sinks.py": registered(
            "mine", "run.reporting.my_sink", "MySink", '"console": "omagd'
        ),
        "src/run/training/records.py": ('sinks = ["console", "jsonl"', 'sinks = ["mine", "console", "jsonl"'),
    },
}  # fmt: skip


def table() -> dict[str, set[str]]:
    """Return the lines of the table: what is added -> files that it names; `tests/` and `docs/` are generated."""
    section = PAGE.split("## To add something, edit these files", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (?!To add|---)([^|]+?) \| ([^|]+) \|", section, re.MULTILINE)
    named = {what: set(re.findall(r"`(src/[\w./]+)`", files)) for what, files in rows}
    return {what: {path for path in files if "." in path} for what, files in named.items()}


def test_the_table_names_the_files_that_are_edited_here():
    assert table() == {what: set(edits) for what, edits in EDITS.items()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the source, documents and the test of keys, with every line of the table done."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("src", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "images"))
    (copy / ".package").mkdir()
    (copy / ".package" / "omagd").symlink_to(copy / "src")
    for edits in EDITS.values():
        for name, edit in edits.items():
            path = copy / name
            if isinstance(edit, str):
                assert not path.exists(), name
                path.write_text(edit)
            else:
                text = path.read_text()
                assert text.count(edit[0]) == 1, f"{name}: {edit[0]}"
                path.write_text(text.replace(*edit))
    return copy


def python(tree: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(tree / ".package"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_what_was_added_trains(tree):
    """The on-policy learner in one run, everything else in another."""
    sizes = "batch_size=4 batch_size_run=4 t_max=40 test_interval=20 test_nepisode=4 log_interval=8"
    run = f"--config=qmix --env-config=my_env with {sizes} agent=my_agent enable_checkpointing=False"
    replay = f"{run} mixer=my_mixer learner=my_learner my_key=7 learner_args.my_share=0.25 local_results_path=replay"
    replay += " buffer_size=8"
    on_policy = f"{run} learner=my_on_policy_learner local_results_path=on_policy"
    on_policy += " updates_per_iteration=1 epsilon_anneal_time=100000"  # instead of the values of qmix.yaml
    program = "import sys, omagd\nfrom omagd.run.cli.main import config_from\nfor line in sys.argv[1:]:\n"
    program += "    assert omagd.run(config_from(line.split()))['exit_state'] == 'completed'"
    python(tree, "-c", program, replay, on_policy)
    for results, learner in (("replay", "my_learner"), ("on_policy", "my_on_policy_learner")):
        (folder,) = (path.parent for path in (tree / results).glob("*/config.json"))
        config = json.loads((folder / "config.json").read_text())
        assert (config["learner"], config["agent"], config["env"]) == (learner, "my_agent", "my_env")
        logged, state = (folder / "mine.txt").read_text().split()
        assert int(logged) > 0 and state == "completed"
        if results == "replay":
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            assert {line["my_stat"] for line in lines if "my_stat" in line} == {7.0}
            assert {line["my_share"] for line in lines if "my_share" in line} == {0.25}
            assert list(folder.glob("models/*/mixer.th"))


@pytest.mark.processes
def test_a_new_key_joins_the_page_of_the_configuration(tree):
    python(tree, "docs/make_configuration.py")
    row = next(line for line in (tree / "docs" / "configuration.md").read_text().splitlines() if "`my_key`" in line)
    assert "a number that my_learner reports" in row and "| 1 |" in row.replace("`", "")
