"""One run as a process: its cores and threads, its log, its end, and what remains of it when its parent is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omagd.run.launchers import without_tasks
from omagd.utils.errors import readable, visible
from omagd.utils.writing import open_lines

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 45.0
"""From SIGTERM to SIGKILL: a run saves at the end of an iteration (at most 10 s) and then writes its files."""

TAIL = 8192
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def start_run(
    command: Sequence[str], log: Path, cpus: Sequence[int] = (), threads: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to a log; call it in the main thread.

    It has a process group of its own, so Ctrl-C in the terminal does not reach it, and gets SIGTERM when this process
    dies, so it saves and ends.

    Args:
        cpus: cores that it may use, all for none. threads: of NumPy and its like; None: as in this process.
    Errors: OSError.
    """
    environment = without_tasks(os.environ)
    if threads is not None:
        environment |= dict.fromkeys(THREADS, str(threads))
    handle = open_lines(log)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=bound(frozenset(cpus)),
        )
    finally:
        os.close(handle)


def bound(cpus: frozenset[int] = frozenset()) -> Callable[[], None]:
    """Return what a new process does before its command begins, so that it gets SIGTERM when this process dies."""
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it has died in the meantime
                os._exit(1)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM sends it to all processes of a task; the first one acts
        if cpus and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)

    return prepare


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of `start_run` and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def finish(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> int:
    """End a process: SIGTERM, after `seconds` SIGKILL. Return its exit code."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_group(process)
        return process.wait()


def children_seconds() -> float:
    """Return the CPU seconds of all processes that this one has waited for, and of those that they waited for."""
    times = os.times()
    return times.children_user + times.children_system


def last_error(log: Path, exit_code: int | None) -> str:
    """Return one line on why a command failed: the last error in its log, else how it ended."""
    if exit_code == 0:
        return ""
    ended = "ended" if exit_code is None else f"exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-exit_code).name}"
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return ended
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith(("error:", "interrupted")) or "Error" in line.split(":")[0]]
    found = (errors or lines)[-1:]
    return readable(visible(found[0])) if found else ended
