"""A run folder that somebody else has prepared: nothing is written through its links, and nothing it says is obeyed."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shutil import copytree

import pytest
from command_budgets import BUDGETS
from command_harness import ROOT, records, summary_of
from graph_toys import INFO

from omagd.config.loading import read_saved
from omagd.config.schema import OF_GRAPHS
from omagd.run import run_folder
from omagd.run.checkpoint.resuming import locked_folder, rank_at_work
from omagd.run.cli.main import config_from, main
from omagd.run.reporting.card import read_card
from omagd.run.run_folder import RunFolder, Untrusted, read_entry, require_own
from omagd.run.training.build import _given_to, read_env_info
from omagd.utils.errors import UserError

USED = [word for word in BUDGETS if not word.startswith(OF_GRAPHS)]  # a warning names the others
COMMAND = ("-u", "--config=qmix", "--env-config=matrix_game", "with", *USED, "t_max=20", "auto_resume=True")
INJECTED = "echo injected >>"
# Links in a run, and what they lead to outside; None: what was in their place.
LINKS = {
    "logs/rank_0.log": "bashrc", "logs": "thesis", "models": "thesis", "models/100": "thesis/100",
    "metrics.jsonl": "metrics.jsonl", "episodes/rank_0.jsonl": "metrics.jsonl", "checkpoints": "thesis",
    "lock.ranks": "bashrc", "card.json": "nothing", "run.json": None,
    ".": None,
}  # fmt: skip


def unfinished(results: Path) -> Path:
    """Leave an unfinished run of `COMMAND`, with nothing in it yet."""
    given = config_from([*COMMAND, f"local_results_path={results}"])
    with suppress(ZeroDivisionError), locked_folder(given, "template") as lock:
        raise ZeroDivisionError
    return Path(lock.path)


def contents(place: Path) -> dict[Path, tuple[bytes, int]]:
    """Return all files in a folder with their content and mode."""
    return {path: (path.read_bytes(), path.stat().st_mode) for path in place.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path) -> Path:
    """Return a folder of things that a run must not touch."""
    place = tmp_path / "home"
    (place / "thesis" / "100").mkdir(parents=True)
    (place / "bashrc").write_text("PATH=/bin\n")
    (place / "thesis" / "100" / "agent.th").write_text("years")
    (place / "metrics.jsonl").write_text('{"years": 3}\n' * 100)
    return place


@pytest.fixture
def run(tmp_path) -> Path:
    return unfinished(tmp_path / "results")


def plant(run: Path, home: Path, where: str, to: str | None) -> None:
    place, moved = run / where, home / f"moved {run.name}"
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rename(moved)
    place.symlink_to(moved if to is None else home / to)


@pytest.mark.processes
def test_a_planted_run_is_neither_continued_nor_changed_and_stops_nothing(run, home, capfd):
    """All of them at once beside an own unfinished run, the oldest, which is continued."""
    results, reasons = run.parent, {}
    for number, (where, to) in enumerate(LINKS.items()):
        plant(copytree(run, results / f"{number:02d}"), home, where, to)
        reasons[f"{number:02d}"] = "it is a link" if where == "." else f"a link, {where}"
    os.mkfifo(copytree(run, results / "pipe") / "metrics.jsonl")
    copytree(run, results / f"name\n{INJECTED} bashrc\x1b[2J\x07")
    reasons |= {"pipe": "neither a file nor a folder, metrics.jsonl", "name": "its name holds control characters"}
    os.utime(run / "run.json", (1, 1))
    places = [home, *(path for path in results.iterdir() if path != run)]
    before = {path: contents(path) for path in places}
    assert main([*COMMAND, f"local_results_path={results}"]) == 0
    assert summary_of(run)["exit_state"] == "completed" and records(run)
    assert {path: contents(path) for path in places} == before
    text = "".join(capfd.readouterr()) + (run / "logs" / "rank_0.log").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert not any(line.startswith(INJECTED) for line in text.splitlines())
    for name, reason in reasons.items():
        (line,) = [line for line in text.splitlines() if f"{results / name}" in line]
        assert "is neither continued nor changed: " in line and reason in line, line
    assert len(list(results.iterdir())) == 1 + len(reasons)


def test_a_folder_of_another_user_is_not_own(run, monkeypatch):
    """On some file systems root's own files belong to nobody; they are still known as own."""
    real = os.stat

    def foreign(path, **more):
        found = real(path, **more)
        return os.stat_result((*found[:4], 4321, *found[5:])) if path == "run.json" and "dir_fd" in more else found

    with monkeypatch.context() as patch, pytest.raises(Untrusted, match=r"run\.json belongs to another user"):
        patch.setattr(os, "stat", foreign)
        require_own(run)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    require_own(run)
    assert list(run.parent.iterdir()) == [run]
    monkeypatch.setattr(run_folder, "_own_ids", lambda *_: frozenset({4321}))
    with pytest.raises(Untrusted, match="it belongs to another user"):
        require_own(run)


