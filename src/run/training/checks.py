"""Checks of a configuration against the components that it names: keys of components, kinds of data, sets of maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from omagd import learners, runners
from omagd.components import action_selectors
from omagd.config.env_info import EnvInfo
from omagd.config.loading import changed, config_names, find_yaml, read_preset
from omagd.config.messages import typed_args
from omagd.config.schema import COMPONENT_ARGS, Config
from omagd.envs.task_sets.sets import is_file, task_set
from omagd.learners.protocol import explores, learner_class
from omagd.modules import agents, mixers
from omagd.utils.errors import UserError, together
from omagd.utils.run_folder import plain

REPLAY_KEYS = ("buffer_size", "updates_per_iteration")
"""Keys of replay: on-policy learners reject values other than the defaults."""

EPSILON_KEYS = ("epsilon_start", "epsilon_finish", "epsilon_anneal_time", "epsilon_speed")
"""Keys of the schedule of epsilon: learners that do not explore by it reject values other than the defaults."""

TARGET_KEYS = {
    "td_lambda": "has a key of its own, learner_args.gae_lambda, where it has a critic",
    **dict.fromkeys(("double_q", "target_update_interval", "target_update_updates"), "has no target networks"),
}
"""Keys of Q-learning's targets, and what PPO and RLOO have instead: they reject values other than the defaults."""


class NoArgs(BaseModel):
    """Keys of a component that has none."""


def check_tasks(config: Config, info: EnvInfo) -> None:
    """Reject what cannot learn or play maps of different sizes. Errors: UserError."""
    if not info.tasks:
        return
    what = f"env_args.map_name={config.map_name}"
    if config.use_graph_reconstruction:
        raise UserError(f"use_graph_reconstruction=True: learns one map, not a set ({what}). Give one map")
    if not info.padded:
        return
    if not plays_any_map(agents.REGISTRY.get(config.agent)):
        fitting = []
        for name in agents.REGISTRY.names():
            with suppress(UserError):  # the agent of a broken plug-in, which this run does not need
                fitting += [name] if plays_any_map(agents.REGISTRY.get(name)) else []
        raise UserError(
            f"agent={config.agent}: reads a fixed number of units, but the maps of {what} have different ones. Use"
            f" agent={' or '.join(fitting)}"
        )
    if config.obs_agent_id:
        raise UserError(f"obs_agent_id=True: ties the agent to one number of units. Use obs_agent_id=False for {what}")
    if not config.share_parameters:
        raise UserError(
            f"share_parameters=False: ties the agents to one number of units. Use share_parameters=True for {what}"
        )


def plays_any_map(agent: type) -> bool:
    """Return whether agents of a class read any number of units."""
    return bool(getattr(agent, "any_number_of_units", False))


def complete_args(config: Config, sections: Sequence[str] = COMPONENT_ARGS) -> Config:
    """Return `config` with all keys of the learner, the agent and the mixer: those that were given, and defaults.

    Errors: UserError for keys and values that their `args_model` rejects, and for keys of one that has no model.
    """
    registries = dict(zip(COMPONENT_ARGS, (learners.REGISTRY, agents.REGISTRY, mixers.REGISTRY), strict=True))
    complete = {}
    for section in sections:
        name = getattr(config, section.removesuffix("_args"))
        model = getattr(registries[section].get(name), "args_model", NoArgs)
        complete[section] = _as_json(section, check_args(config, section, model))
        check_args(config.model_copy(update=complete), section, model)  # as config.json will hold them
    return config.model_copy(update=complete)


def with_maps(config: Config) -> Config:
    """Return `config` with the content of the file that names a set of maps: the file may move or change later."""
    given = config.env_args.get("map_name")
    if not is_file(given) or (found := task_set(given)) is None:
        return config
    return config.model_copy(update={"env_args": {**config.env_args, "map_name": found.as_values()}})


def check_args(config: Config, section: str, model: type[BaseModel]) -> BaseModel:
    """Return the typed keys of a section. Errors: UserError, which names the preset if that sets the unknown key."""
    kind, given = section.removesuffix("_args"), getattr(config, section)
    if kind == "env" and (tasks := task_set(given.get("map_name"))) is not None:
        given = {**given, "map_name": tasks.maps[0]}  # a list is no value of the environment of one map
    owner = f"{kind}={getattr(config, kind)}"
    return typed_args(section, owner, model, given, lambda key: _set_by(config, kind, given, key, section))


