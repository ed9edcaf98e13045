"""Killed ranks are restarted, hanging ranks are named, and nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import shared_memory
import torch
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, children, left_behind, run_folders, summary_of
from sockets import listening, tree
from trap_env import exit_state, make_plugin, start, wait_for_training

from omagd.run.launch.failures import note, note_error, note_hung, notes_of, verdict
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RankFailed
from omagd.utils.signals import Stopped

SAVING = ("checkpoint_interval=0", "t_max=1000000000")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    return make_plugin(tmp_path_factory.mktemp("plugin"))


def places(tmp_path: Path) -> tuple[Path, Path, set[str]]:
    """Return where to run, a folder for temporary files, and what shared memory there is by now."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    return here, temporary, shared_memory.names()


def nothing_left(group: int, cwd: Path, temporary: Path, shared: set[str]) -> None:
    assert left_behind(group, patience=60) == []
    assert temporary_files(temporary) == []
    assert [path for folder in run_folders(cwd) for path in folder.glob(".attempt_*")] == []
    assert shared_memory.left_since(shared) == []


def temporary_files(folder: Path) -> list[str]:
    """Return what lies there but for the cache of compiled kernels that torch itself keeps for each user."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def wait_for(what: Callable[[], object], started: Started, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"it never came\n{started.wait(1).text}"
        time.sleep(0.1)


def newest_checkpoint(here: Path) -> str:
    return max((path.parent.name for path in here.glob("results/*/checkpoints/[0-9]*/manifest.json")), default="")


@pytest.mark.processes
def test_killed_ranks_start_again_and_a_preempted_run_is_saved(plugin, tmp_path):
    """One run's life: its sockets, a kill, the restart, then the SIGTERM that a batch system sends to all at once."""
    here, temporary, shared = places(tmp_path)
    started = start(plugin, here, "slow", *SAVING, TMPDIR=str(temporary))
    ranks = wait_for_training(started, here)
    for attempt in range(2):
        heard = listening(tree(started.process.pid))
        assert sum(len(addresses) > 0 for addresses in heard.values()) >= 3  # the store, and each rank
        assert {str(address) for addresses in heard.values() for address in addresses} == {"127.0.0.1"}
        assert temporary_files(temporary) == []
        if attempt == 0:
            wait_for(lambda: newest_checkpoint(here), started)
            os.kill(ranks[1], signal.SIGABRT)
            before, (log,) = set(ranks), here.glob("results/*/logs/rank_0.log")
            wait_for(lambda log=log: "continuing from" in log.read_text(), started)
            saved = newest_checkpoint(here)
            wait_for(lambda saved=saved: newest_checkpoint(here) > saved, started)  # it trains again
            ranks = children(started.process.pid)
            assert len(ranks) == 2 and not before & set(ranks)
    asked = time.monotonic()
    for pid in (*ranks, started.process.pid):
        os.kill(pid, signal.SIGTERM)
    ended = started.wait(60)
    assert ended.code == 143, ended.text
    assert time.monotonic() - asked < 25  # before they would be killed
    assert "rank 1 was killed by SIGABRT: restarting all ranks from the newest checkpoint (1 of 3)" in ended.text
    assert "is saved" in ended.text
    assert "Traceback" not in ended.text
    (folder,) = run_folders(here)
    assert (summary_of(folder)["exit_state"], summary_of(folder)["restarts"]) == ("interrupted", 1)
    nothing_left(ended.group, here, temporary, shared)


