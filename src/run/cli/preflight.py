"""Checks before a run writes anything: names, devices, environment and paths; all mistakes in one start.

Also what `--list` and `--dry-run` print.
"""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import yaml

from omagd.config.checks import ArgsError
from omagd.config.env_info import EnvInfo
from omagd.config.loading import config_names, to_plain
from omagd.config.schema import COMPONENT_ARGS, OF_GRAPHS, OF_HEAD, OF_PARTS, Config, without
from omagd.envs.factory import described_env, make_env
from omagd.run.cli import Found, tried
from omagd.run.launchers import Plan, is_main, make_plan
from omagd.utils.errors import Mistakes, Unchecked, UserError, foreign, require_extra
from omagd.utils.registry import Registry, is_plugin


@dataclass(frozen=True)
class PreflightResult:
    """A checked configuration and what it means on this machine.

    Attributes:
        stages: names of the stages in order; ("evaluate",) for an evaluation.
        plan: number of ranks and their devices. info: facts of the environment.
        config: the configuration to run; its `t_max` is at most the longest duration of `max_episodes`.
        warnings: about keys that nothing reads, or that ask for more than a batch has.
    """

    stages: tuple[str, ...]
    plan: Plan
    info: EnvInfo
    config: Config
    warnings: tuple[str, ...] = ()


def preflight(
    config: Config, mistakes: Mistakes | None = None, given: Collection[str] = frozenset()
) -> PreflightResult:
    """Check a configuration against this machine and its files, without writing anything.

    Args:
        mistakes: what was found before. given: keys that the user has set, to be warned of those that nothing reads.
    Errors: UserError for everything that is wrong: before, and unknown names, wrong `env_args`, an environment that
        cannot be built; paths without a suitable file, more ranks than devices, `run=default` in one of several
        processes, and values of precision, compiling and memory keys that this machine does not support.
    """
    found = mistakes or Mistakes()
    config = with_fitting(config, found)
    plan = tried(found, make_plan, config)
    from omagd.run.cli.trial import check_given
    from omagd.run.training.checks import check_actions, check_stages, with_maps

    tried(found, check_stages, config)
    for package in ("wandb", "tensorboard"):
        tried(found, _require_log, config, package)
    config = with_args(config, found)
    config, info = _described(config, found)  # before the file of a set is replaced, so that errors name the file
    config = tried(found, with_maps, config) or config
    if info is not None:
        tried(found, _check_name, config, given)
        config = tried(found, _with_longest_end, config, info) or config
        _check_training(config, plan, info, found)
    checked, known = None, info or stand_in(config)
    plays = known is not None and tried(found, check_actions, config, known)
    if known is not None and plays and (known.layout is not None or not _needs_units(config)):
        checked = tried(found, check_given, config, known, found)
    if plan is not None:
        tried(found, _check_token, config, plan)
    found.raise_any()
    assert plan is not None and info is not None and checked is not None
    stages, read = checked
    return PreflightResult(stages, plan, info, config, (*unread(config, given, read), *too_many_parts(config, plan)))


def _with_longest_end(config: Config, info: EnvInfo) -> Config:
    """Return `config` with a `t_max` that no run of `max_episodes` exceeds: all episodes of full length."""
    if config.max_episodes is None:
        return config
    return config.model_copy(update={"t_max": min(config.t_max, config.max_episodes * info.episode_limit)})


def _check_training(config: Config, plan: Plan | None, info: EnvInfo, found: Mistakes) -> None:
    """Check the configuration against the machine, the environment and its components."""
    from omagd.run.training.checks import check_data, check_dealing, check_groups, check_opponents, check_tasks
    from omagd.run.training.device import check_machine
    from omagd.utils.compiling import require_numba

    def fits_machine() -> None:
        if plan is not None:
            check_machine(config, plan, info)
            if not plan.cuda and not config.evaluate:
                require_numba("learning on a CPU")

    tried(found, fits_machine)
    tried(found, check_data, config)
    checks = _require_units, _require_common_reward, check_groups, check_tasks, check_dealing, check_opponents
    for check in checks:
        tried(found, check, config, info)


def _require_log(config: Config, package: str) -> None:
    """Reject a log whose package is missing."""
    if getattr(config, f"use_{package}"):
        require_extra(f"use_{package}=True", "full", package)


