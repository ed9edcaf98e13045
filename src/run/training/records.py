"""Records of a run: its log, its card and its summary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.learners.protocol import learner_class, updates_per_iteration
from omagd.run.checkpoint.recovery import ResumePlan
from omagd.run.checkpoint.state import StageResult
from omagd.run.launchers import ranks_here
from omagd.run.memory_budget import memory_warnings
from omagd.run.reporting.card import Card, beside_one_rank, final_card, made_by, start_lines
from omagd.run.reporting.log_sinks import make_logger
from omagd.run.training.build import n_slots
from omagd.run.training.device import limit_warnings
from omagd.run.training.session import Session
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RunFailed
from omagd.utils.logging import Logger, RunFacts, setup_logging
from omagd.utils.run_folder import RunFolder, keep_json
from omagd.utils.storage import read_entry
from omagd.utils.writing import STORAGE


def open_logger(config: Config, dist: Dist, folder: RunFolder, channel: Any, card: Card, plan: ResumePlan) -> Logger:
    """Return the logger of this rank, with a sink for each configured output."""
    console = setup_logging(folder.log(dist.rank), dist.rank)
    sinks = ["console", "jsonl", "sacred"]
    sinks += ["wandb"] * config.use_wandb + ["tensorboard"] * config.use_tensorboard
    facts = RunFacts(
        folder=folder.path,
        token=folder.token,
        name=config.name,
        env=config.env,
        map_name=config.map_name,
        world_size=dist.world_size,
        config=config.model_dump(mode="json"),
        totals={"epoch": config.graph_pretrain_epochs, **_ends(config)},
        card=card,
        made_by=made_by(),
        saved={} if plan.state is None else plan.state.common["run"]["sinks"],
        wandb_project=config.wandb_project,
        wandb_entity=config.wandb_entity,
        wandb_naming=config.wandb_naming,
    )
    return make_logger(facts, sinks, console, minimal=not dist.is_main, sacred=channel)


def log_start(session: Session, card: Card) -> None:
    """Log sizes, batch, card and folder of the run, and warn if its episodes may not fit in memory."""
    config, dist, info = session.config, session.dist, session.info
    environments = session.env.n_slots * dist.world_size
    learner = learner_class(config.learner)
    targets = f", {learner.how_targets_move(config, environments)}" if hasattr(learner, "how_targets_move") else ""
    sizes = (
        f"{info.n_agents} agents, {info.n_actions} actions, observation {info.obs_dim}, state {info.state_dim}, at most"
        f" {info.episode_limit} steps"
    )
    runner = session.runners["train"]
    batch = f"{dist.world_size} rank(s) on {dist.device.type}, {environments} environments"
    if not config.evaluate:
        played = "on-policy batch" if learner.data == "on_policy" else runner.per_iteration(config, environments)
        batch += (
            f", effective batch {config.batch_size * dist.world_size} {runner.unit}, {updates_per_iteration(config)}"
            f" update(s) per {played}{targets}"
        )
    more = beside_one_rank(config, dist.world_size, session.env.n_slots, learner.data)
    for line in (*([more] if more else []), *start_lines(card, sizes, batch)):
        session.logger.info(line)
    ranks = ranks_here(dist.world_size)
    limits = limit_warnings(config, info, session.folder.path, dist.device.type == "cuda" and ranks > 1)
    for line in (*memory_warnings(config, info, ranks), *limits):
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


def finish_files(folder: RunFolder, summary: dict[str, Any], logger: Logger) -> None:
    """Draw the plots of a completed run, send them to the sinks of `logger`, and write `summary.json`."""
    from omagd.run.reporting.plots import curves, evaluation  # imports Matplotlib
    from omagd.run.reporting.report import write_summary

    if summary["exit_state"] == "completed" and folder.metrics_jsonl.is_file():
        if summary["kind"] == "evaluation":
            drawn = evaluation(folder.episode_logs(), folder.plots / "evaluation.png")
        else:
            drawn = curves(folder.metrics_jsonl, folder.plots / "curves.png")
        if drawn is not None:
            logger.picture(drawn.stem, drawn)
    summary["artifacts"] = folder.artifacts()
    write_summary(folder, summary)


def _ends(config: Config) -> dict[str, int]:
    """Return the clock and the value at which stage 3 ends: `max_episodes` if given, else `t_max`."""
    return {"t_env": config.t_max} if config.max_episodes is None else {"episode": config.max_episodes}
