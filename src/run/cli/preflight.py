"""Checks before a run writes anything: names, devices, environment and paths."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.config.checks import pretrained_file
from omagd.config.env_info import EnvInfo
from omagd.config.messages import ArgsError
from omagd.config.schema import Config, recording
from omagd.run.cli.remaining import (
    fewer,
    keys_named_by,
    registry_of,
    stand_in,
    unread,
    with_args,
    with_fitting,
    with_known_names,
)
from omagd.run.topology import Plan, make_plan
from omagd.utils.errors import Mistakes, UserError, collected
from omagd.utils.plugins import NAMES, in_one_line, is_plugin
from omagd.utils.run_folder import RUN_FILE, RunFolder
from omagd.utils.storage import read_entry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PreflightResult:
    """A checked configuration and what it means on this machine.

    Attributes:
        stages: names of the stages in order; ("evaluate",) for an evaluation.
        plan: number of ranks and their devices. info: facts of the environment.
        config: the configuration to run; its `t_max` is at most the longest duration of `max_episodes`.
        warnings: about keys that nothing reads.
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
        cannot be built, paths without a suitable file, more ranks than devices, `run=default` in one of several
        processes, and values of precision, compiling and memory keys that this machine does not support.
    """
    found = mistakes or Mistakes()
    config = with_known_names(config, found)
    plan: Plan | None = None
    with _caught(found):
        plan = make_plan(config)  # imports torch; the checks above do not
    from omagd.run.memory_budget import oom_hint
    from omagd.run.training.checks import check_stages, with_maps

    config = with_fitting(config, found)
    with _caught(found):
        check_stages(config)
    config = with_args(config, found)
    config, info = _described(config, found)  # before the file of a set is replaced, so that errors name the file
    with _caught(found):
        config = with_maps(config)
    if info is not None:
        with _caught(found):
            _check_name(config, given)
        with _caught(found):
            config = _with_longest_end(config, info)
        _check_training(config, plan, info, found)
    stages: tuple[str, ...] = ()
    read: set[str] | None = None
    known = info or stand_in(config)
    with _caught(found):
        if known is not None:
            with oom_hint(config, "preflight", "networks"):
                stages, read = _check_paths(config, known, found)
    with _caught(found):
        if plan is not None:
            _check_token(config, plan)
    found.raise_any()
    assert plan is not None and info is not None
    return PreflightResult(stages, plan, info, config, tuple(unread(config, given, read)))


@contextmanager
def _caught(found: Mistakes) -> Iterator[None]:
    """Note the UserError of a block, or an error in a plug-in's code, and go on after it."""
    with found.caught(), in_one_line():
        yield


def _with_longest_end(config: Config, info: EnvInfo) -> Config:
    """Return `config` with a `t_max` that no run of `max_episodes` exceeds: all episodes of full length."""
    if config.max_episodes is None:
        return config
    return config.model_copy(update={"t_max": min(config.t_max, config.max_episodes * info.episode_limit)})


def _check_training(config: Config, plan: Plan | None, info: EnvInfo, found: Mistakes) -> None:
    """Check the configuration against the machine, the environment and its components."""
    from omagd.modules.graph_reconstructers import check_inferences
    from omagd.run.training.checks import check_data, check_dealing, check_groups, check_opponents, check_tasks
    from omagd.run.training.device import check_machine
    from omagd.run.training.refresh import check_refresh

    with _caught(found):
        if plan is not None:
            check_machine(config, plan, info)
    for check in (check_refresh, check_data):
        with _caught(found):
            check(config)
    for fits in (_require_units, check_inferences, check_groups, check_tasks, check_dealing, check_opponents):
        with _caught(found):
            fits(config, info)


def _require_units(config: Config, info: EnvInfo) -> None:
    """Reject what predicts unseen units where the environment does not say what units are."""
    lacks = f"env={config.env} has no entity layout, so nobody knows of unseen units"
    if info.layout is None and config.use_graph_reconstruction:
        raise UserError(f"use_graph_reconstruction=True: {lacks}. Use --config=qmix")
    if info.layout is None and config.belief_loss != "none":
        raise UserError(f"belief_loss={config.belief_loss}: {lacks}. Use belief_loss=none")


def _described(config: Config, found: Mistakes) -> tuple[Config, EnvInfo | None]:
    """Return `config` without wrong `env_args`, and the facts of the environment; None if it cannot be built."""
    with _caught(found):
        try:
            return config, describe_env(config)
        except UserError as error:
            found.note(error)
            wrong = error.wrong if isinstance(error, ArgsError) else {*config.env_args, "map_name"}
            known = fewer(config, "env_args", wrong)
            described = describe_env(known)  # what else is wrong, such as a game that is not installed
            if "map_name" not in wrong:  # another map's sizes say nothing about this one
                return known, described
    return config, None