def _set_by(config: Config, kind: str, given: Mapping[str, Any], key: str, section: str = "") -> str:
    """Return the fix where the value of `key` in `given` is from the preset `name`; empty where it is not.

    kind: of component that rejects the key. section: that holds the key, if any.
    """
    if kind == "env" and (fix := _set_by_environment(config, given, key)):
        return fix
    with suppress(UserError):  # a file given by its path, or another name
        path = find_yaml("algs", config.name)
        preset = read_preset("algs", config.name)
        values = preset.get(section) if section else preset
        values = values if isinstance(values, dict) else {}
        for name in config_names("envs") if kind == "env" and key in values else ():
            file = read_preset("envs", name)
            if values.keys() <= file.get(section, {}).keys():
                return f" {path.name} is for env={file.get('env')}: add --env-config={name}"
        if values.get(key, ...) == given[key]:
            return f" {path.name} sets it for another {kind}: use a --config with {kind}={getattr(config, kind)}"
    return ""


def _set_by_environment(config: Config, given: Mapping[str, Any], key: str) -> str:
    """Return the fix where the file of another environment sets `key`, as after `with env=sc2`; empty elsewhere."""
    files = {name: read_preset("envs", name) for name in config_names("envs")}
    own = next((name for name, file in files.items() if file["env"] == config.env), "FILE.yaml")
    for name, file in files.items():
        if file["env"] != config.env and key in (args := file.get("env_args", {})) and args.keys() <= given.keys():
            return f" {name}.yaml sets this: choose the environment by --env-config={own}"
    return ""


def _as_json(section: str, args: BaseModel) -> dict[str, Any]:
    """Return arguments as `config.json` holds them. Errors: UserError for values that JSON has no form for."""
    try:
        values = args.model_dump(mode="json")
    except (ValueError, RecursionError) as problem:  # pydantic's serialization errors are ValueErrors
        raise UserError(f"{section}: a value cannot be saved as JSON ({' '.join(str(problem).split())})") from None
    for key, value in values.items():
        if plain(value) != value:
            raise UserError(f"{section}.{key}={value}: must be finite, so that config.json can hold it")
    return values


@together
def check_data(config: Config) -> Iterator[str]:
    """Reject keys that contradict the learner's kind of data or its precisions. Errors: UserError."""
    given, learner = f"learner={config.learner}", learner_class(config.learner)
    if config.precision not in getattr(learner, "precisions", (config.precision,)):
        fix = " or ".join(learner.precisions)
        yield f"precision={config.precision}: {given} does not support it. Use precision={fix}"
    if learner.data == "replay":
        if config.batch_size > config.buffer_size:
            yield f"batch_size={config.batch_size}: must be at most buffer_size={config.buffer_size}"
        if action_selectors.draws(config.action_selector):
            yield (
                f"action_selector={config.action_selector}: draws from logits, but {given} learns values. Use"
                " action_selector=epsilon_greedy, or learner=ppo_learner"
            )
        return
    if runners.REGISTRY.get(config.runner).unit != "episodes":
        yield f"runner={config.runner}: {given} learns from whole episodes. Use runner=parallel, episode or stream"
    for key in ("t_max", "max_episodes"):  # an episode has at least one step
        if (limit := getattr(config, key)) is not None and config.batch_size > limit:
            yield (
                f"batch_size={config.batch_size}: {given} plays so many episodes before its first update, more than"
                f" {key}={limit} allows. Lower batch_size"
            )
    unread = (*REPLAY_KEYS, *(() if explores(learner) else EPSILON_KEYS))
    why = dict.fromkeys(unread, "learns on-policy: each batch_size episodes are used once")
    if getattr(learner, "of_policy", False):  # others may have targets
        why |= TARGET_KEYS
    for key, (value, default) in changed(config, why).items():
        fix = _set_by(config, "learner", {key: value}, key) or f" Leave it out ({key}={default})"
        yield f"{key}={value}: has no meaning for {given}, which {why[key]}.{fix}"
