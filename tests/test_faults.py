"""Failures, signals and restarts: each is reported with its cause and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, children, left_behind, run_folders, summary_of
from sockets import listening, running, tree, wait_until
from trap_env import TrapRun

from omagd.envs.sanity import MatrixGame
from omagd.run.cli.main import config_from, main
from omagd.run.launch import launcher
from omagd.run.launch.launcher import verdict
from omagd.run.launch.watchdog import naming_a_lost_rank
from omagd.run.signals import Stopped
from omagd.utils.errors import RankFailed, UserError
from omagd.utils.waits import Waits

ENDS = {
    # how, rank, max_restarts, exit code, words of the error
    "raise": ("raise", 1, 0, 1, "error: rank 1, env=trap, slot "),
    "kill again": ("kill", 0, 1, 1, "rank 0 was killed by SIGKILL (the system does that when memory runs out"),
    "exit": ("exit", 1, 0, 1, "rank 1 ended with exit code 0 without an error message"),
    "user": ("user", 1, 0, 2, "error: env_args.how=user: take another\n"),
}


@pytest.mark.processes
def test_the_end_of_one_rank_ends_the_run_and_its_cause_is_reported(tmp_path):
    """In runs side by side; "raise" also blocks the rank's own way out of the group."""
    runs = {
        name: TrapRun(tmp_path / name, how, f"env_args.rank={rank}", f"max_restarts={restarts}")
        for name, (how, rank, restarts, *_) in ENDS.items()
    }
    for name, (how, _, restarts, code, error) in ENDS.items():
        ended = runs[name].end()
        assert (ended.code, runs[name].summary["exit_state"]) == (code, "failed"), ended.text
        assert error in ended.err and "onnection closed" not in ended.err
        assert "Traceback" not in ended.err and (how == "raise") == ("ZeroDivisionError: the trap has" in ended.err)
        assert len([line for line in ended.err.splitlines() if line.startswith("error: ")]) == 1
        assert len(re.findall(r"restarting all ranks .* \(1 of 1\)", ended.text)) == restarts
    record = json.loads((runs["raise"].here / "results" / "sacred" / "1" / "run.json").read_text())
    assert record["status"] == "FAILED"


SIGNALS = {
    # signal, how it is sent, exit code, settings
    "SIGTERM": (signal.SIGTERM, os.kill, 143, ()),
    "SIGINT": (signal.SIGINT, os.killpg, 130, ()),
    "SIGKILL": (signal.SIGKILL, os.kill, -signal.SIGKILL, ()),
    "one process": (signal.SIGTERM, os.kill, 143, ("run=default", "world_size=None")),
}


@pytest.mark.processes
def test_signals_end_all_ranks_within_seconds_and_leave_a_summary(tmp_path):
    """In runs side by side."""
    runs = {name: TrapRun(tmp_path / name, "slow", *words) for name, (*_, words) in SIGNALS.items()}
    for name, run in runs.items():
        run.wait_for_training(ranks=0 if name == "one process" else 2)
    for name, (number, send, code, _) in SIGNALS.items():
        run, asked = runs[name], time.monotonic()
        send(run.pid, number)
        ended = run.end()
        assert time.monotonic() - asked < 20
        assert (ended.code, run.summary["exit_state"]) == (code, "interrupted")
        if number != signal.SIGKILL:
            assert "Traceback" not in ended.err and "frame #" not in ended.text
            saved = "; the newest checkpoint is of iteration [0-9]+; continue with .* auto_resume=True"
            last = ended.err.splitlines()[-1]
            assert re.fullmatch(f"interrupted by {number.name}: {re.escape(str(run.folder))}{saved}", last)


@pytest.mark.processes
def test_killed_ranks_are_restarted_and_a_preempted_run_is_saved(tmp_path):
    """Listen on this host only; kill one rank; restart; send SIGTERM to all at once, as a batch system does."""
    run = TrapRun(tmp_path, "slow", "checkpoint_interval=0", "t_max=1000000000")

    def check_sockets() -> None:
        found = [addresses for addresses in listening(tree(run.pid)).values() if addresses]
        assert len(found) >= 3  # the store, and each rank
        assert {str(address) for addresses in found for address in addresses} == {"127.0.0.1"}
        assert run.temporary_files == []

    before = run.wait_for_training()
    check_sockets()
    run.wait_for(lambda: run.newest_checkpoint)
    os.kill(before[1], signal.SIGABRT)
    run.wait_for(lambda: "continuing from" in (run.folder / "logs" / "rank_0.log").read_text())
    saved = run.newest_checkpoint
    run.wait_for(lambda: run.newest_checkpoint > saved)  # it trains again
    ranks = children(run.pid)
    assert len(ranks) == 2 and not {*before} & {*ranks}
    check_sockets()
    asked = time.monotonic()
    for pid in (*ranks, run.pid):
        os.kill(pid, signal.SIGTERM)
    ended = run.end(60)
    assert time.monotonic() - asked < 25  # before they would be killed
    assert ended.code == 143, ended.text
    assert "rank 1 was killed by SIGABRT: restarting all ranks from the newest checkpoint (1 of 3)" in ended.text
    assert "is saved" in ended.text and "Traceback" not in ended.text
    assert (run.summary["exit_state"], run.summary["restarts"], run.shared_memory) == ("interrupted", 1, [])


