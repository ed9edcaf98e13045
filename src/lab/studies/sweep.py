"""A whole sweep: asks for trials where there is room, runs their seeds, ends those that fall behind, keeps results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omagd.lab.analysis.runs import read_records
from omagd.lab.analysis.statistics import AGGREGATES
from omagd.lab.studies import engine, sweep_report
from omagd.lab.studies.executors import Job, Place
from omagd.lab.studies.state import DONE, FAILED, PRUNED, STATE, StudyState, check_folder, locked_study
from omagd.lab.studies.study import examine, make_executor, require_same_references
from omagd.lab.studies.sweep_spec import Sweep, trial_name
from omagd.lab.studies.trials import JOURNAL, Trials, number_of, optuna
from omagd.lab.studies.view import ConsoleView
from omagd.utils.errors import UserError, import_library, nearest
from omagd.utils.run_folder import closed_to_others
from omagd.utils.storage import is_number
from omagd.utils.writing import replace_file

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

COPY = "sweep.yaml"
LOOK_SECONDS = 1.0
"""Between two looks at the metrics of the runs in progress."""

MOST_AT_A_TIME = 8
Curve = dict[int, float]


def run_sweep(sweep: Sweep, warn: Callable[[str], None], *, quiet: bool = False) -> dict[str, Any]:
    """Run what is left of a sweep; return its results, as in `trials.json`.

    Args:
        warn: called with each warning, one line. quiet: do not show how it goes on.
    Errors: UserError where the sweep or its folder is not as it must be, or nothing can be written there.
    """
    optuna()
    import_library("matplotlib.figure", "sweep")  # now, since it draws at the end of what may take days
    try:
        return _run(sweep, warn, quiet)
    except OSError as problem:
        raise UserError(f"{sweep.folder}: cannot be written ({problem.strerror}). The same command continues") from None


def _run(sweep: Sweep, warn: Callable[[str], None], quiet: bool) -> dict[str, Any]:
    known = StudyState.read(sweep.folder).records if (sweep.folder / STATE).exists() else {}
    strange = [record.job.arm for record in known.values() if number_of(record.job.arm) is None]
    if strange:
        raise UserError(f"{sweep.folder}: is the folder of a study (arm {strange[0]}). Give another name: or results:")
    check_folder(sweep.folder)
    if not (sweep.folder / JOURNAL).exists():
        check_space(sweep)
    place = Place(sweep.folder, sweep.settings)
    executor = make_executor(sweep.executor, place, known.values())
    with closed_to_others(), locked_study(sweep.folder) as state:
        require_same_references(place, state.records.values())
        trials = Trials(sweep, sweep.folder)
        _restore(trials, state, sweep)
        _keep_copy(sweep)
        search = _Search(sweep, state, trials, len(executor.slots), warn)
        view = None if quiet else SweepView(state, len(executor.slots), search)
        try:
            engine.run(search.begin(), executor, state, more=search.more, view=view)
        finally:
            state.save(now=True)
            found = sweep_report.results_of(sweep, trials, state)
            sweep_report.write_tables(sweep, found)
        sweep_report.write_pictures(sweep, found)
        return found


def check_space(sweep: Sweep) -> None:
    """Check a run without the space, and one with each choice alone, as runs check themselves. Errors: UserError."""
    alone = [
        replace(sweep.jobs(0, {parameter.key: choice})[0], arm=f"space.{parameter.key}", name=str(choice))
        for parameter in sweep.space
        for choice in parameter.choices
    ]
    examine([*sweep.jobs(0, {})[:1], *alone], sweep.executor, sweep.source)


class _Search:
    """The trials of one call, and the runs of those that are open."""

    def __init__(
        self, sweep: Sweep, state: StudyState, trials: Trials, slots: int, warn: Callable[[str], None]
    ) -> None:
        self._sweep, self._state, self._trials, self._warn = sweep, state, trials, warn
        self._open: dict[int, tuple[FrozenTrial, list[Job]]] = {}
        self._curves: dict[str, _CurveReader] = {}
        self._looked = 0.0
        self._exhausted = False
        self._metric_seen = any(trial.values or trial.intermediate_values for trial in trials.all())
        fill = min(MOST_AT_A_TIME, math.ceil(slots / len(sweep.seeds)))
        self._at_a_time = sweep.file.at_a_time or max(1, fill)

    def begin(self) -> list[Job]:
        """Return the runs of trials that an earlier start has begun, and those that it could not cancel."""
        jobs = [job for trial in self._trials.open() for job in self._add(trial)]
        ended = {trial_name(t.number): t.state.name for t in self._trials.all() if t.state.is_finished()}
        for record in self._state.records.values():
            name = record.job.name
            if record.job.arm in ended and record.state not in {DONE, FAILED, PRUNED}:
                record.state = DONE if self._state.is_finished(name) else PRUNED
                self._state.changed()
            if record.state == PRUNED and record.reference:
                jobs.append(record.job)
        return jobs

    def more(self) -> list[Job] | None:
        """End trials whose runs have ended or fall behind; return the runs of new ones, None after the last."""
        look = time.monotonic() - self._looked >= LOOK_SECONDS
        if look:
            self._looked = time.monotonic()
        changed = [number for number in list(self._open) if self._follow(number, look)]
        new: list[Job] = []
        while self._may_ask():
            trial = self._trials.ask()
            if trial is None:
                self._exhausted = True
                self._warn(
                    f"after {len(self._trials.all())} trials no combination was found that is new; the sweep ends"
                )
                break
            new += self._add(trial)
        if changed or new:
            found = sweep_report.results_of(self._sweep, self._trials, self._state)
            sweep_report.write_tables(self._sweep, found)
        return new if self._open else None

    def headline(self) -> str:
        """Return how many trials have ended, and the best one."""
        states = [trial.state.name for trial in self._trials.all()]
        parts = [f"{sum(s not in {'RUNNING', 'WAITING'} for s in states)} of {self._sweep.file.trials} trials"]
        parts += [f"{states.count(name.upper())} {name}" for name in ("pruned",) if name.upper() in states]
        parts += [f"{states.count('FAIL')} failed"] * ("FAIL" in states)
        best = self._trials.best()
        return ", ".join(parts) + (f"; best {best.value:.4g} (trial {best.number})" if best else "")

    def _may_ask(self) -> bool:
        room = len(self._open) < self._at_a_time
        return room and not self._exhausted and len(self._trials.all()) < self._sweep.file.trials

    def _add(self, trial: FrozenTrial) -> list[Job]:
        jobs = self._sweep.jobs(trial.number, trial.params)
        self._open[trial.number] = trial, jobs
        return jobs

    def _follow(self, number: int, look: bool) -> bool:
        """Look after an open trial; return whether it has ended."""
        trial, jobs = self._open[number]
        records = [self._state.records.get(job.name) for job in jobs]
        if not self._metric_seen:
            for record in records:
                if record is not None and record.state == DONE:
                    self._require_metric(record.job)
        failed = next((record for record in records if record is not None and record.state == FAILED), None)
        if failed is not None:
            self._fail(number, f"{failed.job.name}: {failed.error}")
        elif all(record is not None and record.state == DONE for record in records):
            self._complete(number)
        elif any(record is not None and record.state == PRUNED for record in records) or (
            look and self._sweep.pruning and self._falls_behind(trial, jobs)
        ):
            self._trials.prune(trial)
            self._close(number)
        else:
            return False
        return True

    def _require_metric(self, job: Job) -> None:
        """Look for the metric in a finished run. Errors: UserError where the run logged other values only."""
        self._metric_seen = bool(self._curve(job))
        file, path = self._sweep.file, self._state.run_folder(job.name).metrics_jsonl
        lines = [] if self._metric_seen else [line for line in read_records(path) if line.get("stage") == file.stage]
        names = sorted({name for line in lines for name in line} - {"stage", "t_env", "epoch", "wall_seconds"})
        if not names or file.metric in names:
            return
        known = [name for name in names if name.startswith("test")] or names
        raise UserError(
            f"{self._sweep.source}: metric={file.metric}: {job.name} has finished without it in {file.stage}."
            f"{nearest(file.metric, names)} Known: {', '.join(known)}. Change metric:, and the same command continues"
        )

    def _complete(self, number: int) -> None:
        trial, jobs = self._open[number]
        values = {}
        for job in jobs:
            curve = self._curve(job)
            if not curve:
                metric = f"{self._sweep.file.stage}/{self._sweep.file.metric}"
                self._fail(number, f"{job.name}: its metrics.jsonl holds no {metric}")
                return
            values[str(job.seed)] = self._value(list(curve.values()))
        if self._sweep.pruning:  # what trials that follow are compared with, however many of their seeds have begun
            curves = [self._curve(job) for job in jobs]
            for seeds in range(1, len(curves) + 1):
                self._trials.report(trial, seeds, self._means(curves[:seeds]))
        self._trials.complete(trial, self._spread(list(values.values())), values)
        self._close(number)

    def _fail(self, number: int, error: str) -> None:
        self._warn(f"trial {number} has failed: {error}")
        self._trials.fail(self._open[number][0], error)
        self._close(number)

    def _close(self, number: int) -> None:
        """Forget a trial; its runs that are left are not wanted."""
        for job in self._open.pop(number)[1]:
            self._curves.pop(job.name, None)
            record = self._state.records.get(job.name)
            if record is not None and record.state not in {DONE, FAILED}:
                self._state.prune(job.name)

    def _value(self, tests: Sequence[float]) -> float:
        best = max if self._sweep.file.direction == "maximize" else min
        values = {"last": tests[-1], "best": best(tests), "mean": float(np.mean(tests))}
        return values[self._sweep.file.over_tests]

    def _falls_behind(self, trial: FrozenTrial, jobs: Sequence[Job]) -> bool:
        """Report the tests that all runs which have begun have reached; return whether the trial should end."""
        curves = [curve for curve in map(self._curve, jobs) if curve]
        return bool(curves) and self._trials.report(trial, len(curves), self._means(curves))

    def _means(self, curves: Sequence[Curve]) -> Curve:
        common = sorted(set.intersection(*map(set, curves)))
        return {test: self._spread([curve[test] for curve in curves]) for test in common}

    def _spread(self, values: Sequence[float]) -> float:
        return float(AGGREGATES[self._sweep.file.over_seeds]([np.array(values)]))

    def _curve(self, job: Job) -> Curve:
        if job.name not in self._curves:
            self._curves[job.name] = _CurveReader(self._state.run_folder(job.name).metrics_jsonl, self._sweep)
        return self._curves[job.name].read()


class _CurveReader:
    """The values of the metric in a run's `metrics.jsonl`, read as it grows."""

    def __init__(self, path: Path, sweep: Sweep) -> None:
        self._path, self._stage, self._metric = path, sweep.file.stage, sweep.file.metric
        self._interval = max(1, sweep.config.test_interval)
        self._offset = 0
        self._values: Curve = {}

    def read(self) -> Curve:
        """Return the values by the number of the test (stages 1 and 2: the epoch), in the order of the file."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:  # a run that continues from a checkpoint removes what came after it
                self._offset, self._values = 0, {}
            if size > self._offset:
                with self._path.open("rb") as file:
                    file.seek(self._offset)
                    text = file.read()
                whole = text.rfind(b"\n") + 1
                self._offset += whole
                for line in text[:whole].splitlines():
                    self._take(line)
        except OSError:
            pass
        return self._values

    def _take(self, line: bytes) -> None:
        if self._metric.encode() not in line:
            return
        try:
            record = json.loads(line)
            value = record[self._metric]
            clock = record["t_env"] // self._interval if "t_env" in record else record["epoch"]
            if record["stage"] == self._stage and is_number(value):
                self._values[int(clock)] = float(value)
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            return


class SweepView(ConsoleView):
    """Shows trials instead of runs in its first line."""

    def __init__(self, state: StudyState, slots: int, search: _Search) -> None:
        super().__init__(state, slots)
        self._search = search

    def headline(self) -> str:
        """Return how many trials have ended, and the best one."""
        return self._search.headline()


def _keep_copy(sweep: Sweep) -> None:
    copy = sweep.folder / COPY
    if not copy.exists() or copy.read_bytes() != sweep.text.encode():
        replace_file(copy, sweep.text.encode())


def _restore(trials: Trials, state: StudyState, sweep: Sweep) -> None:
    """Begin the trials whose runs are in the state while the journal was moved away.

    Errors: UserError where they do not have the keys of this sweep.
    """
    if trials.all():
        return
    found: dict[int, dict[str, Any]] = {}
    for record in state.records.values():
        texts = dict(word.partition("=")[::2] for word in record.job.words)
        try:
            values = {parameter.key: parameter.value_of(texts[parameter.key]) for parameter in sweep.space}
        except (KeyError, ValueError, StopIteration):
            raise UserError(f"{sweep.folder}: belongs to another sweep. Give another name: or results:") from None
        found[number_of(record.job.arm) or 0] = values
    for _, values in sorted(found.items()):
        trials.begin(values)
