"""Studies: the file, the engine, the results file; whole studies are in test_study_runs.py."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from sockets import wait_until

import omagd
from omagd.lab.studies import EXECUTORS, results, scheduler, sweep_spec
from omagd.lab.studies import local as local_runs
from omagd.lab.studies import state as study_state
from omagd.lab.studies import study as whole_study
from omagd.lab.studies.executors import Ended, Job, Place
from omagd.lab.studies.local import LocalArgs, LocalExecutor, last_error
from omagd.lab.studies.slurm import SlurmArgs, SlurmExecutor
from omagd.lab.studies.spec import config_of_words, load
from omagd.lab.studies.state import DONE, ELSEWHERE, FAILED, RUNNING, WAITING, StudyState, locked_study
from omagd.lab.studies.study import run_study
from omagd.lab.studies.view import state_line, study_table
from omagd.run.checkpoint import resuming
from omagd.run.checkpoint.resuming import start_ticks
from omagd.run.cli.main import config_from, main
from omagd.run.signals import Stopped
from omagd.utils.errors import UserError

SMALL = {"t_max": 100, "lr": 0.001}


def jobs_of(values: dict) -> list[Job]:
    return list(load({"name": "toy", **values}).jobs)


def test_arms_environments_and_seeds_are_multiplied_and_override_each_other():
    jobs = jobs_of({
        "config": "qmix", "with": {"lr": 0.1, "batch_size": 5, "test_nepisode": 7}, "seeds": [4, 2],
        "arms": {"plain": None, "deep": {"config": "vdn", "with": {"lr": 1e-05, "epsilon_start": 0.5}}},
        "environments": {"easy": "3m", "hard": {"map": "2s3z", "with": {"batch_size": 6, "epsilon_start": 0.7}}},
    })  # fmt: skip
    assert [job.name for job in jobs] == [
        f"{arm}-{env}-seed{seed}" for arm in ("plain", "deep") for env in ("easy", "hard") for seed in (4, 2)
    ]
    found = {job.name: config_of_words(job.words) for job in jobs}
    picked = {name: (c.name, c.map_name, c.seed, c.lr, c.batch_size, c.epsilon_start) for name, c in found.items()}
    assert picked["plain-easy-seed4"] == ("qmix", "3m", 4, 0.1, 5, 1.0)
    assert picked["deep-easy-seed2"] == ("vdn", "3m", 2, 1e-05, 5, 0.5)
    assert picked["deep-hard-seed2"] == ("vdn", "2s3z", 2, 1e-05, 6, 0.5)  # the arm's value, not the environment's
    assert {c.test_nepisode for c in found.values()} == {7}
    assert {(job.env, job.map) for job in jobs} == {("skirmish", "3m"), ("skirmish", "2s3z")}


@pytest.mark.parametrize(("values", "said"), [
    ({"arms": {"a": {"with": {"lrr": 1}}}}, "arms.a: with lrr=1: unknown key 'lrr'. Did you mean 'lr'?"),
    ({"arms": {"a": {"confg": "qmix"}}}, "arms.a: unknown key 'confg'. Did you mean 'config'?"),
    ({"arms": {}}, "the study is empty: give at least one entry of arms:"),
    ({"seeds": 0}, "the study is empty: seeds=0"),
    ({"environments": []}, "the study is empty: environments: names none"),
    ({"seeds": [1, 1]}, "seeds: 1 is named twice"),
    ({"arms": {"a": {"config": "qmix"}, "b": {"config": "qmix"}}}, "arms.b: is the same run as arms.a"),
    ({"arms": {"a b": None, "a_b": {"config": "vdn"}}}, "arms.a_b: its folder a_b-3m-seed1 is that of arms.a b"),
    ({"with": {"seed": 3}}, "seed=3: give seeds: at the top"), ({"name": "a/b"}, "name=a/b: is the name of a folder"),
    ({"executor": {"locla": {}}}, "executor=locla is not known. Did you mean 'local'?"),
    ({"executor": {"slurm": {"time": 0}}}, "executor.slurm.time=0: must be more than 0"),
    ({"arms": {"": None}}, "arms: a name is empty"),
    ({"arms": {f"a{i}": None for i in range(101)}, "environments": ["3m", "8m"], "seeds": 50},
     "arms: 101 x environments: 2 x seeds: 50 = 10100 runs, more than 10000. Lower one"),
])  # fmt: skip
def test_what_a_study_file_gets_wrong_is_one_line_with_its_place(values, said):
    with pytest.raises(UserError) as caught:
        jobs_of(values)
    assert said in caught.value.message
    assert caught.value.message.startswith("study: ")


def test_files_that_hold_no_study(tmp_path, capsys):
    empty, broken = tmp_path / "empty.yaml", tmp_path / "broken.yaml"
    empty.write_text("# nothing\n")
    broken.write_text("arms: {a: [}\n")
    said_of = {empty: "the study is empty", broken: "cannot be read as YAML", tmp_path / "no": "No such"}
    for file, said in said_of.items():
        assert main(["study", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert main(["study"]) == 2
    assert main(["study", "status", str(tmp_path)]) == 2
    assert "holds no study" in capsys.readouterr().err.splitlines()[-1]


def test_a_configuration_beside_the_study_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("name: mine\nlr: 0.25\n")
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({"arms": {"mine": {"config": "mine.yaml"}}}))
    monkeypatch.chdir("/")
    study = load(tmp_path / "toy.yaml", results=str(tmp_path / "out"))
    assert config_of_words(study.jobs[0].words).lr == 0.25
    assert study.folder == tmp_path / "out" / "toy"


@pytest.mark.parametrize(("key", "place"), [
    ("results_file", "/dev/full"), ("results_file", "pipe"), ("results_file", "file/results.jsonl"),
    ("results_file", "/proc/none/results.jsonl"), ("results", "file"), ("results", "/proc/none"),
])  # fmt: skip
def test_places_where_nothing_can_be_written_are_named_before_the_checks(key, place, tmp_path, monkeypatch, capsys):
    """The checks of the runs take long; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(whole_study, "examine", lambda *_: pytest.fail("checked its runs"))
    os.mkfifo("pipe")
    Path("file").touch()
    Path("toy.yaml").write_text(yaml.safe_dump({"config": "qmix", key: place}))
    assert main(["study", "toy.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert place.partition("/results.")[0] in line and key in line
    assert sorted(os.listdir()) == ["file", "pipe", "toy.yaml"]


# --- the engine, with commands that do what a run does for it: they write run.json and summary.json

STUB = """
import json, os, signal, sys, time
folder, what = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, "starts"), "a") as file:
    file.write(json.dumps([sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"), time.time()]) + "\\n")
open(os.path.join(folder, "run.json"), "w").write("{}")
if what == "fail":
    sys.exit("error: no luck")
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hangs":
    def end(*_):
        open(os.path.join(folder, "saved"), "w").close()
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    time.sleep(60)
met, late = os.path.join(folder, "..", what, "starts"), time.time() + 60
while what.startswith("job") and not os.path.exists(met) and time.time() < late:
    time.sleep(0.01)
time.sleep(0.1)
if what != "nothing":
    open(os.path.join(folder, "summary.json"), "w").write(json.dumps({"win_rate": 0.5, "exit_state": "completed"}))
    open(os.path.join(folder, "run.json"), "w").write(json.dumps({"finished": True}))
open(os.path.join(folder, "ended"), "w").write(repr(time.time()))
"""


def stub_job(name: str, what: str = "done") -> Job:
    return Job(name, what, "toy", "", 1, ("with", f"what={what}"))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The state of an empty study whose runs are stubs."""

    def command(record, state):
        what = record.job.words[-1].partition("=")[2]
        return [sys.executable, "-S", "-E", "-c", STUB, str(state.run_folder(record.job.name).path), what]

    monkeypatch.setattr(scheduler, "command_of", command)
    with locked_study(tmp_path / "study") as state:
        yield state


def local(state: StudyState, **settings: int) -> LocalExecutor:
    return LocalExecutor(Place(state.folder, LocalArgs(**settings)))


def starts(state: StudyState, name: str) -> list:
    return [json.loads(line) for line in (state.run_folder(name).path / "starts").read_text().splitlines()]


def test_a_failed_run_is_noted_and_the_others_go_on(study):
    jobs = [stub_job("a", "fail"), stub_job("b"), stub_job("c", "killed"), stub_job("d", "nothing"), stub_job("e")]
    ended = []
    scheduler.run(jobs, local(study, jobs=1), study, on_end=lambda job, record: ended.append((job.name, record.state)))
    assert ended == [("a", FAILED), ("b", DONE), ("c", FAILED), ("d", FAILED), ("e", DONE)]
    errors = {name: record.error for name, record in study.records.items()}
    assert errors == {
        "a": "error: no luck", "b": "", "c": "ended by SIGKILL", "d": scheduler.NOT_FINISHED, "e": "",
    }  # fmt: skip
    read = StudyState.read(study.folder)
    assert read.records == study.records
    assert read.counts() == {DONE: 2, FAILED: 3}
    table = study_table(read)
    assert "failed: c: ended by SIGKILL" in table and "0.500" in table
    # The next call repeats what has failed, and nothing else.
    before = {name: starts(study, name) for name in ("b", "e")}
    scheduler.run(jobs, local(study, jobs=1), study)
    assert {name: starts(study, name) for name in ("b", "e")} == before
    assert len(starts(study, "a")) == len(starts(study, "d")) == 2


def test_no_more_than_asked_run_at_a_time_on_any_core(study):
    with pytest.raises(UserError, match=r"executor.local: jobs=1000 with cores_per_run=2 need 2000 cores, and \d+ can"):
        local(study, jobs=1000, cores_per_run=2)
    assert local(study).slots == len(cores := sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        pytest.skip("one core")
    scheduler.run([stub_job("both")], local(study, cores_per_run=2), study)
    assert starts(study, "both")[0][:2] == [cores, "2"]
    jobs = [stub_job(f"job{number}", f"job{1 - number}" if number < 2 else "done") for number in range(5)]  # 2 meet
    scheduler.run(jobs, local(study, jobs=2), study)
    seen = [starts(study, job.name)[0] for job in jobs]
    assert {(*allowed, threads) for allowed, threads, _ in seen} == {(*cores, "1")}
    ended = [float((study.run_folder(job.name).path / "ended").read_text()) for job in jobs]
    begun = [start[2] for start in seen]
    assert max(sum(b <= at < e for b, e in zip(begun, ended, strict=True)) for at in begun) == 2


def test_an_interrupted_engine_lets_its_runs_save(study):
    def interrupt():
        if (study.folder / "logs" / "a.log").exists() and "ready" in (study.folder / "logs" / "a.log").read_text():
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        scheduler.run([stub_job("a", "hangs"), stub_job("b")], local(study, jobs=1), study, more=interrupt)
    assert (study.run_folder("a").path / "saved").exists()
    assert StudyState.read(study.folder).counts() == {WAITING: 2}


class Scripted:
    """An executor without processes: a job ends after as many polls as `ends` has; `fails` has the errors of starts."""

    def __init__(self, state: StudyState, slots=1, ends=None, fails=None, references=None, luck=True):
        self.luck = luck
        self.state, self.slots = state, slots
        self.ends, self.fails, self.references = ends or {}, fails or {}, references or {}
        self.begun = dict.fromkeys(self.references, 0)
        self.commands, self.cancelled, self.polls = {}, [], 0

    def start(self, job, command):
        if job.name in self.fails:
            raise self.fails[job.name]
        self.commands[job.name], self.begun[job.name] = command, self.polls

    def poll(self):
        self.polls += 1
        assert self.polls < 100, "the study never ends"
        over = [name for name, at in self.begun.items() if self.polls >= at + self.ends.get(name, 1)]
        return [self.over(name) for name in over]

    def over(self, name: str) -> Ended:
        del self.begun[name]
        self.references.pop(name, None)
        if self.luck:
            finish_run(self.state, name)
        return Ended(name, 0) if self.luck else Ended(name, 1, "error: no luck")

    def running(self):
        return set(self.begun)

    def cancel(self, name):
        self.cancelled.append(name)

    def stop(self):
        pass


def finish_run(state: StudyState, name: str) -> None:
    """Write what a finished run has in its folder."""
    folder = state.run_folder(name)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.summary_json.write_text("{}")
    (folder.path / "run.json").write_text('{"finished": true}')


@pytest.fixture
def unhurried(tmp_path, monkeypatch):
    """The state of an empty study; the engine does not sleep, and the state is saved after every change."""
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(study_state, "SAVE_SECONDS", 0.0)
    with locked_study(tmp_path / "study") as state:
        yield state


def test_a_run_continues_its_own_folder(unhurried):
    """Read as the command line is read."""
    (job,) = jobs_of({"config": "qmix", "with": {"lr": 0.5}})
    for luck, error in ((False, "error: no luck"), (True, "")):
        executor = Scripted(unhurried, luck=luck)
        scheduler.run([job], executor, unhurried)
        assert unhurried.records[job.name].error == error
        config = config_from(executor.commands[job.name][3:])
        assert (config.lr, config.seed) == (0.5, 1)
        assert Path(config.local_results_path) / config.unique_token == unhurried.run_folder(job.name).path
        assert config.auto_resume and config.auto_resume_wait > 0


def test_the_reference_of_a_submitted_run_is_saved_at_once(unhurried, monkeypatch):
    """A kill after sbatch must not lose the job, or it would be submitted again."""
    monkeypatch.setattr(study_state, "SAVE_SECONDS", 1e6)
    unhurried.add([stub_job("a")])
    unhurried.save(now=True)
    executor, saved = Scripted(unhurried, ends={"a": 9}), []

    def look():
        saved.append(StudyState.read(unhurried.folder).records["a"].reference)
        if executor.polls == 3:  # as in SLURM, the number comes with a poll after the start
            executor.references["a"] = "17_0"
        return [] if executor.polls < 6 else None

    scheduler.run([stub_job("a")], executor, unhurried, more=look)
    assert saved == [""] * 3 + ["17_0"] * 3


def test_what_an_interruption_leaves_is_noted_as_it_is(unhurried):
    """Of three runs one finishes while it is stopped, one has to continue, one goes on without this process."""
    executor = Scripted(unhurried, slots=3, ends=dict.fromkeys("abc", 50))
    ended = []

    def interrupt():
        executor.references["c"] = "17_0"
        if executor.polls == 3:
            executor.stop = lambda: executor.ends.update(a=0)
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        jobs = [stub_job(name) for name in "abc"]
        scheduler.run(jobs, executor, unhurried, on_end=lambda job, record: ended.append(job.name), more=interrupt)
    read = StudyState.read(unhurried.folder).records
    assert state_line(StudyState.read(unhurried.folder)) == "1 done, 1 running, 1 waiting, 0 failed"
    left = [(read[name].state, read[name].reference) for name in "abc"]
    assert left == [(DONE, ""), (WAITING, ""), (RUNNING, "17_0")]
    assert ended == ["a"]


def test_runs_are_repeated_only_where_their_result_is_missing(unhurried):
    jobs = [stub_job(name) for name in ("done", "removed", "elsewhere", "failed")]
    unhurried.add(jobs)
    for name, record in unhurried.records.items():
        record.state = {"removed": DONE, "elsewhere": ELSEWHERE}.get(name, name)
    finish_run(unhurried, "done")
    executor = Scripted(unhurried, ends={"removed": 3})
    shown = []
    scheduler.run(jobs, executor, unhurried, more=lambda: shown.append(unhurried.records["failed"].state))
    assert list(executor.commands) == ["removed", "failed"]
    assert shown[0] == WAITING, "while it waits it is not shown as failed"
    assert unhurried.counts() == {DONE: 3, ELSEWHERE: 1}


def test_a_pruned_run_is_cancelled_once_and_one_that_waits_is_never_started(unhurried):
    executor = Scripted(unhurried, ends={"a": 9})

    def prune():
        if executor.polls == 3:
            executor.references["a"] = "17_0"
            unhurried.prune("a")
            unhurried.prune("b")
        return None if executor.polls > 4 else []

    scheduler.run([stub_job(name) for name in "abc"], executor, unhurried, more=prune)
    assert executor.cancelled == ["a"]
    assert unhurried.records["a"].reference == "", "there is nothing left to follow"
    assert list(executor.commands) == ["a", "c"]


@pytest.mark.parametrize(("log", "said"), [
    ("error: old\nresumed\nerror: new\nbye", "error: new"),  # of the last start
    ('Traceback\n  File "a"\nValueError: no luck\nbye', "ValueError: no luck"),
    ("first\nlast\n\n", "last"),
    ("x" * 20_000 + "\nerror: late\n" + "y\n" * 99, "error: late"),
    ("", "exit code 1"),
])  # fmt: skip
def test_the_last_error_of_a_log_is_what_is_said_of_a_run(log, said, tmp_path):
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log", 1) == said
    assert last_error(tmp_path / "log", -signal.SIGKILL) == "ended by SIGKILL" and last_error(tmp_path / "log", 0) == ""


def test_a_run_that_does_not_end_when_asked_is_killed(study, monkeypatch):
    monkeypatch.setattr(local_runs, "STOP_SECONDS", 0.1)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(20)"
    executor, log = local(study, jobs=1), study.folder / "logs" / "a.log"
    executor.start(stub_job("a"), [sys.executable, "-S", "-c", f"import signal, time; {deaf}"])
    (process,) = executor._processes.values()
    assert wait_until(lambda: log.exists() and "ready" in log.read_text())
    executor.stop()
    assert start_ticks(process.pid) is None


# --- the folder of a study


def test_one_process_leads_and_runs_that_ended_with_a_killed_leader_are_shown_as_waiting(tmp_path, capsys, monkeypatch):
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    def read_only(path: Path, flags: int, *more: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "another person's")
        return opened(path, flags, *more)

    opened = os.open
    with locked_study(tmp_path / "s") as state:
        local, handed = state.add([stub_job("a"), stub_job("b")])
        local.state = handed.state = RUNNING
        local.since = handed.since = time.time()
        handed.reference = "17_0"
        state.save(now=True)
        assert main(["study", "status", str(tmp_path / "s")]) == 0
        assert "2 running, 0 waiting, 0 failed; run by process" in capsys.readouterr().out
        with pytest.raises(UserError, match="runs this study already"), locked_study(tmp_path / "s"):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(resuming.os, "open", read_only)
            assert state.leader().startswith("run by process")
        text = (tmp_path / "s" / "study.json").read_text()
    (tmp_path / "s" / "study.json").write_text(text)  # as a killed leader leaves it
    with monkeypatch.context() as patch:
        patch.setattr(resuming.fcntl, "flock", no_locks)
        assert StudyState.read(tmp_path / "s").leader().startswith("unknown whether it runs")
    assert main(["study", "status", str(tmp_path / "s")]) == 0
    shown = capsys.readouterr().out
    assert "1 running, 1 waiting, 0 failed; nothing runs it now; 1 waiting after an interruption" in shown


def test_another_study_and_another_folder_are_rejected(tmp_path):
    for place, names in ((tmp_path / "photos", ["cat.png"]), (tmp_path / "run", ["lock", "logs", "run.json"])):
        place.mkdir()
        for name in names:
            (place / name).touch()
        with pytest.raises(UserError, match="exists and is not the folder of a study"), locked_study(place):
            pass
        assert sorted(os.listdir(place)) == names
    with locked_study(tmp_path / "s") as state:
        state.add([stub_job("a")])
    changed = Job("a", "done", "toy", "", 1, ("with", "what=fail", "lr=0.5"))
    with locked_study(tmp_path / "s") as state, pytest.raises(UserError) as said:
        state.add([changed])
    assert "run a has other keys (what is done there, fail here; lr is not given there, 0.5 here)" in str(said.value)


def test_a_damaged_state_is_named_and_kept(tmp_path):
    with locked_study(tmp_path / "s") as state:
        state.add([stub_job("a")])
    file = tmp_path / "s" / "study.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="has format 2; this version reads 1"):
        StudyState.read(tmp_path / "s")
    whole, other_types = asdict(state.records["a"]), ({"starts": None}, {"card": 5})
    wrong = [json.dumps({"format": 1, "jobs": [whole | each]}).encode() for each in other_types]
    for content in (b"{", b"[]", b'{"format": 1, "jobs": [3]}', *wrong):
        file.write_bytes(content)
        with pytest.raises(UserError, match="study.json: is damaged"):
            StudyState.read(tmp_path / "s")
        assert file.read_bytes() == content


# --- whole studies of scripted runs


class Toy:
    """Starts studies whose runs are scripted, in folders below `root`; `starts` has the jobs of each call."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.root, self.said, self.starts, self.fails, self.references = root, [], [], {}, {}
        self.steps, self.examined = {}, []
        monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(whole_study, "examine", self.examine)
        fits = {"args_model": LocalArgs, "__init__": lambda self, place: None}
        executor = type("Toy", (Scripted,), {**fits, "__new__": lambda cls, place: self.executor(place)})
        monkeypatch.setitem(EXECUTORS._objects, "toy", executor)
        unwanted = type("Local", (Scripted,), {**fits, "__new__": lambda cls, place: pytest.fail("local runs")})
        monkeypatch.setitem(EXECUTORS._objects, "local", unwanted)
        monkeypatch.setattr(EXECUTORS, "names", lambda: ["local", "slurm", "toy"])

    def executor(self, place: Place) -> Scripted:
        self.place = place
        return Scripted(StudyState(place.folder), fails=self.fails, references=dict(self.references))

    def examine(self, jobs, executor, source):
        self.examined += [job.name for job in jobs]
        compared = {job.name: {"env": "skirmish", "t_max": self.steps.get(job.arm, 100)} for job in jobs}
        cards = {name: {"id": "c", "compared": values} for name, values in compared.items()}
        return {job.name: {"identity": " ".join(job.words), "card": cards[job.name]} for job in jobs}

    def file(self, **values) -> Path:
        path = self.root / "files" / "toy.yaml"
        path.parent.mkdir(exist_ok=True)
        given = {"config": "qmix", "seeds": 2, "executor": {"toy": {}}, **values}
        path.write_text(yaml.safe_dump(given, sort_keys=False))
        return path

    def run(self, results_in="here", **values) -> StudyState:
        study = load(self.file(**values), results=str(self.root / results_in))
        state = run_study(study, self.said.append, quiet=True)
        self.complete = whole_study.outcome(state, study)[0]
        return state


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    return Toy(tmp_path, monkeypatch)


def test_results_are_appended_once_and_spare_runs_on_other_machines(toy):
    given = {"results_file": "kept/results.jsonl", "seeds": 3}
    toy.fails["qmix-3m-seed2"] = OSError(28, "No space left on device")
    state = toy.run(**given)
    assert state.counts() == {DONE: 2, FAILED: 1} and not toy.complete
    assert state.records["qmix-3m-seed2"].error == "cannot be started: [Errno 28] No space left on device"
    kept = toy.root / "files" / "kept" / "results.jsonl"  # beside the study file, wherever the command runs
    one, two = (json.loads(line) for line in kept.read_text().splitlines())
    assert [one["job"], two["job"]] == ["qmix-3m-seed1", "qmix-3m-seed3"]
    toy.fails.clear()
    assert toy.run("there", **given).counts() == {DONE: 1, ELSEWHERE: 2} and toy.complete
    assert toy.run("there", **given).counts() == {DONE: 1, ELSEWHERE: 2}
    assert not (toy.root / "there" / "toy" / "runs" / "qmix-3m-seed1").exists()
    whole = kept.read_text().splitlines()
    assert len(whole) == 3
    assert toy.run(**given).counts() == {DONE: 2, ELSEWHERE: 1} and kept.read_text().splitlines() == whole
    # A line that is removed asks for its run again; one that nobody can read does not count.
    kept.write_text("\n".join([*whole[1:], "<<<<<<< HEAD"]) + "\n")
    assert toy.run("there", **given).counts() == {DONE: 2, ELSEWHERE: 1}
    assert [json.loads(line)["job"] for line in kept.read_text().splitlines() if "HEAD" not in line] == [
        "qmix-3m-seed3", "qmix-3m-seed2", "qmix-3m-seed1",
    ]  # fmt: skip
    assert toy.said == [f"results_file={kept}: 1 lines cannot be read and do not count; the file is kept as it is"]


def test_a_result_that_could_not_be_appended_is_appended_by_the_next_start(toy, monkeypatch):
    def full(path, entry):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(results, "append", full)
        assert toy.run(results_file="results.jsonl").counts() == {DONE: 2}
    assert [line.partition(": the next")[0].split(": ", 1)[1].partition("; the")[0] for line in toy.said] == [
        f"cannot be written (No space left on device): qmix-3m-seed{seed} is missing there" for seed in (1, 2)
    ]
    toy.fails = dict.fromkeys(["qmix-3m-seed1", "qmix-3m-seed2"], UserError("started again"))
    assert toy.run(results_file="results.jsonl").counts() == {DONE: 2}
    assert len((toy.root / "files" / "results.jsonl").read_text().splitlines()) == 2


def test_arms_that_cannot_be_compared_are_named_at_the_first_start_and_checked_once(toy):
    toy.steps = {"long": 200}
    given = {"arms": {"short": None, "long": {"with": {"lr": 0.5}}}, "seeds": 1}
    toy.run(**given)
    assert toy.said == ["skirmish 3m: these arms cannot be compared with short: long: t_max 200, not 100"]
    toy.run(**given)
    assert len(toy.said) == 1 and toy.examined == ["short-3m-seed1", "long-3m-seed1"]
    toy.run(**{**given, "arms": {**given["arms"], "longer": {"with": {"lr": 0.25}}}})
    assert len(toy.said) == 2 and toy.examined[2:] == ["longer-3m-seed1"]


def test_a_study_may_grow_but_not_take_the_folder_of_another(toy):
    toy.run()
    copy = toy.root / "here" / "toy" / "study.yaml"
    assert toy.run(seeds=3).counts() == {DONE: 3}
    assert copy.read_bytes() == toy.file(seeds=3).read_bytes()
    with pytest.raises(UserError, match="belongs to another study, without these runs"):
        toy.run(environments=["8m"])
    assert StudyState.read(toy.root / "here" / "toy").counts() == {DONE: 3}


def test_the_words_of_the_command_and_of_python_reach_the_study(toy, capsys, recwarn):
    """`--results`, `--executor`, exit codes, warnings."""
    file = toy.file(executor={"local": {}, "toy": {}}, arms={"a": None, "b": {"with": {"lr": 0.5}}}, seeds=1)
    toy.steps = {"b": 200}
    folder, words = toy.root / "command" / "toy", ["--executor=toy", f"--results={toy.root / 'command'}"]
    toy.fails["b-3m-seed1"] = UserError("no luck")
    assert main(["study", str(file), *words]) == 1
    assert StudyState.read(folder).counts() == {DONE: 1, FAILED: 1}
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(folder) and "cannot be compared with a: b: t_max 200" in printed.err
    found = omagd.study(file, results=str(toy.root / "python"), executor="toy")
    assert [run["state"] for run in found["runs"]] == [DONE, FAILED] and not found["complete"]
    assert found["runs"][1]["error"] == "cannot be started: no luck"
    assert found["folder"] == str(toy.root / "python" / "toy") == str(Path(found["runs"][0]["folder"]).parents[1])
    assert ["cannot be compared" in str(warning.message) for warning in recwarn] == [True]
    toy.fails.clear()
    assert main(["study", str(file), *words]) == 0
    assert omagd.study(file, results=str(toy.root / "python"), executor="toy")["complete"]


def test_seeds_of_a_run_share_its_check_and_other_runs_have_their_own(monkeypatch, capsys):
    """What `--examine` answers: identity and card of each, or the error that the run would end with."""
    base = ["--config=qmix", "with"]
    jobs = [
        [*base, "seed=1"], [*base, "seed=2"], [*base, "torch_threads=2", "seed=1"], [*base, "lr=0.5", "seed=1"],
        [*base, "env_args.map_name=nowhere", "seed=1"], [*base, "dist_backend=nccl", "seed=1"],
    ]  # fmt: skip

    def asked(local: bool) -> list[dict]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"jobs": jobs, "local": local})))
        assert main(["study", "--examine"]) == 0
        return json.loads(capsys.readouterr().out)

    one, other_seed, threads, rate, wrong, card = asked(local=True)
    assert one["identity"] == threads["identity"], "machines with other numbers of cores share a results file"
    assert len({each["identity"] for each in (one, other_seed, rate)}) == 3
    assert one["card"]["id"] == rate["card"]["id"] and one["card"]["method"] != rate["card"]["method"]
    assert "nowhere" in wrong["errors"][0]
    assert "errors" in card, "this machine has no such device"
    assert "card" in asked(local=False)[-1], "those that run it may have one"


