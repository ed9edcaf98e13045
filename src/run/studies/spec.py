"""From a study file to jobs: arms x environments x seeds, each with a configuration that was checked."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from omagd.config.checks import LONGEST_NAME
from omagd.config.loading import apply_texts, base_values, parse_yaml, validate
from omagd.config.messages import shorten, typed_args, validation_message
from omagd.config.schema import Config
from omagd.run.studies import EXECUTORS
from omagd.run.studies.executors import Job
from omagd.utils.errors import UserError, nearest, readable

M = TypeVar("M", bound=BaseModel)
OWN = {
    "seed": "give seeds: at the top", "seeds": "give seeds: at the top",
    "local_results_path": "give results: at the top",
    "unique_token": "leave it out, the study names its runs", "auto_resume": "leave it out, every run resumes",
    "auto_resume_wait": "leave it out", "evaluate": "leave it out, a study trains",
}  # fmt: skip
"""Keys that the study sets itself."""

DEFAULT_EXECUTOR = "local"
MOST_RUNS = 10_000
"""Of one file; the executors take no more, and the state file would be too large to be replaced every second."""

MOST_KEYS = 1000
"""Of `with:`, nested ones counted one by one."""

LONGEST_WORD = 100_000
"""In bytes; Linux takes no argument of 128 KiB."""

PAGES = {"study": "docs/studies.md", "sweep": "docs/sweeps.md"}
OWN_KEYS = {"study": {"arms", "runs", "environments", "results_file"}, "sweep": {"space", "trials", "metric"}}
"""Keys that show which kind of file it is."""


def _whole_numbers(seeds: Any) -> Any:
    """Check the type of seeds; in quotes they are text to YAML. Errors: ValueError with the list to write."""
    found = seeds if isinstance(seeds, list) else [seeds]
    if found and all(type(seed) is int for seed in found) or seeds == []:
        return seeds
    parts = ",".join(map(shorten, found)).replace(",", " ").split()
    fix = ", ".join(parts) if parts and all(part.isdecimal() for part in parts) else "1, 2, 3"
    raise ValueError(f"must be a list of whole numbers, or how many. Write seeds: [{fix}]")


Seeds = Annotated[int | list[int], BeforeValidator(_whole_numbers)]


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
        arms: what is compared, by name. runs: instead of arms, a list of overrides.
        environments: by name, or a list of maps. seeds: a list, or how many (1, 2, …).
        executor: settings by executor (`local: {jobs: 2}`); the first one is used unless the command names another.
        results_file: JSON lines to which every finished run is appended; runs that are there are skipped.
    """

    name: str | None = None
    results: str = "results"
    arms: dict[str, dict[str, Any] | None] | None = None
    runs: list[dict[str, Any]] | None = None
    environments: dict[str, dict[str, Any] | str | None] | list[dict[str, Any] | str] | None = None
    seeds: Seeds = 1
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


def load(given: str | Path | Mapping[str, Any], *, results: str | None = None, executor: str | None = None) -> Study:
    """Return the study of a file, or of its values.

    Args:
        results: instead of the file's `results`. executor: instead of the first one in the file.
    Errors: UserError in one line that names the file, the place in it, and the key.
    """
    text, values, source, base = read_file(given)
    file = validated(StudyFile, values, source)
    where = folder_of(file.name, results or file.results, given, source)
    jobs = tuple(_jobs(file, source, base))
    chosen, settings = executor_of(file.executor, source, executor)
    kept = base / expanded(file.results_file, f"{source}: results_file") if file.results_file else None
    return Study(where, jobs, chosen, settings, kept, text, source)


def folder_of(name: str | None, results: str, given: str | Path | Mapping[str, Any], source: str) -> Path:
    """Return the folder of a study: its name, else the name of its file, in the folder `results`. Errors: UserError."""
    name = name or (Path(given).stem if isinstance(given, (str, Path)) else "")
    if not name:
        raise UserError(f"{source}: name: is missing; it is the name of the folder")
    if not name.isprintable() or name != Path(name).name or name.startswith(".") or len(name) > 100:
        raise UserError(f"{source}: name={shorten(name)}: is the name of a folder; give one without `/`")
    return expanded(results, f"{source}: results").absolute() / name


