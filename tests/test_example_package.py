"""A package that is installed beside omagd adds an environment and a learner, and they train in two workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import omagd

ROOT = Path(omagd.__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "omagd_example"

pytestmark = pytest.mark.processes


def _run(command: list[str], place: Path, cwd: Path) -> subprocess.CompletedProcess:
    """Run Python with the installed example on its path, from a folder outside the repository."""
    path = os.pathsep.join(part for part in (str(place), os.environ.get("PYTHONPATH", "")) if part)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.run(
        [sys.executable, *command], env=env, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return the folder into which the example was installed from a copy of its source."""
    folder = tmp_path_factory.mktemp("example")
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    target = folder / "site"
    done = _run(["-m", "pip", "install", *options, "--target", str(target), str(source)], target, folder)
    assert done.returncode == 0, done.stderr
    return target


def test_the_installed_environment_keeps_the_protocol(place, tmp_path):
    test = ROOT / "tests" / "test_env_protocol.py"
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-q", str(test), "-k", "crossroads"]
    done = _run(command, place, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout and "failed" not in done.stdout


def test_environment_and_learner_of_another_package_train_in_two_workers(place, tmp_path):
    updates = ["run=ddp", "world_size=2", "use_cuda=False", "seed=3", "t_max=960", "test_interval=480"]
    updates += ["batch_size_run=2", "batch_size=4", "test_nepisode=8", "log_interval=240", "save_model=True"]
    updates += ["env_processes=True", f"local_results_path={tmp_path}", "use_wandb=False"]
    command = [str(ROOT / "src" / "main.py"), "--config=soft_qmix", "--env-config=crossroads", "with", *updates]
    done = _run(command, place, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (summary_file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(summary_file.read_text())
    assert summary["world_size"] == 2
    records = [json.loads(line) for line in (summary_file.parent / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss_td"] for record in records if record.get("loss_td") is not None]
    assert losses and all(loss > 0 for loss in losses)
    assert records[-1]["t_env"] >= 960
    assert list((summary_file.parent / "models").glob("*/agent.th"))


def test_without_the_package_its_names_are_unknown(tmp_path):
    command = [str(ROOT / "src" / "main.py"), "--config=qmix", "--env-config=crossroads", "--dry-run"]
    done = _run(command, tmp_path, tmp_path)
    assert done.returncode == 2
    assert "--env-config=crossroads" in done.stderr + done.stdout
