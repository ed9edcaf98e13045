"""Run all stages on one rank: resume or start, build the session, train; write log, card and summary."""

from __future__ import annotations

import math
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from omagd.config.schema import Config
from omagd.learners.protocol import learner_class, updates_per_iteration
from omagd.modules.graph_reconstructers import pretraining
from omagd.run.checkpoint.recovery import ResumePlan, cut_back, recover
from omagd.run.checkpoint.resuming import rank_at_work
from omagd.run.checkpoint.store import StageResult
from omagd.run.launchers import ranks_here
from omagd.run.memory_budget import oom_hint
from omagd.run.reporting.card import (
    Card,
    beside_one_rank,
    changed_versions,
    final_card,
    is_of,
    made_by,
    make_card,
    read_card,
    recorded_of,
    resumed,
    start_lines,
    versions,
)
from omagd.run.reporting.log_sinks import make_logger
from omagd.run.reporting.report import write_summary
from omagd.run.run_folder import RunFolder, keep_json, read_entry
from omagd.run.signals import CLOSING_SECONDS, orphaned, stop_requested, uninterrupted
from omagd.run.training import device
from omagd.run.training.build import build_session, load_pretrained, n_slots, restore_pretrained
from omagd.run.training.evaluate import evaluate, trained_card
from omagd.run.training.loop import fit
from omagd.run.training.stages.base import PretrainedModules, Session, Stage, require_same_weights
from omagd.run.training.stages.rl import RLStage
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RunFailed, UserError
from omagd.utils.logging import Logger, RunFacts, append_to_log, close_bars, setup_logging
from omagd.utils.registry import crash_of, explain
from omagd.utils.storage import STORAGE
from omagd.utils.waits import broken_exchange


def new_stage(name: str, session: Session, pretrained: PretrainedModules) -> Stage:
    """Return a stage by its name. Stages 1 and 2 are imported here: a run without them loads none of their modules."""
    if name == "stage3":
        return RLStage(session, pretrained)
    from omagd.run.training.stages.pretraining import Stage1, Stage2

    return (Stage1 if name == "stage1" else Stage2)(session, pretrained)


def run_experiment(config: Config, dist: Dist, path: str, channel: Any, attempt: int = 0) -> dict[str, Any]:
    """Run everything that `config` asks for on this rank; return the summary (the same on every rank).

    Args:
        dist: this rank. path: the run's folder. channel: what the Sacred sink writes to, or None.
        attempt: number of restarts of all ranks.
    """
    started = time.time()
    torch.set_num_threads(config.torch_threads)
    device.keep_freed_memory()
    device.raise_limit(device.files_needed(device.workers_of(config), dist.world_size))
    device.limit_memory(dist.device, config.max_memory_per_gpu_gb)
    torch.backends.cudnn.deterministic = True  # else gradients of convolutions are sums in any order
    torch.backends.cudnn.allow_tf32 = False  # by default cuDNN's GRU rounds float32 to TF32, as no other product does
    folder = RunFolder(path)
    with device.deterministic_algorithms(config.deterministic), rank_at_work(folder):
        return _run(config, dist, folder, channel, attempt, started)


