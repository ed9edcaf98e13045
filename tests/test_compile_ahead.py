"""At the first start a second process compiles the kernels of learning; it never outlives the run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from omagd.run.training import device

START = """
import sys, time
from omagd.run.training import device
from omagd.utils import compiling
device.compile_ahead()
print(len(device._started), flush=True)
compiling._calls.pop()()  # as if kernels had to be compiled
print(device._started[0].pid, flush=True)
time.sleep(60)
"""
SUMS = """
import numpy as np
from pathlib import Path
from omagd.utils.compiling import Compiler, when_compiling
compiler = Compiler(Path(__file__).parent, "sums", "1 s")
@compiler.kernel
def add(values):
    return values[0] + values[1]
when_compiling(lambda: print("meanwhile"))
compiler.prepare(lambda: add(np.array([1, 2])))
print(add(np.array([3, 4])))
"""


def lives(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores")
def test_who_compiles_ahead_ends_with_a_killed_run(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for name in ("omagd", "secrets"):  # where the run was started: not what it has imported
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the working directory')")
    command, pipe = [sys.executable, "-P", "-c", START], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, cwd=tmp_path) as run:
        try:
            assert run.stdout.readline() == "0\n"  # nothing is started before anything is compiled
            child = int(run.stdout.readline())
            assert "Compiling the learning kernels, once" in run.stderr.readline()  # and by the child
        finally:
            run.send_signal(signal.SIGKILL)
    until = time.monotonic() + 2  # it would compile for longer
    while lives(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(child)


@pytest.mark.processes
def test_others_are_compiled_only_when_something_is(tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for expected in ("meanwhile\n7\n", "7\n"):
        command = [sys.executable, str(tmp_path / "sums.py")]
        assert subprocess.run(command, capture_output=True, text=True, env=env, timeout=60).stdout == expected


def test_a_process_that_cannot_be_started_is_no_error_and_no_terminal_interrupts_it(monkeypatch):
    given = {}

    def popen(command, **options):
        given.update(options)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", popen)
    device._start()
    assert given["start_new_session"] and given["stdin"] == subprocess.DEVNULL
