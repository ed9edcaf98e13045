"""Temporary folders: what killed processes leave is removed by the next start, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command_harness import ROOT

from omagd.envs.sc2 import resources as scratch
from omagd.run.checkpoint.run_lock import start_ticks
from omagd.run.cli.main import config_from
from omagd.run.launch import processes
from omagd.run.launch.processes import NAME, remove_left_behind, temporary_folder

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Return the folder of temporary files of this test and of what it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


def launcher(tmp_path: Path, *command: str) -> subprocess.Popen:
    words = [sys.executable, ROOT / "scripts" / "with_log.py", tmp_path / "logs" / "a.log", "sh", "-c", *command]
    return subprocess.Popen([*words, "sh", "{scratch}"], stdout=subprocess.PIPE, text=True)


@needs_proc
def test_the_folder_of_a_killed_launcher_goes_with_the_next_one_and_that_of_a_living_one_stays(tmp_path, place):
    alive, killed = (launcher(tmp_path, 'echo "$1"; touch "$1/file"; exec sleep 60') for _ in range(2))
    try:
        mine, left = (Path(process.stdout.readline().strip()) for process in (alive, killed))
        killed.send_signal(signal.SIGKILL)
        killed.wait(20)
        killed.stdout.close()
        assert sorted(place.iterdir()) == sorted([mine, left]) and NAME.fullmatch(left.name)
        after = launcher(tmp_path, 'ls -d "$1"')
        out, _ = after.communicate(timeout=20)
        assert after.returncode == 0 and out.strip() not in {str(mine), str(left)}
        assert list(place.iterdir()) == [mine]
    finally:
        alive.terminate()
        alive.communicate(timeout=20)
    assert list(place.iterdir()) == []


def dead_name() -> str:
    """Return the name of a folder of a process that has ended."""
    with temporary_folder("omagd_") as folder:
        own = folder.name
    return own.replace(f"-{start_ticks(os.getpid()) or 0:x}-", "-1-")


@needs_proc
def test_only_own_folders_of_dead_processes_of_this_host_are_removed(place, tmp_path, monkeypatch):
    dead, home = dead_name(), tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    (place / dead).mkdir()
    (place / dead / "link").symlink_to(home)
    (place / f"{dead}link").symlink_to(home)
    (place / f"{dead}file").write_text("")
    elsewhere = dead.replace(dead.split("-")[3].split("_")[0], "0badb007")
    for name in (elsewhere, "omagd_launch_abcdefgh", "omagd_notes", "other"):
        (place / name).mkdir()
    with temporary_folder("omagd_") as mine:
        assert mine.is_dir()
        left = {path.name for path in place.iterdir()} - {mine.name}
    assert left == {f"{dead}link", f"{dead}file", elsewhere, "omagd_launch_abcdefgh", "omagd_notes", "other"}
    assert (home / "thesis.tex").read_text() == "years"
    (place / dead).mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4321)
        remove_left_behind()
    assert (place / dead).is_dir()
    processes.preload(config_from(["--config=qmix"]))
    assert not (place / dead).exists(), "every start of the program removes it"


def test_the_games_folder_is_the_users_own(place, tmp_path):
    """Another user may have put a link where it is expected."""
    home = tmp_path / "home"
    (home / "game-1").mkdir(parents=True)
    (place / f"omagd-sc2-{os.getuid()}").symlink_to(home)
    made = scratch.Scratch()
    assert made.path.parent == place / f"omagd-sc2-{os.getuid()}-2"
    made.close()
    assert [path.name for path in home.rglob("*")] == ["game-1"]