def _run(config: Config, dist: Dist, folder: RunFolder, channel: Any, attempt: int, started: float) -> dict[str, Any]:
    """Resume or start, run all stages, and write the summary in every case."""
    STORAGE.begin(folder.path)
    earlier = earlier_stages(folder)  # before `cut_back` removes the file
    before = read_card(folder.path)
    plan = ResumePlan()
    if not config.evaluate:
        plan = cut_back(folder, dist, recover(folder, dist, config, is_of(before, dist.world_size)))
    card = make_card(config, dist.world_size, dist.device, trained_card(config))
    if plan.kind:
        code = {"continues": recorded_of(before).get("versions"), "versions": versions()}
        card["resumed"] = [*resumed(before), {**resume_entry(plan, folder), **code}]
    logger = open_logger(config, dist, folder, channel, card, plan)
    for line in resume_warnings(plan, folder, changed_versions(before) if plan.kind else ""):
        logger.warning(line)
    summary = {**first_summary(config, dist.world_size, folder, started, card), "restarts": attempt}
    summary["stages"] = earlier if plan.kind else {}
    session: Session | None = None
    exit_state = "failed"
    try:
        with oom_hint(config, "all stages", "start", dist.device):
            session = build_session(_with_weights(config, plan), dist, folder, logger, plan)
        if dist.is_main:
            keep_json(folder.config_json, config.model_dump(mode="json"))
            keep_json(folder.env_info_json, session.info.to_dict())
            keep_json(folder.card_json, card)
        log_start(session, card)
        summary["stages"] = {result.name: stage_entry(result) for result in run_stages(session, plan)}
        summary["card"] = complete_card(session, card, summary["stages"])
        require_weights(folder)
        exit_state = "completed"
    except BaseException as error:
        with uninterrupted():  # the signal may arrive now
            # Ranks whose launcher is gone end one by one: a later one first sees the broken connection.
            gone = broken_exchange(error) and orphaned()
            stopped = gone or isinstance(error, KeyboardInterrupt) or stop_requested()
            exit_state = "interrupted" if stopped else "failed"
        _explain(error, config, dist, folder)
        dist.waits.on_error(error)
        raise
    finally:
        with uninterrupted():
            seconds = time.time() - started if session is None else session.checkpointer.wall_seconds
            summary.update(exit_state=exit_state, wall_seconds=round(seconds, 1))
            _close(config, folder, session, logger, summary, dist.is_main)
    return summary


def _explain(error: BaseException, config: Config, dist: Dist, folder: RunFolder) -> None:
    """Add the short form to an error in a plug-in's code, and write its traceback into the log."""
    if isinstance(error, UserError | RunFailed) or not isinstance(error, Exception) or broken_exchange(error):
        return
    if (crash := crash_of(error)) is None:
        return
    log = folder.log(dist.rank)
    append_to_log(log, "".join(traceback.format_exception(error)).rstrip())
    owner = crash.owner or (f"env={config.env}" if crash.place else "a plug-in")
    where = ", ".join(part for part in (f"rank {dist.rank}" * (dist.world_size > 1), owner, crash.place) if part)
    explain(error, f"{crash.frames}\n{where}: {crash.error} (the whole traceback: {log})")


def _close(
    config: Config, folder: RunFolder, session: Session | None, logger: Logger, summary: dict[str, Any], is_main: bool
) -> None:
    """Write the summary, then close everything; each step runs even if the one before it fails."""
    completed = summary["exit_state"] == "completed"
    with ExitStack() as steps:  # runs in reverse order
        steps.callback(logger.close, summary["exit_state"])
        if session is not None:
            steps.callback(session.close, math.inf if completed else CLOSING_SECONDS / 2)
            if not completed and not config.evaluate:
                summary["stages"] = stages_so_far(session, summary["stages"])
        # The summary first: closing an environment or a sink may take long, or never end.
        if is_main:
            steps.callback(write_summary, folder, summary)
        steps.callback(close_bars)


def run_stages(session: Session, plan: ResumePlan | None = None) -> list[StageResult]:
    """Run the stages of this configuration in order, except those that `plan` has finished or that are given."""
    if session.config.evaluate:
        with oom_hint(session.config, "stage3", "test", session.dist.device):
            return [evaluate(session)]
    pretrained = load_pretrained(session.config, session.info, session.dist.device)
    for module in (pretrained.tokenizer, pretrained.predictor):
        if module is not None:
            require_same_weights(session.dist, module, "pre-trained modules")
    restore_pretrained(session, pretrained, plan or ResumePlan())
    results = session.checkpointer.results
    finished = {result.name for result in results}
    names = [name for name in stage_names(session.config, pretrained) if name not in finished]
    for name in names:
        with oom_hint(session.config, name, "prepare", session.dist.device):
            stage = new_stage(name, session, pretrained)
        result = fit(stage)
        result.facts["phases"] = session.profiler.end()
        result.values.update(session.failure_counts())
        if name == "stage2":
            pretrained.episodes.clear()  # stage 3 collects its own
        session.checkpointer.stage_finished(stage, result, more=name != names[-1])
    return results