def _needs_units(config: Config) -> str:
    """Return what predicts unseen units, as key=value; nothing where no part does."""
    of_loss = "" if config.belief_loss == "none" else f"belief_loss={config.belief_loss}"
    return "use_graph_reconstruction=True" if config.use_graph_reconstruction else of_loss


def _require_units(config: Config, info: EnvInfo) -> None:
    """Reject what predicts unseen units where the environment does not say what units are, or too many of them."""
    from omagd.modules.graph_reconstructers import check_inferences

    if needs := _needs_units(config):
        info.layout_for(needs, config.env)
    check_inferences(config, info)


OF_TEAM = {"critic": ("set",), "score": ("outcome", "return")}
"""Values of `learner_args` that make a learner on policy learn one value for the team."""


def _require_common_reward(config: Config, info: EnvInfo) -> None:
    """Reject rewards of single agents where a mixer, a critic or RLOO learns the team's."""
    from omagd.learners.protocol import explores, learner_class

    if config.evaluate or not info.learns_own_rewards(config.env_args):
        return
    args = config.learner_args
    of_team = [f"learner_args.{key}={args[key]}" for key, values in OF_TEAM.items() if args.get(key) in values]
    if config.mixer != "none" and config.mac != "ddpg_mac" and explores(learner_class(config.learner)):
        of_team.append(f"mixer={config.mixer}")
    if of_team:
        fix = "Use --config=iql, --config=ippo or --config=mappo"
        raise UserError(f"env_args.common_reward=False: {of_team[0]} learns from one reward. {fix}")


def _without_wrong(
    config: Config, section: str, check: Callable[[Config], Found], found: Mistakes
) -> tuple[Config, Found | None]:
    """Return `config` without the keys of a section that a check rejects, and what it returns; None if it fails."""
    while True:
        try:
            return config, check(config)
        except ArgsError as error:
            found.note(error)
            given = getattr(config, section)
            left = {key: value for key, value in given.items() if key not in error.wrong}
            if left == given:
                return config, None
            config = config.model_copy(update={section: left})


def _described(config: Config, found: Mistakes) -> tuple[Config, EnvInfo | None]:
    """Return `config` without wrong `env_args`, and the facts of the environment; None if it cannot be built."""

    def facts(left: Config) -> EnvInfo | None:  # without a wrong argument another environment would be built
        return describe_env(left) if left is config else described_env(left.env, dict(left.env_args))

    left, info = tried(found, _without_wrong, config, "env_args", facts, found) or (config, None)
    fits = info is not None and left.map_name == config.map_name
    return left, info if fits else None  # another map's sizes say nothing about this one


def describe_env(config: Config) -> EnvInfo:
    """Return the facts of the configured environment; where its class cannot tell them, build one and close it.

    Errors: RankFailed if building or closing takes longer than `dist_timeout_minutes`.
    """
    from omagd.run.launch.watchdog import ended_if_hung
    from omagd.run.signals import stoppable
    from omagd.run.training.checks import check_args
    from omagd.run.training.stages.base import BUILDING, CLOSING
    from omagd.utils.dist_utils import Dist

    rank = os.environ.get("RANK", "")
    dist = Dist(int(rank) if rank.isdecimal() else 0)  # a wrong one is said elsewhere
    with stoppable(), ended_if_hung(dist, 60 * config.dist_timeout_minutes):
        with dist.waits.doing(BUILDING):
            check_args(config, "env_args", registry_of("omagd.envs").get(config.env).args_model)
            described = described_env(config.env, dict(config.env_args))
            if described is not None:
                return described
            env = make_env(config.env, dict(config.env_args), 1, processes=False)
        try:
            return env.info
        finally:
            with dist.waits.doing(CLOSING):
                env.close()


def _check_name(config: Config, given: Collection[str]) -> None:
    """Reject a `name` that the user has given to choose a map."""
    if "name" not in given or config.name == config.map_name:
        return
    named = None
    with suppress(UserError):  # no map has that name
        named = described_env(config.env, {**config.env_args, "map_name": config.name})
    if named is not None:
        fix = f"Give env_args.map_name={config.name}, or another name"
        raise UserError(f"name={config.name}: names the run; it plays {config.map_name}, not that map. {fix}")


def _check_token(config: Config, plan: Plan) -> None:
    """Reject a `unique_token` that exists, unless this start may resume that run."""
    from omagd.run.checkpoint.resuming import require_free_token

    again = plan.joins and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if is_main() and not again and (config.evaluate or not config.auto_resume):
        require_free_token(config)


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
# The same for keys of sections.
OF_SECTIONS = {
    "learner_args.critic": "omagd.modules.critics",
    "mask_predictor_config.kind": "omagd.modules.graph_reconstructers",
}


