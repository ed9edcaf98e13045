"""What a study knows about its runs: one file, replaced as a whole, which a later start reads.

Whether a run is finished is decided by the run's own folder, so nothing is lost if this file is older than the runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from omagd.lab.studies.executors import Job
from omagd.lab.studies.results import try_folder
from omagd.run.checkpoint.resuming import Busy, busy_run, take
from omagd.run.run_folder import RUN_FILE, STUDY_FILE, STUDY_RUNS, RunFolder, read_entry, write_json
from omagd.utils.errors import UserError, readable
from omagd.utils.storage import LONGEST_FILE, held, read_json, replace_file

STATE, COPY, RUNS, LOGS = STUDY_FILE, "study.yaml", STUDY_RUNS, "logs"
FORMAT = 1
SAVE_SECONDS = 1.0
WAITING, RUNNING, DONE, FAILED, ELSEWHERE = "waiting", "running", "done", "failed", "elsewhere"
PRUNED = "pruned"
ORDER = (DONE, ELSEWHERE, PRUNED, RUNNING, WAITING, FAILED)


@dataclass
class Record:
    """One job.

    Attributes:
        job: its name, arm, environment, seed and words. state: waiting, running, done, failed, elsewhere (its
            result is in the results file), or pruned (a sweep has ended it). error: of the last failure, one line.
        seconds: of its starts, in all.
        starts: how often it was started. since: when it was last started, seconds since the epoch; 0 before.
        reference: by which the executor finds it again.
        identity: hash of its configuration. card: `id` and `compared` of its card at the start.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    job: Job
    state: str = WAITING
    error: str = ""
    seconds: float = 0.0
    starts: int = 0
    since: float = 0.0
    reference: str = ""
    identity: str = ""
    card: dict[str, Any] = field(default_factory=dict)


class StudyState:
    """The runs of a study, in `records` by the name of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, Record] = {}
        self._saved = 0.0
        self._changed = False

    @classmethod
    def read(cls, folder: Path) -> StudyState:
        """Return the state in a study's folder. Errors: UserError where there is none."""
        state = cls(folder)
        try:
            values = read_json(folder / STATE, LONGEST_FILE)
            if values["format"] != FORMAT:
                raise UserError(f"{folder / STATE}: has format {values['format']}; this version reads {FORMAT}")
            for record in TypeAdapter(list[Record]).validate_python(values["jobs"]):
                if record.card and not isinstance(record.card.get("compared"), dict):
                    raise ValueError("card")
                state.records[record.job.name] = record
        except OSError as problem:
            raise UserError(f"{folder}: holds no study ({problem.strerror}: {STATE})") from None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as problem:
            raise UserError(
                f"{folder / STATE}: is damaged ({type(problem).__name__}). Remove it, and start the study again:"
                " finished runs stay finished"
            ) from None
        return state

    def run_folder(self, name: str) -> RunFolder:
        """Return the folder of a job's run."""
        return RunFolder(self.folder / RUNS / name)

    def is_finished(self, name: str) -> bool:
        """Return whether a job's run has ended and written everything."""
        folder = self.run_folder(name)
        return bool(read_entry(folder.path / RUN_FILE).get("finished")) and folder.summary_json.is_file()

    def add(self, jobs: Iterable[Job]) -> list[Record]:
        """Add jobs that are not there yet; return their records. Errors: UserError for a name with other words."""
        new = []
        for job in jobs:
            known = self.records.get(job.name)
            if known is not None and known.job.words != job.words:
                raise UserError(
                    f"{self.folder}: belongs to another study: its run {job.name} has other keys"
                    f" ({_other_keys(known.job, job)}). Give another name: or results:"
                )
            if known is None:
                self.records[job.name] = known = Record(job)
                new.append(known)
            known.job = job
        self.changed()
        return new

    def prune(self, name: str) -> None:
        """Mark a job as one whose result is not wanted any more; the engine cancels it."""
        record = self.records[name]
        if record.state == RUNNING:
            record.seconds += time.time() - record.since
        record.state = PRUNED
        self.changed()

    def leader(self) -> str:
        """Return who leads the study, in words; after a killed leader, jobs that ended with it count as waiting.

        Jobs that an executor has handed over, as to SLURM, go on without a leader and stay as they are.
        """
        try:
            busy = busy_run(self.folder, strict=True)
        except OSError as problem:
            return f"unknown whether it runs: its lock cannot be read ({problem.strerror})"
        if busy is not None:
            return f"run by {busy}"
        left = [record for record in self.records.values() if record.state == RUNNING and not record.reference]
        for record in left:
            record.state = WAITING
        return "nothing runs it now" + (f"; {len(left)} waiting after an interruption" if left else "")

    def changed(self) -> None:
        """Note that the file has to be written."""
        self._changed = True

    def save(self, now: bool = False) -> None:
        """Write the file if something has changed, at most every second, or `now`. Errors: OSError."""
        if self._changed and (now or time.monotonic() - self._saved >= SAVE_SECONDS):
            records = [asdict(record) for record in self.records.values()]
            write_json(self.folder / STATE, {"format": FORMAT, "jobs": records})
            self._saved, self._changed = time.monotonic(), False

    def keep_copy(self, text: str) -> None:
        """Keep the study file beside the runs. Errors: OSError."""
        copy = self.folder / COPY
        if not copy.exists() or copy.read_bytes() != text.encode():
            replace_file(copy, text.encode())

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state that occurs."""
        states = [record.state for record in self.records.values()]
        return {state: states.count(state) for state in ORDER if state in states}


def _other_keys(there: Job, here: Job) -> str:
    """Return the keys in which two jobs differ, with both values."""
    theirs, mine = (dict(word.partition("=")[::2] for word in job.words) for job in (there, here))
    keys = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    none = "not given"
    return readable("; ".join(f"{key} is {theirs.get(key, none)} there, {mine.get(key, none)} here" for key in keys))


def check_folder(folder: Path) -> None:
    """Raise UserError where a study cannot be: the folder is something else, or nothing can be written there."""
    try:
        if folder.exists() and any(folder.iterdir()) and not any((folder / name).exists() for name in (STATE, RUNS)):
            raise UserError(f"{folder}: exists and is not the folder of a study. Give another name: or results:")
        try_folder(folder)
    except OSError as problem:
        raise UserError(f"{folder}: cannot be written ({problem.strerror}). Give another results:") from None


@contextmanager
def locked_study(folder: Path) -> Iterator[StudyState]:
    """Return the state of a study's folder, which is made if there is none, locked until the context ends.

    Errors: UserError where another process has it, where it is not a study's, or nothing can be written.
    """
    check_folder(folder)
    try:
        for place in (folder, folder / RUNS, folder / LOGS):
            place.mkdir(parents=True, exist_ok=True)
        lock = take(folder)
    except Busy as busy:
        raise UserError(f"{folder}: {busy} runs this study already. See: omagd study status {folder}") from None
    except OSError as problem:
        raise UserError(f"{folder}: cannot be written ({problem.strerror}). Give another results:") from None
    with lock:
        for left in folder.glob(".*.tmp"):  # of a start that was killed while it wrote
            left.unlink(missing_ok=True)
        state = StudyState.read(folder) if (folder / STATE).exists() else StudyState(folder)
        with held(folder):
            try:
                yield state
            finally:
                if state.records:
                    state.changed()
                    with suppress(OSError):
                        state.save(now=True)
