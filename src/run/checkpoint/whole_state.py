"""Another run's whole state, with which a new run begins (`checkpoint_path=<run folder>`)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from omagd.config.schema import REMOVED, Config
from omagd.run.checkpoint.freeing import episode_files, was_freed
from omagd.run.checkpoint.set_aside import link
from omagd.run.checkpoint.store import Checkpoint, Damaged, folders, read_checkpoint
from omagd.utils.errors import UserError
from omagd.utils.logging import PACKAGE
from omagd.utils.run_folder import RunFolder, write_json
from omagd.utils.storage import read_entry

T = TypeVar("T")
LOG = logging.getLogger(PACKAGE)
RATES = ("lr", "critic_lr", "graph_lr")
"""Learning rates, which belong to the whole state of a run."""

LOOKS = 5
"""How often to retry when a running run has removed the checkpoint that was being read."""

CONTINUED = "continued_from.json"

MUST_AGREE: dict[str, Callable[[Any], Any]] = {
    "learner": lambda name: str(name).removesuffix("_ddp"),  # two names of one learner
    "group_size": int, "n_starts": lambda count: count is None, "reconstructor_refresh": bool, "truth_until": bool,
    "fill_unseen": lambda fill: fill == "none", "use_graph_reconstruction": bool, "use_full_obs": bool,
    "use_team_obs": bool, "belief_loss": str,
}  # fmt: skip
"""What must be equal in two runs, if one goes on with the other's state of stage 3: a function of each key's value."""

EARLIER = {
    "group_size": 1, "n_starts": None, "reconstructor_refresh": 0, "truth_until": 0.0, "fill_unseen": "none",
    "use_team_obs": False, "belief_loss": "none",
}  # fmt: skip
"""Values of keys that runs of earlier versions do not have."""


def continue_whole(config: Config, folder: RunFolder) -> None:
    """Copy the whole state that `checkpoint_path` means, if any, into a new run's folder. Errors: UserError."""
    source = whole_state(config, lambda found: _adopt(found, folder))
    if source is None:
        return
    LOG.info(f"continuing from {source.path} in a new folder: {folder.path}")
    theirs = read_entry(RunFolder(source.path.parents[1]).config_json)
    if given := [key for key in RATES if theirs.get(key, ...) not in (..., getattr(config, key))]:
        kept = ", ".join(f"{key}={theirs[key]}" for key in given)
        LOG.warning(f"checkpoint_path: a whole state keeps {kept}; give the run's models/ to change it")


def whole_state(config: Config, use: Callable[[Checkpoint], T]) -> T | None:
    """Return what `use` makes of the newest sound checkpoint that `checkpoint_path` means; None where it means weights.

    A run's folder, its `checkpoints/` or a folder in that mean a whole state, unless `load_step` asks for weights; a
    run's folder means weights, too, where this run cannot go on with the state (`_unlike`). The run may still be
    running: if files disappear because newer checkpoints replaced them, the search is repeated.
    Errors: UserError where there are checkpoints and none of them is sound, or where they were asked for and are not
        this run's kind.
    """
    if not config.checkpoint_path or config.evaluate or config.load_step:
        return None
    given = Path(config.checkpoint_path).expanduser().absolute()
    problems: list[str] = []
    for _ in range(LOOKS):
        candidates, problems = _candidates(given), []
        for path in candidates:
            try:
                found = read_checkpoint(path)
                if not (reason := _unlike(config, found)):
                    _require_files(config, found)
                    found.common()
                    for rank in range(found.manifest["world_size"]):
                        found.of_rank(rank)
                    return use(found)
                models = f"{path.parents[1]}/models"
                if path.parents[1] != given:
                    raise UserError(
                        f"checkpoint_path={config.checkpoint_path}: a state with {reason}. Give {models} to start from"
                        " its weights"
                    )
                LOG.info(f"checkpoint_path: a run with {reason}, so this one starts from the weights in {models}")
                return None
            except (Damaged, FileNotFoundError) as problem:
                problems.append(f"{path.name}: {problem}")
        if candidates == _candidates(given):
            break
    if problems:
        raise UserError(
            f"checkpoint_path={config.checkpoint_path}: no checkpoint there is sound ({problems[0]}); give models/ to"
            " continue from saved weights"
        )
    return None


def _require_files(config: Config, found: Checkpoint) -> None:
    """Compare the files of a checkpoint with its manifest; with `resume=lossy` episodes may be missing.

    Errors: Damaged; UserError where the replay was removed when the run had finished.
    """
    try:
        found.check()
    except Damaged:
        if config.resume == "lossy" and found.faults().keys() <= episode_files(found.manifest):
            return
        if not was_freed(found):
            raise
        raise UserError(
            f"checkpoint_path={config.checkpoint_path}: its replay was removed when it finished (keep_checkpoints="
            "True would have kept it). resume=lossy continues with an empty replay, models/ from the weights"
        ) from None


def _unlike(config: Config, found: Checkpoint) -> str:
    """Return why a run cannot go on with a state of stage 3: the key with both values; empty if it can.

    Learners and starts of episodes have states of their own, and the episodes of a replay hold
    what their agents read.
    """
    saved = read_entry(RunFolder(found.path.parents[1]).config_json)
    if found.manifest["stage"] != "stage3" or "learner" not in saved:
        return ""
    removed = {key: default for key, (default, _) in REMOVED.items()}
    theirs, ours = {**EARLIER, **saved}, {**removed, **config.model_dump()}
    return next(
        (
            f"{key}={theirs[key]}, not {ours[key]}"
            for key, what in MUST_AGREE.items()
            if key in theirs and what(theirs[key]) != what(ours[key])
        ),
        "",
    )


def _candidates(given: Path) -> list[Path]:
    """Return the folders of checkpoints that a path means, newest first."""
    if (given / "manifest.json").exists():
        return [given]
    return folders(given / "checkpoints") or (folders(given) if given.name == "checkpoints" else [])


def _adopt(source: Checkpoint, folder: RunFolder) -> Checkpoint:
    """Copy a checkpoint, and what its run had logged until then, into another run's folder; return the checkpoint.

    Errors: FileNotFoundError if the run is still running and has just removed the checkpoint.
    """
    old = RunFolder(source.path.parents[1])
    if folder.checkpoints.exists():  # half of one that was removed meanwhile
        shutil.rmtree(folder.checkpoints)
    lost = episode_files(source.manifest)  # with `resume=lossy`
    for name in [*source.manifest["files"], f"{source.path.name}/manifest.json"]:
        if name not in lost or (source.path.parent / name).exists():
            link(source.path.parent / name, folder.checkpoints / name)
    for path in (old.metrics_jsonl, old.card_json, *old.episode_logs()):
        if path.exists():
            target = folder.path / path.relative_to(old.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    for path in [old.pretrained(stage, best) for stage in ("stage1", "stage2") for best in (False, True)]:
        if path.is_dir():
            half = shutil.ignore_patterns(".*")
            shutil.copytree(path, folder.models / path.name, ignore=half, dirs_exist_ok=True)
    write_json(folder.path / CONTINUED, {"checkpoint": str(source.path), "iteration": source.manifest["iteration"]})
    return source
