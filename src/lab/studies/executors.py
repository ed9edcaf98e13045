"""The interface of what starts runs: a job, the end of a job, and an executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes:
        name: of its folder in `runs/`; unique within the study. arm: name of its arm. env, map: what it plays.
        words: arguments after `python -m omagd`, without those about folders and resuming, which the engine adds.
    """

    name: str
    arm: str
    env: str
    map: str
    seed: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """The end of a job's process.

    Attributes:
        name: of the job. exit_code: of its command; negative after a signal, as in `subprocess`; None if unknown.
        error: the last line that explains a failure; empty if there is none.
    """

    name: str
    exit_code: int | None
    error: str = ""


@dataclass
class Place:
    """Where an executor works: made by the engine.

    Attributes:
        folder: of the study. settings: the section `executor` of the study file, as `args_model` of the executor.
        references: of jobs that an earlier start has handed over (job name -> reference), from the study's state.
    """

    folder: Path
    settings: Any
    references: dict[str, str] = field(default_factory=dict)

    def log(self, name: str) -> Path:
        """Return the file that holds what a job prints."""
        return self.folder / "logs" / f"{name}.log"


class Executor(Protocol):
    """Starts the commands of jobs and reports their ends. It is made from a `Place`; register it in `EXECUTORS`.

    Attributes:
        args_model: pydantic model of its settings.
        slots: how many jobs may be in progress at a time.
        references: job name -> text by which a later start of the study finds a job that outlives this process; the
            engine saves it. Jobs in `Place.references` that still exist are in progress from the beginning.
    """

    args_model: ClassVar[type[BaseModel]]
    slots: int
    references: dict[str, str]

    def __init__(self, place: Place) -> None: ...

    def start(self, job: Job, command: list[str]) -> None:
        """Start a command, or hand it to a queue; its output is appended to `Place.log(job.name)`.

        Errors: OSError or UserError where that is impossible.
        """

    def poll(self) -> list[Ended]:
        """Return the jobs that have ended since the last call, at once."""

    def running(self) -> set[str]:
        """Return the jobs in progress that have left the queue."""

    def cancel(self, name: str) -> None:
        """End a job: it may write a checkpoint first. `poll` reports its end."""

    def stop(self) -> None:
        """End all jobs in progress that end with this process, and wait until none is left."""
