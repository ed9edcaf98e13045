"""A run whose folder is renamed, deleted or replaced while it trains ends with one line, and makes nothing again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from interruption import COMMAND
from trap_env import TrapRun

from omagd.run.checkpoint import resuming
from omagd.run.checkpoint.checkpointer import CheckpointWriter
from omagd.run.cli.main import main
from omagd.run.training import experiment
from omagd.run.training.stages.rl import RLStage


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace(folder: Path) -> None:
    rename(folder)
    shutil.copytree(folder.with_name("elsewhere"), folder)


def empty(folder: Path) -> None:
    """As `rm -r` leaves it, if the run writes another file meanwhile."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


WAYS = {"rename": rename, "delete": shutil.rmtree, "replace": replace, "empty": empty}
MOMENTS = {
    "training": (RLStage, "update"), "checkpoint": (CheckpointWriter, "commit"),
    "summary": (experiment, "write_summary"), "end": (resuming, "keep_json"),
}  # fmt: skip


def contents(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "sacred" not in path.parts}


@pytest.mark.parametrize(("way", "moment"), [
    ("rename", "training"), ("delete", "checkpoint"), ("empty", "summary"), ("replace", "end"),
])  # fmt: skip
def test_the_run_ends_with_a_line_that_names_both_places(way, moment, tmp_path, monkeypatch, capfd):
    folder, left = tmp_path / "results" / "mine", set[Path]()
    where, name = MOMENTS[moment]
    real: Callable = getattr(where, name)

    def taken_away(*arguments, **more):
        if not left:
            WAYS[way](folder)
            left.update(contents(tmp_path), {tmp_path})
        return real(*arguments, **more)

    monkeypatch.setattr(where, name, taken_away)
    assert main([*COMMAND, f"local_results_path={tmp_path / 'results'}", "unique_token=mine"]) == 2
    text = capfd.readouterr().err
    (line,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert f"{folder} was taken away" in line
    assert ("deleted" if way in ("delete", "empty") else str(folder.with_name("elsewhere"))) in line
    assert "Traceback" not in text
    assert contents(tmp_path) <= left


@pytest.mark.processes
def test_both_ranks_end_and_nothing_is_made_again(tmp_path):
    run = TrapRun(tmp_path, "slow", "unique_token=mine", "checkpoint_interval=0", "auto_resume=True")
    run.wait_for_training()
    run.wait_for(lambda: run.newest_checkpoint)
    folder = run.folder
    rename(folder)
    ended = run.started.wait(60)
    assert ended.code == 2, ended.text
    assert str(folder.with_name("elsewhere")) in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.text and not folder.exists()


@pytest.mark.processes
def test_a_temporary_folder_that_was_removed_leaves_no_traceback(tmp_path):
    words = ["--config=qmix", "with", "run=ddp", "world_size=2", "use_cuda=False"]
    code = (
        "import glob, shutil; from omagd.run.cli.main import config_from; from omagd.run.launch import processes;"
        " processes.MODULES = ();"  # the fork server ends at once
        f" processes.preload(config_from({words})); (made,) = glob.glob('{tmp_path}/omagd_*'); shutil.rmtree(made)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "RANK"} | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
