"""Processes and folders of a launch: the preloading fork server, ranks without a launcher, temporary folders."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from command_harness import PYTHON, ROOT

from omagd.run.launch import processes
from omagd.run.launch.processes import remove_left_behind, temporary_folder
from omagd.utils import storage

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")


@pytest.mark.parametrize(("name", "watched"), [("RANK", []), ("SLURM_PROCID", [processes.STARTED_BY])])
def test_a_rank_ends_with_a_known_launcher_but_not_with_a_shell(name, watched, monkeypatch):
    found = []
    monkeypatch.setattr(processes, "_when_over", lambda wait, launcher: found.append(launcher))
    for each in processes.WATCHED:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "0")
    processes.end_with_launcher()
    assert found == watched


def test_the_end_of_a_launcher_is_noticed_even_if_it_came_first():
    """A process waits for its parent, which ends meanwhile, or ended before."""
    code = "import os, sys, time; from omagd.run.launch.processes import _wait_for_end\n"
    code += "now, parent, child = sys.argv[1] == 'now', os.getpid(), os.fork()\n"
    code += "time.sleep(0.5 * (now == (child > 0))); child and os._exit(0)\n"
    code += "_wait_for_end(parent); print('over', flush=True)"
    started = [subprocess.Popen([PYTHON, "-c", code, when], stdout=-1, text=True) for when in ("now", "before")]
    assert [process.communicate(timeout=60)[0] for process in started] == ["over\n", "over\n"]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Return the folder of temporary files of this test and of the processes that it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


@needs_proc
def test_the_next_start_removes_the_folders_of_killed_processes_only(tmp_path, place, monkeypatch):
    """Of this user's, and no link; those of living processes, new ones and other names stay."""
    words = [PYTHON, ROOT / "scripts" / "with_log.py", tmp_path / "a.log", "sh", "-c", 'echo "$1"; exec sleep 60', "sh"]
    alive, killed = (subprocess.Popen([*words, "{scratch}"], stdout=subprocess.PIPE, text=True) for _ in range(2))
    mine, left = (Path(process.stdout.readline().strip()) for process in (alive, killed))
    killed.kill()
    killed.communicate(timeout=20)
    (tmp_path / "thesis").mkdir()
    (left / "link").symlink_to(tmp_path / "thesis")
    (place / "omagd_12345678.own").symlink_to(tmp_path / "thesis")
    (place / "omagd_notes").mkdir()
    for path in (mine, left, tmp_path / "thesis"):
        os.utime(path, (1, 1))
    with temporary_folder("omagd_") as own:
        assert {path.name for path in place.iterdir()} == {own.name, mine.name, "omagd_12345678.own", "omagd_notes"}
        remove_left_behind()
    alive.terminate()
    alive.communicate(timeout=20)
    assert {path.name for path in place.iterdir()} == {"omagd_12345678.own", "omagd_notes"}
    assert (tmp_path / "thesis").is_dir()
    removed = []

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not removed:
            removed.append(os.readlink(f"/proc/self/fd/{lock}"))
            os.rmdir(removed[0])

    monkeypatch.setattr(storage.fcntl, "flock", flock)  # another start removes the first folder before it is locked
    with temporary_folder("omagd_") as own:
        assert removed and own.is_dir()
