"""The pages on extending are true: their examples learn, and a package installed beside omagd trains."""

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
from command_budgets import BUDGETS
from command_harness import records

import omagd
from omagd.config.env_info import EnvInfo
from omagd.controllers import REGISTRY as CONTROLLERS
from omagd.learners import REGISTRY as LEARNERS
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.run.cli.main import config_from
from omagd.runners.rollout import row_fields

ROOT = Path(__file__).resolve().parents[1]
PAGE = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("extending*.md")))


def python(cwd: Path, *words: str, path: Path) -> None:
    """Run Python in `cwd` with `path` before the usual packages."""
    search = os.pathsep.join(part for part in (str(path), os.environ.get("PYTHONPATH", "")) if part)
    env = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """Return the folder into which the example package was installed from a copy of its source."""
    folder = tmp_path_factory.mktemp("example")
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    shutil.copytree(plugin_toys.EXAMPLE, folder / "source", ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    python(folder, "-m", "pip", "install", *options, "--target", "site", "./source", path=folder / "site")
    return folder / "site"


def test_the_table_of_a_batch_has_all_fields():
    info = EnvInfo("game", "", 2, 3, 2, 3, 4, agent_rewards=True)
    assert re.findall(r'^- `batch\["(\w+)"\]`', PAGE, re.MULTILINE) == list(row_fields(info, full_obs=True))


def test_the_complete_examples_of_the_page_learn_to_remember(tmp_path, monkeypatch):
    """The agent, trained by REINFORCE in two parts per batch; and the predictor, whose error falls."""
    for each in (AGENTS, CONTROLLERS, LEARNERS, omagd.learners.PREDICTORS, omagd.modules.graph_reconstructers.REGISTRY):
        monkeypatch.setattr(each, "_objects", dict(each._objects))
    for name in ("gru_cell", "reinforce", "linear"):
        (code,) = [
            block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f'register("{name}")' in block
        ]
        exec(compile(code, name, "exec"), {"__name__": name})
    words = "--config=qmix --env-config=memory_game with learner=reinforce mac=reinforce_mac agent=gru_cell"
    words += " updates_per_iteration=1 epsilon_anneal_time=100000 batch_size=32 batch_size_run=32 accumulate=2 lr=0.02"
    words += f" t_max=2400 test_nepisode=32 checkpoint_interval=0 local_results_path={tmp_path}"
    assert omagd.run(config_from(words.split()))["return"] == 1.0
    graph = f"--config=omagd_small with mask_predictor_config.kind=linear local_results_path={tmp_path}"
    assert omagd.run(config_from([*graph.split(), *BUDGETS]))["stages"]["stage2"]["values"]["best_epoch"] == 2.0


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
