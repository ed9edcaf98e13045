"""launch.sh, the log beside it and the batch scripts: what they call, and how they end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_harness import ROOT
from sockets import wait_until

WITH_LOG = str(ROOT / "scripts" / "with_log.py")
PUBLISHED = "scripts/launch_distributed_training.sh"
NODE = "--nodes 2 --node-rank 1 --master-addr 10.9.8.7"

# Replaces Python: has no GPU, rejects one key, otherwise writes down its arguments.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 0; exit 0; fi
case "$*" in *--dry-run*) case "$*" in *t_mx=*) echo "error: t_mx" >&2; exit 2 ;; esac; exit 0 ;; esac
printf '%s\\n' "$@" >"$CALLED"
"""

# Replace SLURM's programs. srun runs its command on each host of the job and returns the highest exit code.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLED"
while [ "${1#--}" != "$1" ]; do shift; done
trap 'stop=1; kill -KILL $pids 2>/dev/null' TERM  # as srun: "forcing job termination"
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" & pids="${pids:-} $!"; done
[ -z "${stop:-}" ] || kill -KILL $pids
code=0
for pid in $pids; do
    while true; do wait $pid; last=$?; kill -0 $pid 2>/dev/null || break; done
    [ "$last" -le "$code" ] || code=$last
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLED"
[ "$1" != show ] || printf 'gpu17\\ngpu18\\n'
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>"$CALLED"
kill -TERM $(cat "$WAITING")
"""
LAUNCH = """#!/usr/bin/env bash
echo "launch.sh $*" >>"$CALLED"
[ -z "${WAITING:-}" ] || { trap 'exit 143' TERM; echo "$$" >>"$WAITING"; while true; do sleep 0.05; done; }
exit "${LAUNCH_CODE:-0}"
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def launch(tmp_path):
    """Return a function that runs launch.sh with `FAKE_PYTHON`: (process, Python's arguments)."""
    fake, called = tmp_path / "fake_python", tmp_path / "called"
    program(fake, FAKE_PYTHON)

    def run(arguments: str, script: str = "launch.sh", **variables: str):
        called.unlink(missing_ok=True)
        clean = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG"}}
        env = {**clean, "HOME": str(tmp_path), "PYTHON": str(fake), "CALLED": str(called), "ENV_CONFIG": "skirmish"}
        command = ["bash", str(ROOT / script), *shlex.split(arguments)]
        done = subprocess.run(command, cwd=tmp_path, env={**env, **variables}, capture_output=True, text=True)
        return done, called.read_text().splitlines() if called.exists() else []

    return run


MISTAKES = {
    "--nodes 0": "--nodes 0: must be a whole number", "--nodes": "--nodes needs a value", "--gpus=-1": "--gpus -1",
    "--gpus 99999999999999999999": "--gpus 9999", "--nodes 2": "--node-rank",
    "--nodes 2 --node-rank 0": "--master-addr",
    "--nodes 2 --node-rank 2 --master-addr a": "--node-rank 2: must be below --nodes 2",
    "--nodes 2 --node-rank 0 --master-addr 'a b'": "--master-addr a b",
    "--master-port 65536": "--master-port 65536", "--max-restarts x": "--max-restarts x",
    "--node 2": "--node: not understood", "stray": "stray: not understood", f"{NODE} t_mx=3": "t_mx",
    "--dry-run t_mx=3": "t_mx",
}  # fmt: skip


def test_mistakes_are_one_line_before_anything_runs(launch):
    for arguments, named in MISTAKES.items():
        done, called = launch(arguments, NUM_GPUS="2")
        assert (done.returncode, called) == (2, []), arguments
        assert re.fullmatch(f"error: .*{re.escape(named)}.*\n", done.stderr), done.stderr