@pytest.mark.processes
def test_a_closed_terminal_saves_the_run(tmp_path):
    """SIGHUP reaches the launcher, its ranks and the process that they are forked from at the same time."""
    outer, inner = pty.openpty()
    words = ("--env-config=matrix_game", "with", *BUDGETS, "run=ddp", "world_size=2", "t_max=100000000")
    command = subprocess.Popen(
        [PYTHON, MAIN, "--config=qmix", *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True, stdin=inner, stdout=inner, stderr=inner,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    os.close(inner)
    seen = b""
    while b"steps/s" not in seen:
        seen += os.read(outer, 65536)
    os.close(outer)
    os.killpg(command.pid, signal.SIGHUP)
    assert (command.wait(60), left_behind(command.pid)) == (129, [])
    (folder,) = run_folders(tmp_path)
    assert summary_of(folder)["exit_state"] == "interrupted"
    log = (folder / "logs" / "rank_0.log").read_text()
    (iteration,) = re.findall(r"asked to stop: iteration (\d+) is saved", log)
    last = f"interrupted by SIGHUP: {folder}; the newest checkpoint is of iteration {iteration};"
    assert last in log.splitlines()[-1] and "Traceback" not in log


@pytest.mark.processes
def test_torchrun_restarts_all_ranks_and_they_end_with_it(tmp_path):
    """A rank is killed; later torchrun, whose ranks have sessions of their own."""
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2")
    mark = tmp_path / "mark"
    words = ("t_max=100000000", "checkpoint_interval=0", "env_args.step=80", f"env_args.once={mark}")
    run = TrapRun(tmp_path, "once", *words, program=torchrun)
    run.wait_for(lambda: mark.exists() and "continuing from" in (run.folder / "logs" / "rank_0.log").read_text())
    saved = run.newest_checkpoint
    run.wait_for(lambda: run.newest_checkpoint > saved)  # it trains again
    ranks = tree(run.pid)[1:]
    assert len(ranks) >= 2
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(running, ranks)), 20)
    run.end()
    assert [run.summary[name] for name in ("exit_state", "restarts", "world_size")] == ["interrupted", 1, 2]
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert "loss_td" in json.loads((run.here / "results" / "sacred" / "1" / "metrics.json").read_text())
    assert run.shared_memory == []


# --- the verdict on a failed attempt


BROKEN, GONE, OWN = "broken exchange", "connection closed", "my own mistake"
VERDICTS = (
    # exit code by rank and notes, in order of time; the killed rank; words of the error
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
    ({0: 129, 1: 129}, {}, "", "SIGHUP"),
    ({1: 129, 0: 1}, {0: GONE}, "rank 1 was killed by SIGHUP", ""),
    ({0: 130, 1: 130}, {}, "", "SIGINT"),
)


@pytest.mark.parametrize(("failed", "notes", "killed", "words"), VERDICTS)
def test_only_after_a_signal_from_outside_a_restart_may_help(failed, notes, killed, words):
    found = [
        {"time": i, "rank": rank, "error": RankFailed(text), "exchange": text == BROKEN, "hung": False}
        for i, (rank, text) in enumerate(notes.items())
    ]
    found = verdict(failed, found, max(2, len(failed)))
    assert found.killed == killed and killed in str(found.error) and words in str(found.error)
    together = len(failed) == 2 and len(set(failed.values())) == 1 and min(failed.values()) > 128
    assert isinstance(found.error, Stopped if together else RankFailed)
    assert not together or found.error.exit_code == failed[0]


# --- in this process


def test_under_torchrun_a_lost_connection_is_one_line(tmp_path):
    """With gloo's real error after the other process has ended; other errors are not changed."""
    child = os.fork()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    try:
        group = torch.distributed.ProcessGroupGloo(store, 1 if child == 0 else 0, 2, timedelta(seconds=20))
        group.allreduce(torch.ones(1)).wait()
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    line = r"^rank 0: the connection to another rank broke \(Connection [a-z ]*by peer\): that rank has ended; [^\n]*$"
    with pytest.raises(RankFailed, match=line), naming_a_lost_rank(0), Waits().counted():
        group.allreduce(torch.ones(1)).wait()
    for error in (RuntimeError("Connection closed by peer"), UserError("x")):  # not within an exchange
        with pytest.raises(type(error), match=str(error)), naming_a_lost_rank(0):
            raise error
    with pytest.raises(RuntimeError, match="sizes differ"), naming_a_lost_rank(0), Waits().counted():
        raise RuntimeError("sizes differ")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder, outside any torchrun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("when", ["__init__", "step"])
def test_a_sys_exit_of_an_environment_never_ends_with_exit_code_0(when, monkeypatch, elsewhere, capsys):
    """In the check before the run (`__init__`) and in the run, there with a replaced `sys.exit`, as W&B does."""
    hooked = sys.exit
    if when == "step":
        monkeypatch.setattr(sys, "exit", lambda code=None: hooked(code))

    def leave(*_: object, **__: object) -> None:
        sys.exit(0)

    monkeypatch.setattr(MatrixGame, when, leave)
    words = ["--config=qmix", "--env-config=matrix_game", "-u", "with", *BUDGETS]
    assert main(words) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    place = r"\(.*test_faults\.py, .* leave\)"
    assert re.fullmatch(rf"error: sys\.exit\(0\) was called before the run had ended {place}", line)
    assert [summary_of(folder)["exit_state"] for folder in run_folders(elsewhere)] == ["failed"] * (when == "step")
    with pytest.raises(RankFailed, match="was called before the run had ended"):
        launcher.launch(config_from([word for word in words if word != "-u"]), "without_the_command_line")
