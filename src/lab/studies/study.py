"""A whole study: checks it, finds out what is to be done, runs it, and keeps its results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omagd.lab.studies import EXECUTORS, engine, results
from omagd.lab.studies.executors import Executor, Job, Place
from omagd.lab.studies.files import Rejected
from omagd.lab.studies.processes import bound, children_seconds
from omagd.lab.studies.spec import Study
from omagd.lab.studies.state import DONE, ELSEWHERE, STATE, WAITING, Record, StudyState, check_folder, locked_study
from omagd.lab.studies.view import ConsoleView
from omagd.run.reporting.card import IF_MEANT, READS
from omagd.run.reporting.provenance import code
from omagd.utils.errors import Mistakes, UserError, readable
from omagd.utils.run_folder import closed_to_others

Examined = dict[str, Any]
"""Of a job: `identity`, `card`, or `errors`."""

PAIRS_SHOWN = 3


def run_study(study: Study, warn: Callable[[str], None], *, quiet: bool = False) -> StudyState:
    """Run what is left of a study; return its state.

    Args:
        warn: called with each warning, one line. quiet: do not show how it goes on.
    Errors: UserError where the study or its folder is not as it must be; OSError where its state cannot be written.
    """
    check_folder(study.folder)
    if study.results_file is not None:
        results.check_file(study.results_file)
    known = StudyState.read(study.folder).records if (study.folder / STATE).exists() else {}
    new = [job for job in study.jobs if job.name not in known or known[job.name].job.words != job.words]
    before = StudyState(study.folder)
    before.records = dict(known)
    before.add(study.jobs)  # the folder of another study is rejected before the jobs are examined
    if known and len(new) == len(study.jobs):
        raise UserError(f"{study.folder}: belongs to another study, without these runs. Give another name: or results:")
    examined = examine(new, study.executor, study.source)
    place = Place(study.folder, study.settings)
    names = {job.name for job in study.jobs}
    executor = make_executor(study.executor, place, (known[name] for name in known if name in names))
    with closed_to_others(), locked_study(study.folder) as state:
        begun = time.process_time(), children_seconds()
        state.add(study.jobs)
        state.cpu_seconds["engine"] += begun[0]  # imports and the study file
        state.cpu_seconds["checks"] += begun[1]
        for name, found in examined.items():
            card = {part: found["card"][part] for part in ("id", "compared")}  # the whole card is in the run's folder
            state.records[name].identity, state.records[name].card = found["identity"], card
        state.keep_copy(study.text)
        state.save(now=True)
        wanted = [state.records[job.name] for job in study.jobs]
        for line in not_comparable(wanted) if new else ():
            warn(line)
        require_same_references(place, wanted)
        kept = _Results(study, state, warn)
        spent = dict(state.cpu_seconds)

        def ended(job: Job, record: Record) -> None:
            kept.add(record)
            _note_time(state, spent, begun)

        kept.skip(wanted)
        view = None if quiet else ConsoleView(state, len(executor.slots))
        try:
            engine.run(study.jobs, executor, state, on_end=ended, view=view)
        finally:
            _note_time(state, spent, begun)
        return state


def make_executor(name: str, place: Place, known: Iterable[Record]) -> Executor:
    """Return the executor, before the study's folder is made: one that cannot work here leaves no folder.

    Args:
        known: records of the study's jobs; the executor follows those that an earlier start has handed over.
    Errors: UserError.
    """
    place.references.update(_references(known))
    with closed_to_others():
        return EXECUTORS.get(name)(place)


def require_same_references(place: Place, records: Iterable[Record]) -> None:
    """Check under the study's lock that the executor follows what is to be followed. Errors: UserError."""
    if _references(records) != place.references:
        raise UserError(f"{place.folder}: another process has run this study in the meantime. Start it again")


def _references(records: Iterable[Record]) -> dict[str, str]:
    return {record.job.name: record.reference for record in records if record.reference}


def _note_time(state: StudyState, before: dict[str, float], begun: tuple[float, float]) -> None:
    own, runs = time.process_time() - begun[0], children_seconds() - begun[1]
    state.cpu_seconds = {**before, "engine": before["engine"] + own, "runs": before["runs"] + runs}
    state.changed()