def expanded(path: str | Path, what: str) -> Path:
    """Return a path with `~` written out. Errors: UserError that begins with `what` for a path that cannot be."""
    if "\0" in str(path):
        raise UserError(f"{what}={shorten(readable(str(path)))}: holds a NUL character. Give another path")
    found = os.path.expanduser(path)
    if str(found).startswith("~"):
        raise UserError(f"{what}={shorten(found)}: this machine does not know that user. Give another path")
    return Path(found)


def config_of(job: Job) -> Config:
    """Return the checked configuration of a job. Errors: UserError."""
    return config_of_words(job.words)


def config_of_words(words: Sequence[str]) -> Config:
    """Return the checked configuration of the words of a job. Errors: UserError."""
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    texts = dict(word.split("=", 1) for word in words[words.index("with") + 1 :])
    return validate(apply_texts(_base_values(options.get("config"), options.get("env-config")), texts))


def read_file(
    given: str | Path | Mapping[str, Any], kind: str = "study", needs: str = "arms:, environments: and seeds:"
) -> tuple[str, Any, str, Path]:
    """Return the text of a file, its values, its name in messages, and the folder that its paths start from."""
    if isinstance(given, Mapping):
        return yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True), dict(given), kind, Path.cwd()
    path = expanded(given, kind)
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
    (other,) = OWN_KEYS.keys() - {kind}
    if OWN_KEYS[other] & values.keys() and not OWN_KEYS[kind] & values.keys():
        raise UserError(f"{path}: is a {other} file. Start it with: omagd {other} {path}")
    return text, values, path.name, path.absolute().parent


def validated(model: type[M], values: Any, where: str) -> M:
    """Return the entry of a file as its model. Errors: UserError that names the place."""
    known = [field.alias or name for name, field in model.model_fields.items()]
    if isinstance(values, dict):
        for key in values:
            if key not in known:
                fix = nearest(str(key), known) or f" Known: {', '.join(known)}"
                raise UserError(f"{where}: unknown key '{shorten(key)}'.{fix}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {validation_message(error)}") from None


def executor_of(given: dict[str, dict[str, Any] | None], source: str, asked: str | None) -> tuple[str, BaseModel]:
    """Return the executor to use and its settings; those of the others are checked, too."""
    chosen = asked or next(iter(given), DEFAULT_EXECUTOR)
    found: dict[str, BaseModel] = {}
    for name in dict.fromkeys([*given, chosen]):
        try:
            model = EXECUTORS.get(name).args_model
            values = given.get(name) or {}
            found[name] = typed_args(f"executor.{name}", f"executor {name}", model, values, lambda key: "")
        except UserError as error:
            raise UserError(f"{source}: {error.message}") from None
    return chosen, found[chosen]


def _jobs(file: StudyFile, source: str, base: Path) -> Iterator[Job]:
    """Yield a job for each arm, environment and seed. Errors: UserError."""
    seeds = seeds_of(file.seeds, source)
    factors = {"arms" if file.runs is None else "runs": file.arms or file.runs, "environments": file.environments}
    require_few_runs(source, {**{key: len(given or "1") for key, given in factors.items()}, "seeds": len(seeds)})
    arms, environments = _arms(file, source), _environments(file, source)
    same: dict[str, str] = {}
    names: dict[str, str] = {}
    for arm, entry in arms.items():
        for label, environment in environments.items():
            where = f"{source}: {arm}" + (f", environments {label}" if label else "")
            words = words_of(file, entry, environment, base, where)
            for seed in seeds:
                job = _job(arm, label, seed, (*words, f"seed={seed}"), where)
                config = config_of(job).model_dump_json(exclude={"name"})
                if config in same:
                    raise UserError(f"{where}: is the same run as {same[config]}. Leave one out")
                if job.name.casefold() in names:
                    raise UserError(
                        f"{where}: its folder {job.name} is that of {names[job.name.casefold()]}. Rename one"
                    )
                same[config] = names[job.name.casefold()] = f"{arm} {label}".strip()
                yield job


