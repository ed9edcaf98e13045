"""launch.sh, the log beside it and the batch scripts: what they call, with which words, and how they end."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_harness import ROOT

from omagd.run.cli.main import config_from

WITH_LOG = str(ROOT / "scripts" / "with_log.py")
BATCH = ("slurm/one_node.sbatch", "slurm/many_nodes.sbatch", "slurm/snakes.sbatch")
NODE = "--nodes 2 --node-rank 1 --master-addr 10.9.8.7"

# Stands in for Python: has no GPU, refuses one key, and writes down how it is called otherwise.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 0; exit 0; fi
case "$*" in *--dry-run*) case "$*" in *t_mx=*) echo "error: t_mx" >&2; exit 2 ;; esac; exit 0 ;; esac
printf '%s\\n' "$@" >"$CALLED"
"""

# Stand in for SLURM's programs. srun runs its command on each host of the job and ends in its last exit code.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLED"
while [ "${1#--}" != "$1" ]; do shift; done
trap 'stop=1; kill -TERM $pids 2>/dev/null' TERM
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" & pids="${pids:-} $!"; done
[ -z "${stop:-}" ] || kill -TERM $pids
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
LAUNCH = """#!/usr/bin/env bash
echo "launch.sh $*" >>"$CALLED"
[ -z "${WAITING:-}" ] || { trap 'exit 143' TERM; echo "$$" >>"$WAITING"; while true; do sleep 0.05; done; }
exit "${LAUNCH_CODE:-0}"
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def launch(tmp_path):
    """Return a function that runs launch.sh with a stand-in Python: (process, its arguments)."""
    fake = program(tmp_path / "fake_python", FAKE_PYTHON)
    called = tmp_path / "called"

    def run(arguments: str, script: str = "launch.sh", **variables: str):
        called.unlink(missing_ok=True)
        clean = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG"}}
        env = {**clean, "HOME": str(tmp_path), "PYTHON": str(fake), "CALLED": str(called), **variables}
        command = ["bash", str(ROOT / script), *shlex.split(arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        return done, called.read_text().splitlines() if called.exists() else []

    return run


MISTAKES = {
    "--nodes 0": "--nodes 0: must be a whole number",
    "--nodes": "--nodes needs a value",
    "--gpus=-1": "--gpus -1",
    "--gpus 99999999999999999999": "--gpus 9999",
    "--nodes 2": "--node-rank",
    "--nodes 2 --node-rank 0": "--master-addr",
    "--nodes 2 --node-rank 2 --master-addr a": "--node-rank 2: must be below --nodes 2",
    "--nodes 2 --node-rank 0 --master-addr 'a b'": "--master-addr a b",
    "--master-port 65536": "--master-port 65536",
    "--max-restarts x": "--max-restarts x",
    "--node 2": "--node: not understood",
    "stray": "stray: not understood",
    f"{NODE} t_mx=3": "t_mx",
    "--dry-run t_mx=3": "t_mx",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line_before_anything_runs(launch, arguments):
    done, called = launch(arguments, ENV_CONFIG="skirmish", NUM_GPUS="2")
    assert (done.returncode, called) == (2, [])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert MISTAKES[arguments] in done.stderr


def test_several_hosts_use_torchrun(launch, tmp_path):
    words = (
        f"{NODE} --gpus 3 --master-port=29611 --config qmix --env-config skirmish --max-restarts 5 'name=a b' t_max=9"
    )
    done, called = launch(words, RESULTS_PATH="some where", GLOO_SOCKET_IFNAME="eth7")
    assert done.returncode == 0
    with_log, log, python, *command = called
    assert with_log == WITH_LOG
    assert log.startswith("some where/logs/launch_20") and log.endswith("_node1.log")
    assert command.pop(2) == "--log-dir={scratch}"
    expected = "-m torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node=3 --master-addr=10.9.8.7"
    assert command[:8] == [*expected.split(), "--master-port=29611", "--max-restarts=5"]
    assert command[8:12] == [str(ROOT / "src" / "main.py"), "--config=qmix", "--env-config=skirmish", "with"]
    assert {"run=ddp", "auto_resume=True", "local_results_path=some where"} <= set(command)
    assert not [word for word in command if word.startswith("world_size")]
    assert command[-2:] == ["name=a b", "t_max=9"]


def test_one_host_needs_no_torchrun_and_typed_values_win(launch):
    done, called = launch("--gpus 2 auto_resume=False local_results_path=there", ENV_CONFIG="skirmish")
    assert done.returncode == 0
    assert "torch.distributed.run" not in called
    assert called[1].startswith("there/logs/launch_") and called[1].endswith("_node0.log")
    assert "world_size=2" in called
    settings = dict(word.split("=", 1) for word in called if "=" in word)
    assert (settings["auto_resume"], settings["local_results_path"]) == ("False", "there")


def test_the_published_name_takes_the_flags_of_its_guide(launch):
    """Typed as the guide does it, with the file of a configuration; it ends in what launch.sh does."""
    guide = "--config my/distributed.yaml --nodes 2 --gpus 4 --node-rank 1 --master-addr 192.168.1.100"
    guide += " --master-port 12355 --debug --dry-run"
    done, called = launch(guide, script="scripts/launch_distributed_training.sh", ENV_CONFIG="skirmish")
    assert (done.returncode, called) == (0, [])
    assert done.stdout == launch(guide, ENV_CONFIG="skirmish")[0].stdout
    shown = shlex.split(done.stdout)
    wanted = "--nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr=192.168.1.100 --master-port=12355"
    assert {*wanted.split(), "--config=my/distributed.yaml", "distributed_debug=True"} <= set(shown)
    done, _ = launch("--nodes two", script="scripts/launch_distributed_training.sh")
    assert (done.returncode, done.stderr) == (2, "error: --nodes two: must be a whole number from 1 to 65536\n")


def test_a_dry_run_shows_a_command_that_can_be_typed_and_hosts_differ_in_their_rank_alone(launch):
    shown = []
    for rank in (0, 1):
        words = f"--nodes 2 --node-rank {rank} --master-addr 10.9.8.7 --gpus 1 --debug --dry-run 'name=a b'"
        done, called = launch(words, ENV_CONFIG="skirmish", GLOO_SOCKET_IFNAME="e")
        assert (done.returncode, called) == (0, [])
        shown.append(shlex.split(done.stdout))
    assert shown[0][0] == "GLOO_SOCKET_IFNAME=e"
    assert {"--nnodes=2", "distributed_debug=True", "name=a b"} <= set(shown[0])
    assert set(shown[0]) ^ set(shown[1]) == {"--node-rank=0", "--node-rank=1"}


def shown_commands() -> list[str]:
    """Return what the pages and the script itself say of launch.sh, one line each."""
    pages = [ROOT / "launch.sh", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(re.sub(r" *\\\n\s*", " ", page.read_text(encoding="utf-8")) for page in pages)
    return sorted(set(re.findall(r"^(?:# +)?\./launch\.sh +(--nodes .*)$", text, re.MULTILINE)))


def test_documented_commands_are_understood(launch):
    assert len(shown_commands()) >= 2
    for line in shown_commands():
        done, called = launch(line, ENV_CONFIG="skirmish", GLOO_SOCKET_IFNAME="e")
        assert done.returncode == 0, done.stderr
        at = called.index(str(ROOT / "src" / "main.py"))
        assert config_from(called[at + 1 :]).auto_resume


def with_log(tmp_path: Path, script: str, **options):
    command = [sys.executable, WITH_LOG, str(tmp_path / "logs" / "a.log"), sys.executable, "-u", "-c", script]
    return subprocess.Popen(command, **options)


@pytest.mark.processes
def test_the_exit_code_output_and_scratch_folder_of_a_logged_command(tmp_path):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for script, code in (("pass", 0), ("raise SystemExit(3)", 3), (killed, 137)):
        assert with_log(tmp_path, script).wait(20) == code
    (tmp_path / "logs" / "a.log").unlink()
    script = "import sys; print('one'); print('bar 1%\\rbar 9%', file=sys.stderr); print('\\033[1mtwo\\033[0m', end='')"
    out, err = with_log(tmp_path, script, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=60)
    assert (out, err) == (b"one\n\033[1mtwo\033[0m", b"bar 1%\rbar 9%\n")
    assert sorted((tmp_path / "logs" / "a.log").read_text().splitlines()) == ["bar 9%", "one", "two"]
    words = [sys.executable, "-c", "import os, sys; print(os.path.isdir(sys.argv[1]), sys.argv[1])", "{scratch}"]
    done = subprocess.run([sys.executable, WITH_LOG, str(tmp_path / "log"), *words], capture_output=True, text=True)
    there, folder = done.stdout.split()
    assert (done.returncode, there, os.path.exists(folder)) == (0, "True", False)


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_forwarded_and_is_the_exit_code(tmp_path, number, code):
    """torchrun ends with 1 whatever signal its ranks got."""
    script = "import signal, sys, time\nfor n in (2, 15): signal.signal(n, lambda n, f: sys.exit(1))\n"
    started = with_log(tmp_path, script + "print('ready')\ntime.sleep(60)", stdout=subprocess.PIPE)
    assert started.stdout.readline() == b"ready\n"
    started.send_signal(number)
    assert started.wait(20) == code
    started.stdout.close()


@pytest.mark.processes
def test_a_hangup_that_nohup_ignores_is_not_forwarded(tmp_path):
    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    mark = tmp_path / "go"
    script = (
        f"import os, sys, time\nprint('ready')\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.02)\nsys.exit(5)"
    )
    with with_log(tmp_path, script, preexec_fn=nohup, stdout=subprocess.PIPE) as started:
        assert started.stdout.readline() == b"ready\n"
        started.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        mark.touch()
        assert started.wait(20) == 5


@pytest.mark.processes
def test_a_command_on_a_terminal_has_a_terminal(tmp_path):
    outer, inner = pty.openpty()
    script = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size(1))"
    os.system(f"stty rows 31 cols 97 < {os.ttyname(inner)}")
    started = with_log(tmp_path, script, stdout=inner, stderr=subprocess.DEVNULL)
    os.close(inner)
    shown = ""
    while not shown.endswith("\n"):
        shown += os.read(outer, 1000).decode()
    assert started.wait(20) == 0
    os.close(outer)
    assert shown == "True False 97 31\r\n"
    assert (tmp_path / "logs" / "a.log").read_text() == "True False 97 31\n"


@pytest.fixture
def slurm(tmp_path):
    """Return a function that starts a batch script where SLURM's programs are stand-ins."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program(tmp_path / "bin" / name, text)
    program(tmp_path / "repository" / "launch.sh", LAUNCH)
    program(tmp_path / "repository" / "train_ddp.sh", LAUNCH.replace("launch.sh", "train_ddp.sh $NUM_GPUS"))
    (tmp_path / "repository" / "slurm").mkdir()
    (tmp_path / "repository" / "slurm" / "lib.sh").write_text((ROOT / "slurm" / "lib.sh").read_text())

    def start(script: str, *arguments: str, **variables: str):
        nodes = "2" if "many" in script else "1"
        env = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLED": str(tmp_path / "called"),
            "OMAGD_ROOT": str(tmp_path / "repository"), "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_JOB_NODELIST": "gpu[17-18]", "SLURM_GPUS_ON_NODE": "4", **variables,
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(ROOT / script), *arguments], cwd=tmp_path, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    start.called = lambda: (tmp_path / "called").read_text().splitlines()
    start.waiting = tmp_path / "waiting"
    return start


