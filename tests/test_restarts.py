"""Killed ranks are restarted, hanging ranks are named, and nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
from contextlib import nullcontext

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, children, left_behind, run_folders, summary_of
from sockets import listening, tree
from trap_env import TrapRun

from omagd.run.launch.failures import Notes, verdict
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RankFailed
from omagd.utils.signals import Stopped


@pytest.mark.processes
def test_killed_ranks_are_restarted_and_a_preempted_run_is_saved(tmp_path):
    """Listen on this host only; kill one rank; restart; send SIGTERM to all at once, as a batch system does."""
    run = TrapRun(tmp_path, "slow", "checkpoint_interval=0", "t_max=1000000000")

    def check_sockets() -> None:
        heard = listening(tree(run.pid))
        assert sum(len(addresses) > 0 for addresses in heard.values()) >= 3  # the store, and each rank
        assert {str(address) for addresses in heard.values() for address in addresses} == {"127.0.0.1"}
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
    assert (run.summary["exit_state"], run.summary["restarts"]) == ("interrupted", 1)


@pytest.mark.processes
def test_a_closed_terminal_saves_the_run(tmp_path):
    """SIGHUP reaches the launcher, its ranks and the process that they are forked from at the same time."""
    outer, inner = pty.openpty()
    words = (*BUDGETS, "run=ddp", "world_size=2", "t_max=100000000", "env_processes=True")
    command = subprocess.Popen(
        [PYTHON, MAIN, "--config=qmix", "with", *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True, stdin=inner, stdout=inner, stderr=inner,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    os.close(inner)
    seen = b""
    while b"Recent Stats" not in seen:
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


HANGS = {
    # how, settings, rank, words of the error
    "stop": ("stop", (), "1", "no heartbeat for"),
    "endless": ("endless", ("env_args.rank=-1",), "[01]", "in stage3 (collect) for"),
    "alone": ("endless", ("env_args.rank=-1", "run=default", "world_size=None"), "0", "in stage3 (collect) for"),
}


@pytest.mark.processes
def test_a_rank_that_hangs_is_named_and_ends_the_run(tmp_path):
    """One rank is stopped, all hang at once, a single process hangs; in runs side by side."""
    runs = {name: TrapRun(tmp_path / name, h, *w, "dist_timeout_minutes=0.1") for name, (h, w, *_) in HANGS.items()}
    for name, (how, _, rank, words) in HANGS.items():
        ended = runs[name].end()
        assert (ended.code, runs[name].summary["exit_state"]) == (1, "failed"), ended.text
        (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert re.match(rf"error: rank {rank} \(host \S+, process \d+\) hangs: {re.escape(words)} \d+ s", line), line
        if how == "endless":
            assert re.search(r", in slot [01] from seed \d+", line)
            assert "trap_env.py" in ended.text and "in fail" in ended.text  # the stack
        assert "Traceback" not in ended.err and "restarting" not in ended.text


@pytest.mark.processes
def test_torchrun_restarts_all_ranks(tmp_path):
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2")
    mark = tmp_path / "mark"
    words = ("t_max=400", "checkpoint_interval=0", "env_args.step=80", f"env_args.once={mark}")
    run = TrapRun(tmp_path, "once", *words, program=torchrun)
    ended = run.end()
    assert (ended.code, mark.exists()) == (0, True), ended.text
    assert [run.summary[name] for name in ("exit_state", "restarts", "world_size")] == ["completed", 1, 2]
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert "loss_td" in json.loads((run.here / "results" / "sacred" / "1" / "metrics.json").read_text())
    assert ended.out.count("Next    python") == 1


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
    names = ("time", "rank", "trace", "exchange")
    found = [dict(zip(names, (i, *note, note[1] == BROKEN), strict=True)) for i, note in enumerate(notes.items())]
    found = verdict(failed, found, max(2, len(failed)))
    assert found.killed == killed and killed in str(found.error) and words in str(found.error)
    together = len(failed) == 2 and len(set(failed.values())) == 1 and min(failed.values()) > 128
    assert isinstance(found.error, Stopped if together else RankFailed)
    assert not together or found.error.exit_code == failed[0]


def test_notes_mark_errors_of_exchanges_and_replace_those_of_killed_attempts(tmp_path):
    """The error of an exchange may be the consequence of another rank's end."""
    (tmp_path / ".attempt_2").mkdir()
    (tmp_path / ".attempt_2" / "rank_0.json").touch()
    notes, waits = Notes(tmp_path, 0), Dist().waits
    with notes.opened():
        assert list(tmp_path.iterdir()) == [notes.folder]
        for rank, kind in enumerate((RuntimeError, RuntimeError, torch.OutOfMemoryError)):
            try:
                with waits.counted() if rank else nullcontext():
                    raise kind("connection closed")
            except RuntimeError as error:
                notes.error(rank, error)
        assert [found["exchange"] for found in notes.errors()] == [False, True, False]
        assert "RuntimeError: connection closed" in notes.errors()[0]["trace"]
        notes.hung(3, "rank 1 hangs", "  File x\n")
        (hang,) = [found for found in notes.errors() if found["rank"] == 3]
    assert list(tmp_path.iterdir()) == []
    found = verdict({0: 1, 2: 1, 1: -9}, [hang, {"rank": 2, "trace": "connection closed"}], 3)
    assert isinstance(found.error, RankFailed) and found.killed == ""
    assert str(found.error) == "rank 1 hangs; all ranks have been ended\n  File x"
