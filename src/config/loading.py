"""Resolves YAML files and `with key=value` to one checked, immutable `Config`."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from omagd.config.checks import check
from omagd.config.messages import shorten, validation_message
from omagd.config.schema import COMPONENT_ARGS, Config, MaskPredictorConfig, TokenizerConfig
from omagd.utils.errors import UserError, unknown_name
from omagd.utils.storage import read_json

DEFAULT_CONFIG = "omagd_small"
DEFAULT_ENV_CONFIG = "skirmish"
PLUGIN_GROUP = "omagd.config_dirs"
HERE = Path(__file__).resolve().parent
OPTIONS = {"algs": "--config", "envs": "--env-config"}
SUFFIXES = (".yaml", ".yml")
EXTENDS = "extends"
"""Key of a file, not of the configuration: the file, by name or path, whose keys it begins with."""
SECTIONS: dict[str, type[BaseModel]] = {
    "tokenizer_config": TokenizerConfig,
    "mask_predictor_config": MaskPredictorConfig,
}
OPEN_SECTIONS = frozenset({"env_args", "task_weights", *COMPONENT_ARGS})
"""Sections whose keys the environment, the learner, the agent, the mixer or the set of maps defines."""
# libyaml's loader where PyYAML was built with it: the same values, ten times as fast.
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"
FLOAT = "tag:yaml.org,2002:float"
VERSIONS = frozenset({"game_version"})
"""Keys whose values are text that looks like a number: version 4.10 is not 4.1."""
REMOVED: dict[str, tuple[Any, str]] = {
    "act_in_halves": (False, "it brought no measurable gain; leave it out"),
    "belief_inputs": (False, "teams won less with it (docs/results/reconstruction_details.md); leave it out"),
}
"""Keys that earlier versions had, each with its default there and what to do instead. A `config.json`
may hold them; unfinished runs continue where the key had its default."""
NO_END_IN_STEPS = 10**12
"""`t_max` of a run that only `max_episodes` ends: the largest value of the key."""


class ConfigLoader(SAFE_LOADER):  # type: ignore[misc]
    """Reads plain values, 1e-3 as a number and versions as text; rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a YAML node. Errors: ConstructorError (a YAMLError) for a duplicate key."""
        seen: set[str] = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{key.value}'", key.start_mark)
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
WORDS = {"true": True, "false": False, "null": None, "none": None}


def resolve(
    config: str | None = None, env_config: str | None = None, updates: Mapping[str, Any] | None = None
) -> Config:
    """Return the checked configuration of one run.

    Args:
        config: name of a file in `algs/`, or path of a YAML file; None: omagd_small.
        env_config: name of a file in `envs/`, or path of a YAML file; None: skirmish.
        updates: values by dotted key ("env_args.map_name"); a value may be a mapping.

    Errors: UserError for wrong names, keys and values, and for contradictions.
    """
    return validate(apply_updates(base_values(config, env_config), updates or {}))


def base_values(config: str | None = None, env_config: str | None = None) -> dict[str, Any]:
    """Return the values of default.yaml, overridden by the environment's and then by the algorithm's YAML."""
    values = read_yaml(HERE / "default.yaml")
    names = {"envs": (env_config, DEFAULT_ENV_CONFIG), "algs": (config, DEFAULT_CONFIG)}
    for kind, (given, default) in names.items():
        for path, over in _layers(kind, default if given is None else given):
            values = _counted_in_episodes(_merge(values, over, source=str(path)), over)
    return values


def read_preset(kind: str, name: str) -> dict[str, Any]:
    """Return the keys of a file of `--config` (kind "algs") or `--env-config` ("envs") and of those that it extends."""
    values: dict[str, Any] = {}
    for path, over in _layers(kind, name):
        if _counts_episodes(over):
            values.pop("t_max", None)
        values = _merge(values, over, source=str(path))
    return values


def _layers(kind: str, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return the files that a file extends, the outermost first, then itself, each with its own keys.

    Errors: UserError for a file that is missing, that extends itself, or whose name is another one's.
    """
    layers: list[tuple[Path, dict[str, Any]]] = []
    path = find_yaml(kind, name)
    while True:
        values = read_yaml(path)
        extends, base = EXTENDS in values, values.pop(EXTENDS, None)
        layers.insert(0, (path, values))
        if kind == "algs" and "name" not in values:
            if path.stem in config_names(kind) and path != find_yaml(kind, path.stem):
                raise UserError(f"{path}: has the name of the preset {path.stem}. Add a line `name:` with another one")
            values["name"] = path.stem
        if not extends:
            return layers
        path = _extended(kind, path, base)
        if any(path.resolve() == other.resolve() for other, _ in layers):
            circle = " -> ".join(str(each) for each in (path, *(other for other, _ in layers)))
            raise UserError(f"{layers[0][0]}: {EXTENDS}={base}: goes in a circle, {circle}. Remove one of these lines")