def test_slurm_starts_one_launcher_on_each_host(slurm):
    started = slurm("slurm/many_nodes.sbatch", "--config", "qmix", "name=a b")
    assert started.communicate(timeout=60)[1] == ""
    assert started.returncode == 0
    launches = sorted(line for line in slurm.called() if line.startswith("launch.sh"))
    rest = "--nodes 2 --master-addr gpu17 --master-port 14711 --gpus 4 --config qmix name=a b"
    assert launches == [f"launch.sh --node-rank {rank} {rest}" for rank in (0, 1)]
    assert not [line for line in slurm.called() if "requeue" in line]


def test_slurm_on_one_host_and_the_exit_code_of_a_job(slurm):
    """A job that ends by itself is not queued again."""
    for code in (0, 1, 2, 143):
        started = slurm("slurm/one_node.sbatch", "t_max=9", LAUNCH_CODE=str(code))
        started.communicate(timeout=60)
        assert started.returncode == code
    assert {line for line in slurm.called() if line.startswith("launch.sh")} == {"launch.sh --gpus 4 t_max=9"}
    assert not [line for line in slurm.called() if "requeue" in line]
    started = slurm("slurm/snakes.sbatch", "--max_episodes", "9")
    started.communicate(timeout=60)
    assert started.returncode == 0
    assert [line for line in slurm.called() if line.startswith("train_ddp.sh")] == ["train_ddp.sh 4 --max_episodes 9"]


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_at_its_time_limit_is_queued_again_and_a_cancelled_one_is_not(slurm, script, number, again):
    started = slurm(script, WAITING=str(slurm.waiting))
    hosts, until = 2 if "many" in script else 1, time.monotonic() + 60
    while time.monotonic() < until:
        if slurm.waiting.exists() and slurm.waiting.read_text().count("\n") == hosts:
            break
        time.sleep(0.02)
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == 143
    assert ("scontrol requeue 4711" in slurm.called()) == again


def test_a_batch_script_elsewhere_reports_the_missing_repository(slurm, tmp_path):
    started = slurm("slurm/one_node.sbatch", OMAGD_ROOT=str(tmp_path))
    assert started.communicate(timeout=60)[1].startswith("error: no slurm/lib.sh in")
    assert started.returncode == 2
