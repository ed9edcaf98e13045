"""Executors of clusters, in this process: submitit with SLURM's commands as short scripts, and a module in Ray's place.

Whole studies on a stand-in for SLURM and on a local Ray are in test_study_runs.py and test_studies.py.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sockets import wait_until

from omagd.lab.studies import engine, ray_tasks, slurm
from omagd.lab.studies import state as study_state
from omagd.lab.studies.executors import Ended, Job, Place
from omagd.lab.studies.ray_tasks import RayArgs, RayExecutor
from omagd.lab.studies.slurm import SlurmArgs, SlurmExecutor, SlurmRun
from omagd.lab.studies.state import DONE, FAILED, StudyState, locked_study
from omagd.run.checkpoint.run_lock import start_ticks
from omagd.utils.errors import UserError

SAVES = "trap 'sleep 0.3; echo saved; exit 143' TERM; echo ready; while :; do sleep 0.02; done"
"""A command that needs a moment to save."""


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
        executor.start(job(name), ["true"], ())
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


def test_what_is_not_given_is_left_to_the_cluster(cluster, tmp_path):
    submit(on_slurm(tmp_path), "a")
    flags = {line.removeprefix("#SBATCH --").partition("=")[0] for line in cluster.script if line.startswith("#SBATCH")}
    assert flags.isdisjoint({"partition", "account", "qos", "constraint", "gpus-per-node", "mem", "array"})
    assert {"time", "requeue", "cpus-per-task"} <= flags


def test_a_task_is_requeued_as_often_as_asked_and_is_the_command_of_its_job(cluster, tmp_path):
    executor = on_slurm(tmp_path, requeues=4, cpus=3)
    executor.start(job("a"), ["python", "-m", "x"], ())
    executor.poll()
    (saved,) = (tmp_path / "toy" / "slurm").glob("17*_submitted.pkl")
    submission = pickle.loads(saved.read_bytes())
    assert submission._timeout_countdown == 4
    assert vars(submission.function) == vars(SlurmRun(["python", "-m", "x"], tmp_path / "toy/logs/a.log", 3))


def test_jobs_that_start_together_are_one_array_and_have_references_until_their_end(cluster, tmp_path):
    executor = on_slurm(tmp_path, references={"old": "9_4"})
    assert len(executor.slots) >= 1000, "SLURM decides how many runs there are at a time"
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


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'omagd'\n",
         "ModuleNotFoundError: No module named 'omagd'"),
        ("Job not requeued because: timed-out too many times.", "Job not requeued because: timed-out too many times."),
    ],
)  # fmt: skip
def test_the_error_of_a_task_that_broke_is_its_last_line(trace, said, cluster, tmp_path):
    executor = on_slurm(tmp_path)
    submit(executor, "a", "b")
    end(tmp_path, "17_0", "error", trace)
    assert executor.poll() == [Ended("a", None, said)]
    assert executor.references == {"b": "17_1"}


def test_a_result_that_cannot_be_read_fails_its_job_alone(cluster, tmp_path):
    executor = on_slurm(tmp_path)
    submit(executor, "a", "b")
    end(tmp_path, "17_1", "success", (0, ""))
    end(tmp_path, "17_0", "success", (0, ""))
    (tmp_path / "toy" / "slurm" / "17_0_0_result.pkl").write_bytes(b"x")
    first, second = executor.poll()
    assert (first.name, first.exit_code, second) == ("a", None, Ended("b", 0)) and first.error


def test_slurm_is_asked_as_often_as_poll_seconds_say(cluster, tmp_path):
    executor = on_slurm(tmp_path, poll_seconds=30)
    submit(executor, "a")
    cluster.clock[0] += 1000
    executor.poll()
    before = len(cluster.calls("sacct"))
    for passed, more in ((20, 0), (11, 1)):
        cluster.clock[0] += passed
        executor.poll()
        assert executor.running() == set()
        assert len(cluster.calls("sacct")) == before + more
    assert before <= 2


def test_cancel_asks_slurm_and_stop_leaves_what_it_has(cluster, tmp_path):
    executor = on_slurm(tmp_path)
    submit(executor, "a", "b")
    executor.cancel("b")
    executor.cancel("unknown")
    assert cluster.calls("scancel") == ["17_1"]
    executor.start(job("late"), ["true"], ())
    executor.stop()
    assert executor.poll() == [] and len(cluster.calls("sbatch")) == 1 and len(cluster.calls("scancel")) == 1
    assert executor.references == {"a": "17_0", "b": "17_1"}


REJECTED = "echo 'sbatch: error: invalid partition specified: part' >&2; exit 1"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (REJECTED, "sbatch has failed: sbatch: error: invalid partition specified: part"),
        ("echo nonsense", 'sbatch has failed: Could not make sense of sbatch output "nonsense"'),
        (None, "sbatch has failed: "),
    ],
)
def test_where_sbatch_fails_its_jobs_fail_and_the_others_go_on(answer, said, cluster, tmp_path, monkeypatch):
    polls = []

    def sleep(_):
        polls.append(1)
        assert len(polls) < 50, "the study never ends"

    monkeypatch.setattr(engine, "time", SimpleNamespace(time=time.time, sleep=sleep))
    monkeypatch.setattr(study_state, "SAVE_SECONDS", 0.0)
    works = (cluster.folder / "sbatch").read_text().partition("\n")[2]
    if answer is None:
        (cluster.folder / "sbatch").unlink()
        monkeypatch.setenv("PATH", str(cluster.folder))
    else:
        cluster.command("sbatch", answer)
    looks = []

    def more():
        looks.append(1)
        if len(looks) == 3:  # the cluster works again
            cluster.command("sbatch", works)
            monkeypatch.setenv("PATH", f"{cluster.folder}{os.pathsep}/usr/bin:/bin")
            return [job("later")]
        if len(looks) == 5:
            finish(state, "later")
            end(tmp_path, "17", "success", (0, ""))
        return None if len(looks) > 5 else []

    with locked_study(tmp_path / "toy") as state:
        end(tmp_path, "9_4", "success", (1, "error: old"))
        executor = on_slurm(tmp_path, references={"old": "9_4"})
        engine.run([job("old"), job("a"), job("b")], executor, state, more=more)
        records = state.records
    assert {name: record.state for name, record in records.items()} == {
        "old": FAILED, "a": FAILED, "b": FAILED, "later": DONE,
    }  # fmt: skip
    assert records["old"].error == "error: old"
    assert records["a"].error.startswith(said) and records["a"].error == records["b"].error
    assert "\n" not in records["a"].error


def finish(state: StudyState, name: str) -> None:
    folder = state.run_folder(name)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.summary_json.write_text("{}")
    (folder.path / "run.json").write_text('{"finished": true}')


def test_a_machine_without_slurm_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match='^executor=slurm: Could not detect "srun"'):
        on_slurm(tmp_path)


def test_a_slurm_task_gives_the_end_of_its_command_and_its_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.01)
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    assert SlurmRun(["sh", "-c", "echo $OMP_NUM_THREADS $MKL_NUM_THREADS"], log, 3)() == (0, "")
    assert log.read_text().split() == ["3", "3"]
    assert SlurmRun(["sh", "-c", "echo 'error: no luck' >&2; exit 4"], log, 1)() == (4, "error: no luck")


@pytest.mark.parametrize("text", [SAVES, SAVES.replace("exit 143", ":")])
def test_a_preempted_task_lets_its_run_save_and_ends_it(text, tmp_path, monkeypatch):
    """The second command saves and does not end: it is killed when its time is over."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "SAVE_SECONDS", 1.5)
    log = tmp_path / "a.log"
    run = SlurmRun(["sh", "-c", text], log, 2)
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
    assert vars(again.function) == vars(SlurmRun(["sh", "-c", text], log, 2))
    assert SlurmRun(["true"], log, 1).checkpoint().function.command == ["true"], "before it has begun"


