"""A test session that is killed leaves no process running."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import reaper
from command_harness import PYTHON, ROOT
from sockets import wait_until

MARK = "MARK_OF_THIS_TEST"
# A command of the harness that ignores signals, with a child in its own session; and the same started directly.
TEST = """
import subprocess, sys
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


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the watcher reads /proc")
def test_no_process_outlives_a_killed_session(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    options = ("-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--basetemp", tmp_path / "temp")
    variables = {"PYTHONPATH": str(ROOT / "tests"), MARK: str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    session = subprocess.Popen(
        [PYTHON, "-m", "pytest", *options, tmp_path / "test_it.py"], cwd=tmp_path, env={**os.environ, **variables},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert wait_until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists())
    assert len(reaper.having(MARK, str(tmp_path))) >= 5
    session.kill()
    session.wait(30)
    assert wait_until(lambda: not reaper.having(MARK, str(tmp_path)))
    assert os.getpid() not in reaper.having(reaper.NAME, os.environ[reaper.NAME])
