"""Reads YAML and JSON files of configurations."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from omagd.utils.errors import Mistakes, UserError, collected

# libyaml's loader where PyYAML was built with it: the same values, ten times as fast.
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"
FLOAT = "tag:yaml.org,2002:float"
VERSIONS = frozenset({"game_version"})
"""Keys whose values are text that looks like a number: version 4.10 is not 4.1."""


class ConfigLoader(SAFE_LOADER):  # type: ignore[misc]
    """Reads plain values, 1e-3 as a number and versions as text; notes duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: dict[str, None] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a YAML node; of a duplicate key the last value."""
        seen: set[str] = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    self.twice[f"duplicate key '{key.value}' in line {key.start_mark.line + 1}"] = None
                seen.add(key.value)
                if key.value in VERSIONS and value.tag == FLOAT:
                    value.tag = "tag:yaml.org,2002:str"
        return dict(super().construct_mapping(node, deep))


MOST_NODES = 10**6
"""Most values of a YAML file after its aliases are written out: some hundred bytes can stand for a billion values."""


def _check_nodes(value: Any, counted: dict[int, int]) -> int:
    """Return the number of values in `value`. Errors: YAMLError if there are too many, or if it contains itself.

    counted: numbers by id of what was counted before; 0 for what holds this value.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counted:
        counted[id(value)] = 0
        inner = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_check_nodes(item, counted) for item in inner)
    if not 0 < counted[id(value)] <= MOST_NODES:
        raise yaml.YAMLError("its aliases stand for too many values")
    return counted[id(value)]


# PyYAML follows YAML 1.1, where 1e-3 is text; YAML 1.2 reads it as a number.
ConfigLoader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def parse_yaml(text: str, twice: list[str] | None = None) -> Any:
    """Return the value of a YAML text. Errors: ValueError, RecursionError, YAMLError.

    twice: takes what is said of duplicate keys. Without it, one is a YAMLError.
    """
    loader = ConfigLoader(text)
    try:
        value = loader.get_single_data()
    finally:
        loader.dispose()
    if twice is None and loader.twice:
        raise yaml.YAMLError(next(iter(loader.twice)))
    if twice is not None:
        twice += loader.twice
    _check_nodes(value, {})
    return deepcopy(value)  # not too deep to be copied


def read_yaml(path: Path, mistakes: Mistakes | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file. Errors: UserError if it cannot be read or is no mapping.

    mistakes: collects duplicate keys. Without it, one of them is such an error.
    """
    kind, twice = "JSON" if path.suffix == ".json" else "YAML", list[str]()
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if kind == "JSON" else parse_yaml(text, twice)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as {kind}: {' '.join(str(error).split())}") from None
    with collected(mistakes) as found:
        found.add(*(f"{path}: {line}. Give it once" for line in twice))
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: must hold `key: value` lines, got {type(values).__name__}")
    return values
