"""Executors of clusters, in this process: submitit with SLURM's commands as short scripts."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sockets import wait_until

from omagd.lab.studies import slurm
from omagd.lab.studies.executors import Ended, Job, Place
from omagd.lab.studies.slurm import SlurmArgs, SlurmExecutor, SlurmRun
from omagd.run.checkpoint.resuming import start_ticks
from omagd.utils.errors import UserError

SAVES = "trap 'sleep 0.3; echo saved' TERM; echo ready; while :; do sleep 0.02; done"
"""A command that needs a moment to save, and does not end."""


def job(name: str) -> Job:
    return Job(name, "arm", "toy", "", 1, ("with",))


# --- SLURM


class Slurm:
    """SLURM's commands as scripts that note their arguments; sacct reads a table of states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.command("srun", "exit 9")
        self.command("sbatch", f'cat "$1" >> {folder}/script; echo x >> {folder}/sbatch.log; echo "batch job 17"')
        self.command("scancel", f'echo "$@" >> {folder}/scancel.log')
        self.command("sacct", f"echo x >> {folder}/sacct.log; cat {folder}/states")
        self.states()

    def command(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / name).chmod(0o755)

    def states(self, **states: str) -> None:
        """Set the states of the tasks of array 17, by `_0`, `_1`, …"""
        lines = [f"17{task}|{state}|here" for task, state in states.items()]
        (self.folder / "states").write_text("\n".join(["JobID|State|NodeList", *lines, ""]))

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def script(self) -> list[str]:
        return (self.folder / "script").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """SLURM as the executor sees it; each test has a watcher of its own, whose clock the test sets."""
    submitit = pytest.importorskip("submitit")
    from submitit.core import core

    made = Slurm(tmp_path / "commands")
    made.clock = [1000.0]
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(submitit.SlurmJob, "watcher", type(submitit.SlurmJob.watcher)())

    def sleep(seconds):
        made.clock[0] += seconds

    monkeypatch.setattr(core, "_time", SimpleNamespace(time=lambda: made.clock[0], sleep=sleep))
    return made


def on_slurm(tmp_path: Path, references=None, **settings) -> SlurmExecutor:
    return SlurmExecutor(Place(tmp_path / "toy", SlurmArgs(**settings), references or {}))


def submit(executor: SlurmExecutor, *names: str) -> list[Ended]:
    for name in names:
        executor.start(job(name), ["true"])
    return executor.poll()


def end(tmp_path: Path, task: str, outcome: str, value: object) -> None:
    """Write what submitit leaves at the end of a task."""
    folder = tmp_path / "toy" / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}_0_result.pkl").write_bytes(pickle.dumps((outcome, value)))


def test_settings_of_slurm_reach_sbatch(cluster, tmp_path):
    given = {
        "time": 7, "partition": "part", "account": "acc", "qos": "high", "constraint": "a100", "gpus": 2, "cpus": 3,
        "mem": "8GB", "at_a_time": 1, "setup": ["module load cuda", "echo ready"], "options": {"nice": 5},
    }  # fmt: skip
    submit(on_slurm(tmp_path, requeues=4, **given), "a", "b")
    flags = {line.removeprefix("#SBATCH ") for line in cluster.script if line.startswith("#SBATCH")}
    assert flags >= {
        "--time=7", "--partition=part", "--account=acc", "--qos=high", "--constraint=a100", "--gpus-per-node=2",
        "--cpus-per-task=3", "--mem=8GB", "--array=0-1%1", "--nice=5", "--requeue", "--job-name=toy", "--nodes=1",
        "--ntasks-per-node=1",
    }  # fmt: skip
    setup, command = (
        cluster.script.index("module load cuda"),
        next(number for number, line in enumerate(cluster.script) if line.startswith("srun ")),
    )
    assert cluster.script[setup + 1] == "echo ready" and setup + 1 < command