def _job(arm: str, label: str, seed: int, words: tuple[str, ...], where: str) -> Job:
    plain = Job("", arm, "", "", seed, words)
    try:
        config = config_of(plain)
    except UserError as error:
        raise UserError(f"{where}: {error.message}") from None
    play = label or config.map_name or config.env
    name = re.sub(r"[^\w.=+,-]+", "_", f"{arm.removeprefix('arms.')}-{play}-seed{seed}").lstrip(".")
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(f"{where}: its name is too long for a folder. Give arms: with short names")
    return Job(name, arm.removeprefix("arms."), config.env, config.map_name, seed, words)


def _arms(file: StudyFile, source: str) -> dict[str, Entry]:
    """Return the arms by `arms.NAME`; those of `runs` by their overrides."""
    if file.runs is not None and file.arms is not None:
        raise UserError(f"{source}: runs: and arms: are given; give one of them")
    if file.runs is not None:
        entries = {_title(run) or "plain": Entry.model_validate({"with": run}) for run in file.runs}
        if len(entries) < len(file.runs):
            raise UserError(f"{source}: runs: two entries are equal. Leave one out")
    elif file.arms is not None:
        entries = {f"arms.{n}": validated(Entry, arm or {}, f"{source}: arms.{n}") for n, arm in file.arms.items()}
    else:
        entries = {file.config or "default": Entry()}
    if "arms." in entries:
        raise UserError(f"{source}: arms: a name is empty. Give one, it is part of the names of folders")
    if not entries:
        raise UserError(f"{source}: the study is empty: give at least one entry of arms: or runs:")
    return entries


def _title(run: Mapping[str, Any]) -> str:
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in flat(run))


def _environments(file: StudyFile, source: str) -> dict[str, Environment]:
    given = file.environments
    if given is None:
        return {"": Environment()}
    if isinstance(given, list):
        given = {_environment_name(entry, source): entry for entry in given}
        if len(given) < len(file.environments or ()):
            raise UserError(f"{source}: environments: one is named twice. Leave it out, or give names: `name: {{…}}`")
    if not given:
        raise UserError(f"{source}: the study is empty: environments: names none. Leave it out, or name one")
    maps = {name: {"map": entry} if isinstance(entry, str) else entry or {} for name, entry in given.items()}
    return {name: validated(Environment, entry, f"{source}: environments.{name}") for name, entry in maps.items()}


def _environment_name(entry: dict[str, Any] | str, source: str) -> str:
    if isinstance(entry, str):
        return entry
    found = validated(Environment, entry, f"{source}: environments")
    return found.map or Path(found.env_config or "").stem


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


def words_of(file: Entry, arm: Entry, environment: Environment, base: Path, where: str) -> tuple[str, ...]:
    """Return the words of a run without its seed. An arm overrides its environment, which overrides the study."""
    config = arm.config or file.config
    env_config = environment.env_config or arm.env_config or file.env_config
    options = {"config": config, "env-config": env_config}
    values = dict(flat(file.with_))
    if environment.map is not None:
        values["env_args.map_name"] = environment.map
    values |= dict(flat(environment.with_)) | dict(flat(arm.with_))
    for key in values:
        if key in OWN:
            raise UserError(f"{where}: {key}={shorten(values[key])}: {OWN[key]}")
    if len(values) > MOST_KEYS:
        raise UserError(f"{where}: with: has {len(values)} keys, more than {MOST_KEYS}. Leave some out")
    words = [f"{key}={value}" for key, value in values.items()]
    for word in words:
        if "\0" in word or len(word.encode(errors="replace")) > LONGEST_WORD:
            reason = "holds a NUL character" if "\0" in word else "is too long for a command line"
            raise UserError(f"{where}: {shorten(readable(word))}: {reason}. Give another value")
    chosen = [f"--{flag}={_file(name, base)}" for flag, name in options.items() if name is not None]
    return (*chosen, "with", *words)


def _file(name: str, base: Path) -> str:
    """Return an absolute path for a YAML file beside the study file, else the name as it is."""
    beside = base / os.path.expanduser(name)
    return str(beside) if name.endswith((".yaml", ".yml")) and os.path.isfile(beside) else name


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); nested mappings are taken apart."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@lru_cache(maxsize=256)
def _base_values(config: str | None, env_config: str | None) -> dict[str, Any]:
    return base_values(config, env_config)