def with_fitting(config: Config, found: Mistakes) -> Config:
    """Return `config` with what unknown names of components are here; without those that do not fit their protocols."""
    for key, package in NAMED.items():
        registry = registry_of(package)
        try:
            registry.get(name := getattr(config, key))
        except Unchecked:
            continue
        except UserError as error:
            found.note(error)
            row = foreign(key, name)
            other = row and (row.here or row.near)
            config = config.model_copy(update={key: other}) if other in registry else without(config, (key,))
    with found.caught():
        kind = config.mask_predictor_config.kind
        if kind not in (registry := registry_of(OF_SECTIONS["mask_predictor_config.kind"])):
            config = without(config, ("mask_predictor_config",))
            registry.require(kind)
    return config


def with_args(config: Config, found: Mistakes) -> Config:
    """Return `config` with all keys of learner, agent and mixer, without those that they do not take."""
    from omagd.run.training.checks import complete_args

    for section in COMPONENT_ARGS:
        check = partial(complete_args, sections=(section,))
        _, complete = tried(found, _without_wrong, config, section, check, found) or (config, None)
        config = complete or without(config, (section,))
    return config


def stand_in(config: Config) -> EnvInfo | None:
    """Return facts of an environment or a map that is not there, to check the learner with: those of another one."""
    with suppress(UserError):
        try:
            return described_env(config.env, {})
        except Unchecked:
            return described_env("skirmish", {})
    return None


# What a run with a belief head reads of `OF_GRAPHS`, by belief_loss: keys, or how they begin.
OF_LOSS = {
    "none": (),
    "features": ("graph_pretrain_eval_episodes",),
    "tokens": ("graph_pretrain_eval_episodes", "pretrained_tokenizer_path", "tokenizer_config"),
}

OF_OPPONENTS = ("opponent_pool_size", "opponent_pool_interval", "opponent_order")
"""Keys of opponents that change during a run."""

OF_RUNNERS = {"resident_slots": "resident", "ticks_per_iteration": "ticks"}
"""Keys of one runner."""


def unread(config: Config, given: Collection[str], read: set[str] | None) -> Iterator[str]:
    """Yield a warning about the given keys that no part of this run reads. read: by its parts; None: not known."""
    parts = " ".join(f"{key}={getattr(config, key)}" for key in ("learner", "mac", "agent", "mixer"))
    of_graphs = {key for key in given if key.startswith(OF_GRAPHS) and not key.startswith(OF_LOSS[config.belief_loss])}
    of_others = {key for key in given if OF_RUNNERS.get(key, config.runner) != config.runner}
    # Why keys are not read, where that follows from another key's value.
    switched_off: dict[str, tuple[Collection[str], object]] = {
        "belief_loss=none": (OF_HEAD, config.belief_loss == "none"),
        "use_per=False": (("per_alpha", "per_beta"), not config.use_per),
        "td_lambda=0": (("q_lambda",), config.q_lambda and not config.td_lambda),
        "runner=ticks learns from single steps": (("td_lambda", "q_lambda"), config.runner == "ticks"),
        "target_update_updates": (("target_update_interval",), config.target_update_updates),
        "epsilon_speed": (("epsilon_anneal_time",), config.epsilon_speed is not None),
        "action_selector=greedy": (("epsilon_start", "epsilon_anneal_time"), config.action_selector == "greedy"),
        "mac=ddpg_mac": (("action_selector",), config.mac == "ddpg_mac"),
        "enable_opponent_evasion=False": (("opponent_evasion_start_episode",), not config.enable_opponent_evasion),
        "opponent_difficulty_strategy=none": (OF_OPPONENTS, config.opponent_difficulty_strategy == "none"),
    }
    unused: dict[str, Collection[str]] = {
        parts: (OF_PARTS & set(given)) - read if read is not None else (),
        "use_graph_reconstruction=False": of_graphs if not config.use_graph_reconstruction else (),
        **{why: set(given).intersection(keys) for why, (keys, off) in switched_off.items() if off},
        f"runner={config.runner}": of_others if not is_plugin(registry_of("omagd.runners").get(config.runner)) else (),
    }
    for why, keys in unused.items():
        if keys:
            yield f"{', '.join(sorted(keys))}: nothing in this run reads {'it' if len(keys) == 1 else 'them'} ({why})"


