"""From a sweep file to a space of keys and the jobs of a trial; every key is checked against the configuration."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from omagd.config.checks import shorten
from omagd.config.loading import value_at
from omagd.config.schema import OPEN_SECTIONS, Config
from omagd.lab.analysis.runs import is_number
from omagd.lab.studies import spec
from omagd.lab.studies.executors import Job
from omagd.utils.errors import Mistakes, UserError, import_extra

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = float | int | bool | str | None


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


class SweepFile(spec.Entry):
    """The keys of a sweep file.

    Attributes:
        name, results, executor: as in a study. config, env_config, with_: what all trials share. map: short for
            `with: {env_args.map_name: …}`. space: key -> `SpaceEntry`. trials: how many, failed and pruned ones
            included. seeds: of each trial, a list or how many.
        metric: a value in metrics.jsonl, in the records of `stage`; a run has that of its last test, a trial the mean
            over its runs. direction: what is better. pruning: whether to prune. seed: of the search.
        at_a_time: trials; None: as many as fill the places of the executor, at most 8.
    """

    name: str | None = None
    results: str = "results"
    map: str | None = None
    space: dict[str, dict[str, Any]] = Field(default_factory=dict)
    trials: PositiveInt = 30
    seeds: int | list[int] = 3
    metric: str = "test_battle_won_mean"
    stage: Literal["stage1", "stage2", "stage3"] = "stage3"
    direction: Literal["maximize", "minimize"] = "maximize"
    pruning: bool = True
    seed: int = Field(default=1, ge=0)
    at_a_time: PositiveInt | None = None
    executor: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        folder: of the sweep. file: its values. space: Optuna's distribution of each key. words: of all runs, without
            space and seed. config: without the space. executor: its name. settings: its `args_model`.
            text: the sweep file, or its values as YAML. source: name of the file, for messages.
    """

    folder: Path
    file: SweepFile
    space: dict[str, BaseDistribution]
    seeds: Sequence[int]
    words: tuple[str, ...]
    config: Config
    executor: str
    settings: BaseModel
    text: str
    source: str

    @property
    def definition(self) -> dict[str, str]:
        """What must be equal for trials to belong to one sweep."""
        file = self.file
        return {
            "base": " ".join(self.words), "seeds": str(list(self.seeds)), "metric": f"{file.stage}/{file.metric}",
            "direction": file.direction, "over_tests": "last", "over_seeds": "mean",
            **{f"space.{key}": str(distribution) for key, distribution in self.space.items()},
        }  # fmt: skip

    def jobs(self, number: int, values: Mapping[str, Value]) -> list[Job]:
        """Return the runs of a trial, one per seed."""
        arm = f"trial{number:04d}"
        words = (*self.words, *(f"{key}={value}" for key, value in values.items()))
        config = self.config
        return [
            Job(f"{arm}-seed{seed}", arm, config.env, config.map_name, seed, (*words, f"seed={seed}"))
            for seed in self.seeds
        ]

    def ends(self, key: str) -> tuple[Value, ...]:
        """Return the lowest and the highest value of a key, or its choices."""
        found: Any = self.space[key]
        return tuple(found.choices) if hasattr(found, "choices") else (found.low, found.high)


def optuna() -> Any:
    """Return Optuna, which writes no messages of its own. Errors: UserError where it is not installed."""
    module = import_extra("sweep", "studies", "optuna")
    module.logging.set_verbosity(module.logging.ERROR)
    warnings.filterwarnings("ignore", category=module.exceptions.ExperimentalWarning)
    return module


def load_sweep(given: spec.Given, *, results: str | None = None, executor: str | None = None) -> Sweep:
    """Return the sweep of a file, or of its values.

    Args:
        results: instead of the file's `results`. executor: instead of the first one in the file.
    Errors: UserError in one line that names the file, the place in it, and the key.
    """
    text, values, source, base = spec.read_file(given, "sweep", "space:, trials: and seeds:")
    optuna()  # before what is wrong is looked for with it
    found, folder, seeds = Mistakes(), Path(), list[int]()
    file = spec.validated(SweepFile, values, source, found)
    words: tuple[str, ...] = ("with",)
    config: Config | None = None
    with found.caught():
        folder = spec.folder_of(file.name, results or file.results, given, source)
    with found.caught():
        seeds = list(spec.seeds_of(file.seeds, source))
        spec.require_few_runs(source, {"trials": file.trials, "seeds": len(seeds)})
    with found.caught(source):
        words = spec.words_of(file, spec.Entry(), spec.Environment(map=file.map), base)
        config = spec.config_of_words(words)
    space = _space(file, words, config, source, found)
    chosen, settings = spec.executor_of(file.executor, source, executor, found)
    if file.pruning and (fixed := {"t_max", "test_interval"} & set(file.space)):
        found.add(f"{source}: space.{min(fixed)}: trials have different tests then. Give pruning: false")
    found.raise_any()
    assert config is not None
    return Sweep(folder, file, space, seeds, words, config, chosen, settings, text, source)


def _space(
    file: SweepFile, words: Sequence[str], config: Config | None, source: str, found: Mistakes
) -> dict[str, BaseDistribution]:
    """Return the distributions of the keys of the space. config: without them; None where it is wrong."""
    if not file.space:
        found.add(f"{source}: space: is empty. Give keys, such as `space: {{lr: {{low: 1e-4, high: 1e-2}}}}`")
    taken = {word.partition("=")[0] for word in words}
    space = {}
    for key, values in file.space.items():
        entry = spec.validated(SpaceEntry, values, f"{source}: space.{key}", found)
        with found.caught(f"{source}: space.{key}"):
            if key in spec.OWN:
                raise UserError(spec.OWN[key])
            if key in taken:
                raise UserError("has a value in with: or map:, too. Leave one out")
            space[key] = _distribution(key, entry, config)
    return space


def _distribution(key: str, entry: SpaceEntry, config: Config | None) -> BaseDistribution:
    """Return a key of the space. Errors: UserError."""
    kinds, low, high, step = optuna().distributions, entry.low, entry.high, entry.step
    if entry.choices is not None:
        if low is not None or high is not None or len(set(map(str, entry.choices))) != len(entry.choices):
            raise UserError(f"choices={shorten(entry.choices)}: give values that differ, without low: and high:")
        return kinds.CategoricalDistribution([v if isinstance(v, Value) else str(v) for v in entry.choices])
    if not (is_number(low) and is_number(high)):
        raise UserError("give low: and high:, or choices:")
    whole = all(isinstance(number, int) for number in (low, high, step) if number is not None)
    typed = config.model_dump() if config is not None and key.partition(".")[0] not in OPEN_SECTIONS else {}
    now = value_at(typed, key)  # None where the configuration does not know its type
    if isinstance(now, int) and not isinstance(now, bool) and not whole:
        raise UserError("takes whole numbers: give low:, high: and step: without a point")
    try:
        with warnings.catch_warnings(action="ignore"):  # a range that is no multiple of its step ends earlier
            if whole and not isinstance(now, float):
                return kinds.IntDistribution(low, high, entry.log, step or 1)
            return kinds.FloatDistribution(low, high, entry.log, step)
    except ValueError as problem:
        raise UserError(f"low={shorten(low)}, high={shorten(high)}: {problem}") from None