def describe_env(config: Config) -> EnvInfo:
    """Return the facts of the configured environment; where its class cannot tell them, build one and close it.

    Errors: RankFailed if building or closing takes longer than `dist_timeout_minutes`.
    """
    from omagd.envs.factory import described_env, make_env
    from omagd.run.launch.watchdog import ended_if_hung
    from omagd.run.training.checks import check_args
    from omagd.run.training.session import BUILDING, CLOSING
    from omagd.utils.dist_utils import Dist
    from omagd.utils.signals import stoppable

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
    from omagd.envs.factory import described_env

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
    from omagd.run.launchers import is_main

    again = plan.joins and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if is_main() and not again and (config.evaluate or not config.auto_resume):
        require_free_token(config)


def _check_paths(config: Config, info: EnvInfo, found: Mistakes) -> tuple[tuple[str, ...], set[str] | None]:
    """Reject paths without suitable files; return the names of the stages, and the keys that the learner's parts read.

    The keys are None where no learner is built.
    """
    import torch

    from omagd.run.checkpoint.weights import find_step_folder
    from omagd.run.checkpoint.whole_state import whole_state
    from omagd.run.training.build import build_plain_mac, load_agent, load_pretrained, of_checkpoint
    from omagd.run.training.experiment import stage_names
    from omagd.run.training.stages.base import PretrainedModules

    cpu, pretrained = torch.device("cpu"), PretrainedModules()
    whole: tuple[Path, dict[str, Any]] | None = None
    folder: Path | None = None
    with _caught(found):
        whole = whole_state(config, lambda found: (found.path, found.common()))
        if whole is not None:
            _require_same_maps(config, info, whole[0].parents[1])
        elif config.checkpoint_path:
            folder = find_step_folder(config.checkpoint_path, config.load_step)
            load_agent(build_plain_mac(config, info, cpu), folder, "checkpoint_path")
            if config.evaluate:
                load_pretrained(of_checkpoint(config, folder), info, cpu)
                registry_of("omagd.runners").get(config.runner).check(config)
    if config.evaluate:
        return ("evaluate",), None
    with _caught(found):
        pretrained = load_pretrained(config, info, cpu)
    stages = tuple(stage_names(config, pretrained))
    with _caught(found):
        _require_baselines(config, info)
    with _caught(found):
        if (episodes := config.pretrain_buffer_path) and not Path(episodes).expanduser().is_dir():
            fix = "Give the pretrain_buffer/ of another run"
            raise UserError(f"pretrain_buffer_path={episodes}: no such folder. {fix}")
    if {"stage1", "stage2"} & set(stages):
        with _caught(found):
            _check_policies(config, info)
    return stages, _check_learner(config, info, whole, folder) if "stage3" in stages else None


def _check_policies(config: Config, info: EnvInfo) -> None:
    """Reject paths of the teams that play the episodes of stages 1 and 2 without suitable files."""
    import torch

    from omagd.run.checkpoint.weights import find_step_folder
    from omagd.run.training.build import build_plain_mac, load_agent
    from omagd.run.training.evaluate import trained_team

    cpu, key, policy = torch.device("cpu"), "graph_pretrain_policy", config.graph_pretrain_policy
    with collected(None) as found:
        with _caught(found):
            if policy not in {"random", "mixed"}:
                if not Path(policy).expanduser().exists():
                    raise UserError(f"{key}={policy}: must be random, mixed, or the path of a checkpoint")
                load_agent(build_plain_mac(config, info, cpu), find_step_folder(policy, key=key), key)
        with _caught(found):
            if team := config.graph_pretrain_policy_path:
                trained_team(team, "graph_pretrain_policy_path", info, cpu)


def _check_learner(config: Config, info: EnvInfo, whole: Any, folder: Path | None) -> set[str]:
    """Reject a learner that cannot be built, or whose weights do not fit; return the keys that its parts read.

    whole: path and content of the checkpoint to continue. folder: with the weights to begin with.
    """
    import torch

    from omagd.modules.graph_reconstructers.pretrained import check
    from omagd.run.checkpoint.weights import PREDICTOR_FILE, load_file, load_learner, require_finite

    learner, read = _build_learner(config, info, torch.device("cpu"))
    if whole is not None:
        _require_weights_fit(learner, *whole)
        _require_steps_left(config, whole[1]["shared"]["clock"] if whole[1].get("stage") == "stage3" else {})
    elif folder is not None:
        _require_steps_left(config, load_learner(learner, folder))
        if config.reconstructor_refresh and (path := folder / PREDICTOR_FILE).is_file():
            content = load_file(path, "checkpoint_path")
            check(content.get("meta"), config, info, predictor=True, source=f"checkpoint_path={path}")
            require_finite(content.get("weights", {}), path, "checkpoint_path")
    return read


