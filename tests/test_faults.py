"""Failures: each ends all ranks within seconds, reports the responsible rank and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import left_behind, run_folders
from trap_env import exit_state, make_plugin, start, wait_for_training

from omagd.config.schema import Config
from omagd.envs.sanity import MatrixGame
from omagd.run.cli.main import config_from, main
from omagd.run.launch import launcher as launch
from omagd.run.launch import watchdog
from omagd.run.launch.group import naming_a_lost_rank
from omagd.utils.dist_utils import Dist, Waits
from omagd.utils.errors import RankFailed, UserError


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    return make_plugin(tmp_path_factory.mktemp("plugin"))


ENDS = {
    # how, rank, exit code, words of the error
    "raise": ("raise", 1, 1, "error: rank 1 failed"),
    "kill 0": ("kill", 0, 1, "rank 0 was killed by SIGKILL"),
    "kill 1": ("kill", 1, 1, "rank 1 was killed by SIGKILL"),
    "exit": ("exit", 1, 1, "rank 1 ended with exit code 0 without an error message"),
    "user": ("user", 1, 2, "error: env_args.how=user: take another\n"),
    "leave": ("leave", 1, 1, "rank 1: sys.exit(0) was called before the run had ended"),
}


@pytest.mark.processes
def test_the_end_of_one_rank_ends_the_run_and_its_cause_is_reported(plugin, tmp_path):
    """The runs are side by side; "raise" also blocks the rank's own way out of the group."""
    started = {}
    for name, (how, rank, _, _) in ENDS.items():
        (tmp_path / name).mkdir()
        started[name] = start(plugin, tmp_path / name, how, f"env_args.rank={rank}", "max_restarts=0")
    for name, (how, _, code, words) in ENDS.items():
        ended = started[name].wait(120)
        assert (ended.code, exit_state(tmp_path / name)) == (code, "failed"), ended.text
        assert words in ended.err and "onnection closed" not in ended.err
        assert ended.err.count("Traceback") == (how == "raise") == ("ZeroDivisionError: the trap has" in ended.err)
        assert len([line for line in ended.err.splitlines() if line.startswith("error: ")]) == 1
        assert left_behind(ended.group) == []
    record = json.loads((tmp_path / "raise" / "results" / "sacred" / "1" / "run.json").read_text())
    assert record["status"] == "FAILED"


def test_under_torchrun_a_lost_connection_is_one_line(tmp_path):
    """With gloo's real error after the other process has ended; other errors stay as they are."""
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
        with pytest.raises(type(error)) as raised, naming_a_lost_rank(0):
            raise error
        assert raised.value is error
    with pytest.raises(RuntimeError, match="sizes differ"), naming_a_lost_rank(0), Waits().counted():
        raise RuntimeError("sizes differ")


SIGNALS = {
    # signal, receiver, exit code, more words
    "SIGTERM": (signal.SIGTERM, os.kill, 143, ()),
    "SIGINT": (signal.SIGINT, os.killpg, 130, ()),
    "SIGKILL": (signal.SIGKILL, os.kill, -signal.SIGKILL, ()),
    "one process": (signal.SIGTERM, os.kill, 143, ("run=default", "world_size=None")),
}


@pytest.mark.processes
def test_signals_end_all_ranks_within_seconds_and_leave_a_summary(plugin, tmp_path):
    """The runs are side by side."""
    started = {}
    for name, (_, _, _, words) in SIGNALS.items():
        (tmp_path / name).mkdir()
        started[name] = start(plugin, tmp_path / name, "slow", *words)
    for name in SIGNALS:
        wait_for_training(started[name], tmp_path / name, ranks=0 if name == "one process" else 2)
    for name, (number, send, code, _) in SIGNALS.items():
        asked = time.monotonic()
        send(started[name].process.pid, number)
        ended = started[name].wait(60)
        assert left_behind(ended.group, patience=15) == []
        assert time.monotonic() - asked < 20
        assert (ended.code, exit_state(tmp_path / name)) == (code, "interrupted")
        if number != signal.SIGKILL:
            assert "Traceback" not in ended.err and "frame #" not in ended.text
            (folder,) = run_folders(tmp_path / name)
            saved = "; the newest checkpoint is of iteration [0-9]+; continue with .* auto_resume=True"
            begun = "; no checkpoint yet, the same command starts from scratch"
            last = ended.err.splitlines()[-1]
            assert re.fullmatch(f"interrupted by {number.name}: {re.escape(str(folder))}({saved}|{begun})", last)
            assert number != signal.SIGTERM or re.search(saved, last)


