"""`executor: local`: runs as processes of this machine, each with its log and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from omagd.lab.studies.executors import Ended, Job, Place
from omagd.run.launchers import without_tasks
from omagd.utils.errors import UserError, readable, visible
from omagd.utils.storage import open_lines

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 45.0
"""From SIGTERM to SIGKILL: a run saves at the end of an iteration (at most 10 s) and then writes its files."""

TAIL = 8192
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class LocalArgs(BaseModel):
    """Settings of `executor: local`.

    Attributes:
        jobs: runs at a time; None: as many as fit. cores_per_run: cores that each counts for, and threads of NumPy.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    jobs: PositiveInt | None = None
    cores_per_run: PositiveInt = 1


class LocalExecutor:
    """Starts runs on this machine. Runs end with this process: they save and stop, also when it is killed."""

    args_model = LocalArgs

    def __init__(self, place: Place) -> None:
        self._place, self._args = place, place.settings
        self.references: dict[str, str] = {}
        self.slots = _at_a_time(self._args)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: Job, command: list[str]) -> None:
        """Start a run."""
        self._processes[job.name] = start_run(command, self._place.log(job.name), self._args.cores_per_run)

    def poll(self) -> list[Ended]:
        """Return the runs that have ended."""
        found = []
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[name]
                kill_group(process)  # what it may have left
                found.append(Ended(name, code, last_error(self._place.log(name), code)))
        return found

    def running(self) -> set[str]:
        """Return the runs in progress."""
        return set(self._processes)

    def cancel(self, name: str) -> None:
        """Ask a run to save and end."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            self._processes[name].send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let all runs save and end; kill those that take too long, or all after another Ctrl-C."""
        try:
            for name in self._processes:
                self.cancel(name)
            until = time.monotonic() + STOP_SECONDS
            while time.monotonic() < until and any(process.poll() is None for process in self._processes.values()):
                time.sleep(0.05)
        finally:
            for process in self._processes.values():
                kill_group(process)
                process.wait()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _at_a_time(args: LocalArgs) -> int:
    """Return how many runs go on at a time. Errors: UserError for more runs than cores."""
    usable = usable_cores()
    jobs = args.jobs or max(1, usable // args.cores_per_run)
    if (needed := jobs * args.cores_per_run) > usable:
        raise UserError(
            f"executor.local: jobs={jobs} with cores_per_run={args.cores_per_run} need {needed} cores, and"
            f" {usable} can be used here. Lower one of them"
        )
    return jobs


def start_run(command: Sequence[str], log: Path, threads: int = 1) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to a log; call it in the main thread.

    It has a process group of its own, so Ctrl-C in the terminal does not reach it, and gets SIGTERM when this process
    dies, so it saves and ends. threads: of NumPy and its like. Errors: OSError.
    """
    environment = without_tasks(os.environ) | dict.fromkeys(THREADS, str(threads))
    with open(open_lines(log), "ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=bound(),
        )  # fmt: skip


def bound() -> Callable[[], None]:
    """Return what a new process does before its command begins, so that it gets SIGTERM when this process dies."""
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it has died in the meantime
                os._exit(1)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM sends it to all processes of a task; the first one acts

    return prepare


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of `start_run` and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