def test_others_cannot_change_what_has_been_checked(run):
    for path in (run, run / "logs"):
        path.chmod(0o777)
    require_own(run)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run, run / "logs")] == [0o775, 0o775]
    run.parent.chmod(0o777)
    with pytest.raises(Untrusted, match="everybody may replace it"):
        require_own(run)
    run.parent.chmod(0o1777)
    require_own(run)


def test_a_file_with_a_second_name_gets_a_content_of_its_own(run, home):
    """Hard links: checkpoints share files so, and nobody writes into those."""
    own, shared = run / "metrics.jsonl", run / "checkpoints" / "kept" / "a"
    shared.parent.mkdir(parents=True)
    os.link(home / "metrics.jsonl", own)
    os.link(home / "thesis" / "100" / "agent.th", shared)
    require_own(run)
    assert own.read_bytes() == (home / "metrics.jsonl").read_bytes()
    assert (own.stat().st_nlink, (home / "metrics.jsonl").stat().st_nlink, shared.stat().st_nlink) == (1, 1, 2)
    assert list(run.rglob(".*")) == []


@pytest.mark.processes
def test_what_other_programs_leave_in_the_folder_neither_ends_nor_changes_anything(run, home, monkeypatch, capsys):
    """W&B's links, TensorBoard's and a plug-in's files: links, sockets, hard links, open and unreadable folders."""
    for name in ("wandb/offline-run-1/logs", "tb/plugins/profile", "own sink", "sacred/1", ".cache.1.tmp", "models"):
        left = run / name
        left.mkdir(parents=True, exist_ok=True)
        (left / "debug-core.log").symlink_to(home / "metrics.jsonl")
        (left / "latest").symlink_to(home / "thesis")
        (left / "gone").symlink_to("../../nowhere")
        os.link(home / "bashrc", left / "copy")
        (left / ".half.1.tmp").write_text("theirs") if name != "models" else None
        os.mkfifo(left / "pipe")
        (left / "closed").mkdir()
        (left / "closed").chmod(0)
        (left / "open").mkdir()
        (left / "open").chmod(0o777)
        with socket.socket(socket.AF_UNIX) as server:
            monkeypatch.chdir(left)  # the name of a socket must be short
            server.bind("socket")
    monkeypatch.chdir(run.parent)
    (run / "notes").symlink_to(home)
    left = [path for path in run.rglob("*") if path.name in {"copy", "open", "closed", "pipe", ".half.1.tmp"}]
    before = contents(home), {path: path.lstat() for path in left}
    assert len(left) == 6 * 4 + 5
    assert main([*COMMAND, f"local_results_path={run.parent}"]) == 0
    assert list(run.parent.iterdir()) == [run] and summary_of(run)["exit_state"] == "completed"
    assert before == (contents(home), {path: path.lstat() for path in left})
    assert (run / "models" / "latest").is_symlink()
    text = "".join(capsys.readouterr())
    assert "neither continued nor changed" not in text and " is off from here" not in text


