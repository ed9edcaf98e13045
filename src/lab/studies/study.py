"""A whole study: checks it, finds out what is to be done, runs it, and keeps its results."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omagd.lab.analysis.groups import differences
from omagd.lab.studies import EXECUTORS, scheduler
from omagd.lab.studies import results as results_files
from omagd.lab.studies.executors import Executor, Job, Place
from omagd.lab.studies.local import bound
from omagd.lab.studies.spec import Study, load
from omagd.lab.studies.state import DONE, ELSEWHERE, STATE, WAITING, Record, StudyState, check_folder, locked_study
from omagd.lab.studies.view import printing, state_line
from omagd.run.launchers import require_one_task
from omagd.run.run_folder import closed_to_others
from omagd.run.signals import stoppable
from omagd.utils.errors import Mistakes, UserError, readable

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
        results_files.check_file(study.results_file)
    before = StudyState.read(study.folder) if (study.folder / STATE).exists() else StudyState(study.folder)
    known = set(before.records)
    before.add(study.jobs)  # the folder of another study is rejected before the jobs are examined
    new = [job for job in study.jobs if job.name not in known]
    if known and len(new) == len(study.jobs):
        raise UserError(f"{study.folder}: belongs to another study, without these runs. Give another name: or results:")
    examined = examine(new, study.executor, study.source)
    with closed_to_others(), locked_study(study.folder) as state:
        state.add(study.jobs)
        for name, found in examined.items():
            card = {part: found["card"][part] for part in ("id", "compared")}  # the whole card is in the run's folder
            state.records[name].identity, state.records[name].card = found["identity"], card
        executor = make_executor(study.executor, study.settings, state, {job.name for job in study.jobs})
        state.keep_copy(study.text)
        state.save(now=True)
        wanted = [state.records[job.name] for job in study.jobs]
        for line in not_comparable(wanted) if new else ():
            warn(line)
        kept = _Results(study, state, warn)
        kept.skip(wanted)
        show = None if quiet else printing(lambda: state_line(state))
        scheduler.run(study.jobs, executor, state, on_end=lambda job, record: kept.add(record), show=show)
        return state


def study(
    spec: str | Path | Mapping[str, Any], *, results: str | None = None, executor: str | None = None
) -> dict[str, Any]:
    """Run a study, or what is left of it, like `omagd study`; call it in the main thread. As `omagd.study` for Python.

    Args:
        spec: path of a study file, or its values (docs/studies.md). results: folder around the study's folder.
        executor: local or slurm, instead of the first one that the study names.
    Returns: `folder`; `complete`: whether every run has a result; `runs`: a list with `name`, `arm`, `env`, `map`,
        `seed`, `state`, `error` and `folder` of each.
    Errors: UserError for what the study gets wrong, before anything starts. A failed run is no error.
    """
    require_one_task("study")
    found = load(spec, results=results, executor=executor)
    with stoppable():
        complete, runs = outcome(run_study(found, warnings.warn, quiet=not sys.stderr.isatty()), found)
    return {"folder": str(found.folder), "complete": complete, "runs": runs}


def make_executor(name: str, settings: Any, state: StudyState, jobs: Container[str] | None = None) -> Executor:
    """Return the executor of a study whose lock is held; it follows the jobs that an earlier start has handed over.

    Args:
        jobs: names of those that count; None: all. Errors: UserError.
    """
    known = {record.job.name: record.reference for record in state.records.values() if record.reference}
    references = {name: known[name] for name in known if jobs is None or name in jobs}
    return EXECUTORS.get(name)(Place(state.folder, settings, references))


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


def not_comparable(records: Iterable[Record]) -> list[str]:
    """Return a line for each environment whose arms have cards that differ."""
    first: dict[tuple[str, str], Record] = {}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        place = record.job.env, record.job.map
        base = first.setdefault(place, record)
        if record.job.arm == base.job.arm or not record.card or not base.card:
            continue
        if text := differences(record.card, base.card):
            found.setdefault(place, {})[record.job.arm] = text
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
        self._known = set[results_files.Key]()
        if self._path is None:
            return
        try:
            self._known, bad = results_files.known_keys(self._path)
        except OSError as problem:
            raise UserError(f"results_file={self._path}: cannot be read ({problem.strerror})") from None
        if bad:
            warn(f"results_file={self._path}: {bad} lines cannot be read and do not count; the file is kept as it is")

    def skip(self, records: Iterable[Record]) -> None:
        """Mark runs whose results are in the file already, and append those of finished runs that are not."""
        for record in records:
            inside = results_files.key_of(record.card, record.identity) in self._known
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
        key = results_files.key_of(record.card, record.identity)
        if self._path is None or key in self._known or not (done or record.state == DONE):
            return
        folder = self._state.run_folder(record.job.name)
        entry = results_files.line_of(self._name, record.job, folder, record.card, record.identity, record.seconds)
        try:
            results_files.append(self._path, entry)
            self._known.add(key)
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
