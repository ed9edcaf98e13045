"""From a sweep file to a space of keys and the jobs of a trial; every key is checked against the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from omagd.config.messages import shorten
from omagd.config.schema import OPEN_SECTIONS, Config
from omagd.lab.studies.executors import Job
from omagd.lab.studies.files import (
    Seeds,
    executor_of,
    folder_of,
    read_file,
    require_few_runs,
    require_right,
    seeds_of,
    validated,
)
from omagd.lab.studies.spec import OWN, Entry, Environment, config_of_words, words_of
from omagd.utils.errors import Mistakes, UserError
from omagd.utils.storage import is_number

Value = float | int | bool | str | None
Spread = Literal["mean", "iqm"]
MOST_STEPS = 10**9
NEEDS = "space:, trials: and seeds:"


class SpaceEntry(BaseModel):
    """One key of the space: numbers from `low` to `high`, or `choices`.

    Attributes:
        log: the logarithm is searched evenly. step: only low, low + step, …
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    step: float | int | None = None
    choices: list[Any] | None = None


class Pruning(BaseModel):
    """When a trial is ended early: Optuna's PercentilePruner, by the metric after each test.

    Attributes:
        percentile: a trial goes on while its best value is within this part of the finished trials, the best first,
            at the same test; 50 is the median. after_trials: no trial is ended before so many have finished.
        after_tests: no trial is ended before its seeds have had so many tests.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    percentile: float = Field(default=50.0, gt=0, lt=100)
    after_trials: PositiveInt = 5
    after_tests: PositiveInt = 2


class SweepFile(Entry):
    """The keys of a sweep file.

    Attributes:
        name, results, executor: as in a study. config, env_config, with_: what all trials share. map: short for
            `with: {env_args.map_name: …}`. space: key -> `SpaceEntry`. trials: how many, failed and pruned ones
            included. seeds: of each trial, a list or how many.
        metric: a value in metrics.jsonl, in the records of `stage`. direction: what is better. over_tests: the value
            of a run, from its tests. over_seeds: the value of a trial, from its runs.
        pruning: `Pruning`, or whether to prune. startup_trials: drawn at random before TPE begins. seed: of the search.
        at_a_time: trials; None: as many as fill the places of the executor, at most 8.
    """

    name: str | None = None
    results: str = "results"
    map: str | None = None
    space: dict[str, dict[str, Any]] = Field(default_factory=dict)
    trials: PositiveInt = 30
    seeds: Seeds = 3
    metric: str = "test_battle_won_mean"
    stage: Literal["stage1", "stage2", "stage3"] = "stage3"
    direction: Literal["maximize", "minimize"] = "maximize"
    over_tests: Literal["last", "best", "mean"] = "last"
    over_seeds: Spread = "mean"
    pruning: dict[str, Any] | bool = True
    startup_trials: PositiveInt = 10
    seed: int = Field(default=1, ge=0)
    at_a_time: PositiveInt | None = None
    executor: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


@dataclass(frozen=True)
class Parameter:
    """A key of the space: numbers of a `kind` ("float" or "int") from low to high, or choices (kind "choice")."""

    key: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    choices: tuple[Value, ...] = ()

    @property
    def size(self) -> float:
        """How many values it has."""
        if self.kind == "choice":
            return len(self.choices)
        step = self.step or (1 if self.kind == "int" else None)
        return math.inf if step is None else math.floor((self.high - self.low) / step + 1e-9) + 1

    def number(self, value: float) -> Value:
        """Return an end of the range with the type of the key."""
        return int(value) if self.kind == "int" else float(value)

    def value_of(self, text: str) -> Value:
        """Return the value whose text in `key=text` this is. Errors: ValueError."""
        if self.kind == "choice":
            return next(value for value in self.choices if str(value) == text)
        return int(text) if self.kind == "int" else float(text)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        folder: of the sweep. file: its values. space: its keys. words: of all runs, without space and seed.
        config: without the space. pruning: None for none. executor: its name. settings: its `args_model`.
        text: the sweep file, or its values as YAML. source: name of the file, for messages.
    """

    folder: Path
    file: SweepFile
    space: tuple[Parameter, ...]
    seeds: Sequence[int]
    words: tuple[str, ...]
    config: Config
    pruning: Pruning | None
    executor: str
    settings: BaseModel
    text: str
    source: str

    @property
    def definition(self) -> dict[str, Any]:
        """What must be equal for trials to belong to one sweep."""
        file = self.file
        return {
            "base": list(self.words), "seeds": list(self.seeds), "metric": f"{file.stage}/{file.metric}",
            "direction": file.direction, "over_tests": file.over_tests, "over_seeds": file.over_seeds,
            **{f"space.{p.key}": _entry(p) for p in self.space},
        }  # fmt: skip

    def jobs(self, number: int, values: Mapping[str, Value]) -> list[Job]:
        """Return the runs of a trial, one per seed."""
        arm = trial_name(number)
        words = (*self.words, *(f"{key}={value}" for key, value in values.items()))
        config = self.config
        return [
            Job(f"{arm}-seed{seed}", arm, config.env, config.map_name, seed, (*words, f"seed={seed}"))
            for seed in self.seeds
        ]