@pytest.mark.processes
def test_a_link_in_place_of_a_sinks_folder_switches_that_sink_off(run, home, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (run / "wandb").symlink_to(home / "thesis")
    (run / "tb").symlink_to(home)
    before = contents(home)
    assert main([*COMMAND, f"local_results_path={run.parent}", "use_wandb=True", "use_tensorboard=True"]) == 0
    assert list(run.parent.iterdir()) == [run] and summary_of(run)["exit_state"] == "completed"
    assert contents(home) == before
    text = "".join(capsys.readouterr())
    assert f"W&B is off from here on: {run / 'wandb'} is a link" in text
    assert f"TensorBoard is off from here on: {run / 'tb'} is a link" in text


def test_new_runs_are_not_world_writable_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        run = unfinished(tmp_path)
        with rank_at_work(RunFolder(run)):
            (run / "episodes").mkdir()
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert {"logs", "models", "episodes", "run.json"} <= {path.name for path in run.iterdir()}
    assert not any(path.stat().st_mode & stat.S_IWOTH for path in (run, *run.iterdir()))


NOT_AN_OBJECT = ("pipe", "device", "", "[]", '{"a": ' * 100_000, '{"a": 1}' + " " * (1 << 20), '"x"')


@pytest.mark.parametrize("content", NOT_AN_OBJECT, ids=range(len(NOT_AN_OBJECT)))
def test_the_json_files_of_a_run_are_read_from_regular_small_files_only(tmp_path, content, capsys):
    """No pipe is waited for, no device is read until the memory ends; all readers of single files are one."""
    run, unread = RunFolder(tmp_path), content in {"pipe", "device"}
    for path in (run.config_json, run.env_info_json, run.card_json, run.summary_json, tmp_path / "run.json"):
        if content == "pipe":
            os.mkfifo(path)
        elif content == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_text(content)
    assert read_entry(tmp_path / "run.json") == read_entry(tmp_path / "missing") == read_entry(tmp_path) == {}
    assert read_card(tmp_path) is None
    assert _given_to(run, "pretrained_tokenizer_path") == str(tmp_path)
    for reads, path in ((read_saved, run.config_json), (read_env_info, run.env_info_json)):
        with pytest.raises(UserError) as rejected:
            reads(path, "evaluate x")
        assert ("cannot be read (not a regular file)" in rejected.value.message) == unread
    assert_no_summary(tmp_path, capsys)


def assert_no_summary(run: Path, capsys) -> None:
    assert main(["compare", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: compare {run}: neither its config.json nor its summary.json can be read")


def test_facts_of_an_environment_have_their_types_and_sizes(tmp_path):
    path, layout = tmp_path / "env_info.json", asdict(INFO.layout)
    path.write_text(json.dumps(INFO.to_dict()))
    assert read_env_info(path, "path=x") == INFO
    for wrong in (
        *({"n_agents": value} for value in ({"a": 1}, [[1]], "3", -1, 0, 1e308, 3.0, None, True, 2**70, 1 << 21)),
        *({"obs_dim": 0}, {"map_name": 3}, {"scripted_policies": "x"}, {"has_win": 1}, {"layout": 3}),
        *({"layout": layout | part} for part in ({"enemy_dim": -1}, {"n_allies": 1 << 20}, {"position": [1, 2, 3]})),
    ):
        path.write_text(json.dumps({**INFO.to_dict(), **wrong}))
        with pytest.raises(UserError, match=r"^path=x: .*env_info\.json is damaged"):
            read_env_info(path, "path=x")


def test_a_planted_folder_of_records_is_rejected(tmp_path, home, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "sacred").symlink_to(home)
    before = contents(home)
    assert main([*COMMAND[1:], f"local_results_path={tmp_path / 'results'}"]) == 2
    assert "its sacred/ is a link" in capsys.readouterr().err
    assert contents(home) == before


@pytest.mark.parametrize("planted", ["folder", "file", "name"])
def test_a_planted_log_of_the_launcher_is_not_written(tmp_path, home, planted):
    log = tmp_path / "logs" / "launch.log"
    if planted == "folder":
        log.parent.symlink_to(home)
        (home / "launch.log").write_text("")
    else:
        log.parent.mkdir()
        (os.symlink if planted == "file" else os.link)(home / "bashrc", log)
    before = contents(home)
    command = [sys.executable, ROOT / "scripts" / "with_log.py", log, "echo", INJECTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the log {log} cannot be written (") and done.stderr.count("\n") == 1
    assert contents(home) == before
