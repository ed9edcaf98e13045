"""A package that is installed beside omagd adds an environment and a learner, and they train in two workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import plugin_toys
import pytest

import omagd
from omagd.envs import REGISTRY as ENVS
from omagd.learners import REGISTRY as LEARNERS
from omagd.run.cli.main import config_from

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


def test_the_suite_takes_installed_packages(place, tmp_path):
    """Tests that walk registries pass beside the example and beside a package that has nothing optional.

    Both environments are checked by the protocol; what says how many names there are counts ours alone.
    """
    plugin_toys.install(tmp_path / "site")
    tests = ["test_env_protocol.py", "test_docs.py", "test_runners.py", "test_command_line.py"]
    names = "crossroads or my_env or my_batched or is_current or one_slot or run_modes"
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-v", "-k", names, "-m", "not processes"]
    site = Path(os.pathsep.join([str(place), str(tmp_path / "site")]))
    done = _run([*command, *(str(ROOT / "tests" / name) for name in tests)], site, tmp_path)
    assert done.returncode == 0, done.stdout
    for name in ("crossroads", "my_env", "my_batched"):
        assert f"test_an_episode_is_well_formed[{name}] PASSED" in done.stdout
    follows = "test_an_episode_follows_from_its_seed_and_its_actions"
    assert f"{follows}[my_env] SKIPPED" in done.stdout and f"{follows}[my_batched] PASSED" in done.stdout


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