def _require_baselines(config: Config, info: EnvInfo) -> None:
    """Reject a predictor's file whose baselines stage 3 could not use at its end. Errors: UserError."""
    import torch

    from omagd.learners.belief_baselines import Baselines
    from omagd.run.checkpoint.weights import PREDICTOR_FILE, load_file

    key, given = "pretrained_mask_predictor_path", config.pretrained_mask_predictor_path
    if not given or not config.use_graph_reconstruction:
        return
    path = pretrained_file(key, given, PREDICTOR_FILE)
    if (state := load_file(path, key).get("baselines")) is not None:
        Baselines.restored(state, info, torch.device("cpu"), f"{key}={path}")


def _require_same_maps(config: Config, info: EnvInfo, run: Path) -> None:
    """Reject the whole state of a `run` on other maps: replay, battles and statistics belong to its own."""
    from omagd.run.training.build import read_env_info

    facts = RunFolder(run).env_info_json
    if not facts.is_file():
        return
    trained = read_env_info(facts, "checkpoint_path")
    if (trained.map_name, trained.tasks, trained.n_training) != (info.map_name, info.tasks, info.n_training):
        raise UserError(
            f"checkpoint_path={config.checkpoint_path}: the whole state of a run on {trained.map_name} cannot continue"
            f" on {info.map_name}. Give its models/ to start from its weights"
        )


def _require_steps_left(config: Config, clock: dict[str, int]) -> None:
    """Reject a new run whose checkpoint has already reached the end of training. Errors: UserError.

    An unfinished run that `auto_resume` continues is accepted: it may only have to write its last files.
    """
    from omagd.run.checkpoint.weights import find_step_folder

    steps, episodes = clock.get("t_env", 0), clock.get("episodes", 0)
    if config.max_episodes is not None and episodes >= config.max_episodes:
        key, limit, reached = "max_episodes", config.max_episodes, f"{episodes:,} episodes"
    else:
        key, limit, reached = "t_max", config.t_max, f"{steps:,} steps"
        if steps < limit:
            return
    if config.auto_resume and _is_unfinished(config):
        return
    fix = f"Give a larger {key}, which counts on from there"
    with suppress(UserError):  # an interrupted run may have no weights yet
        find_step_folder(config.checkpoint_path, config.load_step)
        fix += f", or evaluate it: python -m omagd evaluate {config.checkpoint_path}"
    raise UserError(f"{key}={limit}: already reached, checkpoint_path={config.checkpoint_path} is at {reached}. {fix}")


def _is_unfinished(config: Config) -> bool:
    """Return whether this command, or one of its seeds, has an unfinished run."""
    from omagd.run.checkpoint.resuming import identity_of

    seeds = config.seeds or (config.seed,)
    wanted = {identity_of(config.model_copy(update={"seed": seed, "seeds": ()})) for seed in seeds}
    found = map(read_entry, Path(config.local_results_path).expanduser().glob(f"*/{RUN_FILE}"))
    return any(entry.get("identity") in wanted and not entry.get("finished") for entry in found)


def _require_weights_fit(learner: Any, path: Path, common: dict[str, Any]) -> None:
    """Reject a full checkpoint of stage 3 whose networks differ from those of this configuration."""
    from omagd.run.checkpoint.weights import load_into

    if common.get("stage") != "stage3":
        return
    for name, module in learner.modules().items():
        load_into(module, common["shared"]["modules"].get(name, {}), path, "checkpoint_path")


def _build_learner(config: Config, info: EnvInfo, device: torch.device) -> tuple[Any, set[str]]:
    """Build the learner of stage 3 once, so that its errors appear before stages 1 and 2 run.

    Returns the learner, and the keys that it and its parts read: in their constructors, or anywhere in their files.
    """
    from omagd.run.training.build import build_plain_mac, learner_of
    from omagd.run.training.checks import try_networks
    from omagd.utils.dist_utils import Dist

    config = recording(config)
    mac = build_plain_mac(config, info, device)
    runner = registry_of("omagd.runners").get(config.runner)
    runner.check(config)
    single = runner.unit == "steps"
    if single and (config.obs_last_action or mac.agent.init_hidden(1).numel()):
        fix = "use runner=parallel, or obs_last_action=False and an agent without memory (agent=ff)"
        raise UserError(f"runner={config.runner}: learners get single steps, nothing from before: {fix}")
    learner = learner_of(mac, config, info, Dist())
    if any(map(is_plugin, NAMES)):
        try_networks(learner, mac.agent, info)
    return learner, config.keys_read | keys_named_by((learner, mac, *learner.modules().values()))