def trial_name(number: int) -> str:
    """Return the name of a trial."""
    return f"trial{number:04d}"


def load_sweep(
    given: str | Path | Mapping[str, Any], *, results: str | None = None, executor: str | None = None
) -> Sweep:
    """Return the sweep of a file, or of its values.

    Args:
        results: instead of the file's `results`. executor: instead of the first one in the file.
    Errors: UserError in one line that names the file, the place in it, and the key.
    """
    text, values, source, base = read_file(given, "sweep", NEEDS)
    found, of_runs = Mistakes(), Mistakes()
    file = validated(SweepFile, values, source, found)
    folder, seeds, pruning = Path(), list[int](), None
    words: tuple[str, ...] = ("with",)
    config: Config | None = None
    with found.caught():
        folder = folder_of(file.name, results or file.results, given, source)
    with found.caught():
        seeds = list(seeds_of(file.seeds, source))
        require_few_runs(source, {"trials": file.trials, "seeds": len(seeds)})
    with found.caught(source):
        words = words_of(file, Entry(), Environment(map=file.map), base, found, source)
    with of_runs.caught(source):
        config = config_of_words(words)
    with found.caught():
        pruning = _pruning(file, source, found)
    space = _space(file, words, config, source, found)
    alone = list(_alone(space, words, source, of_runs)) if config is not None else _ends(space, words)
    chosen, settings = executor_of(file.executor, source, executor, found)
    if pruning and (fixed := {"t_max", "test_interval"} & set(file.space)):
        found.add(f"{source}: space.{min(fixed)}: trials have different tests then. Give pruning: false")
    require_right(found, of_runs, [Job("", "", "", "", 1, words), *alone], chosen, source)
    assert config is not None
    return Sweep(folder, file, space, seeds, words, config, pruning, chosen, settings, text, source)


def _space(
    file: SweepFile, words: Sequence[str], config: Config | None, source: str, found: Mistakes
) -> tuple[Parameter, ...]:
    """Return the checked keys of the space. config: without them; None where it is wrong."""
    if not file.space:
        found.add(f"{source}: space: is empty. Give keys, such as `space: {{lr: {{low: 1e-4, high: 1e-2}}}}`")
    taken = {word.partition("=")[0] for word in words}
    space = list[Parameter]()
    for key, values in file.space.items():
        entry = validated(SpaceEntry, values, f"{source}: space.{key}", found)
        if values.keys() <= SpaceEntry.model_fields.keys():
            with found.caught(f"{source}: space.{key}"):
                space.append(_parameter(key, entry, config, taken))
    combinations = math.prod(parameter.size for parameter in space)
    if len(space) == len(file.space) and combinations < file.trials and space:
        fix = f"Lower trials to {combinations:.0f}, or add to the space"
        found.add(f"{source}: trials={file.trials}: the space has {combinations:.0f} combinations. {fix}")
    return tuple(space)


