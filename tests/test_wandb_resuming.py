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
    **{key: yaml.safe_load(value) for key, value in (word.split("=") for word in BUDGETS[2:10])}, "t_max": 1200,
    "log_interval": 100, "runner_log_interval": 100, "learner_log_interval": 100, "checkpoint_interval": 0.0,
    "use_wandb": True, "rnn_hidden_dim": 8, "use_cuda": False,
}  # fmt: skip


def command_of(kind):
    """Return the command of a run or a list of seeds; the same command continues it, as in a study or a sweep."""
    more = {"run": "unique_token=mine", "seeds": "seeds=1,2"}[kind]
    words = [f"{key}={value}" for key, value in KEYS.items()]
    start = [PYTHON, MAIN, "--config=vdn", "--env-config=skirmish", "with", "env_args.map_name=3m"]
    return [*start, *words, more, "auto_resume=True"]


def runs_in(place):
    return sorted(path.parent for path in place.glob("results/*/logs") if (path.parent / "run.json").exists())


def is_under_way(run):
    """Return whether a run can be interrupted: it has logged, saved, and W&B records."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return len(lines) >= 3 and offline_files(run) and (run / "saved.json").exists()


@pytest.mark.parametrize(("kind", "how"), [("run", signal.SIGKILL), ("seeds", signal.SIGTERM)])
def test_the_same_command_goes_on_in_the_same_folder_and_wandb_run(tmp_path, kind, how):
    number, command = 2 if kind == "seeds" else 1, command_of(kind)
    first = Started(command, tmp_path)
    assert wait_until(lambda: len(runs_in(tmp_path)) == number and is_under_way(max(runs_in(tmp_path)))), first.kill()
    os.kill(first.group, how)
    first.wait()
    before = runs_in(tmp_path)
    assert not json.loads((before[-1] / "run.json").read_text()).get("finished"), "the run was too short"
    done = [(run / "summary.json").stat().st_mtime_ns for run in before[:-1]]
    run_command(command, tmp_path)
    assert runs_in(tmp_path)[: len(before)] == before and len(runs_in(tmp_path)) == number
    assert [(run / "summary.json").stat().st_mtime_ns for run in before[:-1]] == done, "a finished seed was repeated"
    for run in before:
        assert summary_of(run)["exit_state"] == "completed"
        assert_recorded_once(run)
    assert len(offline_files(before[-1])) == 2
