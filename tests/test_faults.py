"""What goes wrong: every failure ends all ranks within seconds, says whose it was, and leaves no process behind."""

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
from trap_world import exit_state, make_plugin, start, wait_for_training

from omagd.config.schema import Config
from omagd.envs.sanity import MatrixGame
from omagd.run.cli.main import config_from, main
from omagd.run.launch import launcher as launch
from omagd.run.launch import watchdog
from omagd.run.launch.failures import verdict
from omagd.run.launch.group import naming_a_lost_rank
from omagd.utils.dist_utils import Dist, Waits
from omagd.utils.errors import RankFailed, UserError


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    return make_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.mark.processes
def test_an_error_of_one_rank_is_what_the_console_shows(plugin, tmp_path):
    """Also where that rank could not leave the group without the others, which wait for it."""
    ended = start(plugin, tmp_path, "raise").wait(120)
    assert ended.code == 1
    assert "error: rank 1 failed" in ended.err
    assert "ZeroDivisionError: the trap has closed" in ended.err
    assert ended.err.count("Traceback") == 1
    assert "onnection closed" not in ended.err
    assert left_behind(ended.group) == []
    assert exit_state(tmp_path) == "failed"
    record = json.loads((tmp_path / "results" / "sacred" / "1" / "run.json").read_text())
    assert record["status"] == "FAILED"


def test_where_torchrun_reports_the_first_rank_the_others_say_one_line(tmp_path):
    """With what gloo really says when the process at the other end is gone; other errors stay as they are."""
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "rank", "code", "words"),
    [
        ("kill", 0, 1, "rank 0 was killed by SIGKILL"),
        ("kill", 1, 1, "rank 1 was killed by SIGKILL"),
        ("exit", 1, 1, "rank 1 ended with exit code 0 without an error message"),
        ("user", 1, 2, "env_args.how=user: take another"),
        ("leave", 1, 1, "rank 1: sys.exit(0) was called before the run had ended"),
    ],
)
def test_other_ends_of_one_rank(plugin, tmp_path, how, rank, code, words):
    ended = start(plugin, tmp_path, how, f"env_args.rank={rank}", "max_restarts=0").wait(120)
    assert ended.code == code, ended.text
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert left_behind(ended.group) == []
    assert exit_state(tmp_path) == "failed"
    if how == "user":
        (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert line == f"error: {words}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "whom", "code"),
    [
        (signal.SIGTERM, "parent", 143),
        (signal.SIGINT, "group", 130),
        (signal.SIGKILL, "parent", -signal.SIGKILL),
    ],
)
def test_being_told_to_end(plugin, tmp_path, number, whom, code):
    started = start(plugin, tmp_path, "slow")
    wait_for_training(started, tmp_path)
    asked = time.monotonic()
    (os.killpg if whom == "group" else os.kill)(started.process.pid, number)
    ended = started.wait(60)
    assert left_behind(ended.group, patience=15) == []
    assert time.monotonic() - asked < 20
    assert ended.code == code
    assert exit_state(tmp_path) == "interrupted"
    if number != signal.SIGKILL:
        assert "Traceback" not in ended.err and "frame #" not in ended.text
        (folder,), name = run_folders(tmp_path), signal.Signals(number).name
        saved = "; the newest checkpoint is of iteration [0-9]+; continue with the same command and auto_resume=True"
        begun = "; no checkpoint yet, the same command starts from scratch"
        last = ended.err.splitlines()[-1]
        assert re.fullmatch(f"interrupted by {name}: {re.escape(str(folder))}({saved}|{begun})", last)
        if number == signal.SIGTERM:
            assert re.search(saved, last)


@pytest.mark.processes
def test_one_process_told_to_end_writes_its_summary(plugin, tmp_path):
    started = start(plugin, tmp_path, "slow", "run=default", "world_size=None")
    wait_for_training(started, tmp_path, ranks=0)
    os.kill(started.process.pid, signal.SIGTERM)
    ended = started.wait(60)
    assert (ended.code, exit_state(tmp_path)) == (143, "interrupted")
    assert "Traceback" not in ended.err


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


@pytest.mark.parametrize(
    ("failed", "notes", "words"),
    [
        ({0: 1, 1: 1}, {0: (2.0, "connection closed"), 1: (1.0, "my own mistake")}, "my own mistake"),
        ({1: -9, 0: 1}, {0: (1.0, "connection closed")}, "rank 1 was killed by SIGKILL"),
        ({1: -6, 0: 1}, {0: (1.0, "my own mistake")}, "my own mistake"),
        ({1: -6}, {}, "rank 1 was killed by SIGABRT"),
        ({1: 7, 0: 1}, {0: (1.0, "connection closed")}, "rank 1 ended with exit code 7"),
        ({1: 143}, {}, "rank 1 was killed by SIGTERM"),
    ],
)
def test_the_cause_is_told_not_the_consequence(tmp_path, failed, notes, words):
    for rank, (when, trace) in notes.items():
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps({"time": when, "rank": rank, "trace": trace}))
    error = verdict(failed, tmp_path, 2).error
    assert words in str(error)
    assert isinstance(error, RankFailed)


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


# --- bad input: told in the parent, before anything exists


BAD_INPUT = {
    "unknown key": (["with", "t_mox=3"], "t_mox"),
    "unknown name": (["--config=qmix", "with", "agent=n_rn"], "agent=n_rn"),
    "wrong type": (["with", "t_max=soon"], "t_max=soon"),
    "out of range": (["with", "gamma=2"], "gamma=2"),
    "stage 2 without tokenizer": (["with", "reconstructer_stage=stage2"], "pretrained_tokenizer_path"),
    "stage 3 without paths": (["with", "reconstructer_stage=stage3"], "pretrained_tokenizer_path"),
    "no such tokenizer": (["with", "pretrained_tokenizer_path=gone.th"], "pretrained_tokenizer_path=gone.th"),
    "predictor without its tokenizer": (
        ["with", "pretrained_mask_predictor_path=some.th"],
        "pretrained_tokenizer_path",
    ),
    "no such checkpoint": (["--config=qmix", "with", "checkpoint_path=gone"], "checkpoint_path=gone"),
    "no such episodes": (["with", "pretrain_buffer_path=gone"], "pretrain_buffer_path=gone"),
    "evaluate nothing": (["--config=qmix", "with", "evaluate=True"], "checkpoint_path"),
    "nccl without GPU": (["with", "use_cuda=False", "dist_backend=nccl"], "dist_backend=nccl"),
    "no entity layout": (["--env-config=matrix_game"], "use_graph_reconstruction"),
    "no layout for the learner": (
        ["--config=qmix", "--env-config=matrix_game", "with", "learner=nq_graph_learner"],
        "learner=nq_graph_learner",
    ),
    "replay from priorities": (["--config=qmix", "with", "use_per=True"], "use_per=True"),
}


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


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_before_anything_exists(case, elsewhere, capsys):
    argv, word = BAD_INPUT[case]
    assert word in refused(argv, capsys)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("more", [["evaluate=True"], []])
def test_a_damaged_agent_is_refused_before_anything_is_played(more, elsewhere, capsys):
    step = elsewhere / "run" / "models" / "100"
    step.mkdir(parents=True)
    (step / "agent.th").write_bytes(b"not weights")
    before = sorted(elsewhere.rglob("*"))
    assert f"checkpoint_path={step}" in refused(["--config=qmix", "with", f"checkpoint_path={step}", *more], capsys)
    assert f"graph_pretrain_policy={step}" in refused(["with", f"graph_pretrain_policy={step}"], capsys)
    assert sorted(elsewhere.rglob("*")) == before


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
