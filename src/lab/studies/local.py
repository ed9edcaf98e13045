"""`executor: local`: runs as processes of this machine, each with cores of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, PositiveInt

from omagd.lab.studies.executors import Ended, Job, Place
from omagd.lab.studies.processes import STOP_SECONDS, children_seconds, kill_group, last_error, start_run
from omagd.utils.errors import UserError


class LocalArgs(BaseModel):
    """Settings of `executor: local`.

    Attributes:
        jobs: runs at a time; None: as many as fit on the cores. cores_per_run: cores of each. threads: of NumPy and
            its like in each run, and `torch_threads` of runs that do not give it; None: cores_per_run for NumPy.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    jobs: PositiveInt | None = None
    cores_per_run: PositiveInt = 1
    threads: PositiveInt | None = None

    @property
    def cores(self) -> int:
        """Cores of each run, for estimates."""
        return self.cores_per_run


class LocalExecutor:
    """Starts runs on this machine. Runs end with this process: they save and stop, also when it is killed."""

    args_model = LocalArgs

    def __init__(self, place: Place) -> None:
        self._place, self._args = place, place.settings
        self.references: dict[str, str] = {}
        self.slots = _cores(self._args)
        self.words = () if self._args.threads is None else (f"torch_threads={self._args.threads}",)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cpu_seconds: dict[str, float] = {}

    def start(self, job: Job, command: list[str], cpus: tuple[int, ...]) -> None:
        """Start a run on its cores."""
        threads = self._args.threads or self._args.cores_per_run
        self._processes[job.name] = start_run(command, self._place.log(job.name), cpus, threads)

    def poll(self) -> list[Ended]:
        """Return the runs that have ended."""
        found = []
        for name, process in list(self._processes.items()):
            code = self._exit_code(name)
            if code is not None:
                del self._processes[name]
                kill_group(process)  # what it may have left
                cpu_seconds = self._cpu_seconds.pop(name, 0.0)
                found.append(Ended(name, code, last_error(self._place.log(name), code), cpu_seconds))
        return found

    def _exit_code(self, name: str) -> int | None:
        """Return the exit code of a run, None while it goes on; when it has ended, note its CPU time."""
        process = self._processes[name]
        if process.returncode is None:
            before = children_seconds()
            if process.poll() is not None:  # which adds the times of this process, and of no other, to the children's
                self._cpu_seconds[name] = children_seconds() - before
        return process.returncode

    def running(self) -> set[str]:
        """Return the runs in progress."""
        return set(self._processes)

    def cancel(self, name: str) -> None:
        """Ask a run to save and end."""
        with suppress(KeyError, ProcessLookupError):
            self._processes[name].send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let all runs save and end; kill those that take too long, or all after another Ctrl-C."""
        try:
            for name in self._processes:
                self.cancel(name)
            until = time.monotonic() + STOP_SECONDS
            while time.monotonic() < until and any(self._exit_code(name) is None for name in self._processes):
                time.sleep(0.05)
        finally:
            for process in self._processes.values():
                kill_group(process)
                process.wait()


def _cores(args: LocalArgs) -> list[tuple[int, ...]]:
    """Return the cores of each place for a run. Errors: UserError for more runs than cores."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    jobs = args.jobs or max(1, len(usable) // args.cores_per_run)
    if (needed := jobs * args.cores_per_run) > len(usable):
        raise UserError(
            f"executor.local: jobs={jobs} with cores_per_run={args.cores_per_run} need {needed} cores, and"
            f" {len(usable)} can be used here. Lower one of them"
        )
    return [tuple(usable[i * args.cores_per_run : (i + 1) * args.cores_per_run]) for i in range(jobs)]
