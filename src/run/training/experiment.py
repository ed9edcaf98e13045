"""One rank's way through a run: folder, log, session, the stages in order, summary."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from omagd import learners
from omagd.config.schema import Config
from omagd.run.checkpoint.recovery import Recovered, TakenUp, recover
from omagd.run.checkpoint.resuming import rank_at_work
from omagd.run.checkpoint.set_aside import Cut, cut_back
from omagd.run.memory_budget import memory_warnings, oom_hint
from omagd.run.reporting.card import (
    Card,
    changed_versions,
    make_card,
    read_card,
    resumed,
    settled,
    start_lines,
    versions_of,
)
from omagd.run.topology import ranks_here
from omagd.run.training.build import build_session, load_products, n_slots, require_same_weights, restore_products
from omagd.run.training.device import deterministic_algorithms, keep_freed_memory, limit_memory
from omagd.run.training.evaluate import evaluate
from omagd.run.training.loop import fit
from omagd.run.training.session import Session
from omagd.run.training.stages import REGISTRY as STAGES
from omagd.run.training.stages.base import PretrainedModules, StageResult
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RunFailed
from omagd.utils.log_sinks.base import RunFacts
from omagd.utils.logging import Logger, make_logger, setup_logging
from omagd.utils.owned_folder import read_entry
from omagd.utils.progress import close_bars
from omagd.utils.run_folder import RunFolder, keep_json
from omagd.utils.signals import CLOSING_SECONDS, stop_requested, unhurried
from omagd.utils.writing import STORAGE


def run_experiment(config: Config, dist: Dist, path: str, channel: Any, attempt: int = 0) -> dict[str, Any]:
    """Run everything that `config` asks for on this rank; return the summary (the same on every rank).

    Args:
        dist: this rank. path: the run's folder. channel: what the Sacred sink writes to, or None.
        attempt: how often all ranks have been started again.
    """
    started = time.time()
    torch.set_num_threads(config.torch_threads)
    keep_freed_memory()
    limit_memory(dist.device, config.max_memory_per_gpu_gb)
    folder = RunFolder(path)
    with deterministic_algorithms(config.deterministic), rank_at_work(folder):
        return _run(config, dist, folder, channel, attempt, started)


def _run(config: Config, dist: Dist, folder: RunFolder, channel: Any, attempt: int, started: float) -> dict[str, Any]:
    """Take up what is in the folder, run everything, and close the books whatever happens."""
    STORAGE.begin(folder.path)
    earlier = _earlier_stages(folder)  # read now: what follows removes the file
    taken, cut = _take_up(config, dist, folder)
    card = make_card(config, dist.world_size, dist.device)
    before = read_card(folder.path)
    if taken.kind:
        card["resumed"] = [*resumed(before), {**_entry(taken, cut, folder), **versions_of(before, card)}]
    logger = _logger(config, dist, folder, channel, card, taken.found)
    for line in _said(taken, cut, folder, changed_versions(card)):
        logger.warning(line)
    summary = {**first_summary(config, dist.world_size, folder, started, card), "restarts": attempt}
    summary["stages"] = earlier if taken.kind else {}
    exit_state = "failed"
    session = None
    try:
        with oom_hint(config, "all stages", "start", dist.device):
            session = build_session(_with_weights(config, taken), dist, folder, logger)
        session.checkpointer.take_up(taken)
        if dist.is_main:
            keep_json(folder.config_json, config.model_dump(mode="json"))
            keep_json(folder.env_info_json, session.info.to_dict())
            keep_json(folder.card_json, card)
        _say_start(session, card)
        summary["stages"] = {result.name: _plain(result) for result in run_stages(session)}
        summary["card"] = _settle(session, card, summary["stages"])
        _require_weights(folder)
        exit_state = "completed"
    except BaseException as error:
        # Where another rank has stopped first, its silence may arrive here as an error of the connection.
        exit_state = "interrupted" if isinstance(error, KeyboardInterrupt) or stop_requested() else "failed"
        dist.waits.on_error(error)
        raise
    finally:
        with unhurried():
            close_bars()
            seconds = time.time() - started if session is None else session.checkpointer.wall_seconds
            summary.update(exit_state=exit_state, wall_seconds=round(seconds, 1))
            if exit_state != "completed" and session is not None and not config.evaluate:
                summary["stages"] = _reached(session, summary["stages"])
            # The summary comes first: what is closed after it may take long, or never end.
            try:
                if dist.is_main:
                    _finish_files(folder, summary)
            finally:
                try:
                    if session is not None:
                        session.close(math.inf if exit_state == "completed" else CLOSING_SECONDS / 2)
                finally:
                    logger.close(exit_state)
    return summary


def run_stages(session: Session) -> list[StageResult]:
    """Run the stages of this configuration in order, skipping those whose result is given."""
    if session.config.evaluate:
        with oom_hint(session.config, "stage3", "test", session.dist.device):
            return [evaluate(session)]
    products = load_products(session.config, session.info, session.dist.device)
    for module in (products.tokenizer, products.predictor):
        if module is not None:
            require_same_weights(session.dist, module, "pre-trained modules")
    restore_products(session, products)
    results = session.checkpointer.results
    finished = {result.name for result in results}
    names = [name for name in stage_names(session.config, products) if name not in finished]
    for name in names:
        session.logger.stage = name
        with oom_hint(session.config, name, "prepare", session.dist.device):
            stage = STAGES.get(name)(session, products)
        result = fit(stage)
        result.facts["phases"] = session.measures.end()
        result.values.update(session.failure_counts())
        if name == "stage2":
            products.train_episodes = products.held_out = None  # stage 3 plays its own; give the memory back
        session.checkpointer.stage_finished(stage, result, more=name != names[-1])
    return results


def _take_up(config: Config, dist: Dist, folder: RunFolder) -> tuple[TakenUp, Cut]:
    """Return what the run continues from, and what its files were found to hold."""
    if config.evaluate or not config.enable_checkpointing:
        return TakenUp(), Cut()
    taken = recover(folder, dist, config)
    return taken, cut_back(folder, dist, taken)


def _with_weights(config: Config, taken: TakenUp) -> Config:
    """Return the configuration of this start: stage 3 begins with weights of the run itself where they are salvaged."""
    if taken.salvaged is None or taken.salvaged.step is None:
        return config
    return config.model_copy(update={"checkpoint_path": str(taken.salvaged.step), "load_step": 0})


def _entry(taken: TakenUp, cut: Cut, folder: RunFolder) -> dict[str, Any]:
    """Return what the card says of this start."""
    salvaged = taken.salvaged
    files = [] if salvaged is None else [salvaged.step, *salvaged.trained.values()]
    source = taken.found.checkpoint.path if taken.found is not None else next(path for path in files if path)
    return {
        "kind": taken.kind,
        "from": str(source.relative_to(folder.path)),
        "iteration": taken.least if taken.found is None else taken.found.iteration,
        "t_env": taken.t_env,
        "lost_episodes": 0 if taken.found is None or taken.kind == "exact" else taken.found.lost_episodes(),
        "set_aside": str(Path(cut.aside).relative_to(folder.path)) if cut.aside else "",
        "missing_bytes": cut.missing,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _said(taken: TakenUp, cut: Cut, folder: RunFolder, versions: str) -> list[str]:
    """Return what the user should not miss of this start."""
    lines = [f"{path} is damaged ({problem}): it is not used" for path, problem in taken.problems.items()]
    if taken.found is not None and taken.kind == "exact" and taken.older:
        lines.append(f"the newest checkpoint cannot be used; {taken.found.checkpoint.path}, an earlier one, is used")
    if taken.found is not None and taken.kind == "lossy":
        lost = f"{taken.found.lost_episodes()} episode(s) in {', '.join(sorted(taken.found.lost))}"
        lines.append(f"resume=lossy: {lost} cannot be read, and the run continues without them")
    if taken.kind == "weights":
        lines.append("resume=weights: the replay starts empty")
    for name, size in cut.missing.items():
        lines.append(f"{folder.path / name}: {size} bytes that were there at that checkpoint are missing")
    if cut.aside:
        after = "after that" if taken.kind else "before the first complete checkpoint"
        lines.append(f"what was written {after}, or cannot be used, is kept in {cut.aside}")
    return lines + ([f"this run continues with other versions: {versions}"] if versions else [])


def stage_names(config: Config, products: PretrainedModules) -> list[str]:
    """Return the names of the stages that are run: under `evaluation_only`, those whose trained module is given."""
    given = {"stage1": products.tokenizer is not None, "stage2": products.predictor is not None}
    if config.evaluation_only:
        return [name for name, known in given.items() if known]
    if config.stage != "all":
        return [config.stage]
    names = ["stage1", "stage2"] if config.pretrain_only else ["stage1", "stage2", "stage3"]
    return [name for name in names if not given.get(name, False)]


def _logger(config: Config, dist: Dist, folder: RunFolder, channel: Any, card: Card, found: Recovered | None) -> Logger:
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
        saved={} if found is None else found.common["run"]["sinks"],
        wandb_project=config.wandb_project,
        wandb_entity=config.wandb_entity,
    )
    return make_logger(facts, sinks, console, minimal=not dist.is_main, sacred=channel)


def first_summary(
    config: Config, world_size: int, folder: RunFolder, started: float, card: Card | None
) -> dict[str, Any]:
    """Return what a summary says of a run that has reached nothing yet."""
    return {
        "kind": "evaluation" if config.evaluate else "training",
        "name": config.name,
        "env": config.env,
        "map_name": config.map_name,
        "seed": config.seed,
        "world_size": world_size,
        "environments": n_slots(config) * world_size,
        "effective_batch": config.batch_size * world_size,
        "updates_per_iteration": config.updates_per_iteration,
        "card": card,
        "folder": str(folder.path),
        "started": started,
        "stages": {},
    }


def _say_start(session: Session, card: Card) -> None:
    config, dist, info = session.config, session.dist, session.info
    environments = session.env.n_slots * dist.world_size
    learner = learners.REGISTRY.get(config.learner)
    targets = f", {learner.how_targets_move(config, environments)}" if hasattr(learner, "how_targets_move") else ""
    sizes = (
        f"{info.n_agents} agents, {info.n_actions} actions, observation {info.obs_dim}, state {info.state_dim}, at most"
        f" {info.episode_limit} steps"
    )
    runner = session.runners["train"]
    batch = f"{dist.world_size} rank(s) on {dist.device.type}, {environments} environments"
    if not config.evaluate:
        batch += (
            f", effective batch {config.batch_size * dist.world_size} {runner.unit}, {config.updates_per_iteration}"
            f" update(s) per {runner.per_iteration(config, environments)}{targets}"
        )
    for line in start_lines(card, sizes, batch):
        session.logger.info(line)
    for line in memory_warnings(config, info, ranks_here(dist.world_size)):
        session.logger.warning(line)
    session.logger.info(f"results: {session.folder.path}")


def _ends(config: Config) -> dict[str, int]:
    """Return where stage 3 ends: in episodes where those are given, since `t_max` is then an upper bound."""
    return {"t_env": config.t_max} if config.max_episodes is None else {"episode": config.max_episodes}


def _settle(session: Session, card: Card, stages: dict[str, Any]) -> Card:
    """Complete the card by what the game says of itself and what was reached."""
    try:
        stats = session.env_stats()
    except (RuntimeError, OSError) as error:  # what has been reached is reached, whatever has died since
        session.logger.warning(f"the environment no longer tells what it is: {error}")
        stats = {}
    final = settled(card, stats, stages)
    if final["id"] != card["id"]:
        game, said = card["compared"]["game"], final["compared"]["game"]
        session.logger.warning(f"the game says that it is {said}, not {game}: the card is {final['id']}")
    if session.dist.is_main:
        keep_json(session.folder.card_json, final)
    return final


def _require_weights(folder: RunFolder) -> None:
    """End a run that could not write its weights as one that has failed. Errors: RunFailed."""
    missing = STORAGE.unwritten(folder.models)
    if missing:
        where, why = missing[-1].parent, STORAGE.why(missing[0])
        mend = "Make room and type the same command with auto_resume=True: it goes on from the newest checkpoint"
        raise RunFailed(f"{where} could not be written ({why}): the run ends without its weights. {mend}")


def _finish_files(folder: RunFolder, summary: dict[str, Any]) -> None:
    from omagd.run.reporting.plots import curves, evaluation
    from omagd.run.reporting.report import write_summary

    if summary["exit_state"] == "completed" and folder.metrics_jsonl.is_file():
        if summary["kind"] == "evaluation":
            evaluation(folder.episode_logs(), folder.plots / "evaluation.png")
        else:
            curves(folder.metrics_jsonl, folder.plots / "curves.png")
    summary["artifacts"] = folder.artifacts()
    write_summary(folder, summary)


def _earlier_stages(folder: RunFolder) -> dict[str, Any]:
    """Return the stages in the summary of an earlier start, until this one has restored them."""
    stages = read_entry(folder.summary_json).get("stages")
    return stages if isinstance(stages, dict) and all(isinstance(stage, dict) for stage in stages.values()) else {}


def _reached(session: Session, earlier: dict[str, Any]) -> dict[str, Any]:
    """Return the stages of a run that ends early: the finished ones, and the one in progress as far as it has come."""
    checkpointer = session.checkpointer
    reached = {result.name: _plain(result) for result in checkpointer.reached()}
    return reached if checkpointer.stage is not None else {**earlier, **reached}


def _plain(result: StageResult) -> dict[str, Any]:
    return {"clock": result.clock, "values": result.values, "files": result.files, **result.facts}