# --- Ray


class FakeRay:
    """Notes what is asked of Ray. `over`: tasks that have ended, with their result or error."""

    def __init__(self) -> None:
        self.inits, self.limits, self.given, self.cancelled, self.waits = [], [], [], [], []
        self.over: dict[int, object] = {}
        self.down = 0
        self.exceptions = SimpleNamespace(RayError=KeyError)

    def init(self, **options):
        self.inits.append(options)
        signal.signal(signal.SIGTERM, lambda *_: None)

    def remote(self, **limits):
        self.limits.append(limits)

        def task(*args):
            self.given.append(args)
            return len(self.given) - 1

        return lambda function: SimpleNamespace(remote=task) if function is ray_tasks.run_task else None

    def wait(self, tasks, num_returns, timeout):
        self.waits.append((list(tasks), num_returns, timeout))
        assert num_returns <= len(tasks)
        over = [task for task in tasks if task in self.over][:num_returns]
        return over, [task for task in tasks if task not in over]

    def get(self, task):
        if isinstance(self.over[task], Exception):
            raise self.over[task]
        return self.over[task]

    def cancel(self, task, force):
        self.cancelled.append((task, force))

    def shutdown(self):
        self.down += 1


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


def on_ray(tmp_path: Path, *names: str, **settings) -> RayExecutor:
    executor = RayExecutor(Place(tmp_path, RayArgs(**settings)))
    for name in names:
        executor.start(job(name), ["run", name], ())
    return executor


