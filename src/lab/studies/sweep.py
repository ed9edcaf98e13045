"""A whole sweep: asks for trials where there is room, runs their seeds, ends those that fall behind, keeps results.

`trials.json` is both the result and what a later start continues from: it is replaced whenever a trial begins or ends,
before a run of that trial starts. Optuna proposes the values from the trials that it holds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from pydantic import TypeAdapter

from omagd.config.loading import default_config, read_preset, to_plain, value_at
from omagd.lab.analysis.runs import is_number
from omagd.lab.studies import scheduler
from omagd.lab.studies.executors import Job
from omagd.lab.studies.spec import config_of_words
from omagd.lab.studies.state import DONE, FAILED, PRUNED, STATE, StudyState, check_folder, locked_study
from omagd.lab.studies.study import examine, make_executor
from omagd.lab.studies.sweep_spec import Sweep, Value, optuna
from omagd.lab.studies.view import printing
from omagd.run.run_folder import closed_to_others, read_records, write_json
from omagd.utils.errors import UserError, nearest
from omagd.utils.storage import LONGEST_FILE, read_json, replace_file

if TYPE_CHECKING:
    from optuna.study import Study as OptunaStudy

TRIALS = "trials.json"
LOOK_SECONDS = 1.0
"""Between two looks at the metrics of the runs in progress."""

MOST_AT_A_TIME = 8
AFTER_TRIALS, AFTER_TESTS = 5, 2
"""Complete trials, and tests of its seeds, before a trial may be ended early."""

ATTEMPTS, RANDOM_ATTEMPTS = 20, 2000
"""How often the sampler, and then chance, may propose what was tried already."""

MAP = "env_args.map_name"
OPEN, COMPLETE, ENDED_EARLY, BROKEN = "running", "complete", "pruned", "failed"
ORDER = {COMPLETE: 0, ENDED_EARLY: 1, BROKEN: 2, OPEN: 3}
Curve = dict[int, float]


@dataclass
class Trial:
    """One trial.

    Attributes:
        trial: its number. keys: their values. state: running, complete, pruned or failed. value: None if it has none.
        by_seed: the value of each run. error: why it failed. pruned_after_test: number of the test.
    """

    trial: int
    keys: dict[str, Value]
    state: str = OPEN
    value: float | None = None
    by_seed: dict[str, float] = field(default_factory=dict)
    error: str = ""
    pruned_after_test: int | None = None


def run_sweep(sweep: Sweep, warn: Callable[[str], None], *, quiet: bool = False) -> dict[str, Any]:
    """Run what is left of a sweep; return its results, as in `trials.json`.

    Args:
        warn: called with each warning, one line. quiet: do not show how it goes on.
    Errors: UserError where the sweep or its folder is not as it must be, or nothing can be written there.
    """
    try:
        check_folder(sweep.folder)
        if (sweep.folder / STATE).exists() and not (sweep.folder / TRIALS).exists():
            raise UserError(f"{sweep.folder}: is the folder of a study. Give another name: or results:")
        if not (sweep.folder / TRIALS).exists():
            check_space(sweep)
        with closed_to_others(), locked_study(sweep.folder) as state:
            trials = read_trials(sweep)
            executor = make_executor(sweep.executor, sweep.settings, state)
            replace_file(sweep.folder / "sweep.yaml", sweep.text.encode())
            search = _Search(sweep, state, trials, executor.slots, warn)
            show = None if quiet else printing(search.headline)
            try:
                scheduler.run(search.begin(), executor, state, more=search.more, show=show)
            finally:
                state.save(now=True)
                found = search.write()
            return found
    except OSError as problem:
        raise UserError(f"{sweep.folder}: cannot be written ({problem.strerror}). The same command continues") from None


def check_space(sweep: Sweep) -> None:
    """Check a run without the space, and one with each end or choice alone, as runs check themselves.

    Errors: UserError.
    """
    alone = [
        replace(sweep.jobs(0, {key: value})[0], arm=f"space.{key}", name=str(value))
        for key in sweep.space
        for value in sweep.ends(key)
    ]
    examine([replace(sweep.jobs(0, {})[0], arm="", name=""), *alone], sweep.executor, sweep.source)


def read_trials(sweep: Sweep) -> list[Trial]:
    """Return the trials of an earlier start. Errors: UserError where they belong to another sweep."""
    path = sweep.folder / TRIALS
    if not path.exists():
        return []
    try:
        values = read_json(path, LONGEST_FILE)
        trials = sorted(TypeAdapter(list[Trial]).validate_python(values["trials"]), key=lambda each: each.trial)
    except (ValueError, TypeError, KeyError) as problem:
        raise UserError(f"{path}: is damaged ({type(problem).__name__}). Give another name: or results:") from None
    there, here = values.get("definition", {}), sweep.definition
    keys = [key for key in {**there, **here} if there and there.get(key) != here.get(key)]
    if keys == ["metric"] and all(each.value is None for each in trials):  # it was misspelt
        keys = []
    if keys:
        text = "; ".join(f"{key} is {there.get(key, 'absent')} there, {here.get(key, 'absent')} here" for key in keys)
        raise UserError(f"{sweep.folder}: belongs to another sweep ({text}). Give another name:")
    return trials


class _Search:
    """The trials of one call, and the runs of those that are open."""

    def __init__(
        self, sweep: Sweep, state: StudyState, trials: list[Trial], slots: int, warn: Callable[[str], None]
    ) -> None:
        self._sweep, self._state, self._trials, self._warn = sweep, state, trials, warn
        self._curves: dict[str, tuple[int, Curve]] = {}
        self._looked = 0.0
        self._exhausted = False
        fill = min(MOST_AT_A_TIME, math.ceil(slots / len(sweep.seeds)))
        self._at_a_time = sweep.file.at_a_time or max(1, fill)
        self._better = max if sweep.file.direction == "maximize" else min

    def begin(self) -> list[Job]:
        """Return the runs of trials that an earlier start has begun, and those that it could not cancel."""
        jobs = [job for trial in self._open() for job in self._jobs(trial)]
        names = [job.name for trial in self._trials if trial.state != OPEN for job in self._jobs(trial)]
        for record in (self._state.records[name] for name in names if name in self._state.records):
            if record.state not in {DONE, FAILED, PRUNED}:
                record.state = DONE if self._state.is_finished(record.job.name) else PRUNED
                self._state.changed()
            if record.state == PRUNED and record.reference:
                jobs.append(record.job)
        return jobs

    def more(self) -> list[Job] | None:
        """End trials whose runs have ended or fall behind; return the runs of new ones, None after the last."""
        look = time.monotonic() - self._looked >= LOOK_SECONDS
        if look:
            self._looked = time.monotonic()
        changed = [trial for trial in self._open() if self._follow(trial, look)]
        new: list[Job] = []
        while self._may_ask():
            values = propose(self._sweep, self._trials)
            if values is None:
                self._exhausted = True
                self._warn(f"after {len(self._trials)} trials no combination was found that is new; the sweep ends")
            else:
                self._trials.append(Trial(len(self._trials), values))
                new += self._jobs(self._trials[-1])
        if changed or new:
            self.write()
        return new if self._open() else None

    def _may_ask(self) -> bool:
        room = len(self._open()) < self._at_a_time and len(self._trials) < self._sweep.file.trials
        return room and not self._exhausted

    def headline(self) -> str:
        """Return how many trials have ended, and the best one."""
        states = [trial.state for trial in self._trials]
        parts = [f"{len(states) - states.count(OPEN)} of {self._sweep.file.trials} trials"]
        parts += [f"{states.count(name)} {name}" for name in (ENDED_EARLY, BROKEN) if name in states]
        best = best_of(self._sweep, self._trials)
        return ", ".join(parts) + (f"; best {best.value:.4g} (trial {best.trial})" if best else "")

    def write(self) -> dict[str, Any]:
        """Write `trials.json`, `trials.md` and, once a trial is complete, `best.yaml`; return the first one's content.

        Errors: OSError.
        """
        found = results_of(self._sweep, self._trials, self._state)
        write_json(self._sweep.folder / TRIALS, found)
        replace_file(self._sweep.folder / "trials.md", markdown(self._sweep, found).encode())
        if (best := best_of(self._sweep, self._trials)) is not None:
            replace_file(self._sweep.folder / "best.yaml", preset(self._sweep, best).encode())
        return found

    def _open(self) -> list[Trial]:
        return [trial for trial in self._trials if trial.state == OPEN]

    def _jobs(self, trial: Trial) -> list[Job]:
        return self._sweep.jobs(trial.trial, trial.keys)

    def _follow(self, trial: Trial, look: bool) -> bool:
        """Look after an open trial; return whether it has ended."""
        records = [self._state.records.get(job.name) for job in self._jobs(trial)]
        for record in records:
            if record is not None and record.state == DONE:
                self._require_metric(record.job)
        failed = next((record for record in records if record is not None and record.state == FAILED), None)
        if failed is not None:
            trial.state, trial.error = BROKEN, f"{failed.job.name}: {failed.error}"
        elif all(record is not None and record.state == DONE for record in records):
            self._complete(trial)
        elif look and (end := self._falls_behind(trial)) is not None:
            trial.state, (trial.pruned_after_test, trial.value) = ENDED_EARLY, end
        else:
            return False
        if trial.state == BROKEN:
            self._warn(f"trial {trial.trial} has failed: {trial.error}")
        for record in records:  # nobody wants what still runs
            if record is not None and record.state not in {DONE, FAILED, PRUNED}:
                self._state.prune(record.job.name)
        return True

    def _require_metric(self, job: Job) -> None:
        """Look for the metric in a finished run. Errors: UserError where no trial has it and the run logged others."""
        if any(trial.value is not None for trial in self._trials) or self._curve(job):
            return
        file, path = self._sweep.file, self._state.run_folder(job.name).metrics_jsonl
        names = sorted({name for line in read_records(path) if line.get("stage") == file.stage for name in line})
        names = [name for name in names if name not in {"stage", "t_env", "epoch", "wall_seconds"}]
        if names and file.metric not in names:
            known = [name for name in names if name.startswith("test")] or names
            raise UserError(
                f"{self._sweep.source}: metric={file.metric}: {job.name} has finished without it in {file.stage}."
                f"{nearest(file.metric, names)} Known: {', '.join(known)}. Change metric:, and the same command"
                " continues"
            )

    def _complete(self, trial: Trial) -> None:
        for job in self._jobs(trial):
            tests = list(self._curve(job).values())
            if not tests:
                metric = f"{self._sweep.file.stage}/{self._sweep.file.metric}"
                trial.state, trial.error = BROKEN, f"{job.name}: its metrics.jsonl holds no {metric}"
                return
            trial.by_seed[str(job.seed)] = tests[-1]
        trial.state, trial.value = COMPLETE, float(np.mean(list(trial.by_seed.values())))

    def _falls_behind(self, trial: Trial) -> tuple[int, float] | None:
        """Return the test after which a trial should end and its value there, None if it should go on.

        It ends if its best test is worse than the median of the complete trials at its last test. Its means over the
        seeds that have begun are compared with means over as many seeds of complete trials.
        """
        complete = [other for other in self._trials if other.state == COMPLETE]
        begun = [curve for curve in map(self._curve, self._jobs(trial)) if curve]
        mine = _means(begun) if begun else {}
        if not self._sweep.file.pruning or len(complete) < AFTER_TRIALS or max(mine, default=0) < AFTER_TESTS:
            return None
        test, best = max(mine), self._better(mine.values())
        others = [_means([self._curve(job) for job in self._jobs(each)[: len(begun)]]) for each in complete]
        there = [other[test] for other in others if test in other]
        behind = there and best != self._better(best, float(np.median(there)))
        return (test, mine[test]) if behind else None

    def _curve(self, job: Job) -> Curve:
        """Return the metric of a run by the number of the test (stages 1 and 2: the epoch); read again as it grows."""
        path = self._state.run_folder(job.name).metrics_jsonl
        try:
            size = path.stat().st_size
            if size != self._curves.get(job.name, (-1, {}))[0]:
                self._curves[job.name] = size, curve_of(read_records(path), self._sweep)
        except OSError:
            return {}
        return self._curves[job.name][1]


def _means(curves: Sequence[Curve]) -> Curve:
    common = sorted(set.intersection(*map(set, curves)))
    return {test: float(np.mean([curve[test] for curve in curves])) for test in common}


def curve_of(records: Iterable[Mapping[str, Any]], sweep: Sweep) -> Curve:
    """Return the values of the metric by the number of the test, or by the epoch."""
    found: Curve = {}
    for record in records:
        clock = record.get("t_env", record.get("epoch"))
        if record.get("stage") == sweep.file.stage and is_number(record.get(sweep.file.metric)) and is_number(clock):
            number = clock // max(1, sweep.config.test_interval) if "t_env" in record else clock
            found[int(number)] = float(record[sweep.file.metric])
    return found


def _optuna_study(sweep: Sweep, trials: Sequence[Trial], sampler: Any = None) -> OptunaStudy:
    """Return the trials as a study of Optuna's in memory."""
    module = optuna()
    states = module.trial.TrialState
    names = {COMPLETE: states.COMPLETE, ENDED_EARLY: states.PRUNED, BROKEN: states.FAIL, OPEN: states.RUNNING}
    study: OptunaStudy = module.create_study(direction=sweep.file.direction, sampler=sampler)
    for trial in trials:
        steps = {} if trial.pruned_after_test is None else {trial.pruned_after_test: trial.value}
        study.add_trial(
            module.trial.create_trial(
                state=names[trial.state], value=trial.value, params=trial.keys, distributions=sweep.space,
                intermediate_values=steps,
            )
        )  # fmt: skip
    return study