def test_several_hosts_use_torchrun(launch):
    words = (
        f"{NODE} --gpus 3 --master-port=29611 --config qmix --env-config skirmish --max-restarts 5 'name=a b' t_max=9"
    )
    done, (with_log, log, _, *command) = launch(words, RESULTS_PATH="some where", GLOO_SOCKET_IFNAME="eth7")
    assert (done.returncode, with_log) == (0, WITH_LOG)
    assert log.startswith("some where/logs/launch_20") and log.endswith("_node1.log")
    assert command.pop(2) == "--log-dir={scratch}"
    expected = "-m torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node=3 --master-addr=10.9.8.7"
    assert command[:8] == [*expected.split(), "--master-port=29611", "--max-restarts=5"]
    assert command[8:12] == [str(ROOT / "src" / "main.py"), "--config=qmix", "--env-config=skirmish", "with"]
    assert {"run=ddp", "auto_resume=True", "local_results_path=some where"} <= set(command)
    assert not [word for word in command if word.startswith("world_size")]
    assert command[-2:] == ["name=a b", "t_max=9"]


def test_one_host_needs_no_torchrun_and_typed_values_win(launch):
    done, called = launch("--gpus 2 auto_resume=False local_results_path=there")
    assert done.returncode == 0 and "torch.distributed.run" not in called
    assert called[1].startswith("there/logs/launch_") and called[1].endswith("_node0.log")
    settings = dict(word.split("=", 1) for word in called if "=" in word)
    assert settings.items() >= {"world_size": "2", "auto_resume": "False", "local_results_path": "there"}.items()


def test_a_dry_run_prints_a_command_that_differs_between_hosts_by_their_rank_only(launch):
    printed = {}
    for script in ("launch.sh", PUBLISHED):
        for rank in (0, 1):
            words = f"--config my/d.yaml --nodes 2 --node-rank {rank} --master-addr 192.168.1.100 --gpus 4"
            words += " --master-port 12355 --debug --dry-run 'name=a b'"
            done, called = launch(words, script, GLOO_SOCKET_IFNAME="e")
            assert (done.returncode, called) == (0, [])
            printed[script, rank] = shlex.split(done.stdout)
        assert set(printed[script, 0]) ^ set(printed[script, 1]) == {"--node-rank=0", "--node-rank=1"}
    shown = printed["launch.sh", 1]
    assert shown == printed[PUBLISHED, 1] and shown[0] == "GLOO_SOCKET_IFNAME=e"
    wanted = "--nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr=192.168.1.100 --master-port=12355"
    assert {*wanted.split(), "--config=my/d.yaml", "distributed_debug=True", "name=a b"} <= set(shown)


def with_log(tmp_path: Path, script: str, *words: str, **options) -> subprocess.Popen:
    command = [sys.executable, WITH_LOG, str(tmp_path / "logs" / "a.log"), sys.executable, "-u", "-c", script, *words]
    return subprocess.Popen(command, **options)


