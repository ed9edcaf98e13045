"""What study and sweep files share: reading them, seeds, folders, executors, and their mistakes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ValidationError

from omagd.config.loading import parse_yaml
from omagd.config.messages import shorten, typed_args, validation_messages
from omagd.lab.studies import EXECUTORS
from omagd.lab.studies.executors import Job
from omagd.utils.errors import Mistakes, UserError, nearest, readable

M = TypeVar("M", bound=BaseModel)
DEFAULT_EXECUTOR = "local"
MOST_RUNS = 10_000
"""Of one file; the executors take no more, and the state file would be too large to be replaced every second."""

PAGES = {"study": "docs/studies.md", "sweep": "docs/sweeps.md"}
OWN_KEYS = {"study": {"arms", "runs", "grid", "environments", "results_file"}, "sweep": {"space", "trials", "metric"}}
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


class Rejected(UserError):
    """Mistakes of a study or sweep.

    Attributes:
        of_file: those that are not about a configuration. jobs: all runs; a process with torch finds what is wrong in
            their configurations, and more. executor, source: of the file.
    """

    of_file: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()
    executor: str = DEFAULT_EXECUTOR
    source: str = ""


def require_right(found: Mistakes, of_runs: Mistakes, jobs: Sequence[Job], executor: str, source: str) -> None:
    """Raise what was found, in the file and in configurations. jobs: also those that are wrong. Errors: Rejected."""
    if messages := (*found.messages(), *of_runs.messages()):
        rejected = Rejected(*messages)
        rejected.of_file, rejected.jobs = found.messages(), tuple(jobs)
        rejected.executor, rejected.source = executor, source
        raise rejected


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
