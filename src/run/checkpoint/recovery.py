"""Find what a run continues from: a checkpoint, weights without one, or nothing.

A file that exists but cannot be read is never treated as missing. Then cut the run's files back to there.

A run that continues from its newest complete checkpoint repeats what came after it, so later output is removed. In
every other case (an older checkpoint, lost episodes, weights alone, other ranks or versions) it is moved to
`set_aside/<time>_<attempt>/`, under the same names. Each step may be the last one before a kill: files are
copied before they are cut, checkpoints move after everything else, and the next start repeats what is left.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_codec import EpisodeRange, load_range
from omagd.config.schema import Config
from omagd.run.checkpoint import store
from omagd.run.checkpoint.store import (
    EVER,
    SAVED,
    STAGES,
    Checkpoint,
    Damaged,
    Position,
    StageResult,
    clean,
    episode_files,
    folders,
    link,
    note_saved,
    read_checkpoint,
    read_part,
    read_saved,
)
from omagd.run.checkpoint.weights import SavedWeights, saved_weights
from omagd.run.run_folder import OWN, RunFolder, rank_of
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.storage import Unreadable, listed, make_folder, require_held, sync

T = TypeVar("T")


@dataclass(frozen=True)
class RecoveredState:
    """A complete checkpoint that this run continues from.

    Attributes:
        checkpoint: it. common: what all ranks share. own: this rank's part; None where the number of ranks has changed
            or only weights are used. everyone: the parts of all ranks that wrote it, where the number has changed.
        kind: "exact"; "lossy": without the files of episodes in `lost`; "weights": without replay and rank parts.
    """

    checkpoint: Checkpoint
    common: dict[str, Any]
    own: dict[str, Any] | None
    everyone: tuple[dict[str, Any], ...] = ()
    kind: str = "exact"
    lost: frozenset[str] = frozenset()

    @property
    def iteration(self) -> int:
        """Iterations of the run until it was written."""
        return int(self.checkpoint.manifest["iteration"])

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return int(self.checkpoint.manifest["world_size"])

    @property
    def position(self) -> Position:
        """Stage and clock; after a stage's end, all of that stage."""
        manifest = self.checkpoint.manifest
        stage = STAGES.index(manifest["stage"])
        clock = manifest["t_env"] if stage == 2 else manifest["clock"]["epoch"]
        return stage, EVER if self.common["stage"] is None else float(clock)

    def lost_episodes(self) -> int:
        """Return how many episodes of all ranks are in files that cannot be read, of those that the run still kept."""
        logs = [log for rank in self.checkpoint.manifest["logs"] for log in rank.values()]
        if self.kind == "weights":
            return sum(int(log["kept"]) for log in logs)
        parts = [(log["added"] - log["kept"], part) for log in logs for part in log["parts"]]
        return sum(
            part["first"] + part["count"] - max(part["first"], oldest)
            for oldest, part in parts
            if part["file"] in self.lost
        )

    def refill(self, name: str, buffer: EpisodeBuffer, dist: Dist) -> None:
        """Restore the episodes of a buffer; among another number of ranks they are redistributed by age.

        Errors: UserError for what cannot be read.
        """
        if self.kind == "weights":
            return
        try:
            if self.own is not None:
                if entry := self._entry(name, dist.rank):
                    oldest = entry["added"] - entry["kept"]
                    buffer.restore([part.from_number(oldest) for part in self._ranges(entry)], entry["added"])
                return
            share = self._by_age(name)[dist.rank :: dist.world_size]
            buffer.capacity = max(buffer.capacity, len(share)) if name != "replay" else buffer.capacity
            buffer.restore(share, len(share))
        except (Damaged, ValueError, KeyError, TypeError) as problem:
            raise unusable(self.checkpoint.path, problem) from problem

    def _entry(self, name: str, rank: int) -> dict[str, Any]:
        """Return the manifest's entry of a rank's buffer; empty where there is none."""
        return dict(self.checkpoint.manifest["logs"][rank].get(name, {}))

    def _ranges(self, entry: Mapping[str, Any]) -> Iterator[EpisodeRange]:
        for part in entry.get("parts", ()):
            if part["file"] not in self.lost:
                yield load_range(self.checkpoint.shared(part["file"]), part)

    def _by_age(self, name: str) -> list[EpisodeRange]:
        """Return the episodes of all ranks one by one, oldest first."""
        found: list[tuple[int, int, EpisodeRange]] = []
        for rank in range(self.world_size):
            entry = self._entry(name, rank)
            for part in self._ranges(entry):
                kept = part.from_number(entry["added"] - entry["kept"])
                found += [(one.first - entry["added"], rank, one) for one in kept.each()]
        return [episode for _, _, episode in sorted(found, key=lambda each: each[:2])]


