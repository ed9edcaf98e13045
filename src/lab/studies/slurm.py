"""`executor: slurm`: runs as tasks of SLURM job arrays, by submitit. They outlive the process that submits them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from omagd.lab.studies.executors import Ended, Job, Place
from omagd.lab.studies.local import kill_group, last_error, start_run
from omagd.run.checkpoint.resuming import start_ticks
from omagd.utils.errors import UserError, import_extra, readable

MOST = 10_000
SAVE_SECONDS = 60.0
LOOK_SECONDS = 0.5
LOGS = "You can check full logs"
"""In submitit's errors paths follow here; the line before is what the task raised."""


class SlurmArgs(BaseModel):
    """Settings of `executor: slurm`.

    Attributes:
        time: limit of a run in minutes; a run that reaches it is requeued and continues, at most `requeues` times.
        partition, account, qos, constraint: as in sbatch. gpus, cpus, mem: of each run (`mem: 8GB`).
        at_a_time: runs of an array at a time. setup: shell lines before each run (`module load …`).
        options: further options of sbatch by name. poll_seconds: between two calls of sacct.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    time: PositiveInt = 60
    requeues: int = Field(default=100, ge=0)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: int = Field(default=0, ge=0)
    cpus: PositiveInt = 1
    mem: str | None = None
    at_a_time: PositiveInt = 256
    setup: list[str] = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)
    poll_seconds: PositiveInt = 30


class SlurmRun:
    """What a SLURM task does: runs the command of a job; called on a node. A preempted run saves and is requeued."""

    def __init__(self, command: Sequence[str], log: Path, cpus: int) -> None:
        self.command, self.log, self.cpus = list(command), log, cpus
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> tuple[int, str]:
        """Return the exit code and the last error."""
        self._process = start_run(self.command, self.log, threads=self.cpus)
        while (code := self._process.poll()) is None:  # not `wait`, which a signal handler cannot interrupt
            time.sleep(LOOK_SECONDS)
        return code, last_error(self.log, code)

    def checkpoint(self) -> Any:
        """Let the run save and end, and return what submitit requeues: the same command, which continues.

        submitit calls this in a signal handler, where the process must not be waited for.
        """
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            until = time.monotonic() + SAVE_SECONDS
            while start_ticks(self._process.pid) is not None and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
            kill_group(self._process)
        again = SlurmRun(self.command, self.log, self.cpus)
        return import_module("submitit").helpers.DelayedSubmission(again)


class SlurmExecutor:
    """Submits jobs that are started together as one array, and follows them; a later start finds them again."""

    args_model = SlurmArgs

    def __init__(self, place: Place) -> None:
        submitit = import_extra("executor=slurm", "slurm", "submitit")
        logging.getLogger("submitit").setLevel(logging.ERROR)
        self._place, self._args, self._folder = place, place.settings, place.folder / "slurm"
        self.slots = MOST
        try:
            self._slurm = submitit.SlurmExecutor(self._folder, max_num_timeout=self._args.requeues)
            self._slurm.update_parameters(**self._parameters())
        except (RuntimeError, ValueError) as problem:
            raise UserError(f"executor=slurm: {readable(str(problem))}") from None
        self._job_class = submitit.SlurmJob
        self._job_class.watcher._delay_s = self._args.poll_seconds
        self._new: list[tuple[Job, SlurmRun]] = []
        self._jobs: dict[str, Any] = {}
        for name, reference in place.references.items():
            self._jobs[name] = self._job_class(self._folder, reference)
        self.references = dict(place.references)

    def start(self, job: Job, command: list[str]) -> None:
        """Note a job; the next `poll` submits all that were noted."""
        self._new.append((job, SlurmRun(command, self._place.log(job.name), self._args.cpus)))

    def poll(self) -> list[Ended]:
        """Submit what is new; return the jobs that have ended."""
        found = self._submit() if self._new else []
        for name, job in list(self._jobs.items()):
            if job.done():
                del self._jobs[name], self.references[name]
                found.append(self._ended(name, job))
        return found

    def running(self) -> set[str]:
        """Return the jobs that SLURM says are running."""
        return {name for name, job in self._jobs.items() if job.watcher.get_state(job.job_id, "cache") == "RUNNING"}

    def cancel(self, name: str) -> None:
        """Cancel a job in SLURM: it gets SIGTERM first."""
        if name in self._jobs:
            self._jobs[name].cancel(check=False)

    def stop(self) -> None:
        """Leave the jobs to SLURM; those that were not submitted yet are dropped."""
        self._new.clear()

    def _parameters(self) -> dict[str, Any]:
        args = self._args
        given = {
            "job_name": self._place.folder.name, "partition": args.partition, "account": args.account, "qos": args.qos,
            "constraint": args.constraint, "gpus_per_node": args.gpus or None, "mem": args.mem,
        }  # fmt: skip
        return {
            **{name: value for name, value in given.items() if value is not None},
            "time": args.time, "nodes": 1, "ntasks_per_node": 1, "cpus_per_task": args.cpus,
            "srun_args": [f"--cpus-per-task={args.cpus}"],  # since SLURM 22.05 srun does not take it from sbatch
            "array_parallelism": args.at_a_time, "setup": args.setup, "stderr_to_stdout": True,
            "additional_parameters": {"requeue": True, **args.options},
        }  # fmt: skip

    def _submit(self) -> list[Ended]:
        new, self._new = self._new, []
        try:
            with self._slurm.batch():
                jobs = [self._slurm.submit(run) for _, run in new]
        except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
            reason = readable(f"sbatch has failed: {getattr(problem, 'stderr', None) or problem}")
            return [Ended(job.name, None, reason) for job, _ in new]
        for (job, _), submitted in zip(new, jobs, strict=True):
            self._jobs[job.name] = submitted
            self.references[job.name] = str(submitted.job_id)
        return []

    def _ended(self, name: str, job: Any) -> Ended:
        if job.paths.result_pickle.exists():
            try:
                code, error = job.result()
                return Ended(name, code, error)
            except Exception as problem:  # noqa: BLE001 (whatever the task raised, in submitit's wrapping)
                text = str(problem).partition(LOGS)[0]
                lines = [line for line in text.splitlines() if line.strip(" -")]
                return Ended(name, None, readable(lines[-1] if lines else type(problem).__name__))
        return Ended(name, None, f"SLURM job {job.job_id}: {job.watcher.get_state(job.job_id, 'cache')}")
