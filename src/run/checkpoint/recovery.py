"""Finding what a run continues from; what is there but cannot be read is never taken for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.run.checkpoint.plan import RecoveredState, ResumePlan, SavedWeights
from omagd.run.checkpoint.store import (
    MANIFEST,
    Checkpoint,
    Damaged,
    Foreign,
    folders,
    read_checkpoint,
    read_part,
    read_saved,
)
from omagd.run.checkpoint.weights import AGENT_FILE, LEARNER_FILE, PREDICTOR_FILE, TOKENIZER_FILE
from omagd.run.reporting.card import read_card, versions
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder
from omagd.utils.storage import Unreadable, listed

NEW_FOLDER = "auto_resume=False begins from scratch in a new folder"
PRETRAINED = {"stage1": TOKENIZER_FILE, "stage2": PREDICTOR_FILE}


@dataclass(frozen=True)
class _Judged:
    """A folder of `checkpoints/`: what was read of it, and what is wrong with which file."""

    path: Path
    checkpoint: Checkpoint | None
    faults: Mapping[str, str]
    foreign: bool = False

    def usable(self, mode: str, newest: bool) -> str:
        """Return what it can be used for under `resume=mode`: exact, lossy, weights, or nothing."""
        if self.checkpoint is None:
            return ""
        if not self.faults and (newest or mode != "weights"):
            return "exact"
        manifest = self.checkpoint.manifest
        episodes = {part["file"] for rank in manifest["logs"] for said in rank.values() for part in said["parts"]}
        if mode == "lossy" and self.faults.keys() <= episodes:
            return "lossy"
        own = {name for name in self.faults if Path(name).name.startswith("rank_")}
        return "weights" if mode == "weights" and self.faults.keys() <= episodes | own else ""

    @property
    def problem(self) -> str:
        """What is wrong, in words; of several files the first."""
        found = list(self.faults.values())
        return f"{found[0]} and {len(found) - 1} more file(s)" if len(found) > 1 else found[0] if found else ""


def recover(folder: RunFolder, dist: Dist, config: Config) -> ResumePlan:
    """Return what a run continues from. Changes nothing.

    Called on every rank; the ranks share the work of comparing checksums and get the same answer. The newest checkpoint
    is used if it is whole; else `resume` decides.

    Errors: UserError, on all ranks, where something is there and `resume` does not allow to continue without it.
    """
    mode = config.resume
    names, completed, others = _agreed(dist, _look, folder)
    if not names and (completed == 0 or (completed is None and not others)):
        return ResumePlan(behind=bool(others), completed=0)
    problems: dict[Path, str] = {}
    found = None
    for name in names:
        judged = _judge(folder.checkpoints / name, dist)
        newest = not problems and _iteration(name) >= (completed or 0)
        kind = judged.usable(mode, newest)
        found, judged = _loaded(judged, kind, dist)
        if found is None and (second := judged.usable(mode, newest)) != kind:  # a part is not what it should be
            found, judged = _loaded(judged, second, dist)
        if found is not None:
            break
        problems[judged.path] = judged.problem
        if judged.foreign and mode == "exact":
            break  # of another version: nothing says that the checkpoints before it are what is wanted
    least = max([completed or 0, 1, *map(_iteration, names)])
    if mode == "weights" and (found is None or found.kind == "weights"):
        weights = _agreed(dist, _saved_weights, folder, config)
        if weights is not None and (found is None or weights.position > found.position):
            return ResumePlan(None, weights, problems, behind=True, completed=least, least=least)
    if found is None:
        raise _rejected(folder, mode, problems)
    older = bool(problems) or found.iteration < (completed or 0)
    other = found.world_size != dist.world_size or _agreed(dist, _started_otherwise, folder, dist.world_size)
    behind = older or found.kind != "exact" or other
    return ResumePlan(found, None, problems, behind, found.iteration, least, older)


def _started_otherwise(folder: RunFolder, world_size: int) -> bool:
    """Return whether the last start had other ranks or versions: what it wrote later is not played again bit for bit.

    A card that does not say so counts as another one.
    """
    told = (read_card(folder.path) or {}).get("told")
    return not isinstance(told, dict) or (told.get("ranks"), told.get("versions")) != (world_size, versions())


def _iteration(name: str) -> int:
    return int(name.partition("_")[0])


def _agreed(dist: Dist, read: Any, *arguments: Any) -> Any:
    """Return what rank 0 reads, on every rank. Errors: UserError of rank 0, on every rank."""
    value, problem = None, ""
    if dist.is_main:
        try:
            value = read(*arguments)
        except UserError as error:
            problem = error.message
        except OSError as error:
            problem = f"{error.filename} cannot be read ({error.strerror}); nothing was changed"
    value, problem = dist.broadcast((value, problem))
    if problem:
        raise Unreadable(problem)
    return value


def _look(folder: RunFolder) -> tuple[list[str], int | None, bool]:
    """Return names of checkpoints, newest first, iteration of the last complete save, and if there is anything else."""
    for path in (folder.models, folder.plots, folder.logs, folder.checkpoints, folder.path / "episodes"):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is not a folder: move it away, then start again; nothing was changed")
    names = [path.name for path in folders(folder.checkpoints)]
    entries = [*listed(folder.models), *listed(folder.checkpoints / "kept")]
    logs = [Path(entry.path) for entry in listed(folder.path / "episodes")]
    others = bool(entries) or any(path.exists() and path.stat().st_size for path in (folder.metrics_jsonl, *logs))
    return names, read_saved(folder), others


def _judge(path: Path, dist: Dist) -> _Judged:
    """Compare a checkpoint with its manifest, together with the other ranks."""
    checkpoint, faults, foreign, trouble = None, {}, False, ""
    try:
        checkpoint = read_checkpoint(path)
        faults = checkpoint.faults(dist.rank, dist.world_size)
    except Damaged as damage:
        faults, foreign = {MANIFEST: str(damage)}, isinstance(damage, Foreign)
    except Unreadable as problem:
        trouble = problem.message
    everyone = dist.gather((faults, foreign, trouble))
    for _, _, trouble in everyone:
        if trouble:
            raise Unreadable(trouble)
    merged = {name: problem for found, _, _ in everyone for name, problem in found.items()}
    sound = checkpoint if MANIFEST not in merged else None
    return _Judged(path, sound, merged, any(foreign for _, foreign, _ in everyone))


def _loaded(judged: _Judged, kind: str, dist: Dist) -> tuple[RecoveredState | None, _Judged]:
    """Read the parts of a checkpoint that is used for `kind`; where one is none of ours, return what is wrong."""
    if not kind or judged.checkpoint is None:
        return None, judged
    found, problem, trouble = None, {}, ""
    try:
        found = _read(judged.checkpoint, dist, kind, frozenset(judged.faults))
    except Damaged as damage:
        problem = {str(damage).partition(":")[0]: str(damage)}  # by the name of the part
    except Unreadable as error:
        trouble = error.message
    everyone = dist.gather((problem, trouble))
    for _, trouble in everyone:
        if trouble:
            raise Unreadable(trouble)
    problems = {name: text for each, _ in everyone for name, text in each.items()}
    if problems:
        return None, replace(judged, faults={**judged.faults, **problems})
    return found, judged


def _read(checkpoint: Checkpoint, dist: Dist, kind: str, lost: frozenset[str]) -> RecoveredState:
    common = checkpoint.common()
    if kind == "weights":
        return RecoveredState(checkpoint, common, None, (), kind, lost)
    writers = int(checkpoint.manifest["world_size"])
    if writers == dist.world_size:
        return RecoveredState(checkpoint, common, checkpoint.of_rank(dist.rank), (), kind, lost)
    everyone = tuple(checkpoint.of_rank(rank) for rank in range(writers))
    return RecoveredState(checkpoint, common, None, everyone, kind, lost)


def _saved_weights(folder: RunFolder, config: Config) -> SavedWeights | None:
    """Return the newest weights in `models/` that can be read, with all modules that they need; None without any."""
    trained: dict[str, Path] = {}
    given = {"stage1": config.pretrained_tokenizer_path, "stage2": config.pretrained_mask_predictor_path}
    needed = [name for name in PRETRAINED if config.stage in {"all", name} and not given[name]]
    for name in needed if config.use_graph_reconstruction else ():
        files = [folder.pretrained(name, best) / PRETRAINED[name] for best in (True, False)]
        readable = [path for path in files if _can_be_read(path)]
        if not readable:
            return SavedWeights(None, trained) if trained else None
        trained[name] = readable[0]
    for t_env in reversed(folder.saved_steps()):
        step = folder.step(t_env)
        files = [Path(entry.path) for entry in listed(step) if entry.name.endswith(".th")]
        if {AGENT_FILE, LEARNER_FILE} <= {path.name for path in files} and all(map(_can_be_read, files)):
            return SavedWeights(step, trained)
    return SavedWeights(None, trained) if trained else None


def _can_be_read(path: Path) -> bool:
    """Return whether a file of weights is whole. Errors: Unreadable."""
    try:
        read_part(path)
    except Damaged:
        return False
    return True


def _rejected(folder: RunFolder, mode: str, problems: Mapping[Path, str]) -> UserError:
    """Return the error for a run of which something is there that cannot be read."""
    if problems:
        path, problem = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} other(s))" if len(problems) > 1 else ""
        what = f"{path}{more}: {problem}"
    else:
        what = f"{folder.checkpoints} holds no checkpoint, though this run has been saved or has other files"
    ways = {
        "exact": "resume=lossy continues without damaged episodes, resume=weights from the newest weights",
        "lossy": "resume=weights continues from the newest weights",
        "weights": "there are no whole weights either",
    }
    return UserError(f"resume={mode}: {what}. Nothing was changed: {ways[mode]}, {NEW_FOLDER}")