@dataclass(frozen=True)
class ResumePlan:
    """What a start continues from, equal on all ranks except for the ranks' own parts.

    Attributes:
        state: a checkpoint. weights: weights without one. With neither the run begins from scratch.
        problems: what is wrong with each checkpoint that is not used. behind: later output cannot be reproduced, or
            was never saved, so it must be kept. completed: iteration of the last complete save from here on, None to
            leave the note as it is. least: a number of iterations that no checkpoint has reached. older: the newest
            checkpoint is not the one that is used.
        aside: folder of what was set aside, empty where nothing was. missing: bytes of lines that were there when the
            checkpoint was written and are gone, by file below the run's folder. Both are known after `cut_back`.
    """

    state: RecoveredState | None = None
    weights: SavedWeights | None = None
    problems: Mapping[Path, str] = field(default_factory=dict)
    behind: bool = False
    completed: int | None = None
    least: int = 0
    older: bool = False
    aside: str = ""
    missing: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`exact`, `lossy` or `weights`; empty for a run that begins from scratch."""
        return self.state.kind if self.state is not None else "weights" if self.weights is not None else ""

    @property
    def iteration(self) -> int:
        """Iterations of the run until here; where only weights are used, more than any checkpoint has."""
        return self.least if self.state is None or self.kind == "weights" else self.state.iteration

    @property
    def t_env(self) -> int:
        """Environment steps of stage 3 until here."""
        if self.weights is not None:
            return int(self.weights.step.name) if self.weights.step is not None else 0
        return 0 if self.state is None else int(self.state.checkpoint.manifest.get("t_env", 0))

    @property
    def position(self) -> Position | None:
        """Stage and clock, where the lengths of files must be found by them; None where a checkpoint has them."""
        if self.weights is not None:
            return self.weights.position
        return self.state.position if self.state is not None and self.kind == "weights" else None

    @property
    def results(self) -> list[StageResult]:
        """Results of the stages that have ended before."""
        if self.weights is not None:
            return [StageResult(name, {}, {}, {name: str(path)}) for name, path in self.weights.trained.items()]
        return [] if self.state is None else [StageResult(**result) for result in self.state.common["finished"]]

    def lost_episodes(self) -> int:
        """Return how many stored episodes the run continues without."""
        return 0 if self.state is None else self.state.lost_episodes()

    def trained(self, stage: str) -> dict[str, Any] | None:
        """Return the weights that a finished stage has left, None where there are none. Errors: UserError."""
        try:
            if self.weights is not None and stage in self.weights.trained:
                return dict(read_part(self.weights.trained[stage])["weights"])
            if self.state is None or stage not in (modules := self.state.common["modules"]):
                return None
            return read_part(self.state.checkpoint.shared(modules[stage]))
        except (Damaged, KeyError) as problem:
            where = self.state.checkpoint.path if self.state is not None else "models/"
            raise unusable(where, problem) from problem


def unusable(path: Path | str, problem: BaseException) -> UserError:
    """Return the error for a checkpoint whose files are whole but do not fit this run."""
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:160]
    return UserError(
        f"checkpoint {path} does not fit this run ({reason}); use the configuration that wrote it, or auto_resume=False"
    )


def recover(folder: RunFolder, dist: Dist, config: Config, as_before: bool) -> ResumePlan:
    """Return what a run continues from. Changes nothing.

    Called on every rank; the ranks share the work of comparing checksums and get the same answer. The newest checkpoint
    is used if it is whole; else `resume` decides.

    as_before: the last start had these ranks and versions; else its later output cannot be reproduced, and is kept.
    Errors: UserError, on all ranks, where something is there and `resume` does not allow to continue without it.
    """
    mode = config.resume
    names, completed, others = _agreed(dist, _survey, folder)
    if not names and (completed == 0 or (completed is None and not others)):
        return ResumePlan(behind=bool(others), completed=0)
    problems: dict[Path, str] = {}
    found = None
    for name in names:
        newest = not problems and _iteration(name) >= (completed or 0)
        found, problem = _usable(folder.checkpoints / name, dist, mode, newest)
        if found is not None:
            break
        problems[folder.checkpoints / name] = problem
    least = max([completed or 0, 1, *map(_iteration, names)])
    if mode == "weights" and (found is None or found.kind == "weights"):
        weights = _agreed(dist, saved_weights, folder, config)
        if weights is not None and (found is None or weights.position > found.position):
            return ResumePlan(None, weights, problems, behind=True, completed=least, least=least)
    if found is None:
        raise _rejected(folder, mode, problems)
    older = bool(problems) or found.iteration < (completed or 0)
    behind = older or found.kind != "exact" or found.world_size != dist.world_size or not dist.broadcast(as_before)
    return ResumePlan(found, None, problems, behind, found.iteration, least, older)


def _iteration(name: str) -> int:
    return int(name.partition("_")[0])


OCCUPIED = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
"""Errors for a file in the place of a folder, or the other way round."""


def _agreed(dist: Dist, read: Callable[..., T], folder: RunFolder, *more: Any) -> T:
    """Return what rank 0 reads in a run's folder, on every rank. Errors: UserError of rank 0, on every rank."""
    value, problem = None, ""
    if dist.is_main:
        try:
            value = read(folder, *more)
        except UserError as error:
            problem = error.message
        except OSError as error:
            fix = "move it away" if error.errno in OCCUPIED else "check the disk and the permissions"
            problem = f"{error.filename or folder.path} ({error.strerror or error}): {fix}"
    value, problem = dist.broadcast((value, problem))
    if problem:
        raise Unreadable(problem)
    return cast(T, value)


