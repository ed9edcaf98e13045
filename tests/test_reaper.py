"""A test session that is interrupted leaves no process running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reaper
from command_harness import ROOT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the watcher reads /proc"),
]
# A command of the harness that ignores what asks it to end, a child of it in a session of its own, and the same plain.
TEST = """
import subprocess, sys, time
from pathlib import Path
from command_harness import Started

STUBBORN = (
    "import os, signal, subprocess, sys, time\\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\\n"
    "subprocess.Popen(['sleep', '600'], start_new_session=True)\\n"
    "open(sys.argv[1], 'w').close()\\n"
    "time.sleep(600)\\n"
)

def test_it(tmp_path):
    here = Path(__file__).parent
    started = Started([sys.executable, "-c", STUBBORN, str(here / "one")], tmp_path)
    subprocess.Popen([sys.executable, "-c", STUBBORN, str(here / "two")])
    started.wait()
"""


def test_nothing_outlives_an_interrupted_session(tmp_path):
    sessions = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        place = tmp_path / number.name
        place.mkdir()
        (place / "test_it.py").write_text(TEST)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
        variables = {
            **os.environ, "PYTHONPATH": str(ROOT / "tests"), "MARK_OF_THIS_TEST": str(place),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }  # fmt: skip
        sessions[number] = subprocess.Popen(
            [*command, "--basetemp", str(place / "temp"), str(place / "test_it.py")], cwd=place,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables, start_new_session=True,
        )  # fmt: skip
    for number, session in sessions.items():
        place = tmp_path / number.name
        _until(lambda place=place: (place / "one").exists() and (place / "two").exists())
        assert len(_living(place)) >= 5
        os.kill(session.pid, number)
    for number, session in sessions.items():
        session.wait(30)
        _until(lambda number=number: not _living(tmp_path / number.name))
    assert os.getpid() not in reaper.marked(os.environ[reaper.NAME])


def _until(done) -> None:
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def _living(place: Path) -> list[int]:
    """Return the living processes of one session, by a variable that only they have."""
    return reaper.having(f"MARK_OF_THIS_TEST={place}".encode())
