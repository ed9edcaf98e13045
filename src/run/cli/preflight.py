"""Checks before a run writes anything: names, devices, environment and paths."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.config.checks import pretrained_file
from omagd.config.env_info import EnvInfo
from omagd.config.loading import validate
from omagd.config.schema import Config
from omagd.run.topology import Plan, make_plan
from omagd.utils.errors import UserError
from omagd.utils.plugins import in_one_line, is_plugin
from omagd.utils.registry import Registry
from omagd.utils.run_folder import RUN_FILE, RunFolder
from omagd.utils.storage import read_entry

if TYPE_CHECKING:
    import torch


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


@dataclass(frozen=True)
class PreflightResult:
    """A checked configuration and what it means on this machine.

    Attributes:
        stages: names of the stages in order; ("evaluate",) for an evaluation.
        plan: number of ranks and their devices. info: facts of the environment.
        config: the configuration to run; its `t_max` is at most the longest duration of `max_episodes`.
    """

    stages: tuple[str, ...]
    plan: Plan
    info: EnvInfo
    config: Config


@in_one_line()
def preflight(config: Config) -> PreflightResult:
    """Check a configuration against this machine and its files, without writing anything.

    Errors: UserError for unknown names, wrong `env_args`, an environment that cannot be built, paths without a suitable
        file, more ranks than devices, `run=default` in one of several processes, and values of precision, compiling and
        memory keys that this machine does not support.
    """
    for key, package in NAMED.items():
        try:
            registry_of(package).require(getattr(config, key))
        except UserError as error:
            raise UserError(error.message + _named_by_run(config, key)) from None
    registry_of("omagd.modules.graph_reconstructers").require(config.mask_predictor_config.kind)
    _check_replays(config)
    plan = make_plan(config)  # imports torch; the checks above do not
    from omagd.modules.graph_reconstructers import check_inferences
    from omagd.run.training.checks import check_data, check_tasks, complete_args, with_maps
    from omagd.run.training.device import check_machine
    from omagd.run.training.experiment import check_stages
    from omagd.run.training.groups import check_groups
    from omagd.run.training.opponents import check_opponents
    from omagd.run.training.refresh import check_refresh
    from omagd.run.training.tasks import check_dealing

    _require_fits(config)
    check_stages(config)
    config = complete_args(config)
    info = describe_env(config)  # before the file of a set is replaced by its content, so that errors name the file
    config = with_maps(config)
    if config.max_episodes is not None:  # an upper bound in steps: all episodes of full length
        longest = config.max_episodes * info.episode_limit
        config = validate({**config.model_dump(), "t_max": min(config.t_max, longest)})
    check_machine(config, plan, info)
    check_refresh(config)
    check_data(config)
    check_inferences(config, info)
    check_groups(config, info)
    check_tasks(config, info)
    check_dealing(config, info)
    check_opponents(config, info)
    if config.use_graph_reconstruction and info.layout is None:
        raise UserError(
            f"env={config.env}: has no entity layout, so use_graph_reconstruction=True cannot work. Use --config=qmix"
        )
    from omagd.run.memory_budget import oom_hint

    with oom_hint(config, "preflight", "networks"):
        result = PreflightResult(_check_paths(config, info), plan, info, config)
    _check_token(config, plan)
    return result


def _require_fits(config: Config) -> None:
    """Import the named components. Errors: UserError on all of them that do not fit their protocols."""
    wrong = []
    for key, package in NAMED.items():
        try:
            registry_of(package).get(getattr(config, key))
        except UserError as error:
            wrong.append(error)
    if wrong:
        raise UserError("; ".join(error.message for error in wrong)) from wrong[0].__cause__


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

    dist = Dist(int(os.environ.get("RANK", 0)))
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


def _check_replays(config: Config) -> None:
    """Reject `save_replay` for training runs."""
    if config.save_replay and not config.evaluate:
        raise UserError("save_replay=True: replays are written by evaluations only. Add evaluate=True")


def _check_token(config: Config, plan: Plan) -> None:
    """Reject a `unique_token` that exists, unless this start may resume that run."""
    from omagd.run.checkpoint.resuming import require_free_token
    from omagd.run.launchers import is_main

    again = plan.joins and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if is_main() and not again and (config.evaluate or not config.auto_resume):
        require_free_token(config)


def _check_paths(config: Config, info: EnvInfo) -> tuple[str, ...]:
    """Reject paths without suitable files; return the names of the stages to run."""
    import torch

    from omagd.modules.graph_reconstructers.pretrained import check
    from omagd.run.checkpoint.weights import PREDICTOR_FILE, find_step_folder, load_file, load_learner, require_finite
    from omagd.run.checkpoint.whole_state import whole_state
    from omagd.run.training.build import build_plain_mac, load_agent, load_pretrained, of_checkpoint
    from omagd.run.training.evaluate import trained_team
    from omagd.run.training.experiment import stage_names

    cpu = torch.device("cpu")
    whole = whole_state(config, lambda found: (found.path, found.common()))
    if whole is not None:
        _require_same_maps(config, info, whole[0].parents[1])
    if config.checkpoint_path and whole is None:
        folder = find_step_folder(config.checkpoint_path, config.load_step)
        load_agent(build_plain_mac(config, info, cpu), folder, "checkpoint_path")
        if config.evaluate:
            load_pretrained(of_checkpoint(config, folder), info, cpu)
            registry_of("omagd.runners").get(config.runner).check(config)
            return ("evaluate",)
    stages = tuple(stage_names(config, load_pretrained(config, info, cpu)))
    _require_baselines(config, info)
    policy, episodes = config.graph_pretrain_policy, config.pretrain_buffer_path
    if episodes and not Path(episodes).expanduser().is_dir():
        raise UserError(f"pretrain_buffer_path={episodes}: no such folder. Give the pretrain_buffer/ of another run")
    if {"stage1", "stage2"} & set(stages) and policy not in {"random", "mixed"}:
        if not Path(policy).expanduser().exists():
            raise UserError(f"graph_pretrain_policy={policy}: must be random, mixed, or the path of a checkpoint")
        key = "graph_pretrain_policy"
        load_agent(build_plain_mac(config, info, cpu), find_step_folder(policy, key=key), key)
    if {"stage1", "stage2"} & set(stages) and (team := config.graph_pretrain_policy_path):
        trained_team(team, "graph_pretrain_policy_path", info, cpu)
    if "stage3" in stages:
        learner = _build_learner(config, info, cpu)
        if whole is not None:
            _require_weights_fit(learner, *whole)
            _require_steps_left(config, whole[1]["shared"]["clock"] if whole[1].get("stage") == "stage3" else {})
        elif config.checkpoint_path:
            _require_steps_left(config, load_learner(learner, folder))
            if config.reconstructor_refresh and (path := folder / PREDICTOR_FILE).is_file():
                content = load_file(path, "checkpoint_path")
                check(content.get("meta"), config, info, predictor=True, source=f"checkpoint_path={path}")
                require_finite(content.get("weights", {}), path, "checkpoint_path")
    return stages


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
    from omagd.utils.run_folder import RunFolder

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


def _build_learner(config: Config, info: EnvInfo, device: torch.device) -> Any:
    """Build the learner of stage 3 once, so that its errors appear before stages 1 and 2 run."""
    from omagd.run.training.build import build_plain_mac
    from omagd.utils.dist_utils import Dist

    mac = build_plain_mac(config, info, device)
    runner = registry_of("omagd.runners").get(config.runner)
    runner.check(config)
    single = runner.unit == "steps"
    if single and (config.obs_last_action or mac.agent.init_hidden(1).numel()):
        fix = "use runner=parallel, or obs_last_action=False and an agent without memory (agent=ff)"
        raise UserError(f"runner={config.runner}: learners get single steps, nothing from before: {fix}")
    learner = registry_of("omagd.learners").build(config.learner, mac, config, info, Dist())
    if any(
        is_plugin(registry_of(NAMED[key]).get(getattr(config, key))) for key in ("agent", "mixer", "mac", "learner")
    ):
        learner.warm_up()  # finds errors of forward passes, and parameters without a gradient
    return learner
