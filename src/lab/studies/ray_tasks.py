"""`executor: ray`: runs as tasks of a Ray cluster, or of a Ray on this machine that is started for the study."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from omagd.lab.studies.executors import Ended, Job, Place
from omagd.lab.studies.processes import STOP_SECONDS, finish, last_error, start_run
from omagd.utils.errors import UserError, import_extra, readable
from omagd.utils.signals import SIGNALS

MOST = 10_000
LOOK_SECONDS = 0.2


class RayArgs(BaseModel):
    """Settings of `executor: ray`.

    Attributes:
        address: of a running cluster ("auto", "ray://host:10001"); None: RAY_ADDRESS, else a Ray on this machine.
        local_cpus: CPUs of a Ray on this machine; None: all. cpus, gpus: of each run.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    address: str | None = None
    local_cpus: PositiveInt | None = None
    cpus: PositiveInt = 1
    gpus: float = Field(default=0.0, ge=0.0)

    @property
    def cores(self) -> int:
        """Cores of each run, for estimates."""
        return self.cpus


def run_task(command: Sequence[str], log: str, cpus: int) -> tuple[int, str]:
    """Run a command on a node of the cluster; return its exit code and the last error. A cancelled run saves."""
    process = start_run(command, Path(log), threads=cpus)
    try:
        while (code := process.poll()) is None:
            time.sleep(LOOK_SECONDS)
    except BaseException:
        finish(process)
        raise
    return code, last_error(Path(log), code)


class RayExecutor:
    """Hands all jobs to Ray, which starts them where CPUs are free. They end with this process."""

    args_model = RayArgs
    words: tuple[str, ...] = ()

    def __init__(self, place: Place) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # without GPUs a run sees none
        self._ray = import_extra("ray", "executor=ray: needs Ray", "ray")
        args = self._args = place.settings
        self._place = place
        self.references: dict[str, str] = {}
        self.slots: Sequence[tuple[int, ...]] = [()] * MOST
        own = args.address is None and "RAY_ADDRESS" not in os.environ
        options = {"num_cpus": args.local_cpus, "include_dashboard": False} if own else {"address": args.address}
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            self._ray.init(**options, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError, OSError) as problem:
            raise UserError(f"executor.ray: address={args.address}: {readable(str(problem))}") from None
        finally:
            for number, handler in handlers.items():  # Ray ends the process at SIGTERM; the study ends its runs first
                signal.signal(number, handler)
        limits = {"num_cpus": args.cpus, "num_gpus": args.gpus, "max_retries": 0}
        self._task = self._ray.remote(**limits)(run_task)
        self._tasks: dict[str, tuple[Any, float]] = {}

    def start(self, job: Job, command: list[str], cpus: tuple[int, ...]) -> None:
        """Hand a job to Ray."""
        log = self._place.log(job.name)
        self._tasks[job.name] = self._task.remote(command, str(log), self._args.cpus), time.time()

    def poll(self) -> list[Ended]:
        """Return the jobs that have ended."""
        if not self._tasks:
            return []
        waited = [task for task, _ in self._tasks.values()]
        over = set(self._ray.wait(waited, num_returns=len(waited), timeout=0)[0])
        return [self._ended(name) for name, (task, _) in list(self._tasks.items()) if task in over]

    def running(self) -> set[str]:
        """Return the jobs whose command has begun to write its log."""
        return {name for name, (_, since) in self._tasks.items() if _changed(self._place.log(name)) >= since}

    def cancel(self, name: str) -> None:
        """Ask a run to save and end."""
        if name in self._tasks:
            self._ray.cancel(self._tasks[name][0], force=False)

    def stop(self) -> None:
        """Let all runs save and end, and leave the cluster."""
        try:
            for name in self._tasks:
                self.cancel(name)
            if self._tasks:
                waited = [task for task, _ in self._tasks.values()]
                self._ray.wait(waited, num_returns=len(waited), timeout=STOP_SECONDS)
                self._tasks.clear()
        finally:
            self._ray.shutdown()

    def _ended(self, name: str) -> Ended:
        task, _ = self._tasks.pop(name)
        try:
            code, error = self._ray.get(task)
            return Ended(name, code, error)
        except self._ray.exceptions.RayError as problem:
            lines = [line for line in str(problem).splitlines() if line.strip()]
            return Ended(name, None, readable(lines[-1] if lines else type(problem).__name__))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