def _extended(kind: str, path: Path, base: object) -> Path:
    """Return the file that the one at `path` extends, which it calls `base`. Errors: UserError."""
    given = f"{path}: {EXTENDS}"
    if not isinstance(base, str) or not base:
        shown = "" if base is None else shorten(repr(base))
        raise UserError(f"{given}={shown}: must be one name of --list, or the path of one YAML file")
    if not base.endswith(SUFFIXES):
        return find_yaml(kind, base, given)
    target = path.parent / os.path.expanduser(base)
    if not os.path.isfile(target):
        raise UserError(f"{given}={base}: {target} is no file. The path begins at the folder of {path.name}")
    return target


def changed(config: Config, keys: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Return the value and the default of each of these keys whose value is not its default."""
    default = read_yaml(HERE / "default.yaml")
    pairs = {key: (getattr(config, key), default[key]) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def read_saved(path: Path, source: str) -> dict[str, Any]:
    """Return the values of a run's `config.json`, with the current defaults for missing keys.

    source: the argument that named the run, for messages. Errors: UserError for an unreadable file or unknown keys.
    """
    try:
        values = read_json(path)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is damaged"
        raise UserError(f"{source}: {path} cannot be read ({reason}): give the folder of a run") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: {path} must hold a mapping of keys to values: give the folder of a run")
    values = {key: value for key, value in values.items() if key not in REMOVED}
    return _merge(read_yaml(HERE / "default.yaml"), values, source=str(path))


def apply_updates(values: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `updates` (by dotted key). Errors: UserError for an unknown key."""
    result = deepcopy(dict(values))
    for key, value in updates.items():
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        result = _merge(result, nested, source="with", shown=value)
    return _counted_in_episodes(result, updates)


def _counted_in_episodes(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without `t_max` if `given` has `max_episodes` but no `t_max`.

    The `t_max` of a preset does not end a run whose length is given in episodes; a `t_max` given with it does.
    """
    return {**values, "t_max": NO_END_IN_STEPS} if _counts_episodes(given) else values


def _counts_episodes(given: Mapping[str, Any]) -> bool:
    return given.get("max_episodes") is not None and "t_max" not in given


def validate(values: Mapping[str, Any]) -> Config:
    """Return the frozen configuration of plain `values`. Errors: UserError with key, value and expected values."""
    try:
        config = Config.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(validation_message(error)) from None
    check(config)
    return config


def to_plain(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values for YAML and JSON; `validate` is the inverse."""
    return config.model_dump(mode="json")


def parse_value(text: str, current: Any = None, key: str = "") -> Any:
    """Return the value of `text` in `key=text`: a Python literal, else text.

    Args:
        text: the part after the equals sign.
        current: the key's current value; if it is text, `text` stays text ("3" for a name).
        key: dotted name of the key; a version also stays text ("4.10").
    """
    if isinstance(current, str) or (key.rpartition(".")[2] in VERSIONS and text.lower() not in WORDS):
        return _unquoted(text)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, None if there is none."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def apply_texts(values: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` with the texts of `key=text`. Errors: UserError for an unknown key."""
    given = {key: parse_value(text, _value_at(values, key), key) for key, text in texts.items()}
    return apply_updates(values, given)


def config_names(kind: str) -> list[str]:
    """Return the names that `--config` (kind "algs") or `--env-config` (kind "envs") takes, sorted."""
    return sorted({path.stem for folder in config_dirs() for path in (folder / kind).glob("*.yaml")})


def config_dirs() -> list[Path]:
    """Return the folders with `algs/` and `envs/`: this package's, then those of installed plug-ins."""
    return [HERE, *(_plugin_dir(point) for point in entry_points(group=PLUGIN_GROUP))]


def _plugin_dir(point: EntryPoint) -> Path:
    try:
        return Path(str(point.load()))
    except (ImportError, AttributeError) as error:
        what = f"entry point {point.name} of {PLUGIN_GROUP}"
        raise UserError(f"{what}: cannot be loaded ({error}). Fix or uninstall that package") from None


def find_yaml(kind: str, name: str, given: str = "") -> Path:
    """Return the file of `--config=name` (kind "algs") or `--env-config=name` (kind "envs").

    given: what holds the name, if not that option.
    """
    given = given or OPTIONS[kind]
    if name.endswith(SUFFIXES):
        if not os.path.isfile(name):  # unlike Path.is_file, False for a name that no file can have
            raise UserError(f"{given}={name}: no such file. Give a YAML file, or one of the names of --list")
        return Path(name)
    files = {path.stem: path for folder in reversed(config_dirs()) for path in (folder / kind).glob("*.yaml")}
    if name not in files:
        raise unknown_name(given, name, sorted(files))
    return files[name]


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Errors: ValueError, RecursionError, YAMLError."""
    value = yaml.load(text, Loader=ConfigLoader)
    _check_nodes(value, {})
    return deepcopy(value)  # not too deep to be copied


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Errors: UserError if it cannot be read or is no mapping."""
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: must hold `key: value` lines, got {type(values).__name__}")
    return values


def known_keys() -> list[str]:
    """Return every key by its dotted name, in the schema's order; what is below `OPEN_SECTIONS` is not listed."""
    keys: list[str] = []
    for key in Config.model_fields:
        keys += [f"{key}.{inner}" for inner in SECTIONS[key].model_fields] if key in SECTIONS else [key]
    return keys


def _merge(values: dict[str, Any], over: Mapping[str, Any], *, source: str, shown: Any = None) -> dict[str, Any]:
    """Return `values` overridden by `over`, section by section. Errors: UserError for an unknown key."""
    result = dict(values)
    for key, value in over.items():
        if key not in Config.model_fields:
            raise _unknown(key, source, value if shown is None else shown)
        if key in OPEN_SECTIONS and value is None and source != "with":  # drops the keys of the files below
            result[key] = {}
            continue
        if key in {*OPEN_SECTIONS, *SECTIONS} and not isinstance(value, Mapping):
            pair = re.match(r"\{\W*(\w+)\W*:\s*([^,}]+)", str(value)) if source == "with" else None
            fix = f". Write {key}.{pair[1]}={pair[2]}" if pair else ""
            raise UserError(f"{key}={shorten(value)}: must be a mapping of keys to values{fix}")
        if key in OPEN_SECTIONS:
            result[key] = {**result.get(key, {}), **value}
        elif key in SECTIONS:
            for inner in value:
                if inner not in SECTIONS[key].model_fields:
                    raise _unknown(f"{key}.{inner}", source, value[inner])
            result[key] = {**result.get(key, {}), **value}
        elif isinstance(value, Mapping) and isinstance(shown, str | int | float | bool):
            raise _unknown(".".join([key, *value]), source, shown)
        else:
            result[key] = value
    return result


def _unknown(key: str, source: str, value: Any) -> UserError:
    """Return the error for an unknown key, with the nearest known one."""
    if key in REMOVED:
        given = f"with {key}={shorten(value)}" if source == "with" else f"{source}: {key}"
        return UserError(f"{given}: this key was removed: {REMOVED[key][1]}")
    if key == EXTENDS:
        return UserError(f"{source} {key}={shorten(value)}: this is a key of files. Use --config={shorten(value)}")
    names = {name.rpartition(".")[2]: name for name in reversed(known_keys())} | {name: name for name in known_keys()}
    names |= {} if source == "with" else {EXTENDS: EXTENDS}
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    fix = f" Did you mean '{names[close[0]]}'?" if close else " `--dry-run` shows all keys"
    if source == "with":
        return UserError(f"with {key}={shorten(value)}: unknown key '{key}'.{fix}")
    return UserError(f"{source}: unknown key '{key}'.{fix}")


def _unquoted(text: str) -> str:
    """Return `text` without enclosing quotes."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
