"""The fork server that preloads ranks: when it starts; and ranks end with the process that started them."""

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
from omagd.run.launch import processes

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
def test_it_starts_where_ranks_will_start_here(words, rank, wanted, monkeypatch):
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
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """Also if it is killed. The runs are side by side."""
    started = {}
    for how, (launcher, more) in LAUNCHERS.items():
        (tmp_path / how).mkdir()
        words = (MAIN, "-u", "--config=qmix", "with", "run=ddp", *BUDGETS, more, "t_max=100000000")
        started[how] = Started([PYTHON, *launcher, *words], tmp_path / how)
    for how, command in started.items():
        until = time.monotonic() + 60
        while not list(tmp_path.glob(f"{how}/results/*/metrics.jsonl")) and time.monotonic() < until:
            time.sleep(0.1)
        descendants = tree(command.process.pid)
        assert len(descendants) >= 3
        os.kill(command.process.pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while (alive := [pid for pid in descendants[1:] if running(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in alive:  # torchrun's ranks have sessions of their own
            os.kill(pid, signal.SIGKILL)
        assert alive == []
        command.wait(60)
        assert left_behind(command.group, patience=20) == []
        (folder,) = run_folders(tmp_path / how)
        assert summary_of(folder)["exit_state"] == "interrupted"


def test_a_rank_started_in_a_shell_outlives_it(monkeypatch):
    """A single process, or ranks whose variables were set by hand, are not ended with the shell."""
    watched = []
    monkeypatch.setattr(processes, "_when_over", lambda wait, launcher: watched.append(launcher))
    for name in processes.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    processes.end_with_launcher()
    assert watched == []
    monkeypatch.setenv("SLURM_PROCID", "0")
    processes.end_with_launcher()
    assert watched == [processes.STARTED_BY]


def test_the_end_of_a_launcher_is_noticed_also_if_it_came_first():
    """A process waits for its parent, which ends meanwhile, or ended before."""
    code = "import os, sys, time; from omagd.run.launch.processes import _wait_for_end\n"
    code += "now, parent, child = sys.argv[1] == 'now', os.getpid(), os.fork()\n"
    code += "time.sleep(0.5 * (now == (child > 0))); child and os._exit(0)\n"
    code += "_wait_for_end(parent); print('over', flush=True)"
    started = [subprocess.Popen([PYTHON, "-c", code, when], stdout=-1, text=True) for when in ("now", "before")]
    assert [process.communicate(timeout=60)[0] for process in started] == ["over\n", "over\n"]