@pytest.mark.processes
def test_a_port_in_use_is_no_error_and_two_jobs_do_not_collide(plugin, tmp_path):
    """A stranger holds the port that two jobs want; started at once, each of them finds another one."""
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        jobs = [start(plugin, place, "never", "t_max=40", f"ddp_port={port}") for place in places]
        ends = [job.wait(120) for job in jobs]
    assert [ended.code for ended in ends] == [0, 0], [ended.text for ended in ends]
    assert [f"ddp_port={port} is taken; using " in ended.text for ended in ends] == [True, True]
    assert [exit_state(place) for place in places] == ["completed"] * 2


# --- the parts of it, without processes


@pytest.mark.parametrize("when", ["checked", "played"])
def test_a_sys_exit_of_an_environment_never_ends_with_exit_code_0(when, monkeypatch, tmp_path, capsys):
    """In the check before the run, or in the run; this process, as `run=default` has it, with W&B's hook or without."""
    monkeypatch.chdir(tmp_path)
    if when == "played":
        hooked = sys.exit
        monkeypatch.setattr(sys, "exit", lambda code=None: hooked(code))
        hook = sys.exit
        monkeypatch.setattr(sys, "exit", lambda code=None: hook(code))  # W&B's, where a test has started it

    def leave(*_: object, **__: object) -> None:
        sys.exit(0)

    monkeypatch.setattr(MatrixGame, "__init__" if when == "checked" else "step", leave)
    assert main(["--config=qmix", "--env-config=matrix_game", "-u", "with", *BUDGETS]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: sys\.exit\(0\) was called before the run had ended \(.*test_faults\.py, .* leave\)", line
    )
    if when == "played":
        assert exit_state(tmp_path) == "failed"


def test_a_single_process_that_hangs_where_no_error_arrives_ends_with_its_books_closed(monkeypatch, tmp_path, capsys):
    """The environment swallows every error: the watchdog's thread writes the summary and ends the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watchdog, "CLOSING_SECONDS", 0.1)
    codes: list[int] = []
    released = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        released.set()

    def swallow(config: Config, dist: Dist, path: str, channel: object) -> dict:
        dist.waits.playing = True
        until = time.monotonic() + 30
        while not released.is_set() and time.monotonic() < until:
            with suppress(BaseException):
                released.wait(0.05)
        return {}

    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(launch, "run_experiment", swallow)
    words = ["--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "dist_timeout_minutes=0.005"]
    launch.launch(config_from(words), "hung")
    assert codes == [1]
    assert json.loads((tmp_path / "results" / "hung" / "summary.json").read_text())["exit_state"] == "failed"
    assert "error: rank 0 (host " in capsys.readouterr().err


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Type the commands in an empty folder, outside any torchrun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run `argv`, which must be refused in one line with at most two of help; return what it said."""
    assert main(argv) == 2
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert said.out == ""
    assert lines[0].startswith("error: ")
    assert len(lines) <= 3
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.processes
def test_weights_of_another_map_and_damaged_weights_are_refused(small_run, elsewhere, capsys):
    tokenizer, other = small_run / "models" / "pretrain_stage1_best", "env_args.map_name=5m_vs_6m"
    damaged = elsewhere / "damaged"
    damaged.mkdir()
    whole = (tokenizer / "tokenizer.th").read_bytes()
    (damaged / "tokenizer.th").write_bytes(whole[: len(whole) // 2])
    before = sorted(elsewhere.rglob("*"))
    said = refused(["with", other, *BUDGETS, f"pretrained_tokenizer_path={tokenizer}"], capsys)
    assert "pretrained_tokenizer_path=" in said
    said = refused(["with", *BUDGETS, f"pretrained_tokenizer_path={damaged}"], capsys)
    assert "pretrained_tokenizer_path=" in said
    said = refused(["with", *BUDGETS, "tokenizer_config.code_dim=4", f"pretrained_tokenizer_path={tokenizer}"], capsys)
    assert "code_dim" in said or "pretrained_tokenizer_path=" in said
    said = refused(["with", other, *BUDGETS, "evaluate=True", f"checkpoint_path={small_run}"], capsys)
    assert "path" in said
    assert sorted(elsewhere.rglob("*")) == before
