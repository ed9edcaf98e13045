"""From a study file to jobs: arms x environments x seeds, each with a configuration that was checked.

The last functions are those that a sweep file needs, too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omagd.config.checks import LONGEST_NAME, shorten, typed_args, validation_messages
from omagd.config.loading import SUFFIXES, apply_texts, base_values, parse_yaml, validate
from omagd.config.schema import Config
from omagd.lab.studies import EXECUTORS
from omagd.lab.studies.executors import Job
from omagd.run.reporting.card import flattened
from omagd.utils.errors import Mistakes, UserError, collected, nearest

OWN = {
    "seed": "give seeds: at the top", "seeds": "give seeds: at the top",
    "local_results_path": "give results: at the top",
    "unique_token": "leave it out, the study names its runs", "auto_resume": "leave it out, every run resumes",
    "auto_resume_wait": "leave it out", "evaluate": "leave it out, a study trains",
}  # fmt: skip
"""Keys that the study sets itself."""

M = TypeVar("M", bound=BaseModel)
DEFAULT_EXECUTOR = "local"
Given = str | Path | Mapping[str, Any]
"""Path of a file, or its values."""

MOST_RUNS = 10_000
"""Of one file; the executors take no more, and the state file would be too large to be replaced every second."""

PAGES = {"study": "docs/studies.md", "sweep": "docs/sweeps.md"}


class Entry(BaseModel):
    """What arms, environments and the study itself may give.

    Attributes:
        config, env_config: as `--config` and `--env-config`. with_: `with:` in the file, values by key.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    config: str | None = None
    env_config: str | None = None
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class Environment(BaseModel):
    """One environment. map: short for `with: {env_args.map_name: …}`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    env_config: str | None = None
    map: str | None = None
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class StudyFile(Entry):
    """The keys of a study file.

    Attributes:
        name: of the study's folder; default: the name of the file. results: the folder around it.
        arms: what is compared, by name.
        environments: by name, or a list of maps. seeds: a list, or how many (1, 2, …).
        executor: settings by executor (`local: {jobs: 2}`); the first one is used unless the command names another.
        results_file: JSON lines to which every finished run is appended; runs that are there are skipped.
    """

    name: str | None = None
    results: str = "results"
    arms: dict[str, dict[str, Any] | None] | None = None
    environments: dict[str, dict[str, Any] | str | None] | list[dict[str, Any] | str] | None = None
    seeds: int | list[int] = 1
    executor: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    results_file: str | None = None


@dataclass(frozen=True)
class Study:
    """A checked study.

    Attributes:
        folder: of the study. jobs: all of them. executor: its name. settings: its `args_model`.
        results_file: to append to, None for none. text: the study file, or its values as YAML.
        source: name of the file, for messages.
    """

    folder: Path
    jobs: tuple[Job, ...]
    executor: str
    settings: BaseModel
    results_file: Path | None
    text: str
    source: str


def load(given: Given, *, results: str | None = None, executor: str | None = None) -> Study:
    """Return the study of a file, or of its values.

    Args:
        results: instead of the file's `results`. executor: instead of the first one in the file.
    Errors: UserError in one line that names the file, the place in it, and the key.
    """
    text, values, source, base = read_file(given, "study", "arms:, environments: and seeds:")
    found, where = Mistakes(), Path()
    file = validated(StudyFile, values, source, found)
    with found.caught():
        where = folder_of(file.name, results or file.results, given, source)
    chosen, settings = executor_of(file.executor, source, executor, found)
    jobs = tuple(_jobs(file, source, base, found))
    found.raise_any()
    kept = base / os.path.expanduser(file.results_file) if file.results_file else None
    return Study(where, jobs, chosen, settings, kept, text, source)


def config_of_words(words: Sequence[str]) -> Config:
    """Return the checked configuration of the words of a job. Errors: UserError."""
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    texts = dict(word.split("=", 1) for word in words[words.index("with") + 1 :])
    names = options.get("config"), options.get("env-config")
    with collected(None) as found:
        try:
            values = _base_values(*names)
        except UserError:
            values = base_values(*names, found)
        return validate(apply_texts(values, texts, found), found)


def _jobs(file: StudyFile, source: str, base: Path, found: Mistakes) -> Iterator[Job]:
    """Yield a job for each arm, environment and seed whose configuration is right; `found` collects mistakes."""
    seeds: Sequence[int] = [1]
    with found.caught():
        seeds = seeds_of(file.seeds, source)
    factors = {"arms": file.arms, "environments": file.environments}
    counts = {key: len(given or "1") for key, given in factors.items()}
    arms, environments = dict[str, Entry](), dict[str, Environment]()
    with found.caught():
        require_few_runs(source, {**counts, "seeds": len(seeds)})
        arms = _arms(file, source, found)
        environments = _environments(file, source, found)
    same: dict[str, str] = {}
    names: dict[str, str] = {}
    for arm, entry in arms.items():
        for label, environment in environments.items():
            where = f"{source}: {arm}" + (f", environments {label}" if label else "")
            with found.caught(where):
                words = words_of(file, entry, environment, base)
                for seed in seeds:
                    job = Job("", arm, "", "", seed, (*words, f"seed={seed}"))
                    config = config_of_words(job.words)
                    job = _named(job, config, label)
                    _require_another(job, config, f"{arm} {label}".strip(), same, names)
                    yield job


def _require_another(job: Job, config: Config, title: str, same: dict[str, str], names: dict[str, str]) -> None:
    """Reject a run that another one of the study equals, or whose folder is that of another one. Errors: UserError."""
    values, folder = config.model_dump_json(exclude={"name"}), job.name.casefold()
    if values in same:
        raise UserError(f"is the same run as {same[values]}. Leave one out")
    if folder in names:
        raise UserError(f"its folder {job.name} is that of {names[folder]}. Rename one")
    same[values] = names[folder] = title


def _named(job: Job, config: Config, label: str) -> Job:
    """Return a job with its name, environment and map. Errors: UserError."""
    play, arm = label or config.map_name or config.env, job.arm.removeprefix("arms.")
    name = re.sub(r"[^\w.=+,-]+", "_", f"{arm}-{play}-seed{job.seed}").lstrip(".")
    if len(name.encode()) > LONGEST_NAME:
        raise UserError("its name is too long for a folder. Give arms: with short names")
    return Job(name, arm, config.env, config.map_name, job.seed, job.words)


def _arms(file: StudyFile, source: str, found: Mistakes) -> dict[str, Entry]:
    """Return the arms by `arms.NAME`."""
    if file.arms is None:
        return {file.config or "default": Entry()}
    entries = {f"arms.{n}": validated(Entry, arm or {}, f"{source}: arms.{n}", found) for n, arm in file.arms.items()}
    if "arms." in entries:
        raise UserError(f"{source}: arms: a name is empty. Give one, it is part of the names of folders")
    if not entries:
        raise UserError(f"{source}: the study is empty: give at least one entry of arms:")
    return entries


def _environments(file: StudyFile, source: str, found: Mistakes) -> dict[str, Environment]:
    given = file.environments
    if given is None:
        return {"": Environment()}
    if isinstance(given, list):
        given = {_environment_name(entry, source, found): entry for entry in given}
        if len(given) < len(file.environments or ()):
            raise UserError(f"{source}: environments: one is named twice. Leave it out, or give names: `name: {{…}}`")
    if not given:
        raise UserError(f"{source}: the study is empty: environments: names none. Leave it out, or name one")
    maps = {name: {"map": entry} if isinstance(entry, str) else entry or {} for name, entry in given.items()}
    return {
        name: validated(Environment, entry, f"{source}: environments.{name}", found) for name, entry in maps.items()
    }


def _environment_name(entry: dict[str, Any] | str, source: str, found: Mistakes) -> str:
    if isinstance(entry, str):
        return entry
    named = validated(Environment, entry, f"{source}: environments", found)
    return named.map or Path(named.env_config or "").stem


def words_of(file: Entry, arm: Entry, environment: Environment, base: Path) -> tuple[str, ...]:
    """Return the words of a run without its seed. An arm overrides its environment, which overrides the study.

    Errors: UserError for keys that the study sets.
    """
    config = arm.config or file.config
    env_config = environment.env_config or arm.env_config or file.env_config
    values = flattened(file.with_)
    if environment.map is not None:
        values["env_args.map_name"] = environment.map
    values |= flattened(environment.with_) | flattened(arm.with_)
    if wrong := [f"{key}={shorten(value)}: {OWN[key]}" for key, value in values.items() if key in OWN]:
        raise UserError(*wrong)
    options = {"config": config, "env-config": env_config}
    chosen = [f"--{flag}={_file(name, base)}" for flag, name in options.items() if name is not None]
    return (*chosen, "with", *(f"{key}={value}" for key, value in values.items()))


def _file(name: str, base: Path) -> str:
    """Return an absolute path for a YAML file beside the study file, else the name as it is."""
    beside = base / os.path.expanduser(name)
    return str(beside) if name.endswith(SUFFIXES) and os.path.isfile(beside) else name


_base_values = lru_cache(maxsize=256)(base_values)


def folder_of(name: str | None, results: str, given: Given, source: str) -> Path:
    """Return the folder of a study: its name, else the name of its file, in the folder `results`. Errors: UserError."""
    name = name or (Path(given).stem if isinstance(given, (str, Path)) else "")
    if not name:
        raise UserError(f"{source}: name: is missing; it is the name of the folder")
    if not name.isprintable() or name != Path(name).name or name.startswith(".") or len(name) > 100:
        raise UserError(f"{source}: name={shorten(name)}: is the name of a folder; give one without `/`")
    return Path(results).expanduser().absolute() / name


def read_file(given: Given, kind: str, needs: str) -> tuple[str, Any, str, Path]:
    """Return the text of a file, its values, its name in messages, and the folder that its paths start from."""
    if isinstance(given, Mapping):
        return yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True), dict(given), kind, Path.cwd()
    path = Path(os.path.expanduser(given))
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_yaml(text)
        str(values)  # ValueError for a whole number of thousands of digits, which no message could show
    except OSError as problem:
        raise UserError(f"{path}: cannot be read ({problem.strerror}): give a {kind} file ({PAGES[kind]})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as problem:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: the {kind} is empty: give {needs} ({PAGES[kind]})")
    return text, values, path.name, path.absolute().parent


def validated(model: type[M], values: Any, where: str, found: Mistakes) -> M:
    """Return the entry of a file as its model, without what is wrong in it. where: its place, for messages."""
    known = [field.alias or name for name, field in model.model_fields.items()]
    if isinstance(values, dict):
        for key in [key for key in values if key not in known]:
            fix = nearest(str(key), known) or f" Known: {', '.join(known)}"
            found.note(UserError(f"unknown key '{shorten(key)}'.{fix}"), where)
        values = {key: value for key, value in values.items() if key in known}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        messages = validation_messages(error)
        found.note(UserError(*messages.values()), where)
        wrong = {key.partition(".")[0] for key in messages}
        kept = {key: values[key] for key in values if key not in wrong} if isinstance(values, dict) else {}
        return model.model_validate(kept)


def executor_of(
    given: dict[str, dict[str, Any] | None], source: str, asked: str | None, found: Mistakes
) -> tuple[str, BaseModel]:
    """Return the executor to use and its settings; those of the others are checked, too."""
    chosen = asked or next(iter(given), DEFAULT_EXECUTOR)
    settings: dict[str, BaseModel] = {}
    for name in dict.fromkeys([*given, chosen]):
        with found.caught(source):
            model = EXECUTORS.get(name).args_model
            values = given.get(name) or {}
            settings[name] = typed_args(f"executor.{name}", f"executor {name}", model, values, lambda key: "")
    if chosen not in settings:  # wrong, which was noted
        return DEFAULT_EXECUTOR, EXECUTORS.get(DEFAULT_EXECUTOR).args_model()
    return chosen, settings[chosen]


def seeds_of(given: int | list[int], source: str) -> Sequence[int]:
    """Return the seeds of a list, or 1, 2, … up to a number. Errors: UserError."""
    if (given if isinstance(given, int) else len(given)) > MOST_RUNS:
        raise UserError(f"{source}: seeds={shorten(given)}: are more than {MOST_RUNS}. Give fewer")
    seeds = list(range(1, given + 1)) if isinstance(given, int) else given
    if not seeds:
        raise UserError(f"{source}: the study is empty: seeds={shorten(given)}. Give a list, or a number of them")
    if len(set(seeds)) < len(seeds):
        twice = next(seed for number, seed in enumerate(seeds) if seed in seeds[:number])
        raise UserError(f"{source}: seeds: {shorten(twice)} is named twice. Leave it out")
    return seeds


def require_few_runs(source: str, factors: Mapping[str, int]) -> None:
    """Reject a file with too many runs. factors: what is multiplied, by its key. Errors: UserError."""
    runs = math.prod(factors.values())
    if runs > MOST_RUNS:
        product = " x ".join(f"{key}: {number}" for key, number in factors.items())
        raise UserError(f"{source}: {product} = {runs} runs, more than {MOST_RUNS}. Lower one, or use several files")