def _with_weights(config: Config, plan: ResumePlan) -> Config:
    """Return `config` with the run's own weights as the initial weights of stage 3, where it resumes from `models/`."""
    if plan.weights is None or plan.weights.step is None:
        return config
    return config.model_copy(update={"checkpoint_path": str(plan.weights.step), "load_step": 0})


def stage_names(config: Config, pretrained: PretrainedModules) -> list[str]:
    """Return the names of the stages to run; with `evaluation_only`, those whose trained module is given."""
    given = {"stage1": pretrained.tokenizer, "stage2": pretrained.predictor}
    if config.evaluation_only:
        return [name for name, module in given.items() if module is not None]
    if config.stage == "stage1" and config.use_graph_reconstruction and "stage1" not in pretraining(config):
        kind = f"mask_predictor_config.kind={config.mask_predictor_config.kind}"
        raise UserError(f"reconstructer_stage=stage1: {kind} reads no tokens, so nothing would use them. Use stage2")
    if config.stage != "all":
        return [config.stage]
    names = [*pretraining(config), *(() if config.pretrain_only else ("stage3",))]
    return [name for name in names if given.get(name) is None]


def open_logger(config: Config, dist: Dist, folder: RunFolder, channel: Any, card: Card, plan: ResumePlan) -> Logger:
    """Return the logger of this rank, with a sink for each configured output."""
    console = setup_logging(folder.log(dist.rank), dist.rank)
    sinks = ["console", "jsonl", "sacred"]
    sinks += ["wandb"] * config.use_wandb + ["tensorboard"] * config.use_tensorboard
    end = {"t_env": config.t_max} if config.max_episodes is None else {"episode": config.max_episodes}
    facts = RunFacts(
        folder=folder.path,
        token=folder.token,
        name=config.name,
        env=config.env,
        map_name=config.map_name,
        world_size=dist.world_size,
        config=config.model_dump(mode="json"),
        totals={"epoch": config.graph_pretrain_epochs, **end},
        card=card,
        made_by=made_by(),
        saved={} if plan.state is None else plan.state.common["run"]["sinks"],
    )
    return make_logger(facts, sinks, console, minimal=not dist.is_main, sacred=channel)


def log_start(session: Session, card: Card) -> None:
    """Log sizes, batch, card and folder of the run, and warn if its episodes may not fit in memory."""
    config, dist, info = session.config, session.dist, session.info
    environments = session.env.n_slots * dist.world_size
    learner = learner_class(config.learner)
    targets = f", {learner.how_targets_move(config, environments)}" if hasattr(learner, "how_targets_move") else ""
    runner = session.runners["train"]
    batch = f"{dist.world_size} rank{'s' * (dist.world_size > 1)} on {dist.device.type}, {environments} environments"
    if not config.evaluate:
        played = "on-policy batch" if learner.data == "on_policy" else runner.per_iteration(config, environments)
        updates = updates_per_iteration(config)
        batch += (
            f", effective batch {config.batch_size * dist.world_size} {runner.unit}, {updates}"
            f" update{'s' * (updates != 1)} per {played}{targets}"
        )
    more = beside_one_rank(config, dist.world_size, session.env.n_slots, learner.data)
    for line in (*([more] if more else []), *start_lines(card, info.sizes, batch)):
        session.logger.info(line)
    on_gpus = dist.device.type == "cuda" and ranks_here(dist.world_size) > 1
    ranks = ranks_here(dist.world_size) if device.replay_device(config, info, dist)[0].type == "cpu" else 0
    for line in device.limit_warnings(config, info, session.folder.path, on_gpus, ranks):
        session.logger.warning(line)
    session.logger.info(f"results: {session.folder.path}")