def _alone(space: Sequence[Parameter], words: Sequence[str], source: str, of_runs: Mistakes) -> Iterator[Job]:
    """Yield a run for each end or choice of each key alone; of a key only the first that is wrong."""
    wrong = set[str]()
    for job in _ends(space, words):
        if job.arm in wrong:
            continue
        with of_runs.caught(f"{source}: {job.arm}"):
            wrong.add(job.arm)
            config_of_words(job.words)
            wrong.remove(job.arm)
        yield job


def _ends(space: Sequence[Parameter], words: Sequence[str]) -> list[Job]:
    """Return a run for each end or choice of each key alone."""
    return [
        Job("", f"space.{found.key}", "", "", 1, (*words, f"{found.key}={value}"))
        for found in space
        for value in found.choices or (found.low, found.high)
    ]


def _pruning(file: SweepFile, source: str, found: Mistakes) -> Pruning | None:
    if isinstance(file.pruning, bool):
        return Pruning() if file.pruning else None
    return validated(Pruning, file.pruning, f"{source}: pruning", found)


def _parameter(key: str, entry: SpaceEntry, config: Config | None, taken: set[str]) -> Parameter:
    """Return a key of the space. Errors: UserError."""
    if key in OWN:
        raise UserError(OWN[key])
    if key in taken:
        raise UserError("has a value in with: or map:, too. Leave one out")
    return _choices(key, entry) if entry.choices is not None else _range(key, entry, config)


def _choices(key: str, entry: SpaceEntry) -> Parameter:
    choices = entry.choices or []
    if entry.low is not None or entry.high is not None or entry.step is not None or entry.log:
        raise UserError("choices: take no low:, high:, log: or step:")
    if len({str(value) for value in choices}) != len(choices) or len(choices) < 2:
        raise UserError(f"choices={shorten(choices)}: give at least two values that differ")
    if any(isinstance(value, Mapping) for value in choices):
        raise UserError(f"choices={shorten(choices)}: give values, not mappings of keys")
    plain = (value if isinstance(value, Value) else str(value) for value in choices)
    return Parameter(key, "choice", choices=tuple(plain))


def _range(key: str, entry: SpaceEntry, config: Config | None) -> Parameter:
    low, high, step = entry.low, entry.high, entry.step
    if low is None or high is None:
        raise UserError("give low: and high:, or choices:")
    if not (is_number(low) and is_number(high)) or low >= high:
        raise UserError(f"low={shorten(low)} must be less than high={shorten(high)}")
    if entry.log and (low <= 0 or step is not None):
        raise UserError(f"log: needs low={low} above 0, and no step:")
    if step is not None and not 0 < step <= high - low:
        raise UserError(f"step={step}: must be more than 0, and at most high - low")
    if step is not None and (high - low) / step > MOST_STEPS:
        raise UserError(f"step={step}: makes more than {MOST_STEPS:,} values. Give a larger one, or none")
    whole = all(isinstance(number, int) for number in (low, high, step) if number is not None)
    now = _now(config, key)
    if isinstance(now, int) and not isinstance(now, bool) and not whole:
        raise UserError("takes whole numbers: give low:, high: and step: without a point")
    if whole and not isinstance(now, float):
        return Parameter(key, "int", low, high, entry.log, step)
    return Parameter(key, "float", float(low), float(high), entry.log, None if step is None else float(step))


def _now(config: Config | None, key: str) -> Any:
    """Return the value of a key without the space; None if it has none, or the configuration does not know its type."""
    found: Any = config.model_dump() if config is not None and key.partition(".")[0] not in OPEN_SECTIONS else None
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _entry(parameter: Parameter) -> list[Any]:
    if parameter.kind == "choice":
        return list(parameter.choices)
    return [parameter.kind, parameter.low, parameter.high, parameter.log, parameter.step]