def examine(jobs: Sequence[Job], executor: str, source: str) -> dict[str, Examined]:
    """Return identity and card of jobs, by name, from a process that checks them as a run would check itself.

    That process needs torch and seconds; this one stays small, and later starts of the study need neither.
    Errors: UserError that names everything for which jobs would be rejected, with their arms.
    """
    if not jobs:
        return {}
    asked = {"local": executor == "local", "jobs": [list(job.words) for job in jobs]}
    command = [sys.executable, "-m", "omagd", "study", "--examine"]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False, preexec_fn=bound()
    )
    try:
        found: list[Examined] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise UserError(f"{source}: its runs cannot be checked: {readable(lines[-1])}") from None
    mistakes = Mistakes()
    for job, entry in zip(jobs, found, strict=True):
        if "errors" in entry:
            name = f" ({job.name})" if job.name else ""
            mistakes.note(UserError(*entry["errors"]), f"{source}: {job.arm}{name}" if job.arm else source)
    mistakes.raise_any()
    return {job.name: entry for job, entry in zip(jobs, found, strict=True)}


@contextmanager
def named_with_runs() -> Iterator[None]:
    """Add to the mistakes of a study or sweep those that its runs would be rejected for."""
    try:
        yield
    except Rejected as rejected:
        if not rejected.jobs:
            raise
        found = Mistakes()
        found.add(*rejected.of_file)
        with found.caught():
            examine(rejected.jobs, rejected.executor, rejected.source)
        found.raise_any()
        raise


def not_comparable(records: Iterable[Record]) -> list[str]:
    """Return a line for each environment whose arms have cards that differ."""
    first: dict[tuple[str, str], Record] = {}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        place = record.job.env, record.job.map
        base = first.setdefault(place, record)
        if record.job.arm == base.job.arm or not record.card or not base.card:
            continue
        mine, theirs = record.card["compared"], base.card["compared"]
        keys = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
        if keys:
            text = ", ".join(f"{key} {mine.get(key, 'none')}, not {theirs.get(key, 'none')}" for key in keys)
            found.setdefault(place, {})[record.job.arm] = f"{text} ({IF_MEANT})" if keys == [READS] else text
    lines = []
    for place, arms in found.items():
        shown = "; ".join(f"{arm}: {text}" for arm, text in list(arms.items())[:PAIRS_SHOWN])
        more = f"; and {len(arms) - PAIRS_SHOWN} more" if len(arms) > PAIRS_SHOWN else ""
        lines.append(
            f"{' '.join(filter(None, place))}: these arms cannot be compared with {first[place].job.arm}: {shown}{more}"
        )
    return lines


class _Results:
    """The results file of a study, where it has one."""

    def __init__(self, study: Study, state: StudyState, warn: Callable[[str], None]) -> None:
        self._path, self._name, self._state, self._warn = study.results_file, study.folder.name, state, warn
        self._known: dict[results.Key, dict[str, Any]] = {}
        self._commit = code().label if self._path is not None else ""
        if self._path is None:
            return
        try:
            self._known, bad = results.known_keys(self._path)
        except OSError as problem:
            raise UserError(f"results_file={self._path}: cannot be read ({problem.strerror})") from None
        if bad:
            warn(f"results_file={self._path}: {bad} lines cannot be read and do not count; the file is kept as it is")

    def skip(self, records: Iterable[Record]) -> None:
        """Mark runs whose results are in the file already, and append those of finished runs that are not."""
        for record in records:
            inside = results.key_of(record.card, record.identity) in self._known
            finished = self._state.is_finished(record.job.name)
            if finished:
                self.add(record, done=True)
            elif inside and record.state != ELSEWHERE:
                record.state = ELSEWHERE
                self._state.changed()
            elif not inside and record.state == ELSEWHERE:  # its line was removed
                record.state = WAITING
                self._state.changed()

    def add(self, record: Record, done: bool = False) -> None:
        """Append the result of a job that has ended, unless it is there."""
        key = results.key_of(record.card, record.identity)
        if self._path is None or key in self._known or not (done or record.state == DONE):
            return
        folder = self._state.run_folder(record.job.name)
        entry = results.line_of(
            self._name, record.job, folder, record.card, record.identity, commit=self._commit,
            seconds=record.seconds, cpu_seconds=record.cpu_seconds,
        )  # fmt: skip
        try:
            results.append(self._path, entry)
            self._known[key] = entry
        except OSError as problem:
            self._warn(
                f"results_file={self._path}: cannot be written ({problem.strerror}): {record.job.name} is missing"
                " there; the next start of the study appends it"
            )


def outcome(state: StudyState, study: Study) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether every job of a study has a result, and one entry per job."""
    entries = []
    for job in study.jobs:
        record = state.records[job.name]
        about = {"name": job.name, "arm": job.arm, "env": job.env, "map": job.map, "seed": job.seed}
        folder = str(state.run_folder(job.name).path)
        entries.append({**about, "state": record.state, "error": record.error, "folder": folder})
    return all(entry["state"] in {DONE, ELSEWHERE} for entry in entries), entries