def test_jobs_that_start_together_are_one_array_and_have_references_until_their_end(cluster, tmp_path):
    executor = on_slurm(tmp_path, references={"old": "9_4"})
    assert executor.slots >= 1000, "SLURM decides how many runs there are at a time"
    assert submit(executor, "a", "b", "c") == [] and len(cluster.calls("sbatch")) == 1
    assert executor.references == {"old": "9_4", "a": "17_0", "b": "17_1", "c": "17_2"}
    cluster.states(_0="RUNNING", _1="PENDING", _2="RUNNING")
    cluster.clock[0] += 1000
    assert executor.poll() == [] and executor.running() == {"a", "c"}
    end(tmp_path, "17_0", "success", (0, ""))
    end(tmp_path, "17_1", "success", (3, "error: no luck"))
    end(tmp_path, "9_4", "success", (0, ""))
    assert sorted(executor.poll(), key=lambda each: each.name) == [
        Ended("a", 0), Ended("b", 3, "error: no luck"), Ended("old", 0),
    ]  # fmt: skip
    assert executor.references == {"c": "17_2"} and executor.poll() == [] and executor.running() == {"c"}
    assert len(cluster.calls("sbatch")) == 1, "submitted again"


def test_a_task_that_slurm_has_ended_is_reported_with_its_state(cluster, tmp_path):
    executor = on_slurm(tmp_path)
    submit(executor, "a", "b")
    cluster.states(_0="OUT_OF_MEMORY", _1="PREEMPTED")
    cluster.clock[0] += 1000
    assert executor.poll() == [Ended("a", None, "SLURM job 17_0: OUT_OF_MEMORY")]
    assert executor.references == {"b": "17_1"}, "a preempted task is requeued"


def test_cancel_asks_slurm_and_stop_leaves_what_it_has(cluster, tmp_path):
    executor = on_slurm(tmp_path)
    submit(executor, "a", "b")
    executor.cancel("b")
    executor.cancel("unknown")
    assert cluster.calls("scancel") == ["17_1"]
    executor.start(job("late"), ["true"])
    executor.stop()
    assert executor.poll() == [] and len(cluster.calls("sbatch")) == 1 and len(cluster.calls("scancel")) == 1
    assert executor.references == {"a": "17_0", "b": "17_1"}


def test_a_task_runs_its_command_and_a_submission_that_fails_is_said(cluster, tmp_path):
    log = tmp_path / "a.log"
    assert SlurmRun(["sh", "-c", "echo $OMP_NUM_THREADS; exit 3"], log, 2)() == (3, "2")
    cluster.command("sbatch", "echo 'sbatch: error: invalid partition specified: part' >&2; exit 1")
    executor, said = on_slurm(tmp_path), "sbatch has failed: sbatch: error: invalid partition specified: part"
    assert submit(executor, "a", "b") == [Ended("a", None, said), Ended("b", None, said)]
    assert executor.poll() == [] and executor.references == {}


def test_a_machine_without_slurm_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match='^executor=slurm: Could not detect "srun"'):
        on_slurm(tmp_path)


def test_a_preempted_task_lets_its_run_save_and_kills_it_when_its_time_is_over(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "SAVE_SECONDS", 1.5)
    log = tmp_path / "a.log"
    run = SlurmRun(["sh", "-c", SAVES], log, 2)
    process = run._process = slurm.start_run(run.command, log)
    try:
        wait_until(lambda: "ready" in log.read_text())
        began = time.monotonic()
        again = run.checkpoint()
        assert time.monotonic() - began < 8, "SLURM kills the task soon"
        assert "saved" in log.read_text()
        wait_until(lambda: start_ticks(process.pid) is None)
    finally:
        slurm.kill_group(process)
        process.wait()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert vars(again.function) == vars(SlurmRun(["sh", "-c", SAVES], log, 2))
    assert SlurmRun(["true"], log, 1).checkpoint().function.command == ["true"], "before it has begun"
