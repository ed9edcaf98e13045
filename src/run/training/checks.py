"""Checks of a configuration against the components, the environment and the stages that it names.

Shapes: S rows, B slots, n agents, A actions, H hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from omagd import envs, learners, runners
from omagd.components import action_selectors, opponent_schedules
from omagd.config.checks import typed_args
from omagd.config.env_info import EnvInfo
from omagd.config.loading import changed, config_names, find_yaml, read_preset
from omagd.config.schema import COMPONENT_ARGS, Config
from omagd.envs.task_sets import is_file, task_set
from omagd.learners.protocol import explores, learner_class
from omagd.modules import agents, mixers
from omagd.modules.agents.agent import Agent, AgentInputs
from omagd.modules.graph_reconstructers import pretraining
from omagd.run.run_folder import plain
from omagd.utils.errors import UserError, together, unknown_name
from omagd.utils.registry import is_plugin, owner_of

REPLAY_KEYS = ("buffer_size", "updates_per_iteration", "use_per")
"""Keys of replay: on-policy learners reject values other than the defaults."""

EPSILON_KEYS = ("epsilon_start", "epsilon_finish", "epsilon_anneal_time", "epsilon_speed")
"""Keys of the schedule of epsilon: learners that do not explore by it reject values other than the defaults."""


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
        raise UserError(
            f"agent={config.agent}: supports one map size only, but the maps of {what} differ in size. Use"
            " agent=attention_rnn or hpn_rnn"
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
    if config.mac == "ddpg_mac" and not (_is_a(learner, "DDPGLearner") or is_plugin(learner)):
        yield f"mac=ddpg_mac: acts for learner=ddpg_learner, not for {given}. Use mac=n_mac"
    if explores(learner) and action_selectors.draws(config.action_selector):
        yield (
            f"action_selector={config.action_selector}: draws from logits, but {given} learns values. Use"
            " action_selector=epsilon_greedy, or learner=ppo_learner"
        )
    if learner.data == "replay":
        if config.batch_size > config.buffer_size:
            yield f"batch_size={config.batch_size}: must be at most buffer_size={config.buffer_size}"
        if config.use_per and not hasattr(learner, "errors"):
            yield f"use_per=True: {given} does not tell the errors of episodes. Use learner=nq_learner"
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
    why |= getattr(learner, "unread", {})  # plug-ins may have targets
    for key, (value, default) in changed(config, why).items():
        fix = _set_by(config, "learner", {key: value}, key) or f" Leave it out ({key}={default})"
        yield f"{key}={value}: has no meaning for {given}, which {why[key]}.{fix}"


def try_networks(learner: Any, agent: Agent, info: EnvInfo) -> None:
    """Run a learner's discarded passes and a step of its agent; check what networks of plug-ins return.

    Errors: UserError for another shape, and for parameters without a gradient; those of the networks themselves.
    """
    modules = {part for module in learner.modules().values() for part in module.modules()}
    hooks = [part.register_forward_hook(partial(_check, info)) for part in modules if is_plugin(type(part))]
    try:
        learner.warm_up()
    finally:
        for hook in hooks:
            hook.remove()
    if is_plugin(type(agent)):
        _check_step(agent, info)


def _check_step(agent: Agent, info: EnvInfo) -> None:
    """Check what acting calls: `init_hidden` returns [B, n, H], and `step` [B, n, A] and [B, n, H]."""
    owner, like = owner_of(type(agent)), next(agent.parameters())
    with torch.no_grad():
        hidden = agent.init_hidden(2)
        _require(owner, "init_hidden(2)", hidden, (2, info.n_agents, -1))
        returned: Any = agent.step(AgentInputs.blank(2, info, like), hidden)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UserError(f"{owner}: step returned {_said(returned)}, not values and hidden states")
    _require(owner, "values of step", returned[0], (2, info.n_agents, _n_outputs(agent, info)))
    _require(owner, "hidden states of step", returned[1], tuple(hidden.shape))


def _n_outputs(agent: Any, info: EnvInfo) -> int:
    """Return how many numbers an agent returns for each row: an actor those of one action."""
    return info.action_dim if _is_a(type(agent), "DDPGAgent") else info.n_actions


def _check(info: EnvInfo, module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
    owner = owner_of(type(module))
    kind = owner.partition("=")[0]
    if kind == "agent" and given:
        _require(owner, "forward", returned, (*given[0].features.shape[:2], _n_outputs(module, info)))
    elif kind in {"mixer", "critic"} and given:
        rows = len(getattr(given[0], "state", given[-1]))
        _require(owner, "forward", returned, (rows,), (rows, info.n_agents))


def _require(owner: str, what: str, found: Any, *shapes: tuple[int, ...]) -> None:
    """Require a tensor of one of some shapes; -1 stands for any size."""
    for shape in shapes if isinstance(found, Tensor) else ():
        if len(shape) == found.dim() and all(a in (-1, b) for a, b in zip(shape, found.shape, strict=True)):
            return
    raise UserError(f"{owner}: {what} returned {_said(found)}, not {' or '.join(map(_text, shapes))}")


def _said(found: Any) -> str:
    return _text(found.shape) if isinstance(found, Tensor) else type(found).__name__


def _text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('H' if size == -1 else str(size) for size in shape)}]"


def _is_a(kind: type, name: str) -> bool:
    """Return whether a class is one of that name, or inherits it; the module with that class is not loaded."""
    return any(base.__name__ == name for base in kind.__mro__)


def check_actions(config: Config, info: EnvInfo) -> bool:
    """Return True; reject continuous actions for learners and agents of discrete ones. Errors: UserError."""
    if info.box is None:
        return True
    if not getattr(learner_class(config.learner), "continuous", False):
        raise UserError(
            f"learner={config.learner}: learns values of discrete actions, and those of env={config.env} are"
            " continuous. Use --config=mappo, ippo, maddpg or matd3"
        )
    if config.use_graph_reconstruction:
        raise UserError(f"use_graph_reconstruction=True: reads discrete actions, and those of env={config.env} are not")
    kind, learner = agents.REGISTRY.get(config.agent), learner_class(config.learner)
    # An actor returns an action; other agents the mean and the deviation of one.
    actor = _is_a(learner, "DDPGLearner")
    fits = is_plugin(learner) or _is_a(kind, "DDPGAgent") == actor
    if not is_plugin(kind) and not (getattr(kind, "continuous", False) and fits):
        fix = "ddpg or bicnet" if actor else "n_rnn or ff"
        raise UserError(
            f"agent={config.agent}: its outputs are not those of learner={config.learner} for the continuous actions"
            f" of env={config.env}. Use agent={fix}"
        )
    return True


@together
def check_groups(config: Config, info: EnvInfo) -> Iterator[str]:
    """Reject keys of groups that contradict one another, the learner or the environment. Errors: UserError."""
    if config.evaluate:
        return
    learner, given = learner_class(config.learner), f"group_size={config.group_size}"
    if config.group_size == 1:
        if getattr(learner, "needs_groups", False):
            yield (
                f"{given}: learner={config.learner} compares each episode with the others of its group. Use"
                " group_size=8, say, which divides batch_size_run"
            )
        if config.enable_dynamic_sampling:
            yield "enable_dynamic_sampling=True: is about groups. Use group_size=8, say, or leave it out"
        return
    if learner.data != "on_policy":
        yield (
            f"{given}: learner={config.learner} learns from a replay, in which episodes are not compared. Use"
            " group_size=1, or learner=rloo_learner"
        )
    if config.runner not in {"parallel", "resident"}:
        yield f"{given}: needs runner=parallel or resident, where groups begin together, not runner={config.runner}"
    if config.batch_size_run % config.group_size:
        yield f"{given}: must divide batch_size_run={config.batch_size_run}, the slots that groups fill"
    if complete_args(config, ("learner_args",)).learner_args.get("score") == "outcome" and not info.has_win:
        yield (
            f"learner_args.score=outcome: env={config.env} has battles without a winner (no battle_won). Use"
            " learner_args.score=return"
        )
    yield from _check_sampling(config, info)


def _check_sampling(config: Config, info: EnvInfo) -> Iterator[str]:
    if config.enable_dynamic_sampling and not info.has_win:
        yield (
            f"enable_dynamic_sampling=True: drops groups by battle_won, which env={config.env} does not report. Use"
            " enable_dynamic_sampling=False"
        )
    elif not config.enable_dynamic_sampling and changed(config, ["max_sampling_attempts"]):
        yield (
            f"max_sampling_attempts={config.max_sampling_attempts}: bounds the rounds that replace dropped groups. Add"
            " enable_dynamic_sampling=True, or leave it out"
        )


EVASION = "evasion"


def change(config: Config) -> bool:
    """Return whether a run's opponents change."""
    return config.opponent_difficulty_strategy != "none" or config.enable_opponent_evasion