def _survey(folder: RunFolder) -> tuple[list[str], int | None, bool]:
    """Return names of checkpoints, newest first; iteration of the last complete save; whether there are other files."""
    for path in (folder.models, folder.plots, folder.logs, folder.checkpoints, folder.path / "episodes"):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is not a folder: move it away, then start again; nothing was changed")
    names = [path.name for path in folders(folder.checkpoints)]
    entries = [*_own(folder, folder.models), *listed(folder.checkpoints / "kept")]
    logs = _own(folder, folder.path / "episodes")
    others = bool(entries) or any(path.exists() and path.stat().st_size for path in (folder.metrics_jsonl, *logs))
    return names, read_saved(folder), others


def _own(folder: RunFolder, part: Path) -> list[Path]:
    """Return what a run itself has written into a part of its folder. Errors: Unreadable."""
    found = [Path(entry.path) for entry in listed(part)]
    return [path for path in found if OWN.fullmatch(str(path.relative_to(folder.path)))]


def _usable(path: Path, dist: Dist, mode: str, newest: bool) -> tuple[RecoveredState | None, str]:
    """Return a checkpoint if it is whole enough for `resume=mode`, else what is wrong with it.

    Each rank compares a share of the files with the manifest. Reading the parts may find more damage.
    """
    read: list[Checkpoint] = []

    def compare() -> dict[str, str]:
        read.append(read_checkpoint(path))
        return read[0].faults(dist.rank, dist.world_size)

    everyone, damaged = _on_all_ranks(dist, compare)
    faults = {name: problem for part in everyone for name, problem in (part or {}).items()} | damaged
    while store.MANIFEST not in faults and (kind := _kind(read[0], faults, mode, newest)):
        states: list[RecoveredState] = []
        _, more = _on_all_ranks(dist, partial(_read, states, read[0], dist, kind, frozenset(faults)))
        if not more:
            return states[0], ""
        faults |= more
    problem = next(iter(faults.values()), "")
    return None, f"{problem} and {len(faults) - 1} more file(s)" if len(faults) > 1 else problem


