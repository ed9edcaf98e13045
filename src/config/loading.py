"""Resolves YAML files and `with key=value` to one checked, immutable `Config`."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from omagd.config.checks import check, shorten, unknown_key, unusable, validation_messages
from omagd.config.schema import ACTED_WITH, EXTENDS, FIELDS, OPEN_SECTIONS, REMOVED, SECTIONS, Config, without
from omagd.utils.errors import Mistakes, Unchecked, UserError, collected, foreign, readable, unknown_name
from omagd.utils.registry import installed
from omagd.utils.storage import read_json

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


DEFAULT_ENV_CONFIG = "skirmish"
PLUGIN_GROUP = "omagd.config_dirs"
HERE = Path(__file__).resolve().parent
OPTIONS = {"algs": "--config", "envs": "--env-config"}
SUFFIXES = (".yaml", ".yml", ".json")
WORDS = {"true": True, "false": False, "null": None, "none": None}
NO_END_IN_STEPS = 10**12
"""`t_max` of a run that only `max_episodes` ends: the largest value of the key."""


def resolve(
    config: str | None = None, env_config: str | None = None, updates: Mapping[str, Any] | None = None
) -> Config:
    """Return the checked configuration of one run.

    Args:
        config: name of a file in `algs/`, or path of a file; None: see `default_config`.
        env_config: name of a file in `envs/`, or path of a file; None: skirmish.
        updates: values by dotted key ("env_args.map_name"); a value may be a mapping.

    Errors: UserError for all wrong names, keys and values, and contradictions.
    """
    with collected(None) as found:
        values = base_values(config, env_config, found)
        return validate(apply_texts(values, updates or {}, found, parse=False), found)


def base_values(
    config: str | None = None, env_config: str | None = None, mistakes: Mistakes | None = None
) -> dict[str, Any]:
    """Return the values of default.yaml, overridden by the environment's and then by the algorithm's file.

    mistakes: collects what is wrong in the files. Without it, errors: UserError.
    """
    with collected(mistakes) as found:
        values = read_yaml(HERE / "default.yaml")
        for kind, given in (("envs", env_config), ("algs", config)):
            env = values["env"]
            default = DEFAULT_ENV_CONFIG if kind == "envs" else default_config(env)
            for path, over in _layers(kind, default if given is None else given, found):
                values = _counted_in_episodes(_laid(values, over, str(path), found), over)
            if kind == "algs" and env_config is not None and values["env"] != env:
                found.add(f"--env-config={env_config}: --config={config} sets env={values['env']}. Leave one out")
    return values


def default_config(env: str) -> str:
    """Return the preset of a run without `--config`; `qmix_fast` plays 128 games at once, too many for other games."""
    return "qmix_fast" if env == "skirmish" else "qmix"


def read_preset(kind: str, name: str) -> dict[str, Any]:
    """Return the keys of a file of `--config` (kind "algs") or `--env-config` ("envs") and of those that it extends."""
    values: dict[str, Any] = {}
    with collected(None) as found:
        for path, over in _layers(kind, name, found):
            if _counts_episodes(over):
                values.pop("t_max", None)
            values = _merge(values, over, found, source=str(path))
    return values


def given_keys(config: str | None, env_config: str | None, texts: Mapping[str, Any]) -> set[str]:
    """Return the keys that the user has set: those of the command line, and others than the defaults in own files.

    A value of the preset whose name a file has is a default of that file, as in a run's `config.json`.
    """
    found = {key for key, text in texts.items() if isinstance(text, str)}
    files = [dict(text) for text in texts.values() if isinstance(text, Mapping)]
    for kind, name in (("envs", env_config), ("algs", config)):
        if name is not None and name.endswith(SUFFIXES):
            files += [over for path, over in _layers(kind, name, Mistakes()) if path.parent.parent not in config_dirs()]
    for over in files:
        preset = over.get("name")
        known = preset in config_names("algs")
        defaults = base_values(preset) if known else read_yaml(HERE / "default.yaml")
        found |= {key for key, value in _current(over).items() if defaults.get(key) != value}
    return found


def _laid(values: dict[str, Any], over: Mapping[str, Any], source: str, found: Mistakes) -> dict[str, Any]:
    """Return `values` overridden by a file. One that holds all keys, such as a run's `config.json`, replaces them.

    Arguments of another environment are dropped.
    """
    dropped = OPEN_SECTIONS if over.keys() >= FIELDS else {"env_args"} if over.get("env", ...) != values["env"] else ()
    if "env" in over:
        values = {**values, **{section: {} for section in dropped}}
    return _merge(values, over, found, source=source)


def _layers(kind: str, name: str, found: Mistakes) -> list[tuple[Path, dict[str, Any]]]:
    """Return the files that a file extends, the outermost first, then itself, each with its own keys.

    found: collects mistakes: a file that is missing, that extends itself, or whose name is another one's.
    """
    layers: list[tuple[Path, dict[str, Any]]] = []
    try:
        path = find_yaml(kind, name)
        while True:
            values = read_yaml(path, found)
            extends, base = EXTENDS in values, values.pop(EXTENDS, None)
            layers.insert(0, (path, values))
            if kind == "algs" and "name" not in values:
                if path.stem in config_names(kind) and path != find_yaml(kind, path.stem):
                    found.add(f"{path}: has the name of the preset {path.stem}. Add a line `name:` with another one")
                values["name"] = path.stem
            if not extends:
                return layers
            path = _extended(kind, path, base)
            if any(path.resolve() == other.resolve() for other, _ in layers):
                circle = " -> ".join(str(each) for each in (path, *(other for other, _ in layers)))
                raise UserError(
                    f"{layers[0][0]}: {EXTENDS}={base}: goes in a circle, {circle}. Remove one of these lines"
                )
    except UserError as error:
        found.note(error)
        found.complete = False
        return layers


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
    """Return the value and the default of each of these keys whose value is not its default; not of wrong ones."""
    default, found = read_yaml(HERE / "default.yaml"), dict[str, tuple[Any, Any]]()
    for key in keys:
        with suppress(Unchecked):
            if (value := getattr(config, key)) != default[key]:
                found[key] = value, default[key]
    return found


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
    for key, player in ACTED_WITH.items():
        if (value := value_at(values, key)) not in (None, REMOVED[key][0]):
            raise UserError(f"{source}: trained with {key}={value}, which was removed. Play it with {player}")
    values = _without(REMOVED, values)
    if values.get("task_dealing") == "queue":  # how training dealt its maps, which left; a trained team plays the same
        del values["task_dealing"]
    with collected(None) as found:
        return _merge(read_yaml(HERE / "default.yaml"), values, found, source=str(path))


def _nested(key: str, value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping that a dotted key of `values` stands for, with what lies beside it below a section's keys."""
    parts = key.split(".")
    for depth in reversed(range(len(parts))):
        beside = value_at(values, ".".join(parts[:depth])) if depth > 1 else None
        value = {**(beside if isinstance(beside, Mapping) else {}), parts[depth]: value}
    return dict(value)