@pytest.mark.processes
def test_the_exit_code_output_and_scratch_folder_of_a_logged_command(tmp_path):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for script, code in (("raise SystemExit(3)", 3), (killed, 137)):
        assert with_log(tmp_path, script).wait(20) == code
    (tmp_path / "logs" / "a.log").unlink()
    script = "import os, sys; print(os.path.isdir(sys.argv[1]), sys.argv[1])\n"
    script += "print('bar 1%\\rbar 9%', file=sys.stderr); print('\\033[1mtwo\\033[0m', end='')"
    started = with_log(tmp_path, script, "{scratch}", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = (output.decode() for output in started.communicate(timeout=60))
    first, last = out.split("\n")
    there, folder = first.split()
    assert (there, os.path.exists(folder), last, err) == ("True", False, "\033[1mtwo\033[0m", "bar 1%\rbar 9%\n")
    assert {*(tmp_path / "logs" / "a.log").read_text().splitlines()} == {first, "bar 9%", "two"}


@pytest.mark.processes
@pytest.mark.parametrize(("number", "ignored", "code"), [
    (signal.SIGTERM, False, 143), (signal.SIGHUP, False, 129), (signal.SIGHUP, True, 5),
])  # fmt: skip
def test_a_signal_is_forwarded_and_decides_the_exit_code_unless_nohup_ignores_it(tmp_path, number, ignored, code):
    """torchrun exits with 1 whatever signal its ranks received."""
    script = "import signal, sys, time\nfor n in (1, 2, 15): signal.signal(n, lambda *_: sys.exit(1))\n"
    action = signal.SIG_IGN if ignored else signal.SIG_DFL
    script += f"print('ready')\ntime.sleep({0.5 if ignored else 60})\nsys.exit(5)"
    prepare = lambda: signal.signal(signal.SIGHUP, action)  # noqa: E731
    with with_log(tmp_path, script, stdout=subprocess.PIPE, preexec_fn=prepare) as started:
        assert started.stdout.readline() == b"ready\n"
        started.send_signal(number)
        assert started.wait(20) == code


@pytest.fixture
def slurm(tmp_path):
    """Return a function that starts a batch script with replaced programs of SLURM."""
    called, repository = tmp_path / "called", tmp_path / "repository"
    programs = {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "bin/scancel": SCANCEL, "repository/launch.sh": LAUNCH}
    programs["repository/train_ddp.sh"] = LAUNCH.replace("launch.sh", "train_ddp.sh $NUM_GPUS")
    programs["repository/slurm/lib.sh"] = (ROOT / "slurm" / "lib.sh").read_text()
    for name, text in programs.items():
        program(tmp_path / name, text)

    def start(script: str, *arguments: str, **variables: str):
        called.write_text("")
        env = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLED": str(called), "OMAGD_ROOT": str(repository),
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2" if script == "many_nodes" else "1",
            "SLURM_JOB_NODELIST": "gpu[17-18]", "SLURM_GPUS_ON_NODE": "4", **variables,
        }  # fmt: skip
        command = ["bash", str(ROOT / "slurm" / f"{script}.sbatch"), *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE)

    start.called = lambda: called.read_text().splitlines()
    return start


HOSTS = "--nodes 2 --master-addr gpu17 --master-port 14711 --gpus 4 --config qmix name=a b"
JOBS = (
    ("many_nodes", ("--config", "qmix", "name=a b"), 0, [f"launch.sh --node-rank {rank} {HOSTS}" for rank in (0, 1)]),
    *(("one_node", ("t_max=9",), code, ["launch.sh --gpus 4 t_max=9"]) for code in (0, 1, 143)),
    ("snakes", ("--max_episodes", "9"), 0, ["train_ddp.sh 4 --max_episodes 9"]),
)


def test_a_job_starts_one_launcher_on_each_host_and_ends_with_its_exit_code(slurm, tmp_path):
    for script, arguments, code, launches in JOBS:
        started = slurm(script, *arguments, LAUNCH_CODE=str(code))
        assert (started.communicate(timeout=60)[1], started.returncode) == ("", code)
        assert sorted(line for line in slurm.called() if ".sh " in line and not line.startswith("srun")) == launches
        assert not [line for line in slurm.called() if "requeue" in line]
    started = slurm("one_node", OMAGD_ROOT=str(tmp_path))
    assert started.communicate(timeout=60)[1].startswith("error: no slurm/lib.sh in")
    assert started.returncode == 2


@pytest.mark.parametrize("script", ["one_node", "many_nodes", "snakes"])
@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_at_its_time_limit_is_queued_again_and_a_cancelled_one_is_not(slurm, tmp_path, script, number, again):
    waiting, hosts = tmp_path / "waiting", 2 if script == "many_nodes" else 1
    started = slurm(script, WAITING=str(waiting))
    assert wait_until(lambda: waiting.exists() and waiting.read_text().count("\n") == hosts)
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == 143
    assert ("scontrol requeue 4711" in slurm.called()) == again
    assert "scancel --signal=TERM 4711" in slurm.called()
