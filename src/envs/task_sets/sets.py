"""Task sets: several maps of one environment, some to train on, some held out for tests.

`env_args.map_name` takes the name of a set, a list of maps, or a YAML file with the keys `training` and `held_out`; a
run replaces the file by its content (`as_values`), with the file's name under `name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from omagd.config.env_info import map_label
from omagd.config.messages import validation_message
from omagd.utils.errors import UserError


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
    Errors: UserError for an empty list, a map that is named twice, and a file that cannot be read as a set.
    """
    if isinstance(map_name, str):
        if map_name in NAMED:
            return NAMED[map_name]
        if is_file(map_name):
            return _checked(_read(Path(map_name)), map_name)
        if "," not in map_name and not map_name.startswith("["):
            return None
        map_name = [part.strip() for part in map_name.strip("[]()").split(",") if part.strip()]
    if isinstance(map_name, Mapping):
        return _checked(_of_values(map_name, map_label(map_name), SetValues, "env_args.map_name"), str(dict(map_name)))
    if not isinstance(map_name, list | tuple):
        return None
    names = tuple(map_name)
    if not all(isinstance(name, str) and name for name in names):
        raise UserError(f"env_args.map_name={map_name}: a list of maps must hold their names, such as [3m,5m]")
    return _checked(TaskSet(map_label(names), names), str(map_name))


def _checked(found: TaskSet, given: str) -> TaskSet:
    if not found.training:
        raise UserError(f"env_args.map_name={given}: the list of maps is empty. Give at least one, such as [3m,5m]")
    twice = next((name for i, name in enumerate(found.maps) if name in found.maps[:i]), None)
    if twice is not None:
        raise UserError(f"env_args.map_name={given}: the map {twice} is named twice")
    return found


def _read(path: Path) -> TaskSet:
    key = f"env_args.map_name={path}"
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8"
        raise UserError(f"{key}: cannot be read ({reason})") from None
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"{key}: is no YAML file. Give the keys training and held_out, each a list of maps") from None
    if not isinstance(content, dict):
        raise UserError(f"{key}: must hold the keys training and held_out, each a list of maps")
    return _of_values(content, map_label(str(path)), SetFile, key)


def _of_values(content: Mapping[str, Any], label: str, model: type[SetFile], key: str) -> TaskSet:
    try:
        found = model.model_validate(dict(content))
    except ValidationError as error:
        raise UserError(f"{key}: {validation_message(error)}. Give the keys training and held_out") from None
    return TaskSet(label, tuple(found.training), tuple(found.held_out))
