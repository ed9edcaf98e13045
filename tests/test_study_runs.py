"""Whole studies: killed and continued; docs/studies.md holds one."""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from pathlib import Path

import pytest
import yaml
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, ROOT, Started, run_command, summary_of
from reaper import having
from run_equality import differences
from sockets import wait_until

from omagd.lab.studies.spec import load

pytestmark = pytest.mark.processes
PATIENCE = 240.0
MARK = "OMAGD_STUDY_TEST"
KEYS = (
    "t_max", "batch_size_run", "batch_size", "buffer_size", "test_nepisode", "log_interval", "runner_log_interval",
    "learner_log_interval", "use_cuda",
)  # fmt: skip
SMALL = {
    **{key: yaml.safe_load(value) for key, value in (word.split("=") for word in BUDGETS) if key in KEYS},
    "rnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 4, "test_interval": 60, "checkpoint_interval": 0.0,
}  # fmt: skip


def start(file: Path, mark: str) -> Started:
    command = [PYTHON, MAIN, "study", str(file), "--results", str(file.parent / "results")]
    return Started(command, file.parent, **{MARK: mark})


def trains(folder: Path) -> bool:
    """Return whether a run has written a checkpoint."""
    return any(folder.glob("checkpoints/[0-9]*/manifest.json"))


def test_a_study_goes_on_after_a_kill_and_ends_with_the_bits_of_a_run_left_alone(tmp_path):
    file, mark = tmp_path / "toy.yaml", uuid.uuid4().hex
    study = {
        "with": {**SMALL, "t_max": 300}, "arms": {"qmix": {"config": "qmix"}}, "environments": ["3m"],
        "executor": {"local": {"jobs": 1}}, "results_file": "kept/results.jsonl",
    }  # fmt: skip
    file.write_text(yaml.safe_dump(study))
    folder = tmp_path / "results" / "toy"
    one = folder / "runs" / "qmix-3m-seed1"
    started = start(file, mark)
    wait_until(lambda: trains(one) or started.process.poll() is not None, PATIENCE, "no checkpoint")
    os.kill(started.process.pid, signal.SIGKILL)  # it leads the study: its run saves and ends
    assert started.wait().code == -signal.SIGKILL
    wait_until(lambda: not having(MARK, mark), PATIENCE, "a run goes on unnoticed")
    ended = start(file, mark).wait()
    assert ended.code == 0, ended.text
    (line,) = (json.loads(line) for line in (tmp_path / "kept" / "results.jsonl").read_text().splitlines())
    assert line["card"] == json.loads((one / "card.json").read_text())
    assert line["summary"]["win_rate"] == summary_of(one)["win_rate"]
    assert line["tests"]["t_env"] == sorted(line["tests"]["t_env"]) != []
    assert str(tmp_path) not in json.dumps(line)
    own = [f"local_results_path={tmp_path}", "unique_token=alone"]
    run_command([PYTHON, MAIN, "-u", *load(file).jobs[0].words, *own], tmp_path)
    assert differences(one, tmp_path / "alone") == []


def test_the_study_of_the_page_is_accepted():
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    block = re.findall(r"^```yaml\n(# .*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    values = {"name": "toy", **yaml.safe_load(block)}
    assert len(load(values).jobs) == 18