# --- what is shown


def test_an_interrupted_study_says_what_is_left_and_how_to_continue(tmp_path, monkeypatch, capsys):
    def stopped(study, warn):
        with locked_study(study.folder) as state:
            state.add(study.jobs)
            for record, how in zip(state.records.values(), (DONE, WAITING, FAILED), strict=True):
                record.state = how
            raise Stopped(signal.SIGINT)

    monkeypatch.setattr(whole_study, "run_study", stopped)
    monkeypatch.chdir(tmp_path)
    Path("my toy.yaml").write_text("config: qmix\nseeds: 3\n")
    assert main(["study", "my toy.yaml", "--executor", "slurm"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "interrupted by SIGINT: 1 done, 0 running, 1 waiting, 1 failed in"
        f" {tmp_path / 'results' / 'my toy'}. Continue with: omagd study 'my toy.yaml' --executor=slurm"
    )
    monkeypatch.setattr(whole_study, "run_study", lambda *_: (_ for _ in ()).throw(Stopped(signal.SIGTERM)))
    assert main(["study", "my toy.yaml", "--results=other"]) == 143
    assert "SIGTERM: nothing was started in " in capsys.readouterr().err


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch):
    def slurm():
        return SlurmExecutor(Place(tmp_path, SlurmArgs()))

    for module, extra, needs in (("submitit", "slurm", slurm), ("optuna", "studies", sweep_spec.optuna)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=rf'needs \w+: pip install "omagd\[{extra}\]"'):
            needs()
