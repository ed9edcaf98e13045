"""Run all stages on one rank: resume or start, build the session, train, write the summary."""

from __future__ import annotations

import math
import time
import traceback
from contextlib import ExitStack
from typing import Any

import torch

from omagd.config.schema import Config
from omagd.modules.graph_reconstructers import pretraining
from omagd.run.checkpoint.recovery import ResumePlan, recover
from omagd.run.checkpoint.resuming import rank_at_work
from omagd.run.checkpoint.set_aside import cut_back
from omagd.run.checkpoint.state import StageResult
from omagd.run.launchers import ranks_here
from omagd.run.memory_budget import oom_hint
from omagd.run.reporting.card import changed_versions, make_card, read_card, resumed, versions_of
from omagd.run.training.build import build_session, load_pretrained, restore_pretrained
from omagd.run.training.device import (
    deterministic_algorithms,
    files_needed,
    keep_freed_memory,
    limit_memory,
    raise_limit,
    workers_of,
)
from omagd.run.training.evaluate import evaluate, trained_card
from omagd.run.training.loop import fit
from omagd.run.training.records import (
    complete_card,
    earlier_stages,
    finish_files,
    first_summary,
    log_start,
    open_logger,
    require_weights,
    resume_entry,
    resume_warnings,
    stage_entry,
    stages_so_far,
)
from omagd.run.training.session import Session
from omagd.run.training.stages.base import PretrainedModules, Stage
from omagd.run.training.stages.health import require_same_weights
from omagd.run.training.stages.rl import RLStage
from omagd.utils.compiling import warn_no_more
from omagd.utils.dist_utils import Dist, broken_exchange
from omagd.utils.errors import RunFailed, UserError
from omagd.utils.logging import Logger, append_to_log, close_bars
from omagd.utils.registry import crash_of, explain
from omagd.utils.run_folder import RunFolder, keep_json
from omagd.utils.signals import CLOSING_SECONDS, orphaned, stop_requested, uninterrupted
from omagd.utils.writing import STORAGE


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
    keep_freed_memory()
    raise_limit(files_needed(workers_of(config), dist.world_size))
    limit_memory(dist.device, config.max_memory_per_gpu_gb)
    torch.backends.cudnn.allow_tf32 = False  # by default cuDNN's GRU rounds float32 to TF32, as no other product does
    if dist.rank % ranks_here(dist.world_size):  # the first rank of a host warns
        warn_no_more()
    folder = RunFolder(path)
    with deterministic_algorithms(config.deterministic), rank_at_work(folder):
        return _run(config, dist, folder, channel, attempt, started)


def _run(config: Config, dist: Dist, folder: RunFolder, channel: Any, attempt: int, started: float) -> dict[str, Any]:
    """Resume or start, run all stages, and write the summary in every case."""
    STORAGE.begin(folder.path)
    earlier = earlier_stages(folder)  # before `cut_back` removes the file
    plan = _resume_plan(config, dist, folder)
    card = make_card(config, dist.world_size, dist.device, trained_card(config))
    before = read_card(folder.path)
    if plan.kind:
        card["resumed"] = [*resumed(before), {**resume_entry(plan, folder), **versions_of(before, card)}]
    logger = open_logger(config, dist, folder, channel, card, plan)
    for line in resume_warnings(plan, folder, changed_versions(card)):
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
        # Ranks whose launcher is gone end one by one: a later one may see only the broken connection.
        stopped = isinstance(error, KeyboardInterrupt) or stop_requested() or (broken_exchange(error) and orphaned())
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
            steps.callback(finish_files, folder, summary, logger)
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
            pretrained.forget_episodes()  # stage 3 collects its own
        session.checkpointer.stage_finished(stage, result, more=name != names[-1])
    return results


def _resume_plan(config: Config, dist: Dist, folder: RunFolder) -> ResumePlan:
    """Return what the run continues from, after its files have been cut back to it."""
    if config.evaluate or not config.enable_checkpointing:
        return ResumePlan()
    return cut_back(folder, dist, recover(folder, dist, config))


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