def resume_entry(plan: ResumePlan, folder: RunFolder) -> dict[str, Any]:
    """Return the entry of the card's list `resumed` for this start."""
    weights = plan.weights
    files = [] if weights is None else [weights.step, *weights.trained.values()]
    source = plan.state.checkpoint.path if plan.state is not None else next(path for path in files if path)
    return {
        "kind": plan.kind,
        "from": str(source.relative_to(folder.path)),
        "iteration": plan.least if plan.state is None else plan.state.iteration,
        "t_env": plan.t_env,
        "lost_episodes": plan.lost_episodes(),
        "set_aside": str(Path(plan.aside).relative_to(folder.path)) if plan.aside else "",
        "missing_bytes": dict(plan.missing),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def resume_warnings(plan: ResumePlan, folder: RunFolder, versions: str) -> list[str]:
    """Return a warning for everything that was lost, damaged or changed since the last start."""
    lines = [f"{path} is damaged ({problem}): it is not used" for path, problem in plan.problems.items()]
    if plan.state is not None and plan.kind == "exact" and plan.older:
        lines.append(f"the newest checkpoint cannot be used; {plan.state.checkpoint.path}, an earlier one, is used")
    if plan.state is not None and plan.kind == "lossy":
        lost = f"{plan.lost_episodes()} episode(s) in {', '.join(sorted(plan.state.lost))}"
        lines.append(f"resume=lossy: {lost} cannot be read, and the run continues without them")
    if plan.kind == "weights":
        lines.append("resume=weights: the replay starts empty")
    for name, size in plan.missing.items():
        lines.append(f"{folder.path / name}: {size} bytes that were there at that checkpoint are missing")
    if plan.aside:
        after = "after that" if plan.kind else "before the first complete checkpoint"
        lines.append(f"what was written {after}, or cannot be used, is kept in {plan.aside}")
    return lines + ([f"this run continues with other versions: {versions}"] if versions else [])


def complete_card(session: Session, card: Card, stages: dict[str, Any]) -> Card:
    """Return the card with the version that the game reports and the results; write it to the run's folder."""
    try:
        stats = session.env_stats()
    except (RuntimeError, OSError) as error:  # the results stand, whatever has died since
        session.logger.warning(f"the environment cannot report its version: {error}")
        stats = {}
    final = final_card(card, stats, stages)
    if final["id"] != card["id"]:
        game, actual = card["compared"]["game"], final["compared"]["game"]
        session.logger.warning(f"the game reports {actual}, not {game}: the card is {final['id']}")
    if session.dist.is_main:
        keep_json(session.folder.card_json, final)
    return final


def first_summary(
    config: Config, world_size: int, folder: RunFolder, started: float, card: Card | None
) -> dict[str, Any]:
    """Return the summary of a run without results."""
    return {
        "kind": "evaluation" if config.evaluate else "training",
        "name": config.name,
        "env": config.env,
        "map_name": config.map_name,
        "seed": config.seed,
        "world_size": world_size,
        "environments": n_slots(config) * world_size,
        "effective_batch": config.batch_size * world_size,
        "updates_per_iteration": updates_per_iteration(config),
        "card": card,
        "made_by": made_by(),
        "folder": str(folder.path),
        "started": started,
        "stages": {},
    }


def earlier_stages(folder: RunFolder) -> dict[str, Any]:
    """Return the stages in the summary of an earlier start."""
    stages = read_entry(folder.summary_json).get("stages")
    return stages if isinstance(stages, dict) and all(isinstance(stage, dict) for stage in stages.values()) else {}


def stages_so_far(session: Session, earlier: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a run that ends early: finished stages, and the state of the stage in progress."""
    checkpointer = session.checkpointer
    reached = {result.name: stage_entry(result) for result in checkpointer.reached()}
    return reached if checkpointer.stage is not None else {**earlier, **reached}


def stage_entry(result: StageResult) -> dict[str, Any]:
    """Return a stage's entry in the summary."""
    return {"clock": result.clock, "values": result.values, "files": result.files, **result.facts}


def require_weights(folder: RunFolder) -> None:
    """Fail a run whose weights could not be written. Errors: RunFailed."""
    missing = STORAGE.unwritten(folder.models)
    if missing:
        where, why = missing[-1].parent, STORAGE.why(missing[0])
        fix = "Free some space and run the same command with auto_resume=True: it resumes from the newest checkpoint"
        raise RunFailed(f"{where} could not be written ({why}): the run ends without its weights. {fix}")
