"""What a run is given is tried before it writes anything: weights, episodes of other runs, and its learner, once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from omagd import learners, runners
from omagd.config.env_info import EnvInfo
from omagd.config.schema import OF_PARTS, Config, without
from omagd.run.checkpoint.resuming import identity_of
from omagd.run.checkpoint.weights import find_step_folder, load_into, load_learner, run_folder_of, whole_state
from omagd.run.cli import tried
from omagd.run.memory_budget import oom_hint
from omagd.run.run_folder import RUN_FILE, RunFolder, read_entry
from omagd.run.training.build import build_mac, learner_of, load_agent, load_pretrained, of_checkpoint, read_env_info
from omagd.run.training.checks import try_networks
from omagd.run.training.experiment import stage_names
from omagd.run.training.judges import JUDGES
from omagd.run.training.stages.base import PretrainedModules
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import Mistakes, UserError
from omagd.utils.registry import NAMES, is_plugin


def check_given(config: Config, info: EnvInfo, found: Mistakes) -> tuple[tuple[str, ...], set[str] | None]:
    """Reject paths without suitable files; return the names of the stages, and the keys that the learner's parts read.

    The keys are None where no learner is built.
    """
    with oom_hint(config, "preflight", "networks"):
        whole, folder = tried(found, _checkpoint, config, info) or (None, None)
        if config.evaluate:
            return ("evaluate",), None
        pretrained = tried(found, load_pretrained, config, info, torch.device("cpu")) or PretrainedModules()
        stages = tuple(stage_names(config, pretrained))
        tried(found, _require_judges, config, info, stages)
        tried(found, _require_episodes, config)
        if {"stage1", "stage2"} & set(stages):
            tried(found, _check_policies, config, info)
        if "stage2" in stages:
            tried(found, lambda: learners.PREDICTORS.get(config.mask_predictor_config.kind))
        return stages, _check_learner(config, info, whole, folder) if "stage3" in stages else None


def _checkpoint(config: Config, info: EnvInfo) -> tuple[tuple[Path, dict[str, Any]] | None, Path | None]:
    """Return the whole state to continue, as its path and content, else the folder with the weights to begin with."""
    if not config.checkpoint_path or _continues(config):  # from what its own folder holds
        return None, None
    cpu, whole = torch.device("cpu"), whole_state(config, lambda found: (found.path, found.common()))
    if whole is not None:
        _require_same_maps(config, info, whole[0].parents[1])
        return whole, None
    folder = find_step_folder(config.checkpoint_path, config.load_step)
    load_agent(build_mac(config, info, cpu), folder, "checkpoint_path")
    if config.evaluate:
        load_pretrained(of_checkpoint(config, folder), info, cpu)
        runners.REGISTRY.get(config.runner).check(config)
    return None, folder


def _require_episodes(config: Config) -> None:
    """Reject a `pretrain_buffer_path` that is no folder."""
    if (episodes := config.pretrain_buffer_path) and not Path(episodes).expanduser().is_dir():
        fix = "Give the pretrain_buffer/ of another run"
        raise UserError(f"pretrain_buffer_path={episodes}: no such folder. {fix}")


def _require_judges(config: Config, info: EnvInfo, stages: Collection[str]) -> None:
    """Find the judges that the end of a stage asks, and let them reject what they would read beside the predictor."""
    if "stage2" in stages or config.use_graph_reconstruction or config.belief_loss != "none":
        found = [JUDGES.get(name) for name in JUDGES.names()]
        if config.pretrained_mask_predictor_path and config.use_graph_reconstruction:
            for judge in found:
                judge.check(config, info)


def _check_policies(config: Config, info: EnvInfo) -> None:
    """Reject paths of the teams that play the episodes of stages 1 and 2 without suitable files."""
    key, policy = "graph_pretrain_policy", config.graph_pretrain_policy
    if policy not in {"random", "mixed"}:
        if not Path(policy).expanduser().exists():
            raise UserError(f"{key}={policy}: must be random, mixed, or the path of a checkpoint")
        folder = find_step_folder(policy, key=key)
        trained = read_entry(RunFolder(run_folder_of(folder)).config_json)
        for more in ("use_graph_reconstruction", "use_full_obs", "use_team_obs"):
            if trained.get(more) and not _continues(config):
                fix = "Give a run that reads observations alone, such as one of --config=fog_baseline"
                raise UserError(f"{key}={policy}: its agents read more ({more}=True). {fix}")
        load_agent(build_mac(config, info, torch.device("cpu")), folder, key)


def _check_learner(config: Config, info: EnvInfo, whole: Any, folder: Path | None) -> set[str]:
    """Reject a learner that cannot be built, or whose weights do not fit; return the keys that its parts read.

    whole: path and content of the checkpoint to continue. folder: with the weights to begin with.
    """
    learner, read = build_learner_once(config, info, torch.device("cpu"))
    if whole is not None:
        path, common = whole
        shared = common["shared"] if common.get("stage") == "stage3" else {}
        for name, module in learner.modules().items() if shared else ():
            load_into(module, shared["modules"].get(name, {}), path, "checkpoint_path")
        _require_steps_left(config, shared.get("clock", {}))
    elif folder is not None:
        _require_steps_left(config, load_learner(learner, folder))
    return read


def _require_same_maps(config: Config, info: EnvInfo, run: Path) -> None:
    """Reject the whole state of a `run` on other maps: replay, battles and statistics belong to its own."""
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
    """Reject a new run whose checkpoint has already reached the end of training. Errors: UserError."""
    steps, episodes = clock.get("t_env", 0), clock.get("episodes", 0)
    if config.max_episodes is not None and episodes >= config.max_episodes:
        key, limit, reached = "max_episodes", config.max_episodes, f"{episodes:,} episodes"
    else:
        key, limit, reached = "t_max", config.t_max, f"{steps:,} steps"
        if steps < limit:
            return
    fix = f"Give a larger {key}, which counts on from there"
    with suppress(UserError):  # an interrupted run may have no weights yet
        find_step_folder(config.checkpoint_path, config.load_step)
        fix += f", or evaluate it: python -m omagd evaluate {config.checkpoint_path}"
    raise UserError(f"{key}={limit}: already reached, checkpoint_path={config.checkpoint_path} is at {reached}. {fix}")


def _continues(config: Config) -> bool:
    """Return whether `auto_resume` continues an unfinished run of this command, or of one of its seeds."""
    if not config.auto_resume or config.evaluate:
        return False
    seeds = config.seeds or (config.seed,)
    wanted = {identity_of(config.model_copy(update={"seed": seed, "seeds": ()})) for seed in seeds}
    found = map(read_entry, Path(config.local_results_path).expanduser().glob(f"*/{RUN_FILE}"))
    return any(entry.get("identity") in wanted and not entry.get("finished") for entry in found)


def build_learner_once(config: Config, info: EnvInfo, device: torch.device) -> tuple[Any, set[str]]:
    """Build the learner of stage 3 once, so that its errors appear before stages 1 and 2 run.

    Returns the learner, and the keys that it and its parts read: in their constructors, or anywhere in their files.
    """
    config = without(config)  # notes what is read
    mac = build_mac(config, info, device)
    runner = runners.REGISTRY.get(config.runner)
    runner.check(config)
    single = runner.unit == "steps"
    if single and (config.obs_last_action or mac.agent.init_hidden(1).numel()):
        fix = "use runner=parallel, or obs_last_action=False and an agent without memory (agent=ff)"
        raise UserError(f"runner={config.runner}: learners get single steps, nothing from before: {fix}")
    learner = learner_of(mac, config, info, Dist())
    if any(map(is_plugin, NAMES)):
        try_networks(learner, mac.agent, info)
    return learner, config.keys_read | keys_named_by((learner, mac, *learner.modules().values()))


def keys_named_by(parts: Collection[object]) -> set[str]:
    """Return the keys that some objects' classes and the functions beside them name; all of parts where unreadable."""
    classes = {cls for part in parts for cls in type(part).__mro__[:-1] if not cls.__module__.startswith("torch")}
    try:
        texts = {file: Path(file).read_text(encoding="utf-8") for file in set(map(inspect.getfile, classes))}
    except (OSError, TypeError):
        return set(OF_PARTS)
    names, found = {cls.__name__ for cls in classes}, set()
    for text in texts.values():
        lines = text.split("\n")  # once: `ast.get_source_segment` would split the text for each node
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef) or node.name in names:
                found.update(re.findall(r"\bconfig\.(\w+)", "\n".join(lines[node.lineno - 1 : node.end_lineno])))
    return found
