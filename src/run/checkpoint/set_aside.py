"""Cut a run's files back to where it continues; copy another run's state; free what a finished run keeps.

What cannot be reproduced is kept in `set_aside/`.

A run that continues from its newest complete checkpoint repeats what came after it, so later output is removed. In
every other case (an older checkpoint, lost episodes, weights alone, other ranks or versions) it is moved to
`set_aside/<time>_<attempt>/`, under the same names. Each step may be the last one before a kill: files are
linked before they are cut, checkpoints move after everything else, and the next start repeats what is left.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from omagd.config.schema import REMOVED, Config
from omagd.run.checkpoint.recovery import STAGES, Position, ResumePlan
from omagd.run.checkpoint.store import (
    SAVED,
    Checkpoint,
    Damaged,
    clean,
    episode_files,
    folders,
    note_saved,
    read_checkpoint,
    read_saved,
)
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import PACKAGE
from omagd.utils.run_folder import FOLDER, RUN_FILE, RunFolder, rank_of, write_json
from omagd.utils.storage import ABSENT, atomic_file, listed, make_folder, opened, read_entry, require_held, sync

OCCUPIED = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
"""Errors for a file in the place of a folder, or the other way round."""


def cut_back(folder: RunFolder, dist: Dist, plan: ResumePlan) -> ResumePlan:
    """Cut a run's files back to what `plan` continues from; return the plan with `aside` and `missing`.

    Half-written files of killed starts are removed too. Called on every rank, while no rank of another start is alive;
    rank 0 does the work, and no rank returns before. Errors: UserError, on all ranks, where the disk fails.
    """
    own = plan.state.own if plan.state is not None else None
    sizes = dist.gather(None if own is None else int(own["episode_bytes"]))
    missing: dict[str, int] = {}
    aside, problem = "", ""
    if dist.is_main:
        try:
            aside, missing = _cut(folder, plan, sizes)
        except OSError as error:
            fix = "move it away" if error.errno in OCCUPIED else "free the disk or correct the permissions"
            problem = f"{error.filename or folder.path} ({error.strerror or error}); {fix}"
        except UserError as error:
            problem = error.message
    aside, missing, problem = dist.broadcast((aside, missing, problem))
    if problem:
        raise UserError(f"the run cannot be prepared to continue: {problem}, then start again: nothing is lost")
    return replace(plan, aside=aside, missing=missing)


def _cut(folder: RunFolder, plan: ResumePlan, sizes: list[int | None]) -> tuple[str, dict[str, int]]:
    """Cut on rank 0; return the folder of what was set aside, and the missing bytes by file."""
    require_held(folder.path)
    aside = Aside(folder)
    for path in [*folder.files(), folder.path / SAVED, *folder.episode_logs()]:
        if path.exists() and not path.is_file():  # for example a folder: the run could not write its file
            aside.move(path)
    missing = _cut_lines(folder, plan, sizes, aside)
    later = [folder.step(step) for step in folder.saved_steps() if step > plan.t_env]
    if plan.behind:
        for path in [folder.summary_json, *later, *_pretrained_behind(folder, plan)]:
            aside.move(path)
        _keep_checkpoints(folder, plan, aside)
    else:
        folder.summary_json.unlink(missing_ok=True)
        for path in later:
            shutil.rmtree(path, ignore_errors=True)
    clean(folder.checkpoints)
    for half in folder.half_written():
        half.unlink(missing_ok=True)
    if plan.completed is not None and plan.completed != read_saved(folder):
        note_saved(folder, plan.completed)
    return str(aside.path) if aside.path.exists() else "", missing


def _cut_lines(folder: RunFolder, plan: ResumePlan, sizes: list[int | None], aside: Aside) -> dict[str, int]:
    """Cut the files that are appended to; return how many bytes are missing before the cut, by name."""
    missing = {}
    for path, size in _ends(folder, plan, sizes):
        there = path.stat().st_size if path.exists() else 0
        if there < size:
            missing[str(path.relative_to(folder.path))] = size - there
        elif plan.behind:
            aside.tail(path, size)
        elif there > size:
            os.truncate(path, size)
    return missing


def _ends(folder: RunFolder, plan: ResumePlan, sizes: list[int | None]) -> Iterator[tuple[Path, int]]:
    """Yield the files that are appended to, and how many of their bytes stay."""
    found, logs = plan.state, folder.episode_logs()
    if plan.position is not None:  # weights alone: no checkpoint has the lengths of the files
        yield folder.metrics_jsonl, _bytes_until(folder.metrics_jsonl, plan.position)
        for path in logs:
            yield path, _bytes_until(path, (2, plan.t_env - 0.5))  # `t_env` of a line is when its iteration began
        return
    if found is None:
        yield from ((path, 0) for path in (folder.metrics_jsonl, *logs))
        return
    run = found.common["run"]
    yield folder.metrics_jsonl, int(run["metrics_bytes"])
    each = sizes if found.own is not None else [int(part["episode_bytes"]) for part in found.everyone]
    ends = {rank: size or 0 for rank, size in enumerate(each)}
    if "earlier_ranks" in run:  # checkpoints of earlier versions do not note them: then those logs stay
        ends = {**{rank_of(path): 0 for path in logs}, **run["earlier_ranks"], **ends}
    yield from ((folder.episode_log(rank), ends[rank]) for rank in sorted(ends))


def _bytes_until(path: Path, position: Position) -> int:
    """Return the bytes of the lines that were written until a position of the run."""
    size = 0
    if not path.exists():
        return size
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                stage = STAGES.index(record.get("stage", "stage3"))
                when = stage, float(record["t_env" if stage == 2 else "epoch"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return size
            if when > position:
                return size
            size += len(line)
    return size


def _pretrained_behind(folder: RunFolder, plan: ResumePlan) -> list[Path]:
    """Return the folders of modules whose stage was not finished where the run continues."""
    behind = [stage for stage in STAGES[:2] if stage not in plan.finished]
    paths = [folder.pretrained(stage, best) for stage in behind for best in (False, True)]
    return [path for path in paths if path.exists()]


def _keep_checkpoints(folder: RunFolder, plan: ResumePlan, aside: Aside) -> None:
    """Set aside what is newer than the checkpoint that the run continues from, and a copy of that if it is damaged."""
    for path in folders(folder.checkpoints):
        source = plan.state is not None and plan.state.checkpoint.path == path
        if source and plan.kind != "exact":
            aside.checkpoint(path, stays=True)
        if source or (plan.state is None and path not in plan.problems):
            return
        aside.checkpoint(path, stays=False)


class Aside:
    """A new folder `set_aside/<time>_<attempt>/` of a run, made when something comes into it."""

    def __init__(self, folder: RunFolder) -> None:
        self.root = folder.path
        name = f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(4)}"
        self.path = folder.path / "set_aside" / name

    def _place(self, path: Path) -> Path:
        """Return the new place of a path of the run, and create its folder."""
        target, is_new = self.path / path.relative_to(self.root), not self.path.exists()
        make_folder(target.parent)
        for changed in (self.path, self.path.parent, self.root) if is_new else ():
            sync(changed)
        return target

    def move(self, path: Path) -> None:
        """Move a file or a folder."""
        if not os.path.lexists(path):
            return
        target = self._place(path)
        path.rename(target)
        for changed in (target.parent, path.parent):
            sync(changed)

    def tail(self, path: Path, size: int) -> None:
        """Keep a whole file here, and its first `size` bytes where it was."""
        if not path.exists() or path.stat().st_size <= size:
            return
        if size == 0:
            self.move(path)
            return
        target = self._place(path)
        link(path, target)
        sync(target.parent)
        with atomic_file(path) as head, path.open("rb") as all_of_it:
            shutil.copyfileobj(all_of_it, head)
            head.truncate(size)
        sync(path.parent)

    def checkpoint(self, path: Path, stays: bool) -> None:
        """Keep a checkpoint with the shared files that it names, so that it is complete here; or move it."""
        try:
            names = {name for name in read_checkpoint(path).manifest["files"] if name.startswith("kept/")}
        except Damaged:
            names = {f"kept/{entry.name}" for entry in listed(path.parent / "kept")}
        for name in sorted(names):
            if (path.parent / name).is_file():
                link(path.parent / name, self._place(path.parent / name))
        if not stays:
            self.move(path)
            return
        for entry in listed(path):
            if entry.is_file(follow_symlinks=False):
                link(path / entry.name, self._place(path / entry.name))
            else:  # something else in the place of a file
                self.move(path / entry.name)


def link(source: Path, target: Path) -> None:
    """Link a file that is never changed to another place; copy it if the disk has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        if not target.exists():
            shutil.copy2(source, target)
            sync(target)


