"""Runs the jobs of a study: starts them where there is room, notes how they end, and goes on with the others."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable

from omagd.lab.studies.executors import Ended, Executor, Job
from omagd.lab.studies.state import DONE, ELSEWHERE, FAILED, PRUNED, RUNNING, WAITING, Record, StudyState
from omagd.utils.errors import UserError

POLL_SECONDS = 0.25
BUSY_MINUTES = 2
"""How long a run waits for the processes of an earlier start of it, which save and end."""

NOT_FINISHED = "ended with exit code 0 without a result"


def run(
    jobs: Iterable[Job],
    executor: Executor,
    state: StudyState,
    *,
    on_end: Callable[[Job, Record], None] | None = None,
    more: Callable[[], list[Job] | None] | None = None,
    show: Callable[[Record], None] | None = None,
) -> None:
    """Run jobs until none is left. Nothing is repeated within one call: what fails is noted, and the others go on.

    Args:
        jobs: their records are added to the state where they are missing; finished ones are not started again.
        executor: its jobs in progress are ended if this call ends early, unless they outlive this process.
        on_end: called with each job that has ended in this call, done or failed.
        more: called regularly; returns further jobs, or None when there will be none. It may prune jobs
            (`StudyState.prune`): those in progress are cancelled, waiting ones are not started.
        show: called with each record whose state has changed.
    Errors: OSError where the state cannot be written.
    """
    engine = _Engine(executor, state, on_end or (lambda job, record: None), show or (lambda record: None))
    try:
        engine.take(jobs)
        while True:
            engine.step()
            if more is not None:
                further = more()
                if further is None:
                    more = None
                else:
                    engine.take(further)
            if engine.idle and more is None:
                return
            time.sleep(POLL_SECONDS)
    finally:
        engine.end()


class _Engine:
    """The jobs of one call of `run`."""

    def __init__(
        self,
        executor: Executor,
        state: StudyState,
        on_end: Callable[[Job, Record], None],
        show: Callable[[Record], None],
    ) -> None:
        self._executor, self._state, self._on_end, self._show = executor, state, on_end, show
        self._waiting: deque[Record] = deque()
        self._started: dict[str, Record] = {}
        self._cancelled: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in progress."""
        return not self._waiting and not self._started

    def take(self, jobs: Iterable[Job]) -> None:
        """Add jobs."""
        jobs = list(jobs)
        if not jobs:
            return
        self._state.add(jobs)
        for job in jobs:
            record = self._state.records[job.name]
            if record.state == ELSEWHERE or (record.state == DONE and self._state.is_finished(job.name)):
                continue
            if record.state == PRUNED and job.name not in self._executor.references:
                continue
            if record.state != PRUNED and self._state.is_finished(job.name):
                self._close(record, DONE)
            elif job.name in self._executor.references:  # it outlived the process that started it
                self._started[job.name] = record
            else:
                self._set(record, WAITING)
                self._waiting.append(record)

    def step(self) -> None:
        """Note what has ended, and start what has room."""
        for ended in self._executor.poll():
            self._note(ended)
        while self._waiting and len(self._started) < self._executor.slots:
            record = self._waiting.popleft()
            if record.state != PRUNED:
                self._start(record)
        running, submitted = self._executor.running(), False
        for name, record in self._started.items():
            reference = self._executor.references.get(name, "")
            if reference != record.reference:
                record.reference, submitted = reference, True
                self._state.changed()
            if record.state == PRUNED:
                if name not in self._cancelled:
                    self._cancelled.add(name)
                    self._executor.cancel(name)
            elif name in running and record.state != RUNNING:
                record.since = time.time()
                self._set(record, RUNNING)
        self._state.save(now=submitted)  # a job whose reference is lost would be submitted again

    def end(self) -> None:
        """End what is in progress and save the state."""
        try:
            self._executor.stop()
        finally:
            over = {ended.name for ended in self._executor.poll()}
            for name, record in self._started.items():
                if record.state == PRUNED:
                    continue
                self._spend(record)
                if self._state.is_finished(name):
                    self._close(record, DONE)
                elif name in over or name not in self._executor.references:
                    self._close(record, WAITING)
            self._state.save(now=True)

    def _start(self, record: Record) -> None:
        record.error, record.starts = "", record.starts + 1
        command = command_of(record, self._state)
        try:
            self._executor.start(record.job, command)
        except (OSError, UserError) as problem:
            self._fail(record, f"cannot be started: {problem}")
            return
        self._started[record.job.name] = record
        self._state.changed()

    def _note(self, ended: Ended) -> None:
        record = self._started.pop(ended.name, None)
        if record is None:
            return
        if record.state == PRUNED:
            record.reference = ""
            self._state.changed()
            return
        self._spend(record)
        if self._state.is_finished(ended.name):
            self._close(record, DONE)
        else:
            self._fail(record, ended.error or NOT_FINISHED)

    def _fail(self, record: Record, error: str) -> None:
        record.error = error
        self._close(record, FAILED)

    def _spend(self, record: Record) -> None:
        if record.state == RUNNING:
            record.seconds += time.time() - record.since

    def _close(self, record: Record, state: str) -> None:
        record.reference = ""
        self._set(record, state)
        if state in {DONE, FAILED}:
            self._on_end(record.job, record)

    def _set(self, record: Record, state: str) -> None:
        if record.state != state:
            record.state = state
            self._state.changed()
            self._show(record)


def command_of(record: Record, state: StudyState) -> list[str]:
    """Return the command of a job: it continues its own folder, whatever happened to an earlier start of it."""
    job = record.job
    options = [word for word in job.words if word.startswith("--")]
    keys = job.words[len(options) :] or ("with",)
    own = [
        f"local_results_path={state.folder / 'runs'}",
        f"unique_token={job.name}",
        "auto_resume=True",
        f"auto_resume_wait={BUSY_MINUTES}",
    ]
    return [sys.executable, "-m", "omagd", "--unobserved", *options, *keys, *own]
