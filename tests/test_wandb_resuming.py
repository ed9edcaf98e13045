"""Interrupted runs go on with the installed W&B, which keeps links in their folders: no run and no step is repeated."""

from __future__ import annotations

import json
import os
import signal

import pytest
import yaml
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, run_command, summary_of
from sockets import wait_until
from wandb_files import assert_recorded_once, offline_files

pytestmark = pytest.mark.processes
KEYS = {
    **{key: yaml.safe_load(value) for key, value in (word.split("=") for word in BUDGETS[2:10])}, "t_max": 1500,
    "log_interval": 100, "runner_log_interval": 100, "learner_log_interval": 100, "checkpoint_interval": 0.0,
    "use_wandb": True, "rnn_hidden_dim": 8, "use_cuda": False,
}  # fmt: skip


WORDS = [f"{key}={value}" for key, value in KEYS.items()]
COMMAND = [PYTHON, MAIN, "--config=vdn", "with", "env_args.map_name=3m", *WORDS, "seeds=1,2", "auto_resume=True"]


def runs_in(place):
    return sorted(path.parent for path in place.glob("results/*/logs") if (path.parent / "run.json").exists())


def is_under_way(run):
    """Return whether a run can be interrupted: it has logged, saved, and W&B records."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return len(lines) >= 3 and offline_files(run) and (run / "saved.json").exists()


def test_the_same_command_goes_on_in_the_same_folder_and_wandb_run(tmp_path, monkeypatch):
    """A list of seeds is killed in its second one. A service of W&B that the environment names may be gone."""
    monkeypatch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-1")
    first = Started(COMMAND, tmp_path)
    assert wait_until(lambda: len(runs_in(tmp_path)) == 2 and is_under_way(max(runs_in(tmp_path)))), first.kill()
    os.kill(first.group, signal.SIGKILL)
    first.wait()
    before = runs_in(tmp_path)
    assert not json.loads((before[-1] / "run.json").read_text()).get("finished"), "the run was too short"
    done = [(run / "summary.json").stat().st_mtime_ns for run in before[:-1]]
    run_command(COMMAND, tmp_path)
    assert runs_in(tmp_path) == before
    assert [(run / "summary.json").stat().st_mtime_ns for run in before[:-1]] == done, "a finished seed was repeated"
    for run in before:
        assert summary_of(run)["exit_state"] == "completed"
        assert_recorded_once(run)
    assert len(offline_files(before[-1])) == 2