@together
def check_opponents(config: Config, info: EnvInfo) -> Iterator[str]:
    """Reject changing opponents that environment or agent do not support. Errors: UserError."""
    env = envs.REGISTRY.get(config.env)
    ladders = getattr(env, "ladders", {config.opponent_order: ()})
    if config.opponent_order not in ladders:
        yield unknown_name("opponent_order", config.opponent_order, ladders).message
    if not change(config):
        return
    strategy = config.opponent_difficulty_strategy
    given = "enable_opponent_evasion=True" if strategy == "none" else f"opponent_difficulty_strategy={strategy}"
    if not hasattr(env, "set_opponents"):
        yield f"{given}: env={config.env} has no opponents that can be changed. Use another --env-config"
    if config.env_processes:
        yield f"{given}: needs env_processes=False"
    if config.enable_opponent_evasion:
        _check_evasion(config, info)
    if opponent_schedules.REGISTRY.get(strategy).selves:
        kind = agents.REGISTRY.get(config.agent)
        if not hasattr(kind, "frozen_needs"):
            fix = "Use an agent without memory: agent=ddpg for DDPG, agent=ff for Q-learning"
            yield f"{given}: agent={config.agent} cannot be frozen as an opponent. {fix}"
        elif needs := kind.frozen_needs(config):
            yield f"{given}: agent={config.agent} can be frozen as an opponent only with {', '.join(needs)}"