def propose(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Value] | None:
    """Return values that were not tried; None if none are found.

    They depend on the seed of the sweep, the number of the trial and the trials so far: a sweep that was interrupted
    proposes what it would have proposed.
    """
    samplers = optuna().samplers
    tried = {json.dumps(trial.keys, sort_keys=True) for trial in trials}
    seed = int(np.random.SeedSequence([sweep.file.seed, len(trials)]).generate_state(1)[0])
    tpe = samplers.TPESampler(seed=seed, constant_liar=True)
    for sampler, attempts in ((tpe, ATTEMPTS), (samplers.RandomSampler(seed=seed), RANDOM_ATTEMPTS)):
        study = _optuna_study(sweep, trials, sampler)
        for _ in range(attempts):
            values = dict(study.ask(sweep.space).params)
            if json.dumps(values, sort_keys=True) not in tried:
                return values
    return None


def best_of(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the best value."""
    complete = [trial for trial in trials if trial.state == COMPLETE]
    return min(complete, key=lambda trial: (_worse(sweep, trial.value), trial.trial), default=None)


def _worse(sweep: Sweep, value: float | None) -> float:
    return (-1 if sweep.file.direction == "maximize" else 1) * (value or 0.0)


def results_of(sweep: Sweep, trials: Sequence[Trial], state: StudyState) -> dict[str, Any]:
    """Return the trials, the best one first: the content of `trials.json`."""
    file, best, rows = sweep.file, best_of(sweep, trials), []
    for trial in sorted(trials, key=lambda each: (ORDER[each.state], _worse(sweep, each.value), each.trial)):
        names = [job.name for job in sweep.jobs(trial.trial, trial.keys)]
        seconds = sum(state.records[name].seconds for name in names if name in state.records)
        rows.append({**asdict(trial), "seconds": seconds, "runs": names})
    return {
        "sweep": sweep.folder.name, "metric": file.metric, "direction": file.direction,
        "seeds": list(sweep.seeds), "best": None if best is None else best.trial,
        "definition": sweep.definition, "trials": rows,
    }  # fmt: skip


def markdown(sweep: Sweep, found: Mapping[str, Any]) -> str:
    """Return the trials as a Markdown table, above it the best one."""
    file, seeds = sweep.file, [str(seed) for seed in found["seeds"]]
    rows = [["trial", file.metric, *(f"seed {seed}" for seed in seeds), *sweep.space, "state"]]
    rows.append(["---"] * len(rows[0]))
    for row in found["trials"]:
        after = "" if row["pruned_after_test"] is None else f" at test {row['pruned_after_test']}"
        state = f"{row['state']}{after}" + (f": {row['error']}" if row["error"] else "")
        values = [row["value"], *(row["by_seed"].get(seed) for seed in seeds), *map(row["keys"].get, sweep.space)]
        rows.append([str(row["trial"]), *map(_number, values), state.replace("|", "\\|")])
    more = "more" if file.direction == "maximize" else "less"
    about = f"{len(found['trials'])} of {file.trials} trials; mean over seeds of the last {file.metric}"
    lines = [f"# {found['sweep']}", "", f"{about} ({more} is better).", ""]
    if found["best"] is not None:
        env = [word for word in sweep.words if word.startswith("--env-config=")]
        options = " ".join([f"--config={sweep.folder / 'best.yaml'}", *env])
        lines += [f"Best: trial {found['best']}. Train with it: `{options}`.", ""]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def preset(sweep: Sweep, best: Trial) -> str:
    """Return the base configuration with the keys of a trial as YAML for `--config`. The map is left out."""
    options = dict(word.removeprefix("--").split("=", 1) for word in sweep.words if word.startswith("--"))
    given = [word.partition("=")[0] for word in sweep.words[sweep.words.index("with") + 1 :]]
    values = read_preset("algs", options.get("config", default_config(sweep.config.env)))
    found = to_plain(config_of_words(sweep.jobs(best.trial, best.keys)[0].words))
    for key in dict.fromkeys([*given, *best.keys]):
        if key != MAP or key in best.keys:
            _put(values, key, value_at(found, key))
    values["name"] = sweep.folder.name
    place = f"{sweep.config.env} {sweep.config.map_name}".strip()
    score = f"{sweep.file.metric} {_number(best.value)} on {place}, {len(sweep.seeds)} seeds"
    head = f"# Trial {best.trial} of the sweep {sweep.folder.name}: {score}.\n"
    searched = "".join(f"# searched: {key}\n" for key in best.keys)
    return head + searched + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value