@pytest.mark.processes
def test_a_terminal_that_is_closed_saves_the_run(tmp_path):
    """The hangup reaches the launcher, its ranks and the process that they are forked from at the same time."""
    outer, inner = pty.openpty()
    words = (*BUDGETS, "run=ddp", "world_size=2", "t_max=100000000", "env_processes=True")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen(
        [PYTHON, MAIN, "--config=qmix", "with", *words], cwd=tmp_path, env=environment, start_new_session=True,
        stdin=inner, stdout=inner, stderr=inner,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    os.close(inner)
    seen = b""
    while b"Recent Stats" not in seen:
        seen += os.read(outer, 65536)
    os.close(outer)
    os.killpg(command.pid, signal.SIGHUP)
    assert command.wait(60) == 129
    assert left_behind(command.pid) == []
    (folder,) = run_folders(tmp_path)
    assert summary_of(folder)["exit_state"] == "interrupted"
    said = (folder / "logs" / "rank_0.log").read_text()
    (iteration,) = re.findall(r"asked to stop: iteration (\d+) is saved", said)
    last = f"interrupted by SIGHUP: {folder}; the newest checkpoint is of iteration {iteration};"
    assert last in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.processes
def test_after_the_last_restart_the_run_fails(plugin, tmp_path):
    here, temporary, shared = places(tmp_path)
    options = ("max_restarts=1", "env_args.step=1", "checkpoint_interval=1000", "t_max=1000000")
    ended = start(plugin, here, "kill", *options, TMPDIR=str(temporary)).wait()
    assert ended.code == 1, ended.text
    assert len(re.findall(r"restarting all ranks .* \(1 of 1\)", ended.text)) == 1
    assert "error: rank 1 was killed by SIGKILL (the system does that when memory runs out" in ended.err
    assert exit_state(here) == "failed"
    nothing_left(ended.group, here, temporary, shared)


@pytest.mark.processes
def test_a_rank_that_hangs_is_named_and_ends_the_run(plugin, tmp_path):
    """One was stopped, all hang at once, a single process hangs; their runs, which mostly wait, are side by side."""
    found = {}
    cases = {
        "stop": ((), "1", "no heartbeat for"),
        "endless": (("env_args.rank=-1",), "[01]", "in stage3 (collect) for"),
        "alone": (("env_args.rank=-1", "run=default", "world_size=None"), "0", "in stage3 (collect) for"),
    }
    for name, (words, _, _) in cases.items():
        (tmp_path / name).mkdir()
        around = places(tmp_path / name)
        how = "stop" if name == "stop" else "endless"
        words = (*words, "dist_timeout_minutes=0.1")
        found[name] = start(plugin, around[0], how, *words, TMPDIR=str(around[1])), around
    for name, (_, rank, says) in cases.items():
        started, (here, _, _) = found[name]
        ended = started.wait(120)
        assert ended.code == 1, ended.text
        (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert re.match(rf"error: rank {rank} \(host \S+, process \d+\) hangs: {re.escape(says)} \d+ s", line), line
        if name != "stop":
            assert re.search(r", in slot [01] from seed \d+", line)
            assert "omagd_trap.py" in ended.text and "in fail" in ended.text  # the stack
        assert "Traceback" not in ended.err and "restarting" not in ended.text
        assert exit_state(here) == "failed"
    for started, (here, temporary, shared) in found.values():
        nothing_left(started.group, here, temporary, shared)


@pytest.mark.processes
def test_torchrun_starts_all_ranks_again(plugin, tmp_path):
    here, temporary, shared = places(tmp_path)
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2")
    options = ("--config=qmix", "--env-config=trap", "with", "run=ddp", *BUDGETS, "t_max=400", "checkpoint_interval=0")
    trap = ("env_args.how=once", "env_args.step=80", f"env_args.once={tmp_path / 'sprung'}")
    path = os.pathsep.join(part for part in (plugin, os.environ.get("PYTHONPATH", "")) if part)
    started = Started([*torchrun, MAIN, *options, *trap], here, PYTHONPATH=path)
    ended = started.wait(120)
    assert ended.code == 0, ended.text
    assert (tmp_path / "sprung").exists()
    (folder,) = run_folders(here)
    assert (summary_of(folder)["exit_state"], summary_of(folder)["restarts"]) == ("completed", 1)
    assert summary_of(folder)["world_size"] == 2
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert "loss_td" in json.loads((here / "results" / "sacred" / "1" / "metrics.json").read_text())
    assert ended.out.count("Next    python") == 1
    nothing_left(ended.group, here, temporary, shared)


# --- the parts of it, without processes


BROKEN, GONE, OWN = "broken exchange", "connection closed", "my own mistake"
VERDICTS = (
    # exit code by rank in order of time, notes in order of time, the signal that killed a rank, words of the error
    ({0: 1, 1: -6}, {0: BROKEN}, "rank 1 was killed by SIGABRT", ""),
    ({0: 1, 2: 1, 1: -6}, {0: BROKEN, 2: BROKEN}, "rank 1 was killed by SIGABRT", ""),
    ({0: 1, 2: 1, 1: -6}, {2: OWN, 0: BROKEN}, "", OWN),
    ({1: -6, 0: 1}, {0: OWN}, "", OWN),
    ({1: -6}, {}, "rank 1 was killed by SIGABRT", ""),
    ({1: -9, 0: 1}, {0: GONE}, "rank 1 was killed by SIGKILL", "memory"),
    ({0: 1, 1: -9}, {0: GONE}, "rank 1 was killed by SIGKILL", ""),
    ({1: -11, 0: -6}, {}, "rank 1 was killed by SIGSEGV", ""),
    ({1: 143, 0: 1}, {0: GONE}, "rank 1 was killed by SIGTERM", ""),
    ({1: 7, 0: 1}, {0: GONE}, "", "rank 1 ended with exit code 7"),
    ({0: 1, 1: 1}, {1: OWN, 0: GONE}, "", OWN),
    ({1: 1, 0: -6}, {1: OWN}, "", OWN),
    ({0: 143, 1: 143}, {}, "", "SIGTERM"),
    ({1: 143, 0: 143}, {}, "", "SIGTERM"),
    ({0: 129, 1: 129}, {}, "", "SIGHUP"),
    ({1: 129, 0: 1}, {0: GONE}, "rank 1 was killed by SIGHUP", ""),
    ({0: 130, 1: 130}, {}, "", "SIGINT"),
)


@pytest.mark.parametrize(("failed", "notes", "killed", "words"), VERDICTS)
def test_only_a_signal_is_worth_another_try(tmp_path, failed, notes, killed, words):
    for moment, (rank, trace) in enumerate(notes.items()):
        note(tmp_path, f"rank_{rank}", {"time": moment, "rank": rank, "trace": trace, "exchange": trace == BROKEN})
    found = verdict(failed, tmp_path, max(2, len(failed)))
    assert found.killed == killed and killed in str(found.error) and words in str(found.error)
    together = len(failed) == 2 and len(set(failed.values())) == 1 and min(failed.values()) > 128
    assert isinstance(found.error, Stopped if together else RankFailed)
    assert not together or found.error.exit_code == failed[0]


def test_the_error_of_an_exchange_differs_from_a_rank_s_own(tmp_path):
    """A closed store stands for another rank that has ended: the error of the exchange is a consequence."""
    waits = Dist().waits
    for rank, kind in enumerate((RuntimeError, RuntimeError, torch.OutOfMemoryError)):
        try:
            with waits.counted() if rank else nullcontext():
                raise kind("connection closed")
        except RuntimeError as error:
            note_error(rank, tmp_path, error)
    notes = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(3)]
    assert [found["exchange"] for found in notes] == [False, True, False]
    assert "RuntimeError: connection closed" in notes[0]["trace"]


def test_a_hang_is_the_verdict_whatever_else_broke(tmp_path):
    note_hung(0, tmp_path, "rank 1 hangs", "  File x\n")
    note(tmp_path, "rank_2", {"time": time.time() + 1, "rank": 2, "trace": "connection closed"})
    found = verdict({0: 1, 2: 1, 1: -9}, tmp_path, 3)
    assert isinstance(found.error, RankFailed) and found.killed == ""
    assert str(found.error) == "rank 1 hangs; all ranks have been ended\n  File x"


def test_notes_of_killed_attempts_are_removed(tmp_path):
    stale = tmp_path / ".attempt_2"
    stale.mkdir()
    (stale / "rank_0.json").write_text("{}")
    with notes_of(str(tmp_path), 0) as notes:
        assert notes.is_dir() and not stale.exists()
    assert list(tmp_path.iterdir()) == []