def _check_evasion(config: Config, info: EnvInfo) -> None:
    start, length = config.opponent_evasion_start_episode, info.episode_limit
    if EVASION not in info.scripted_policies:
        raise UserError(f"enable_opponent_evasion=True: env={config.env} has no opponent called {EVASION}")
    if start * length >= config.t_max:
        raise UserError(
            f"opponent_evasion_start_episode={start}: is after the end of the run; t_max={config.t_max} is"
            f" {config.t_max // length} episodes of {length} steps. Give a smaller one"
        )


OF_SETS = ("task_weights", "task_dealing", "enable_task_sharding", "sync_every_n_steps")


OF_SHARDS = ("balance_tasks_across_gpus", "min_tasks_per_gpu")


@together
def check_dealing(config: Config, info: EnvInfo) -> Iterator[str]:
    """Reject keys of task sets that mean nothing or contradict each other. Errors: UserError."""
    if config.evaluate:  # of any maps, by a team that was trained on a set
        return
    given = {key: value for key, (value, _) in changed(config, (*OF_SETS, *OF_SHARDS)).items()}
    if not info.tasks:
        for key, value in given.items():
            yield f"{key}={value}: has no meaning for one map. Give a set of maps, or leave it out"
        return
    trained = info.tasks[: info.n_training]
    for name in config.task_weights:
        if name not in trained:
            yield (
                f"task_weights.{name}={config.task_weights[name]}: is not trained on here. Maps: {', '.join(trained)}"
            )
    played = [name for name in trained if config.task_weights.get(name, 1.0) > 0]
    if not played:
        yield f"task_weights={config.task_weights}: no map has a positive weight. Give one at least"
        return
    if config.enable_task_sharding and config.dealing != "sharded":
        yield f"enable_task_sharding=True: contradicts task_dealing={config.dealing}. Give one of the two"
    for key in OF_SHARDS if config.dealing != "sharded" else ():
        if key in given:
            yield f"{key}={given[key]}: needs task_dealing=sharded, not {config.dealing}, or leave it out"
    if config.min_tasks_per_gpu > len(played):
        yield (
            f"min_tasks_per_gpu={config.min_tasks_per_gpu}: there are {len(played)} map(s) to play:"
            f" {', '.join(played)}. Give at most {len(played)}"
        )
    if config.dealing != "round_robin" and not runners.REGISTRY.get(config.runner).rounds:
        yield (
            f"runner={config.runner}: task_dealing={config.dealing} deals rounds of episodes. Use runner=parallel, or"
            " task_dealing=round_robin"
        )


def check_stages(config: Config) -> None:
    """Reject stages without the trained modules that they need. Errors: UserError."""
    if not config.use_graph_reconstruction or config.evaluate:
        return
    predictor = config.pretrained_mask_predictor_path
    if "stage1" in pretraining(config) and not config.pretrained_tokenizer_path:
        if config.stage in {"stage2", "stage3"}:
            raise UserError(
                f"reconstructer_stage={config.stage}: needs pretrained_tokenizer_path=… "
                "(models/pretrain_stage1_best/ of a stage1 run), or reconstructer_stage=all"
            )
        if predictor:
            raise UserError(
                f"pretrained_mask_predictor_path={predictor}: needs the tokenizer that it was"
                " trained with. Also give pretrained_tokenizer_path=… of the same pre-training"
            )
    if config.stage == "stage3" and not predictor:
        raise UserError(
            "reconstructer_stage=stage3: needs pretrained_mask_predictor_path=… "
            "(models/pretrain_stage2_best/ of a stage2 run), or reconstructer_stage=all"
        )


def require_same_map(trained: EnvInfo, info: EnvInfo, source: str, agent: Agent) -> None:
    """Reject weights of another map, or of another environment with other sizes.

    A policy of another environment with the same map and sizes may play: `skirmish` and `sc2` differ in nothing else.
    An agent that reads any number of units may play all maps whose units have the same features.
    source: what named the policy. Errors: UserError.
    """
    same = (trained.n_agents, trained.n_actions, trained.obs_dim) == (info.n_agents, info.n_actions, info.obs_dim)
    if trained.map_name == info.map_name and (same or trained.name == info.name):
        return
    from omagd.modules.agents.entity_agents import EntityAgent

    there, here = f"{trained.name} {trained.map_name}".strip(), f"{info.name} {info.map_name}".strip()
    if isinstance(agent, EntityAgent) and not agent.n_numbers and trained.name == info.name:
        from omagd.envs.task_set_env import unit_features  # only where maps differ

        own, other = unit_features(trained), unit_features(info)
        different = [f"{name} {own[name]} and {other[name]}" for name in own if own[name] != other[name]]
        if not different:
            return
        raise UserError(f"{source} was trained on {there}; units of {here} have other features ({different[0]})")
    raise UserError(f"{source} was trained on {there}, not on {here}: give one of {here}, or play {there}")
