"""Whole studies of tiny runs: killed and continued, on SLURM, estimated; docs/studies.md holds one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import slurm_stand_in
import yaml
from command_budgets import BUDGETS
from command_harness import ROOT, run_command, summary_of
from reaper import having
from run_equality import differences
from sockets import wait_until

from omagd.lab.studies.spec import load
from omagd.lab.studies.state import StudyState

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


def start(file: Path, mark: str, *words: str, kind: str = "study", **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "omagd", kind, str(file), "--results", str(file.parent / "results"), *words]
    return subprocess.Popen(
        command, cwd=file.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def wait_for(condition, what: str, patience: float = PATIENCE):
    return wait_until(condition, patience, what)


def leads(mark: str, name: str) -> int | None:
    """Return the id of the process of a job's run, None if there is none."""
    for pid in having(MARK, mark):
        with contextlib.suppress(OSError):
            if f"unique_token={name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    return None


def trains(folder: Path) -> bool:
    """Return whether a run has written a checkpoint."""
    return any(folder.glob("checkpoints/[0-9]*/manifest.json"))


def alone(file: Path, place: Path) -> Path:
    """Return the folder of a study's first run, started by hand and left alone."""
    own = [f"local_results_path={place / 'alone'}", "unique_token=alone"]
    run_command([sys.executable, "-m", "omagd", "-u", *load(file).jobs[0].words, *own], place)
    return place / "alone" / "alone"


def test_a_study_goes_on_after_every_kill_and_ends_with_the_bits_of_runs_left_alone(tmp_path):
    file, mark = tmp_path / "toy.yaml", uuid.uuid4().hex
    study = {
        "with": {**SMALL, "t_max": 400}, "arms": {"qmix": {"config": "qmix"}}, "environments": ["3m"], "seeds": 2,
        "executor": {"local": {"jobs": min(2, len(os.sched_getaffinity(0)))}}, "results_file": "kept/results.jsonl",
    }  # fmt: skip
    file.write_text(yaml.safe_dump(study))
    folder = tmp_path / "results" / "toy"
    one, two = (folder / "runs" / f"qmix-3m-seed{seed}" for seed in (1, 2))

    process = start(file, mark)
    wait_for(lambda: trains(one) or process.poll() is not None, "no checkpoint")
    process.kill()  # the process that leads the study: its runs save and end
    process.communicate()
    wait_for(lambda: not having(MARK, mark), "a run goes on unnoticed")
    status = run_command([sys.executable, "-m", "omagd", "study", "status", str(folder)], tmp_path).out
    assert "nothing runs it now" in status

    process = start(file, mark)
    wait_for(lambda: leads(mark, one.name), "the run was not started again")
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert re.search(rf"SIGINT: .* in {folder}\. Continue with: omagd study {file} --results=.*$", text)
    assert having(MARK, mark) == []

    process = start(file, mark)
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    lines = [json.loads(line) for line in (tmp_path / "kept" / "results.jsonl").read_text().splitlines()]
    assert sorted(line["job"] for line in lines) == [one.name, two.name]
    for line in lines:
        run = folder / "runs" / line["job"]
        assert line["card"] == json.loads((run / "card.json").read_text())
        assert line["summary"]["win_rate"] == summary_of(run)["win_rate"]
        assert line["tests"]["t_env"] == sorted(line["tests"]["t_env"]) != []
        assert str(tmp_path) not in json.dumps(line)

    assert differences(one, alone(file, tmp_path)) == []
    assert (one / "plots" / "curves.png").stat().st_size > 10_000