def test_settings_of_ray_limit_its_tasks(ray, tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    executor = on_ray(tmp_path, "a", local_cpus=6, cpus=3, gpus=0.5)
    assert signal.getsignal(signal.SIGTERM) is handler, "Ray's would end the study before its runs have saved"
    assert (ray.inits[0]["num_cpus"], "address" in ray.inits[0]) == (6, False)
    assert ray.limits == [{"num_cpus": 3, "num_gpus": 0.5, "max_retries": 0}], "the study counts the starts of a run"
    assert ray.given == [(["run", "a"], str(tmp_path / "logs" / "a.log"), 3)]
    assert len(executor.slots) >= 1000 and executor.references == {}
    on_ray(tmp_path, address="auto", local_cpus=6)
    assert ray.inits[1]["address"] == "auto" and "num_cpus" not in ray.inits[1]
    monkeypatch.setenv("RAY_ADDRESS", "host:1")
    on_ray(tmp_path)
    assert ray.inits[2]["address"] is None and "num_cpus" not in ray.inits[2], "Ray reads RAY_ADDRESS"


def test_a_cluster_that_is_not_there_is_one_line_and_handlers_stay(ray, tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)

    def missing(**_):
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise ConnectionError("no head\nfound")

    monkeypatch.setattr(ray, "init", missing)
    with pytest.raises(UserError, match=r"^executor\.ray: address=far:1: no head.*found$"):
        on_ray(tmp_path, address="far:1")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_queued_tasks_are_not_running_and_ended_ones_are_reported_once(ray, tmp_path):
    old = tmp_path / "logs" / "b.log"
    old.parent.mkdir()
    old.write_text("an earlier start")
    os.utime(old, (1.0, 1.0))
    executor = on_ray(tmp_path, "a", "b", "c", "d")
    assert executor.running() == set(), "they wait in Ray's queue"
    for name in "ab":
        with (tmp_path / "logs" / f"{name}.log").open("a") as file:
            file.write("begun")
        os.utime(file.name, (time.time() + 1, time.time() + 1))
    assert executor.running() == {"a", "b"}
    assert executor.poll() == []
    ray.over = {0: (0, ""), 2: (3, "error: no luck"), 3: KeyError("a node\ndied")}
    assert executor.poll() == [
        Ended("a", 0), Ended("c", 3, "error: no luck"), Ended("d", None, str(KeyError("a node\ndied"))),
    ]  # fmt: skip
    assert executor.poll() == [] and executor.running() == {"b"}
    assert {timeout for *_, timeout in ray.waits} == {0}, "the study must not be held up"
    executor.cancel("a")
    executor.cancel("b")
    assert ray.cancelled == [(1, False)], "a task that is forced to end does not save"


def test_the_end_of_a_ray_lets_all_runs_save(ray, tmp_path, monkeypatch):
    executor = on_ray(tmp_path, "a", "b")
    executor.stop()
    assert ray.cancelled == [(0, False), (1, False)]
    assert ray.waits == [([0, 1], 2, ray_tasks.STOP_SECONDS)] and ray.down == 1
    assert executor.poll() == [] and len(ray.waits) == 1
    on_ray(tmp_path).stop()
    assert len(ray.waits) == 1 and ray.down == 2, "nothing to wait for"

    def gone(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(ray, "wait", gone)
    with pytest.raises(ConnectionError):
        on_ray(tmp_path, "a").stop()
    assert ray.down == 3, "the cluster is left all the same"


def test_a_cancelled_ray_task_lets_its_run_save(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_tasks, "LOOK_SECONDS", 0.01)
    log = tmp_path / "a.log"
    assert ray_tasks.run_task(["sh", "-c", "echo $OMP_NUM_THREADS"], str(log), 3) == (0, "")
    assert log.read_text() == "3\n"
    assert ray_tasks.run_task(["sh", "-c", "echo 'error: no luck'; exit 4"], str(log), 1) == (4, "error: no luck")
    log.unlink()

    def cancelled(_):
        if log.exists() and "ready" in log.read_text():
            raise KeyboardInterrupt  # as Ray cancels a task
        time_sleep(0.01)

    time_sleep = time.sleep
    monkeypatch.setattr(ray_tasks, "time", SimpleNamespace(sleep=cancelled))
    with pytest.raises(KeyboardInterrupt):
        ray_tasks.run_task(["sh", "-c", SAVES], str(log), 1)
    assert "saved" in log.read_text()