def _counted_in_episodes(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without `t_max` if `given` has `max_episodes` but no `t_max`.

    The `t_max` of a preset does not end a run whose length is given in episodes; a `t_max` given with it does.
    """
    return {**values, "t_max": NO_END_IN_STEPS} if _counts_episodes(given) else values


def _counts_episodes(given: Mapping[str, Any]) -> bool:
    return given.get("max_episodes") is not None and "t_max" not in given


def validate(values: Mapping[str, Any], mistakes: Mistakes | None = None) -> Config:
    """Return the frozen configuration of plain `values`.

    mistakes: collects wrong values and contradictions; the configuration is then one without the wrong values, as far
        as its files could be read. Errors: UserError without it, or where a file could not be read.
    """
    with collected(mistakes) as found:
        try:
            config = Config.model_validate(dict(values))
        except ValidationError as error:
            messages = validation_messages(error)
            found.add(*messages.values())
            wrong = {key.partition(".")[0] for key in messages}
            default = read_yaml(HERE / "default.yaml")
            config = without(Config.model_validate({**values, **{key: default[key] for key in wrong}}), wrong)
        if unfit := unusable(config):
            found.add(*unfit.values())
            config = without(config, unfit)
        if not found.complete:
            found.raise_any()
        with found.caught():
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
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, None if there is none."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def apply_texts(
    values: Mapping[str, Any], texts: Mapping[str, Any], mistakes: Mistakes | None = None, *, parse: bool = True
) -> dict[str, Any]:
    """Return `values` with the texts of `key=text`, and with the values of files by their paths.

    mistakes: collects unknown keys. Without it, errors: UserError.
    parse: False for values in place of texts, where a mapping is a section.
    """
    result, given = deepcopy(dict(values)), dict[str, Any]()
    with collected(mistakes) as found:
        for key, text in texts.items():
            if parse and isinstance(text, Mapping):
                result = _laid(result, text, key, found)
                given |= text
                continue
            row = None if key.partition(".")[0] in FIELDS else foreign("key", key)
            current = value_at(result, row.here if row and row.here else key)
            value = parse_value(text, current, key) if parse else text
            result = _merge(result, _nested(key, value, result), found, source="with", shown=value)
            given[key] = value
    return _counted_in_episodes(result, given)


def config_names(kind: str) -> list[str]:
    """Return the names that `--config` (kind "algs") or `--env-config` (kind "envs") takes, sorted."""
    return sorted({path.stem for folder in config_dirs() for path in (folder / kind).glob("*.yaml")})


def config_dirs() -> list[Path]:
    """Return the folders with `algs/` and `envs/`: this package's, then those of installed plug-ins."""
    return [HERE, *(_plugin_dir(point) for point in installed(PLUGIN_GROUP))]


def _plugin_dir(point: EntryPoint) -> Path:
    try:
        return Path(str(point.load()))
    except Exception as error:  # noqa: BLE001 (whatever the package's code raises)
        what = f"entry point {point.name} of {PLUGIN_GROUP}"
        why = readable(f"{type(error).__name__}: {error}")
        raise UserError(f"{what}: cannot be loaded ({why}). Fix or uninstall that package") from error


def find_yaml(kind: str, name: str, given: str = "") -> Path:
    """Return the YAML or JSON file of `--config=name` (kind "algs") or `--env-config=name` (kind "envs").

    given: what holds the name, if not that option.
    """
    given = given or OPTIONS[kind]
    if name.endswith(SUFFIXES):
        if not os.path.isfile(name):  # unlike Path.is_file, False for a name that no file can have
            raise UserError(f"{given}={name}: no such file. Give a YAML file, or one of the names of --list")
        return Path(name)
    files = {path.stem: path for folder in reversed(config_dirs()) for path in (folder / kind).glob("*.yaml")}
    if name not in files:
        raise unknown_name(given, name, sorted(files), OPTIONS[kind])
    return files[name]


def known_keys() -> list[str]:
    """Return every key by its dotted name, in the schema's order; what is below `OPEN_SECTIONS` is not listed."""
    keys: list[str] = []
    for key in Config.model_fields:
        keys += [f"{key}.{inner}" for inner in SECTIONS[key].model_fields] if key in SECTIONS else [key]
    return keys


def _merge(
    values: dict[str, Any], over: Mapping[str, Any], found: Mistakes, *, source: str, shown: Any = None
) -> dict[str, Any]:
    """Return `values` overridden by `over`, section by section.

    found: collects unknown keys. The value of one that has another name here goes to that name.
    """
    result = dict(values)
    for key, value in (over if source == "with" else _current(over)).items():
        given = value if shown is None else shown
        if key not in Config.model_fields:
            if not ((row := foreign("key", key)) and row.taken):
                found.add(unknown_key(key, source, given))
            if row and row.here and value_at(over, row.here) is None:
                result = _merge(result, _nested(row.here, value, result), found, source=source, shown=shown)
        elif key in OPEN_SECTIONS and value is None and source != "with":  # drops the keys of the files below
            result[key] = {}
        elif key in {*OPEN_SECTIONS, *SECTIONS} and not isinstance(value, Mapping):
            pair = re.match(r"\{\W*(\w+)\W*:\s*([^,}]+)", str(value)) if source == "with" else None
            fix = f". Write {key}.{pair[1]}={pair[2]}" if pair else ""
            found.add(f"{key}={shorten(value)}: must be a mapping of keys to values{fix}")
        elif key in OPEN_SECTIONS:
            result[key] = {**result.get(key, {}), **value}
        elif key in SECTIONS:
            known = SECTIONS[key].model_fields
            found.add(*(unknown_key(f"{key}.{inner}", source, value[inner]) for inner in value if inner not in known))
            result[key] = {**result.get(key, {}), **{inner: value[inner] for inner in value if inner in known}}
        elif source == "with" and value in ([], ()):
            found.add(f"{key}={value}: holds nothing. Leave it out")
        elif isinstance(value, Mapping) and isinstance(shown, str | int | float | bool):
            found.add(unknown_key(".".join([key, *value]), source, shown))
        else:
            result[key] = value
    return result


def _current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without removed keys at their defaults, which the `config.json` of an earlier version holds."""
    return _without({key for key, (default, _) in REMOVED.items() if value_at(values, key) == default}, values)


def _without(keys: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without some keys, given by dotted names."""
    kept = {key: value for key, value in values.items() if key not in keys}
    for section in SECTIONS.keys() & kept.keys():
        if isinstance(kept[section], Mapping):
            kept[section] = {key: value for key, value in kept[section].items() if f"{section}.{key}" not in keys}
    return kept