def test_slurm_tasks_outlive_the_process_that_submitted_them_and_are_followed_by_the_next(tmp_path):
    pytest.importorskip("submitit")
    file, mark = tmp_path / "toy.yaml", uuid.uuid4().hex
    study = {
        "with": SMALL, "arms": {"qmix": {"config": "qmix"}}, "environments": ["3m"], "seeds": 2,
        "executor": {"slurm": {"time": 5, "at_a_time": 1, "poll_seconds": 2, "options": {"nice": 5}}},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(study))
    variables = slurm_stand_in.install(tmp_path / "slurm")
    folder = tmp_path / "results" / "toy"
    process = start(file, mark, **variables)
    wait_for(lambda: trains(folder / "runs" / "qmix-3m-seed1") or process.poll() is not None, "no checkpoint")
    assert len(slurm_stand_in.states(tmp_path / "slurm")) == 2
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, text
    assert re.search(r"SIGTERM: 0 done, .* in .* Continue with: omagd", text)
    assert StudyState.read(folder).records["qmix-3m-seed2"].reference == "17_1"
    process = start(file, mark, **variables)
    out, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert list(slurm_stand_in.states(tmp_path / "slurm")) == ["17_0", "17_1"], "submitted again"
    assert [summary_of(run)["exit_state"] for run in folder.glob("runs/*")] == ["completed"] * 2
    script = next(iter((tmp_path / "slurm" / "state").glob("*.sh"))).read_text()
    for line in ("--array=0-1%1", "--time=5", "--cpus-per-task=1", "--nice=5", "--requeue", "--job-name=toy"):
        assert f"#SBATCH {line}\n" in script
    wait_for(lambda: not having(MARK, mark), "a task is left")


def test_a_preempted_slurm_task_saves_and_is_requeued(tmp_path):
    """SIGUSR2 comes before the end of a task's time: the run saves, and SLURM starts the task again."""
    submitit = pytest.importorskip("submitit")
    assert submitit.SlurmJob
    folder = tmp_path / "study"
    stub = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    stub += f"if open({str(tmp_path / 'times')!r}, 'a').tell(): sys.exit(0)\n"
    stub += f"open({str(tmp_path / 'times')!r}, 'a').write('x'); print('ready', flush=True); time.sleep(60)"
    program = (
        "import sys; from pathlib import Path\n"
        "from omagd.lab.studies.executors import Job, Place\n"
        "from omagd.lab.studies.slurm import SlurmArgs, SlurmExecutor\n"
        "place = Path(sys.argv[1]); (place / 'logs').mkdir(parents=True)\n"
        "executor = SlurmExecutor(Place(place, SlurmArgs(poll_seconds=2)))\n"
        "executor.start(Job('a', '', '', '', 1, ()), sys.argv[2:], ())\n"
        "assert executor.poll() == []; print(executor.references['a'])\n"
    )
    variables = slurm_stand_in.install(tmp_path / "slurm")
    command = [sys.executable, "-c", program, str(folder), sys.executable, "-S", "-E", "-c", stub]
    environment = {**os.environ, **variables}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    log = folder / "logs" / "a.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text(), "not started")
    subprocess.run([tmp_path / "slurm" / "bin" / "scancel", job, "--signal", "USR2"], env=environment, check=True)
    wait_for(lambda: slurm_stand_in.states(tmp_path / "slurm")[job] == "COMPLETED", "not requeued")
    assert list(slurm_stand_in.states(tmp_path / "slurm")) == [job]
    assert (tmp_path / "times").read_text() == "x"


def test_the_study_of_the_page_is_accepted():
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    block = re.findall(r"^```yaml\n(# .*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    values = {"name": "toy", **yaml.safe_load(block)}
    assert len(load(values).jobs) == 18


def test_the_estimate_leaves_nothing(tmp_path):
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump({"with": SMALL, "arms": {"q": {"config": "qmix"}}, "seeds": 3}))
    ended = run_command(
        [sys.executable, "-m", "omagd", "study", str(file), "--dry-run", "--probe-seconds", "2"], tmp_path
    )
    row = next(line.split() for line in ended.out.splitlines() if line.startswith("q "))
    assert row[:4] == ["q", "skirmish", "3m", "3"]
    assert "unknown" not in row
    assert re.search(r"^3 runs, about \d+\.\d+ core-hours$", ended.out, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["toy.yaml"]
