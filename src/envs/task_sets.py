"""Task sets: several maps of one environment, some to train on, some held out for tests.

`env_args.map_name` takes the name of a set, a list of maps, or a YAML file with the keys `training` and `held_out`; a
run replaces the file by its content (`as_values`), with the file's name under `name`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from omagd.config.checks import shorten, validation_messages
from omagd.config.env_info import map_label
from omagd.config.loading import parse_yaml, read_yaml
from omagd.utils.errors import UserError

FORM = "Give a YAML file with the keys training and held_out, each a list of maps"
PLAIN = re.compile(r"[^\s,'\"\[\](){}]([^,'\"\[\](){}]*[^\s,'\"\[\](){}])?")
"""What the name of one map can be: no list, no quotes, no space around it."""


@dataclass(frozen=True)
class TaskSet:
    """Maps by name.

    Attributes:
        label: name of the set in results. training: maps that are trained on. held_out: further maps for tests alone.
    """

    label: str
    training: tuple[str, ...]
    held_out: tuple[str, ...] = ()

    @property
    def maps(self) -> tuple[str, ...]:
        """All maps; an episode's task is the index of its map here."""
        return self.training + self.held_out

    def as_values(self) -> dict[str, Any]:
        """Return plain values that `task_set` makes the same set of, whatever happens to the file that it is from."""
        return {"name": self.label, "training": list(self.training), "held_out": list(self.held_out)}


def _set(label: str, training: str, tests: str) -> TaskSet:
    trained = tuple(training.split())
    return TaskSet(label, trained, tuple(name for name in tests.split() if name not in trained))


# Source: LAMDA-RL/ODIS, src/config/tasks (Zhang et al. 2023, "Discovering generalizable multi-agent coordination skills
# from multi-task offline data"). The maps of the training set are tested as well.
NAMED = {
    found.label: found
    for found in (
        _set("marine-easy", "3m 5m 10m", "3m 4m 5m 6m 7m 8m 9m 10m 11m 12m"),
        _set(
            "marine-hard", "3m 5m_vs_6m 9m_vs_10m",
            "4m 5m 10m 12m 7m_vs_8m 8m_vs_9m 10m_vs_11m 10m_vs_12m 13m_vs_15m",
        ),
        _set(
            "stalker-zealot", "2s3z 2s4z 3s5z",
            "1s3z 1s4z 1s5z 2s3z 2s4z 2s5z 3s3z 3s4z 3s5z 4s3z 4s4z 4s5z 4s6z",
        ),
    )
}  # fmt: skip


class SetFile(BaseModel):
    """A YAML file of a set."""

    model_config = ConfigDict(extra="forbid", strict=True)
    training: list[str]
    held_out: list[str] = []


class SetValues(SetFile):
    """The same in a configuration, with the set's name."""

    name: str = ""


def is_file(map_name: object) -> bool:
    """Return whether `env_args.map_name` is the path of a set's file."""
    return isinstance(map_name, str) and map_name.endswith((".yaml", ".yml"))


def task_set(map_name: Any) -> TaskSet | None:
    """Return the set that `env_args.map_name` names, None for a single map.

    map_name: name of a set; a list of maps, or their names with commas between them; path of a YAML file, or what
        `as_values` returns.
    Errors: UserError for an empty list, an entry that is not the name of one map, a map that is named twice, and a file
        that cannot be read as a set.
    """
    key = f"env_args.map_name={_shown(map_name)}"
    if isinstance(map_name, str):
        if map_name in NAMED:
            return NAMED[map_name]
        if is_file(map_name):
            return _checked(_of_values(_read(map_name), map_label(map_name), SetFile, key), key)
        if "," not in map_name and not map_name.startswith("["):
            return None
        map_name = _listed(map_name, key)
    if isinstance(map_name, Mapping):
        return _checked(_of_values(map_name, map_label(map_name), SetValues, key), key)
    if not isinstance(map_name, list | tuple):
        return None
    return _checked(TaskSet(map_label(map_name), tuple(map_name)), key)


@contextmanager
def naming_the_set(given: Any, map_name: str) -> Iterator[None]:
    """Within the block, errors about the map `map_name` also name the set, which was `given` as its value."""
    try:
        yield
    except UserError as error:
        section, name = "env_args.", f"map_name={map_name}"
        if not error.message.startswith(section + name):
            raise
        message = error.message.removeprefix(section)
        raise UserError(f"{section}map_name={_shown(given)}: {message}") from None


def _shown(given: Any) -> str:
    return shorten(given.get("name") or dict(given) if isinstance(given, Mapping) else given)


def _listed(text: str, key: str) -> list[Any]:
    """Return a list that was given as text: `3m,5m`, `[3m, 5m]`, `('3m', '5m')`."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    try:
        names = parse_yaml(text if text.startswith("[") else f"[{text}]")
    except (ValueError, RecursionError, yaml.YAMLError):
        names = None
    if not isinstance(names, list):
        raise UserError(f"{key}: is no list of maps. Give their names, such as [3m,5m]")
    return names


def _checked(found: TaskSet, key: str) -> TaskSet:
    """Return `found` if it consists of different single maps. Errors: UserError."""
    if not found.training:
        raise UserError(f"{key}: the list of maps is empty. Give at least one, such as [3m,5m]")
    for name in found.maps:
        if not isinstance(name, str) or not PLAIN.fullmatch(name):
            what = shorten(repr(name))
            raise UserError(f"{key}: a list of maps must hold their names, such as [3m,5m], and {what} is none")
        if name in NAMED or is_file(name):
            what = "set" if name in NAMED else "file"
            raise UserError(f"{key}: {name} is a {what} of maps. Give its maps, or the {what} alone")
        if found.maps.count(name) > 1:
            raise UserError(f"{key}: the map {name} is named twice")
    return found


def _read(given: str) -> dict[str, Any]:
    path = os.path.expanduser(given)  # unlike Path.expanduser, no error for an unknown user
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that no file can have
        reason = "not a regular file" if os.path.exists(path) else "no such file"
        raise UserError(f"env_args.map_name={given}: cannot be read ({reason}). {FORM}")
    try:
        return read_yaml(Path(path))
    except UserError as error:
        raise UserError(*(f"env_args.map_name={message}. {FORM}" for message in error.messages)) from None


def _of_values(content: Mapping[str, Any], label: str, model: type[SetFile], key: str) -> TaskSet:
    try:
        found = model.model_validate(dict(content))
    except ValidationError as error:
        messages = validation_messages(error).values()
        raise UserError(*(f"{key}: {message}. {FORM}" for message in messages)) from None
    return TaskSet(label, tuple(found.training), tuple(found.held_out))
