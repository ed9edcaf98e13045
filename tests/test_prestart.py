"""Ranks that are forked from a process which has imported everything: when there is one, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing import forkserver

import pytest
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, left_behind, run_folders, summary_of
from sockets import running, tree

from omagd.run.cli.main import config_from
from omagd.run.launch import group, processes

DDP = ("--config=qmix", "with", "run=ddp", "world_size=2")


@pytest.mark.parametrize(
    ("words", "rank", "wanted"),
    [
        (DDP, None, True),
        (DDP, "0", False),  # torchrun has started the ranks
        ((*DDP, "use_ddp=False"), None, False),
        ((*DDP[:-1], "world_size=1"), None, False),
        (("--config=qmix", "with"), None, False),
    ],
)
def test_it_is_begun_where_ranks_will_be_started_here(words, rank, wanted, monkeypatch):
    started = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: started.append(True))
    monkeypatch.setattr(forkserver, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(processes, "_preloading", False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert processes.start_method() == "spawn"
    config = config_from(list(words))
    processes.preload(config)
    processes.preload(config)
    assert started == [True] * wanted
    assert processes.start_method() == ("forkserver" if wanted else "spawn")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
LAUNCHERS = {"spawned": ((), "world_size=2"), "torchrun": (TORCHRUN, "env_processes=True")}


@pytest.mark.processes
@pytest.mark.parametrize("how", LAUNCHERS)
def test_ranks_end_with_the_process_that_started_them(how, tmp_path):
    """Also where it is killed, so that it can tell nobody; and nothing of it stays outside the run's folder."""
    launcher, more = LAUNCHERS[how]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = (MAIN, "-u", "--config=qmix", "with", "run=ddp", *BUDGETS, more, "t_max=100000000")
    started = Started([PYTHON, *launcher, *words], tmp_path, TMPDIR=str(temporary))
    until = time.monotonic() + 60
    while not list(tmp_path.glob("results/*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    processes = tree(started.process.pid)
    assert len(processes) >= 3
    os.kill(started.process.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while (alive := [pid for pid in processes[1:] if running(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in alive:  # torchrun's ranks have sessions of their own
        os.kill(pid, signal.SIGKILL)
    assert alive == []
    started.wait(60)
    assert left_behind(started.group, patience=20) == []
    if how == "spawned":
        assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    (folder,) = run_folders(tmp_path)
    assert summary_of(folder)["exit_state"] == "interrupted"


def test_a_rank_that_somebody_has_started_in_a_shell_is_not_ended_with_it(monkeypatch):
    """A single process, or ranks whose variables were set by hand and left running, outlive the shell."""
    watched = []
    monkeypatch.setattr(group, "_when_over", lambda wait, launcher: watched.append(launcher))
    for name in group.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    group.end_with_launcher()
    assert watched == []
    monkeypatch.setenv("SLURM_PROCID", "0")
    group.end_with_launcher()
    assert watched == [group.STARTED_BY]


def test_the_end_of_a_launcher_is_seen_also_where_it_came_first():
    """A process that waits for its parent: the parent ends meanwhile, or had ended before it was asked about."""
    code = "import os, sys, time; from omagd.run.launch.group import _wait_for_end\n"
    code += "now, parent, child = sys.argv[1] == 'now', os.getpid(), os.fork()\n"
    code += "time.sleep(0.5 * (now == (child > 0))); child and os._exit(0)\n"
    code += "_wait_for_end(parent); print('over', flush=True)"
    for when in ("now", "before"):
        found = subprocess.run([PYTHON, "-c", code, when], capture_output=True, text=True, timeout=60, check=True)
        assert found.stdout == "over\n"