def _kind(checkpoint: Checkpoint, faults: Mapping[str, str], mode: str, newest: bool) -> str:
    """Return what a checkpoint can be used for under `resume=mode`: exact, lossy, weights, or nothing."""
    if not faults and (newest or mode != "weights"):
        return "exact"
    episodes = episode_files(checkpoint.manifest)
    own = {name for name in faults if Path(name).name.startswith("rank_")} if mode == "weights" else set()
    return mode if mode != "exact" and faults.keys() <= episodes | own else ""


def _on_all_ranks(dist: Dist, read: Callable[[], Any]) -> tuple[list[Any], dict[str, str]]:
    """Call `read` on every rank; return the values of all ranks, and what is damaged by file.

    The value of a rank that found damage is None. Errors: Unreadable, on all ranks, where one could not read a file.
    """
    value, faults, trouble = None, {}, ""
    try:
        value = read()
    except Damaged as damage:
        faults = {str(damage).partition(":")[0]: str(damage)}
    except Unreadable as problem:
        trouble = problem.message
    everyone = dist.gather((value, faults, trouble))
    for *_, trouble in everyone:
        if trouble:
            raise Unreadable(trouble)
    merged = {name: problem for _, found, _ in everyone for name, problem in found.items()}
    return [value for value, *_ in everyone], merged


def _read(states: list[RecoveredState], checkpoint: Checkpoint, dist: Dist, kind: str, lost: frozenset[str]) -> None:
    """Read the parts of a checkpoint and append them to `states`. Errors: Damaged, Unreadable."""
    common, writers = checkpoint.common(), 0 if kind == "weights" else int(checkpoint.manifest["world_size"])
    own = checkpoint.of_rank(dist.rank) if writers == dist.world_size else None
    everyone = tuple(checkpoint.of_rank(rank) for rank in range(writers)) if own is None else ()
    states.append(RecoveredState(checkpoint, common, own, everyone, kind, lost))


def _rejected(folder: RunFolder, mode: str, problems: Mapping[Path, str]) -> UserError:
    """Return the error for a run with files of which none can be used."""
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
    new = "auto_resume=False begins from scratch in a new folder"
    return UserError(f"resume={mode}: {what}. Nothing was changed: {ways[mode]}, {new}")


def cut_back(folder: RunFolder, dist: Dist, plan: ResumePlan) -> ResumePlan:
    """Cut a run's files back to what `plan` continues from; return the plan with `aside` and `missing`.

    Half-written files of killed starts are removed too. Called on every rank, while no rank of another start is alive;
    rank 0 does the work, and no rank returns before. Errors: UserError, on all ranks, where the disk fails.
    """
    own = plan.state.own if plan.state is not None else None
    sizes = dist.gather(None if own is None else int(own["episode_bytes"]))
    try:
        aside, missing = _agreed(dist, _cut, folder, plan, sizes)
    except Unreadable as problem:
        raise UserError(
            f"the run cannot be prepared to continue: {problem}, then start again: nothing is lost"
        ) from None
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
    behind = set(STAGES[:2]) - {result.name for result in plan.results}
    paths = [folder.pretrained(stage, best) for stage in sorted(behind) for best in (False, True)]
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
        shutil.copy2(path, target)
        for changed in (target, target.parent):
            sync(changed)
        os.truncate(path, size)

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