T = TypeVar("T")
LOG = logging.getLogger(PACKAGE)
RATES = ("lr", "critic_lr", "graph_lr")
"""Learning rates, which belong to the whole state of a run."""

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
    run's folder means weights, too, where this run cannot go on with the state (`_unlike`).
    Errors: UserError where there are checkpoints and none of them is sound, or where they were asked for and are not
        this run's kind.
    """
    if not config.checkpoint_path or config.evaluate or config.load_step:
        return None
    given = Path(config.checkpoint_path).expanduser().absolute()
    problems: list[str] = []
    for path in _candidates(given):
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
                    f"checkpoint_path={config.checkpoint_path}: a state with {reason}. Give {models} to start from its"
                    " weights"
                )
            LOG.info(f"checkpoint_path: a run with {reason}, so this one starts from the weights in {models}")
            return None
        except (Damaged, FileNotFoundError) as problem:  # the run may be running, and have removed it just now
            problems.append(f"{path.name}: {problem}")
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
    faults, episodes = found.faults(), episode_files(found.manifest)
    if not faults or config.resume == "lossy" and faults.keys() <= episodes:
        return
    if faults.keys() == episodes and is_finished(RunFolder(found.path.parents[1])):
        raise UserError(
            f"checkpoint_path={config.checkpoint_path}: its replay was removed when it finished (keep_checkpoints="
            "True would have kept it). resume=lossy continues with an empty replay, models/ from the weights"
        )
    raise Damaged(next(iter(faults.values())))


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
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # half of one that was removed meanwhile
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


EPISODES = ".episodes"


def is_finished(folder: RunFolder) -> bool:
    """Return whether a run has ended and written everything."""
    return bool(read_entry(folder.path / RUN_FILE).get("finished"))


def free_replay(folder: RunFolder, remove: bool = True) -> tuple[int, int]:
    """Remove the episodes of a finished run's checkpoints; return the number of files and the bytes that this frees.

    Every folder is opened by its name in the one before, following no links. A file that another run shares by a hard
    link frees nothing. remove: False only counts. Errors: OSError.
    """
    files = size = 0
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(opened(folder.path, FOLDER))
            for name in ("checkpoints", "kept"):
                handle = stack.enter_context(opened(name, FOLDER, handle))
        except ABSENT:
            return 0, 0
        for name in sorted(os.listdir(handle)):
            about = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if not name.endswith(EPISODES) or not stat.S_ISREG(about.st_mode):
                continue
            files, size = files + 1, size + about.st_size * (about.st_nlink == 1)
            if remove:
                os.unlink(name, dir_fd=handle)
    return files, size


def free_finished(folder: RunFolder) -> None:
    """Remove the replay of a run that has just finished, and log how much that frees."""
    try:
        size = free_replay(folder)[1]
    except OSError as problem:
        LOG.warning(f"the replay of the finished run stays in its checkpoints: {problem}")
        return
    if size:
        LOG.info(f"freed {size / 1e6:.1f} MB: the replay in the checkpoints (keep_checkpoints=True keeps it)")
