"""A run folder that somebody else has prepared: nothing is written through its links, and nothing it says is obeyed."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from command_budgets import BUDGETS
from command_harness import ROOT, records, summary_of
from graph_toys import INFO

from omagd.config.loading import read_saved, resolve
from omagd.run.checkpoint import resuming
from omagd.run.checkpoint.resuming import claimed_folder, rank_at_work
from omagd.run.cli.listing import comparison
from omagd.run.cli.main import config_from, main
from omagd.run.reporting import plots
from omagd.run.reporting.card import read_card
from omagd.run.reporting.plots import _label_beside
from omagd.run.run import SeedList
from omagd.run.training.build import _given_to, read_env_info
from omagd.utils import owned_folder, storage
from omagd.utils.errors import UserError
from omagd.utils.owned_folder import Untrusted, require_own
from omagd.utils.run_folder import RunFolder
from omagd.utils.storage import Unreadable, read_entry

COMMAND = ("-u", "--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "t_max=20", "auto_resume=True")
INJECTED = "echo injected >>"


def unfinished(results: Path) -> Path:
    """Leave an unfinished run of `COMMAND`, with nothing in it yet."""
    given = config_from([*COMMAND, f"local_results_path={results}"])
    with suppress(ZeroDivisionError), claimed_folder(given, "template") as claim:
        raise ZeroDivisionError
    return Path(claim.path)


def outside(place: Path) -> dict[str, bytes]:
    """Return all files in a folder with their content and mode."""
    return {
        str(path.relative_to(place)): path.read_bytes() + bytes([path.stat().st_mode & 0x7F])
        for path in place.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def home(tmp_path) -> Path:
    """Return a folder of things that a run must not touch."""
    place = tmp_path / "home"
    (place / "thesis" / "100").mkdir(parents=True)
    (place / "bashrc").write_text("PATH=/bin\n")
    (place / "thesis" / "100" / "agent.th").write_text("years")
    (place / "metrics.jsonl").write_text('{"years": 3}\n' * 100)
    return place


def link(where: str, to: str) -> Callable[[Path, Path], None]:
    def plant(run: Path, home: Path) -> None:
        place = run / where
        if place.is_dir():
            shutil.rmtree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(home / to)

    return plant


def pipe(run: Path, home: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")


def moved(run: Path, home: Path) -> None:
    run.rename(home / "moved")
    run.symlink_to(home / "moved")


PLANTED: dict[str, tuple[str, Callable[[Path, Path], None], str]] = {
    "log": ("a", link("logs/rank_0.log", "bashrc"), "a link, logs/rank_0.log"),
    "log folder": ("b", link("logs", "thesis"), "a link, logs"),
    "models": ("c", link("models", "thesis"), "a link, models"),
    "step": ("d", link("models/100", "thesis/100"), "a link, models/100"),
    "metrics": ("e", link("metrics.jsonl", "metrics.jsonl"), "a link, metrics.jsonl"),
    "episodes": ("f", link("episodes/rank_0.jsonl", "metrics.jsonl"), "a link, episodes/rank_0.jsonl"),
    "checkpoints": ("g", link("checkpoints", "thesis"), "a link, checkpoints"),
    "entry": (
        "h",
        lambda run, home: (run / "run.json").rename(home / "e") and link("run.json", "e")(run, home),
        "link",
    ),
    "lock": ("i", link("lock.ranks", "bashrc"), "a link, lock.ranks"),
    "wandb": ("j", link("wandb", "thesis"), "a link, wandb"),
    "wandb inside": ("k", link("wandb/latest-run", "thesis"), "a link, wandb/latest-run"),
    "dangling": ("l", link("card.json", "nothing"), "a link, card.json"),
    "pipe": ("m", pipe, "neither a file nor a folder, metrics.jsonl"),
    "moved": ("n", moved, "it is a link"),
    "name": (f"o\n{INJECTED} bashrc\x1b[2J\x07", lambda run, home: None, "its name holds control characters"),
}


@pytest.mark.processes
def test_a_planted_run_is_neither_continued_nor_changed_and_stops_nothing(tmp_path, home, capfd, monkeypatch):
    """All of them at once beside an own unfinished run, the oldest, which is continued."""
    monkeypatch.setattr(plots, "curves", lambda *_: None)
    results = tmp_path / "results"
    own = unfinished(results)
    for name, plant, _ in PLANTED.values():
        run = results / name
        shutil.copytree(own, run)
        plant(run, home)
    os.utime(own / "run.json", (1, 1))
    before, planted = outside(home), {name: outside(results / name) for name, _, _ in PLANTED.values()}
    assert main([*COMMAND, f"local_results_path={results}"]) == 0
    said = capfd.readouterr()
    assert summary_of(own)["exit_state"] == "completed" and records(own)
    assert outside(home) == before
    assert {name: outside(results / name) for name in planted} == planted
    text = said.out + said.err + (own / "logs" / "rank_0.log").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert not any(line.startswith(INJECTED) for line in text.splitlines())
    for name, _, reason in PLANTED.values():
        shown = name.split("\n")[0]
        (line,) = [line for line in text.splitlines() if f"{results / shown}" in line]
        assert "is neither continued nor changed: " in line and reason in line, line
    assert sorted(path.name for path in results.iterdir()) == sorted([own.name, *planted])


def test_a_folder_of_another_user_is_not_own(tmp_path, monkeypatch):
    run = unfinished(tmp_path)
    real = os.stat

    def foreign(path, **more):
        found = real(path, **more)
        return os.stat_result((*found[:4], 4321, *found[5:])) if path == "run.json" and "dir_fd" in more else found

    monkeypatch.setattr(os, "stat", foreign)
    with pytest.raises(Untrusted, match=r"run\.json belongs to another user"):
        require_own(run)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(owned_folder, "_own_ids", lambda *_: frozenset({4321}))
    with pytest.raises(Untrusted, match="it belongs to another user"):
        require_own(run)


def test_where_all_files_of_root_belong_to_nobody_the_own_ones_are_known(tmp_path, monkeypatch):
    run = unfinished(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    require_own(run)
    assert list(tmp_path.iterdir()) == [run]


def test_others_cannot_change_what_has_been_checked(tmp_path):
    run = unfinished(tmp_path)
    for path in (run, run / "logs"):
        path.chmod(0o777)
    require_own(run)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run, run / "logs")] == [0o775, 0o775]
    tmp_path.chmod(0o777)
    with pytest.raises(Untrusted, match="everybody may replace it"):
        require_own(run)
    tmp_path.chmod(0o1777)
    require_own(run)
    tmp_path.chmod(0o755)


def test_a_file_with_a_second_name_gets_a_content_of_its_own(tmp_path, home):
    """Hard links: checkpoints share files so, and nobody writes into those."""
    run = unfinished(tmp_path / "results")
    (run / "checkpoints" / "kept").mkdir(parents=True)
    os.link(home / "metrics.jsonl", run / "metrics.jsonl")
    os.link(home / "thesis" / "100" / "agent.th", run / "checkpoints" / "kept" / "a")
    require_own(run)
    assert (run / "metrics.jsonl").read_bytes() == (home / "metrics.jsonl").read_bytes()
    assert (run / "metrics.jsonl").stat().st_nlink == (home / "metrics.jsonl").stat().st_nlink == 1
    assert (run / "checkpoints" / "kept" / "a").stat().st_nlink == 2
    assert list(run.rglob(".*")) == []


def test_the_links_that_wandb_makes_are_no_obstacle(tmp_path):
    run = unfinished(tmp_path)
    (run / "wandb" / "offline-run-1" / "logs").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("offline-run-1")
    (run / "wandb" / "debug.log").symlink_to("offline-run-1/logs/debug.log")
    require_own(run)
    (run / "wandb" / "up").symlink_to("offline-run-1/../../logs")
    with pytest.raises(Untrusted, match="wandb/up"):
        require_own(run)


def test_an_own_entry_that_cannot_be_read_is_no_reason_to_start_from_scratch(tmp_path, monkeypatch, capsys):
    run, inner = unfinished(tmp_path), os.open
    monkeypatch.setattr("omagd.utils.storage.RETRY_SECONDS", ())

    for code, own, answer in ((errno.EIO, True, 2), (errno.EACCES, True, 2), (errno.EACCES, False, 0)):

        def opens(path, *more, code=code, **how):
            if Path(path).name == "run.json":
                raise OSError(code, os.strerror(code))
            return inner(path, *more, **how)

        with monkeypatch.context() as patch:
            patch.setattr(storage.os, "open", opens)
            patch.setattr(storage, "_is_own", lambda path, own=own: own)
            found = resuming._same_runs
            if answer == 0:
                assert found(tmp_path, "any", logging.getLogger("omagd")) == []
                continue
            assert main([*COMMAND, f"local_results_path={tmp_path}"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"error: {run}/run.json cannot be read ({os.strerror(code)})")
    assert list(tmp_path.iterdir()) == [run]


def test_a_folder_that_cannot_be_entered_is_passed_over_unless_it_is_the_users_own(tmp_path, monkeypatch):
    """As another user where this one is root, whom permissions do not bind."""
    monkeypatch.setattr("omagd.utils.storage.RETRY_SECONDS", ())
    monkeypatch.chdir(tmp_path)
    root, found = os.geteuid() == 0, partial(resuming._same_runs, Path("."), "mine", logging.getLogger("omagd"))
    for name in ("closed", "open"):
        Path(name).mkdir()
        Path(name, "run.json").write_text('{"identity": "mine"}')
    Path("closed").chmod(0o000)
    tmp_path.chmod(0o755)
    if root:
        os.seteuid(65534)
    try:
        listed = SeedList(resolve("qmix", None, {"local_results_path": "closed", "seeds": (1, 2), "auto_resume": True}))
        assert listed.finished_runs() == {}
        if root:  # another user's
            assert found() == [Path("open")]
            os.seteuid(0)
            os.chown("closed", 65534, -1)
            os.seteuid(65534)
        with pytest.raises(Unreadable, match=r"^closed/run.json cannot be read \(Permission denied\)"):
            found()
    finally:
        if root:
            os.seteuid(0)
        Path("closed").chmod(0o700)


def test_new_runs_are_not_world_writable_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        run = unfinished(tmp_path)
        with rank_at_work(RunFolder(run)):
            (run / "episodes").mkdir()
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    for path in (run, run / "logs", run / "models", run / "episodes", run / "run.json"):
        assert not path.stat().st_mode & stat.S_IWOTH, path


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1}' + b" " * (1 << 20)])
def test_an_entry_that_is_none_is_empty(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    assert read_entry(tmp_path / "run.json") == {}
    assert read_entry(tmp_path / "missing") == read_entry(tmp_path) == {}
    os.mkfifo(tmp_path / "pipe")
    assert read_entry(tmp_path / "pipe") == {}


def test_an_error_is_one_line():
    error = UserError("a\x1b]0;owned\x07\nb", "c\nd")
    assert (str(error), str(pickle.loads(pickle.dumps(error)))) == (error.message, error.message)
    assert error.message.isprintable()


@pytest.mark.parametrize("content", ["pipe", "device", "deep", "huge", "text"])
def test_the_json_files_of_a_run_are_read_from_regular_small_files_only(tmp_path, content):
    """No pipe is waited for, no device is read until the memory ends; all readers of single files are one."""
    run = RunFolder(tmp_path)
    for path in (run.config_json, run.env_info_json, run.card_json, run.summary_json):
        if content == "pipe":
            os.mkfifo(path)
        elif content == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_text({"deep": '{"a": ' * 100_000, "huge": "[1]" + " " * (1 << 20), "text": '"x"'}[content])
    assert read_card(tmp_path) is None
    assert _given_to(run, "pretrained_tokenizer_path") == str(tmp_path)
    assert _label_beside(run.metrics_jsonl) == ""
    found = []
    for reads in (read_saved, read_env_info):
        with pytest.raises(UserError) as rejected:
            reads(run.config_json if reads is read_saved else run.env_info_json, "evaluate x")
        found.append(rejected.value.message)
    unread = content in {"pipe", "device"}
    assert all(("cannot be read (not a regular file)" in said) == unread for said in found), found
    with pytest.raises(UserError, match=r"holds no summary\.json"):
        comparison([str(tmp_path)])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"n_agents": value} for value in ({"a": 1}, [[1]], "3", -1, 0, 1e308, 3.0, None, True, 2**70, 1 << 21)),
        *({"obs_dim": 0}, {"map_name": 3}, {"scripted_policies": "x"}, {"has_win": 1}, {"layout": 3}),
        *(
            {"layout": {**asdict(INFO.layout), name: value}}
            for name, value in (("enemy_dim", -1), ("n_allies", 1 << 20))
        ),
        {"layout": {**asdict(INFO.layout), "position": [1, 2, 3]}},
    ],
)
def test_facts_of_an_environment_have_their_types_and_sizes(tmp_path, wrong):
    path = tmp_path / "env_info.json"
    path.write_text(json.dumps(INFO.to_dict()))
    assert read_env_info(path, "path=x") == INFO
    path.write_text(json.dumps({**INFO.to_dict(), **wrong}))
    with pytest.raises(UserError, match=r"^path=x: .*env_info\.json is damaged"):
        read_env_info(path, "path=x")


def test_texts_of_a_run_folder_are_shown_without_control_characters(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    hostile = f"qmix\n{INJECTED} x\x1b]0;owned\x07"
    (run / "summary.json").write_text(json.dumps({"name": hostile, "exit_state": hostile, "stages": {}, "seed": 1}))
    assert main(["compare", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    assert INJECTED in out and not any(line.startswith(INJECTED) for line in out.splitlines())


def test_a_planted_folder_of_records_is_rejected(tmp_path, home, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "sacred").symlink_to(home)
    before = outside(home)
    assert main([*COMMAND[1:], f"local_results_path={tmp_path / 'results'}"]) == 2
    assert "its sacred/ is a link" in capsys.readouterr().err
    assert outside(home) == before


@pytest.mark.parametrize(
    "content",
    [
        {"stages": 3},
        {"stages": {"stage3": {"values": None}}},
        {"stages": {"stage3": {"values": {"test_battle_won_mean": [1]}}}},
        {"wall_seconds": {}, "stages": {}},
        {"wall_seconds": math.inf, "stages": {}},
        [],
    ],
)
def test_a_wrong_summary_is_one_line(tmp_path, capsys, content):
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert main(["compare", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: compare {tmp_path}: holds no summary.json that can be read. Give a run's folder\n"
    )


@pytest.mark.parametrize("planted", ["folder", "file", "name"])
def test_a_planted_log_of_the_launcher_is_not_written(tmp_path, home, planted):
    log = tmp_path / "results" / "logs" / "launch.log"
    log.parent.parent.mkdir()
    if planted == "folder":
        log.parent.symlink_to(home)
        (home / "launch.log").write_text("")
    else:
        log.parent.mkdir()
        (log.symlink_to if planted == "file" else lambda to: os.link(to, log))(home / "bashrc")
    before = outside(home)
    command = [sys.executable, ROOT / "scripts" / "with_log.py", log, "echo", INJECTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the log {log} cannot be written (") and done.stderr.count("\n") == 1
    assert outside(home) == before