def too_many_parts(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a warning if on-policy batches may have fewer episodes than `learner_args.minibatches`."""
    from omagd.learners.protocol import learner_class
    from omagd.run.training.build import n_slots

    parts = config.learner_args.get("minibatches")
    episodes = plan.world_size * max(config.batch_size, n_slots(config))
    of_batches = learner_class(config.learner).data == "on_policy" and not config.evaluate
    if of_batches and isinstance(parts, int) and parts > episodes:  # a plug-in's may be anything
        yield (
            f"learner_args.minibatches={parts}: a batch has about {episodes} episodes, so an epoch takes as many steps."
            f" Raise batch_size, or give at most {episodes}"
        )


def registry_of(package: str) -> Registry[Any]:
    """Return the REGISTRY of a package by its import name."""
    registry: Registry[Any] = importlib.import_module(package).REGISTRY
    return registry


def listing() -> str:
    """Return all names that the command line accepts, one paragraph per kind (`--list`)."""
    from omagd.envs.battle.maps import MAPS
    from omagd.envs.jaxmarl_env import KEYS
    from omagd.envs.smax import MapName as SMAX_MAPS
    from omagd.envs.task_sets import NAMED as SETS
    from omagd.envs.worlds import LBF_MAPS, RWARE_MAPS, MpeMap

    lines = [_paragraph("--config", config_names("algs")), _paragraph("--env-config", config_names("envs"))]
    lines += [_paragraph(key, registry_of(package).names()) for key, package in (NAMED | OF_SECTIONS).items()]
    shown = "3m_mixed_sight6", "3m_hidden"  # of the starts and sights that the name of any map can have
    lines.append(_paragraph("env_args.map_name (skirmish)", [*SETS, *MAPS, *shown]))
    lines.append(_paragraph("env_args.map_name (smax)", list(get_args(SMAX_MAPS))))
    for env, maps in {"lbf": (*LBF_MAPS, "..."), "mpe": get_args(MpeMap), "rware": (*RWARE_MAPS, "...")}.items():
        lines.append(_paragraph(f"env_args.map_name ({env})", list(maps)))
    lines.append(_paragraph("env_args.key (jaxmarl)", [*KEYS, "..."]))
    return "\n".join(lines) + "\n"


def resolved(config: Config, checked: PreflightResult) -> str:
    """Return the configuration as YAML for `--config=FILE`, with derived facts as comments (`--dry-run`)."""
    values = to_plain(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return text + "".join(f"# {name}: {value}\n" for name, value in facts(config, checked).items())


def facts(config: Config, checked: PreflightResult) -> dict[str, object]:
    """Return derived facts by name: stages, ranks, effective batch, environments, sizes."""
    from omagd import runners
    from omagd.learners.protocol import learner_class
    from omagd.run.memory_budget import GIGABYTE, data_key, replay_bytes
    from omagd.run.reporting.card import beside_one_rank, make_card
    from omagd.run.training.build import n_slots
    from omagd.run.training.evaluate import trained_card

    info, plan = checked.info, checked.plan
    start = "torchrun" if plan.joins else "spawn" if plan.spawns else "this process"
    device = "cuda" if plan.cuda else "cpu"
    card = make_card(config, plan.world_size, plan.device(0), trained_card(config))
    slots, unit = n_slots(config), runners.REGISTRY.get(config.runner).unit
    stored = "replay" if data_key(config) == "buffer_size" else "on-policy batch"
    more = beside_one_rank(config, plan.world_size, slots, learner_class(config.learner).data)
    return {
        "stages": ", ".join(checked.stages),
        **({"beside one rank": more} if more else {}),
        "world size": f"{plan.world_size} ({start}, {device})",
        "effective batch": f"{config.batch_size * plan.world_size} {unit} per update",
        "environments": f"{slots * plan.world_size} ({info.name} {info.map_name})".replace(" )", ")"),
        "environment": info.sizes,
        "card": f"{card['id']} (docs/card.md)",
        stored: f"at most {replay_bytes(config, info) / GIGABYTE:.2f} GB on each rank, all episodes at their longest",
    }


def _paragraph(title: str, names: list[str]) -> str:
    body = textwrap.fill(
        " ".join(names), width=110, break_on_hyphens=False, initial_indent="  ", subsequent_indent="  "
    )
    return f"{title}:\n{body}"
