"""Cut a run's files back to where it continues; what cannot be reproduced is kept in `set_aside/`.

A run that continues from its newest complete checkpoint repeats what came after it, so later output is removed. In
every other case (an older checkpoint, lost episodes, weights alone, other ranks or versions) it is moved to
`set_aside/<time>_<attempt>/`, under the same names. Each step may be the last one before a kill: files are
linked before they are cut, checkpoints move after everything else, and the next start repeats what is left.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from omagd.run.checkpoint.plan import STAGES, Position, ResumePlan
from omagd.run.checkpoint.store import SAVED, Damaged, clean, folders, note_saved, read_checkpoint, read_saved
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.held_folder import make_folder, require_held
from omagd.utils.run_folder import RunFolder, rank_of
from omagd.utils.storage import listed, sync
from omagd.utils.writing import atomic_file

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
