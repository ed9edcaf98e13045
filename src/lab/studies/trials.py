"""The trials of a sweep: Optuna's study in a journal file, which survives a kill at any moment."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omagd.lab.studies.sweep_spec import Parameter, Sweep, Value, trial_name
from omagd.utils.errors import UserError, import_extra, readable
from omagd.utils.storage import sync

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study as OptunaStudy
    from optuna.trial import FrozenTrial

JOURNAL = "sweep.journal"
NAME = "sweep"
DEFINITION, ERROR, SEEDS, TESTS = "definition", "error", "seeds", "tests"
ATTEMPTS = 20
"""How often the sampler may propose what was tried already before combinations are drawn at random."""

RANDOM_ATTEMPTS = 2000
LEAST, ENOUGH = 4, 10
"""Trials that importances need; fewer than the second number are named beside them."""

STRIDE = 1_000_000
"""A trial's step: the number of its seeds times this, plus the number of the test. Equal numbers are compared."""


def optuna() -> Any:
    """Return Optuna, which writes no messages of its own. Errors: UserError where it is not installed."""
    module = import_extra("optuna", "sweep: needs Optuna", "studies")
    module.logging.set_verbosity(module.logging.ERROR)
    warnings.filterwarnings("ignore", category=module.exceptions.ExperimentalWarning)
    return module


class Trials:
    """The trials of a sweep.

    Args:
        sweep: to which they belong. folder: of the sweep, whose lock is held.
    Errors: UserError where the journal is damaged, or belongs to another sweep.
    """

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self._optuna, self._sweep = optuna(), sweep
        path = folder / JOURNAL
        _mend(path)
        try:
            backend = self._optuna.storages.journal.JournalFileBackend(str(path))
            self._storage = self._optuna.storages.JournalStorage(backend)
            there = NAME in self._optuna.get_all_study_names(self._storage)
            given = {} if there else {"direction": sweep.file.direction}
            begin = self._optuna.load_study if there else self._optuna.create_study
            self.study: OptunaStudy = begin(storage=self._storage, study_name=NAME, **given)
            known = self.study.user_attrs.get(DEFINITION)
            self.all()
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, IndexError) as problem:
            raise _damaged(path, type(problem).__name__) from None
        if known is None or self._differs_by_an_unused_metric(known):
            self.study.set_user_attr(DEFINITION, sweep.definition)
        elif known != json.loads(json.dumps(sweep.definition)):
            raise UserError(f"{folder}: belongs to another sweep ({_differences(known, sweep)}). Give another name:")
        self._distributions = {parameter.key: self._distribution(parameter) for parameter in sweep.space}

    def all(self) -> list[FrozenTrial]:
        """Return all trials by number; do not change them."""
        return self.study.get_trials(deepcopy=False)

    def open(self) -> list[FrozenTrial]:
        """Return the trials that have not ended."""
        return [trial for trial in self.all() if not trial.state.is_finished()]

    def ask(self) -> FrozenTrial | None:
        """Begin a trial with values that were not tried; None if none are found.

        The values depend on the seed of the sweep, the number of the trial and the trials so far: a sweep that was
        interrupted proposes what it would have proposed. The trial is one line in the journal, complete or absent.
        """
        trials = self.all()
        tried = {_values_key(trial.params) for trial in trials}
        for attempt in range(ATTEMPTS + RANDOM_ATTEMPTS):
            values = self._propose(trials, attempt)
            if _values_key(values) not in tried:
                return self.begin(values)
        return None

    def begin(self, values: Mapping[str, Value]) -> FrozenTrial:
        """Begin a trial with these values. Errors: ValueError where they are not in the space."""
        made = self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState.RUNNING, params=dict(values), distributions=self._distributions
        )
        self.study.add_trial(made)
        return self.all()[-1]

    def report(self, trial: FrozenTrial, seeds: int, tests: Mapping[int, float]) -> bool:
        """Note the means of a trial's first `seeds` runs by the number of the test; return whether it should end."""
        known = self._fresh(trial).intermediate_values
        pruning = self._sweep.pruning
        for test, value in tests.items():
            step = STRIDE * seeds + test
            if step in known:
                continue
            self._storage.set_trial_intermediate_value(trial._trial_id, step, value)
            if pruning is not None and test >= pruning.after_tests:
                pruner = self._optuna.pruners.PercentilePruner(pruning.percentile, pruning.after_trials)
                if pruner.prune(self.study, self._fresh(trial)):
                    return True
        return False

    def complete(self, trial: FrozenTrial, value: float, by_seed: Mapping[str, float]) -> None:
        """End a trial with its value; by_seed: the value of each run."""
        self._end(trial, {SEEDS: dict(by_seed)}, value)

    def prune(self, trial: FrozenTrial) -> None:
        """End a trial early. Its value is the last one that was reported."""
        self._end(trial, {}, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, trial: FrozenTrial, error: str) -> None:
        """End a trial that has no value; error: why, one line."""
        self._end(trial, {ERROR: readable(error)}, state=self._optuna.trial.TrialState.FAIL)

    def best(self) -> FrozenTrial | None:
        """Return the complete trial with the best value."""
        complete = [trial for trial in self.all() if trial.state.name == "COMPLETE"]
        sign = 1 if self._sweep.file.direction == "maximize" else -1
        return max(complete, key=lambda trial: (sign * trial.value, -trial.number), default=None)  # type: ignore[operator]

    def importances(self) -> dict[str, float]:
        """Return how much each key matters, by PED-ANOVA; the sum is 1; empty with too few trials to tell.

        Pruned trials count with the value where they ended: without them what is bad would hardly occur.
        Source: Watanabe et al. 2023, PED-ANOVA: Efficiently Quantifying Hyperparameter Importance.
        """
        trial_of = self._optuna.trial.create_trial
        ended = [trial for trial in self.all() if trial.state.name in {"COMPLETE", "PRUNED"} and trial.values]
        if len(ended) < LEAST or len({trial.value for trial in ended}) < 2:
            return {}
        importance, values = self._optuna.importance, self._optuna.create_study(direction=self._sweep.file.direction)
        values.add_trials(trial_of(value=t.value, params=t.params, distributions=t.distributions) for t in ended)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importance.get_param_importances(values, evaluator=importance.PedAnovaImportanceEvaluator())
        return {key: float(share) for key, share in found.items() if math.isfinite(share)}

    def _differs_by_an_unused_metric(self, known: Mapping[str, Any]) -> bool:
        """Return whether only the metric was changed, before it gave any trial a value: it was misspelt."""
        here = json.loads(json.dumps(self._sweep.definition))
        used = any(trial.values or trial.intermediate_values for trial in self.all())
        return not used and known != here and {**known, "metric": here["metric"]} == here

    def _propose(self, trials: Sequence[FrozenTrial], attempt: int) -> dict[str, Value]:
        file, samplers = self._sweep.file, self._optuna.samplers
        seed = int(np.random.SeedSequence([file.seed, len(trials), attempt]).generate_state(1)[0])
        if attempt < ATTEMPTS:
            sampler = samplers.TPESampler(n_startup_trials=file.startup_trials, seed=seed, constant_liar=True)
        else:
            sampler = samplers.RandomSampler(seed=seed)
        memory = self._optuna.create_study(direction=file.direction, sampler=sampler)
        memory.add_trials(trials)
        return dict(memory.ask(self._distributions).params)

    def _distribution(self, parameter: Parameter) -> BaseDistribution:
        kinds = self._optuna.distributions
        low, high, log, step = parameter.low, parameter.high, parameter.log, parameter.step
        if parameter.kind == "choice":
            return kinds.CategoricalDistribution(parameter.choices)
        if parameter.kind == "int":
            return kinds.IntDistribution(int(low), int(high), log, int(step or 1))
        return kinds.FloatDistribution(low, high, log, step)

    def _fresh(self, trial: FrozenTrial) -> FrozenTrial:
        return self._storage.get_trial(trial._trial_id)

    def _end(self, trial: FrozenTrial, notes: Mapping[str, Any], value: float | None = None, state: Any = None) -> None:
        for name, note in notes.items():
            self._storage.set_trial_user_attr(trial._trial_id, name, note)
        self.study.tell(trial.number, value, state=state)


