"""What remains of a configuration with mistakes: names, keys and facts with which its other keys can be checked."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omagd.config.env_info import EnvInfo
from omagd.config.messages import ArgsError
from omagd.config.schema import COMPONENT_ARGS, OF_GRAPHS, OF_HEAD, OF_PARTS, Config, without
from omagd.utils.errors import Mistakes, Unreadable, UserError
from omagd.utils.foreign import find_name
from omagd.utils.registry import Registry
from omagd.utils.run_folder import RunFolder
from omagd.utils.storage import read_entry

# Configuration keys that name a component, and the package whose REGISTRY holds it.
NAMED = {
    "run": "omagd.run",
    "env": "omagd.envs",
    "learner": "omagd.learners",
    "runner": "omagd.runners",
    "mac": "omagd.controllers",
    "action_selector": "omagd.components.action_selectors",
    "opponent_difficulty_strategy": "omagd.components.opponent_schedules",
    "agent": "omagd.modules.agents",
    "mixer": "omagd.modules.mixers",
}


def with_known_names(config: Config, found: Mistakes) -> Config:
    """Return `config` with what unknown names of components are here; without those that are not known here either."""
    for key, package in NAMED.items():
        registry = registry_of(package)
        try:
            registry.require(name := getattr(config, key))
        except Unreadable:
            continue
        except UserError as error:
            found.add(error.message + _named_by_run(config, key))
            row = find_name(key, name)
            other = row and (row.here or row.near)
            config = config.model_copy(update={key: other}) if other in registry else without(config, (key,))
    with found.caught():
        kind = config.mask_predictor_config.kind
        if kind not in (registry := registry_of("omagd.modules.graph_reconstructers")):
            config = without(config, ("mask_predictor_config",))
            registry.require(kind)
    return config


def with_fitting(config: Config, found: Mistakes) -> Config:
    """Return `config` without the names of components that do not fit their protocols. Imports the others."""
    for key, package in NAMED.items():
        with found.caught():
            name = getattr(config, key)
            try:
                registry_of(package).get(name)
            except UserError:
                config = without(config, (key,))
                raise
    return config


def with_args(config: Config, found: Mistakes) -> Config:
    """Return `config` with all keys of learner, agent and mixer, without those that they do not take."""
    for section in COMPONENT_ARGS:
        with found.caught():
            config = _completed(config, section, found)
    return config


def _completed(config: Config, section: str, found: Mistakes) -> Config:
    from omagd.run.training.checks import complete_args

    try:
        return complete_args(config, (section,))
    except ArgsError as error:
        found.note(error)
        left = fewer(config, section, error.wrong)
        if getattr(left, section) != getattr(config, section):
            return _completed(left, section, found)
    except UserError as error:
        found.note(error)
    return without(config, (section,))


def fewer(config: Config, section: str, keys: Collection[str]) -> Config:
    """Return `config` without some keys of a section."""
    left = {key: value for key, value in getattr(config, section).items() if key not in keys}
    return config.model_copy(update={section: left})


def stand_in(config: Config) -> EnvInfo | None:
    """Return facts of an environment or a map that is not there, to check the learner with: those of another one."""
    from omagd.envs.factory import described_env

    with suppress(UserError):
        try:
            return described_env(config.env, {})
        except Unreadable:
            return described_env("skirmish", {})
    return None


def unread(config: Config, given: Collection[str], read: set[str] | None) -> Iterator[str]:
    """Yield a warning about the given keys that no part of this run reads. read: by its parts; None: not known."""
    of_parts = sorted(key for key in given if key in OF_PARTS and read is not None and key not in read)
    if of_parts:
        parts = " ".join(f"{key}={getattr(config, key)}" for key in ("learner", "mac", "agent", "mixer"))
        yield f"{', '.join(of_parts)}: nothing in this run reads {'it' if len(of_parts) == 1 else 'them'} ({parts})"
    of_graphs = [key for key in given if key.startswith(OF_GRAPHS) and not key.startswith(_of_head(config))]
    of_graphs = [] if config.use_graph_reconstruction else of_graphs
    of_head = [key for key in given if key in OF_HEAD] if config.belief_loss == "none" else []
    for keys, why in ((sorted(of_graphs), "use_graph_reconstruction=False"), (sorted(of_head), "belief_loss=none")):
        if keys:
            yield f"{', '.join(keys)}: nothing in this run reads {'it' if len(keys) == 1 else 'them'} ({why})"


def _of_head(config: Config) -> tuple[str, ...]:
    """Return the keys of `OF_GRAPHS` that a run with a belief head reads, or how they begin."""
    return {
        "none": (),
        "features": ("graph_pretrain_eval_episodes",),
        "tokens": ("graph_pretrain_eval_episodes", "pretrained_tokenizer_path", "tokenizer_config"),
    }[config.belief_loss]


def keys_named_by(parts: Collection[object]) -> set[str]:
    """Return the keys that some objects' classes and the functions beside them name; all of parts where unreadable."""
    classes = {cls for part in parts for cls in type(part).__mro__[:-1] if not cls.__module__.startswith("torch")}
    try:
        texts = {file: Path(file).read_text(encoding="utf-8") for file in set(map(inspect.getfile, classes))}
    except (OSError, TypeError):
        return set(OF_PARTS)
    names, found = {cls.__name__ for cls in classes}, set()
    for text in texts.values():
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef) or node.name in names:
                found.update(re.findall(r"\bconfig\.(\w+)", ast.get_source_segment(text, node) or ""))
    return found


def registry_of(package: str) -> Registry[Any]:
    """Return the REGISTRY of a package by its import name."""
    registry: Registry[Any] = importlib.import_module(package).REGISTRY
    return registry


def _named_by_run(config: Config, key: str) -> str:
    """Return the end of an error about an unknown name, if the run at `checkpoint_path` has it from a plug-in."""
    from omagd.run.checkpoint.weights import find_step_folder, run_folder_of

    with suppress(UserError):
        path = RunFolder(run_folder_of(find_step_folder(config.checkpoint_path, config.load_step))).config_json
        if read_entry(path).get(key) == getattr(config, key):
            return f". {path} names it: install the package that provides it"
    return ""