def _mend(path: Path) -> None:
    """Check a journal; move a line that was being written when the machine stopped into a file beside it.

    Errors: UserError for a line that is not JSON; OSError.
    """
    for left in path.parent.glob(f"{path.name}.lock*"):  # of a start that was killed; the folder's own lock is held
        left.unlink(missing_ok=True)
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            raise _damaged(path, f"line {number}") from None
    if whole < len(content):
        with path.with_name(f"{path.name}.torn").open("ab") as kept:
            kept.write(content[whole:] + b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        os.truncate(path, whole)
        sync(path)


def _damaged(path: Path, where: str) -> UserError:
    return UserError(
        f"{path}: is damaged ({where}). Move it away and start the sweep again: its trials are found in study.json"
    )


def _values_key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _differences(there: Mapping[str, Any], sweep: Sweep) -> str:
    here = sweep.definition
    keys = [key for key in {**there, **here} if there.get(key) != json.loads(json.dumps(here.get(key)))]
    return readable(
        "; ".join(f"{key} is {there.get(key, 'absent')} there, {here.get(key, 'absent')} here" for key in keys)
    )


def number_of(arm: str) -> int | None:
    """Return the number of a trial's arm, None for other arms."""
    digits = arm.removeprefix("trial")
    return int(digits) if digits.isdecimal() and arm == trial_name(int(digits)) else None
