"""Asynchronous checkpointing: save the state of a run while it trains, and restore it.

At the end of an iteration each rank copies its state and continues; a thread writes the copy, and rank 0's completes
the checkpoint when all ranks have written theirs. Whether to save or to stop is summed over the ranks in each
iteration, so all save the same one. Episodes are written once, into files that successive checkpoints share.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_codec import EpisodeRange
from omagd.config.schema import Config
from omagd.run.checkpoint.recovery import RecoveredState, ResumePlan, unusable
from omagd.run.checkpoint.store import (
    FORMAT,
    MANIFEST,
    CheckpointStore,
    Scope,
    StageResult,
    Stateful,
    digest,
    note_saved,
    pack,
    remove_kept,
    sealed,
    serialized,
    upgraded,
)
from omagd.run.checkpoint.weights import checksum
from omagd.run.reporting.metrics import added
from omagd.run.run_folder import RunFolder, plain, rank_of, write_json
from omagd.run.signals import deferred, saving, stop_now, stop_wanted
from omagd.utils.dist_utils import Dist, Pending
from omagd.utils.errors import UserError
from omagd.utils.logging import Logger
from omagd.utils.seeding import random_state, set_random_state
from omagd.utils.storage import (
    LONGEST_FILE,
    REMIND_SECONDS,
    STORAGE,
    Unreadable,
    make_folder,
    read_json,
    replace_file,
    require_held,
    sync,
)

Stage: TypeAlias = Any
"""A stage of training/stages/base.py, which knows this module."""


TRAINED_BY = {"stage1": "tokenizer", "stage2": "predictor"}
MISFIT = (KeyError, ValueError, TypeError, RuntimeError, AttributeError, IndexError)
"""What restoring raises for a state of another configuration."""


class Checkpointer:
    """Saves and restores one run on this rank.

    A stage registers what belongs to its state (`register`); `restore` is the one entry point for putting it back.

    Args:
        config: the run. dist: the ranks. folder: of the run. plan: what this start continues from; nothing if None.

    Attributes:
        results: of the stages that are finished. stage: the one in progress, once it is restored or started.
        iteration: iterations of the run, over all its stages and starts.
    """

    def __init__(self, config: Config, dist: Dist, folder: RunFolder, plan: ResumePlan | None = None) -> None:
        self.config, self.dist, self.folder = config, dist, folder
        self.enabled = config.enable_checkpointing and not config.evaluate
        self._plan = plan = plan or ResumePlan()
        self.results = plan.results
        self.stage: Stage | None = None
        self.iteration = plan.iteration
        self._registered: dict[Scope, dict[str, Stateful]] = {"shared": {}, "rank": {}}
        self._began = time.monotonic()
        attempt = dist.broadcast(secrets.token_hex(4)) if self.enabled else ""
        keep = config.max_checkpoints_to_keep
        store = CheckpointStore(folder.checkpoints, dist.rank, dist.world_size, attempt, keep)
        self._writer = SnapshotWriter(store, dist, folder, config.dist_timeout_minutes)
        if plan.state is not None:
            self._began -= float(plan.state.common["run"]["wall_seconds"])
            self._writer.continue_from(plan.state)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[str] | None = None
        self._failed = ""
        self._saved_at = time.monotonic()
        self._flags: Pending | None = None
        self._urgent = False
        self._sums: dict[str, str] = {}

    def start_stage(self) -> None:
        """Forget what the stage before has registered. Called by each stage before it registers anything."""
        self._registered = {"shared": {}, "rank": {}}

    def register(self, name: str, stateful: Stateful, scope: Scope = "shared") -> None:
        """Save `stateful` in every checkpoint of the stage in progress, and restore it from there.

        Args:
            name: its key in the checkpoint; registered objects are restored in the order in which they were registered.
            stateful: what is saved. scope: `shared`, equal on all ranks, or `rank`.
        Errors: ValueError for a name that is taken, or an unknown scope.
        """
        if scope not in self._registered or any(name in found for found in self._registered.values()):
            raise ValueError(f"{name!r}: registered already, or scope={scope!r} is neither 'shared' nor 'rank'")
        self._registered[scope][name] = stateful

    def until_boundary(self) -> AbstractContextManager[None]:
        """Return the context in which a signal waits a little for the end of an iteration."""
        return deferred(tells=self.dist.is_main) if self.enabled else nullcontext()

    def ask(self) -> None:
        """Begin to ask all ranks whether to save this iteration, and whether it is the last one."""
        if not self.enabled:
            return
        due = self.dist.is_main and time.monotonic() - self._saved_at >= self.config.checkpoint_interval
        flags = stop_wanted(), due, self._busy
        self._flags = self.dist.sum_later(torch.tensor(flags, dtype=torch.int64))

    def boundary(self, stage: Stage) -> None:
        """End an iteration: save if that is due; stop if a rank was asked to. Errors: Stopped, FolderGone."""
        self.iteration += 1
        require_held(self.folder.path)
        if not self.enabled:
            return
        assert self._flags is not None
        stop, due, busy = self._flags.wait().tolist()
        self._urgent |= stage.urgent()  # until it is saved, also where a save is in progress now
        if not self._busy:
            self.finish()  # raises what the thread could not handle
        if stop or stage.done():
            if stop:
                saving()  # from here on a late signal does not cut the save short
            self.finish()
            self._begin(stage, stage.buffers())
            self.finish()
        elif (due or self._urgent) and not busy:
            self._begin(stage, stage.buffers())
        if stop:
            self._log_saved(stage.session)
            stop_now()

    def _log_saved(self, session: Any) -> None:
        """Log whether the last iteration is saved."""
        failed = self.dist.gather(self._failed)  # rank 0 comes here when the checkpoint is complete, or cannot be
        problem = next(filter(None, failed), "")
        how = f"is not saved ({problem}): the previous checkpoint remains" if problem else "is saved"
        log = session.logger.error if problem else session.logger.info
        log(f"asked to stop: iteration {self.iteration} {how}")

    def stage_finished(self, stage: Stage, result: StageResult, more: bool) -> None:
        """Keep a stage's result and, where `more` stages follow, save what it trained."""
        self.results.append(result)
        self.stage = None
        if self.enabled and more:
            self.finish()
            self._begin(stage, stage.pretrained.episodes, over=True)
            self.finish()

    def reached(self) -> list[StageResult]:
        """Return the results of the finished stages, and what the stage in progress has reached."""
        return [*self.results, *([] if self.stage is None else [self.stage.so_far()])]

    def finish(self) -> None:
        """Wait until the save in progress is complete, or has failed."""
        if self._saving is not None:
            self._failed = self._saving.result()
            self._saving = None

    def close(self, patience: float = math.inf) -> None:
        """Wait for the thread and end it. patience: seconds that a save may still wait for the other ranks."""
        self._writer.store.waits_until = time.monotonic() + patience
        self._thread.shutdown(wait=True)

    @property
    def wall_seconds(self) -> float:
        """Seconds that the run has taken, including earlier starts up to their last checkpoint."""
        return time.monotonic() - self._began

    @property
    def _busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def _begin(self, stage: Stage, buffers: dict[str, EpisodeBuffer], over: bool = False) -> None:
        """Copy everything and let the thread write it. Errors: UserError where something is not finite."""
        stage.require_sound()
        session = stage.session
        own = {
            "stage": {} if over else self._states("rank"),
            "random": random_state(),
            "runners": {name: runner.snapshot() for name, runner in session.runners.items()},
            "past": session.logged_failures,
            "episode_bytes": STORAGE.size(session.episode_log.path),
        }
        draft = CheckpointWriter(self._writer.store, self.iteration)
        # One name for all ranks: on a network disk they may see different folders.
        draft.final = draft.final.with_name(self.dist.broadcast(draft.final.name))
        snapshot = Snapshot(
            draft=draft,
            own=pack(own),
            common=pack(self._common(stage, over)) if self.dist.is_main else None,
            modules=self._new_modules(stage.pretrained) if self.dist.is_main else {},
            episodes={name: self._new_episodes(name, buffer) for name, buffer in buffers.items()},
            facts={
                "iteration": self.iteration,
                "stage": stage.name,
                "t_env": stage.clock.t_env,
                "clock": stage.clock.state_dict(),
                "score": None if over else stage.score(),
                "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            },
            flushed={path: STORAGE.size(path) for path in (self.folder.metrics_jsonl, session.episode_log.path)},
        )
        self._saved_at, self._urgent = time.monotonic(), False
        self._saving = self._thread.submit(self._writer.write, snapshot, session.logger)

    def _states(self, scope: Scope) -> dict[str, Any]:
        return {name: stateful.state_dict() for name, stateful in self._registered[scope].items()}

    def _common(self, stage: Stage, over: bool) -> dict[str, Any]:
        """Return what all ranks share; rank 0 writes it."""
        logger = stage.session.logger
        bytes_of = {rank_of(path): path.stat().st_size for path in self.folder.episode_logs()}
        return {
            "stage": None if over else stage.name,
            "shared": {} if over else self._states("shared"),
            "finished": [asdict(result) for result in self.results],
            "products": self._checksums(stage.pretrained),
            "run": {
                "wall_seconds": self.wall_seconds,
                "metrics_bytes": STORAGE.size(self.folder.metrics_jsonl),
                # Of ranks that this start does not have: nobody writes to their logs now.
                "earlier_ranks": {rank: size for rank, size in bytes_of.items() if rank >= self.dist.world_size},
                "sinks": logger.state_dict(pack),
            },
        }

    def _checksums(self, pretrained: Any) -> dict[str, str]:
        """Return checksums of the pretrained modules; they do not change any more."""
        for name, module in pretrained.modules().items():
            if name not in self._sums:
                self._sums[name] = checksum(module.state_dict())
        return dict(self._sums)

    def _new_modules(self, pretrained: Any) -> dict[str, dict[str, Any]]:
        """Return copies of the weights of modules that this run has trained and no file holds."""
        names = {result.name for result in self.results} - self._writer.modules.keys()
        trained = pretrained.modules()
        wanted = {stage: trained.get(name) for stage, name in TRAINED_BY.items() if stage in names}
        return {stage: pack(module.state_dict()) for stage, module in wanted.items() if module is not None}

    def _new_episodes(self, name: str, buffer: EpisodeBuffer) -> tuple[EpisodeRange, dict[str, Any]]:
        """Return a buffer's episodes that are in no file, and facts about the whole buffer."""
        oldest = buffer.added - len(buffer)
        parts = self._writer.parts.get(name, [])
        parts = self._writer.parts[name] = [part for part in parts if part["first"] + part["count"] > oldest]
        after = parts[-1]["first"] + parts[-1]["count"] if parts else 0
        return buffer.since(after), {"added": buffer.added, "kept": len(buffer)}

    def restore(self, stage: Stage) -> None:
        """Restore the state that this start continues from into the first stage that runs; start any other stage.

        Errors: UserError where the state does not fit the stage.
        """
        plan, self._plan = self._plan, ResumePlan()  # the tensors are not needed a second time
        if plan.state is not None:
            self._restore(stage, plan.state)
        else:
            stage.start()
            if plan.weights is not None:
                self._renew(stage)
        self.stage = stage

    def _restore(self, stage: Stage, state: RecoveredState) -> None:
        modules, saved = self._checksums(stage.pretrained), state.common["products"]
        if any(modules.get(name) != saved[name] for name in saved):
            raise UserError(
                "pretrained_tokenizer_path or pretrained_mask_predictor_path: not the modules with which this run"
                " began; give the same ones, or auto_resume=False"
            )
        inside = state.common["stage"] == stage.name
        if state.common["stage"] is not None and not inside:
            raise UserError(
                f"checkpoint {state.checkpoint.path} is of {state.common['stage']}, which this configuration does not"
                " run; use the configuration that wrote it"
            )
        try:
            for name, buffer in stage.buffers().items():
                state.refill(name, buffer, self.dist)
            if inside:
                shared = upgraded(state.common["shared"])
                for name, stateful in self._registered["shared"].items():
                    stateful.load_state_dict(shared[name])
                stage.fit_rates(state.world_size)
            else:
                stage.start()
            if state.own is not None:
                self._restore_rank(stage, state.own, inside)
            else:
                self._merge_ranks(stage, state.everyone, inside)
            if state.kind != "exact":
                stage.episodes_changed()
        except MISFIT as problem:
            raise unusable(state.checkpoint.path, problem) from problem
        stage.session.logger.info(self._description(stage, state, inside))

    def _restore_rank(self, stage: Stage, own: dict[str, Any], inside: bool) -> None:
        """Restore this rank's part."""
        session = stage.session
        for name, runner in session.runners.items():
            if name in own["runners"]:  # earlier versions had fewer purposes
                runner.restore(own["runners"][name])
        session.resume_counting(own["past"])
        if inside:
            for name, stateful in self._registered["rank"].items():
                stateful.load_state_dict(own["stage"][name])
            set_random_state(own["random"])

    def _merge_ranks(self, stage: Stage, everyone: Sequence[dict[str, Any]], inside: bool) -> None:
        """Continue among another number of ranks: new reproducible streams, and rank 0 gets what was measured."""
        self._renew(stage)
        if not self.dist.is_main:
            return
        stage.session.resume_counting(added([part["past"] for part in everyone]))
        for name, runner in stage.session.runners.items():
            states = [part["runners"].get(name, {}) for part in everyone]
            runner.lost += sum(int(state.get("lost", 0)) + int(state.get("dropped", 0)) for state in states)
        for name, stateful in self._registered["rank"].items() if inside and everyone else ():
            if hasattr(stateful, "merge"):
                stateful.merge([part["stage"][name] for part in everyone])

    def _renew(self, stage: Stage) -> None:
        """Begin new reproducible streams of random numbers, with the episodes that this rank has now."""
        for runner in stage.session.runners.values():
            runner.renew(self.iteration)
        stage.renew(self.iteration)
        stage.episodes_changed()

    def _description(self, stage: Stage, state: RecoveredState, inside: bool) -> str:
        where = stage.when if inside else f"the beginning of {stage.title}"
        text = f"continuing from {state.checkpoint.path}: iteration {state.iteration}, {where}"
        if state.kind == "lossy":
            text += f"; resume=lossy: {state.lost_episodes()} episode(s) are lost"
        if state.kind == "weights":
            text += "; resume=weights: the replay starts empty, generators begin new streams"
        if state.own is not None or state.kind == "weights":
            return text
        batch, unit = self.config.batch_size * self.dist.world_size, stage.session.runners["train"].unit
        return (
            f"{text}; it was written by {state.world_size} rank(s), now there are {self.dist.world_size}: episodes are"
            f" redistributed across ranks by age, generators begin new streams, the effective batch is {batch} {unit}"
        )


POLL_SECONDS = 0.02


class CheckpointWriter:
    """Writes one rank's part of a checkpoint, in any thread.

    Attributes:
        files: what this rank has written, as in the manifest.
    """

    def __init__(self, store: CheckpointStore, iteration: int) -> None:
        self.store, self.name = store, f"{iteration:08d}"
        self.path = store.path / f".{self.name}.{store.attempt}.partial"
        self.files: dict[str, dict[str, Any]] = {}
        self._new: set[str] = set()  # of those, the new ones
        self.final, number = store.path / self.name, 1
        while self.final.exists():  # a damaged checkpoint of the same iteration is not written over
            number += 1
            self.final = store.path / f"{self.name}_{number}"

    def put(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a `pack` state as `<name>.th`. Errors: OSError."""
        file = f"{self.final.name}/{name}.th"
        self._new.add(file)
        self.files[file] = write_part(self.path / f"{name}.th", state)

    def keep(self, name: str, write: Callable[[Path], object]) -> str:
        """Let `write` write the shared file `kept/<name>` of this checkpoint; return its name in the manifest."""
        file, path = f"kept/{name}", self.store.path / "kept" / name
        make_folder(path.parent)
        self._new.add(file)
        write(path)
        self.files[file] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        sync(path.parent)
        return file

    def refer(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Include files of earlier checkpoints in this one."""
        self.files.update({name: dict(entry) for name, entry in files.items()})

    def report(self, facts: Mapping[str, Any]) -> None:
        """Report that this rank's part is complete and on the disk."""
        if self.path.is_dir():
            sync(self.path)
        write_json(self.path / f"report_{self.store.rank}.json", {"files": self.files, "facts": facts})

    def report_failure(self, reason: str) -> None:
        """Remove the shared files that this rank wrote, and report, if possible, that its part is missing."""
        with suppress(OSError):  # the disk has become read-only
            remove_kept(self.store.path, self._new)
        with suppress(OSError):  # or is full: rank 0 stops waiting after its time limit
            write_json(self.path / f"report_{self.store.rank}.json", {"failed": reason})

    def commit(self, facts: Mapping[str, Any], patience: float) -> Path:
        """Wait for all reports, then make the checkpoint appear; rank 0 alone. Return its folder.

        Args:
            facts: of the manifest. patience: seconds to wait for the other ranks.
        Errors: OSError where something could not be written or a rank did not report: then there is no checkpoint.
        """
        deadline = time.monotonic() + patience
        reports = [self._report_of(rank, deadline) for rank in range(self.store.world_size)]
        files = {name: entry for report in reports for name, entry in report["files"].items()}
        logs = [report["facts"] for report in reports]
        manifest = plain({**facts, "world_size": self.store.world_size, "logs": logs, "files": files})
        write_json(self.path / MANIFEST, sealed({"format": FORMAT, **manifest}))
        for rank in range(self.store.world_size):
            (self.path / f"report_{rank}.json").unlink()
        sync(self.path)
        require_held(self.final)
        self.path.rename(self.final)
        return self.final

    def discard(self) -> None:
        """Remove what was written into the folder of this draft."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _report_of(self, rank: int, deadline: float) -> dict[str, Any]:
        path = self.path / f"report_{rank}.json"
        while not path.exists():
            if time.monotonic() > min(deadline, self.store.waits_until):
                raise OSError(None, f"rank {rank} has not written its part")
            require_held(path)
            time.sleep(POLL_SECONDS)
        report = read_json(path, LONGEST_FILE)
        if "failed" in report:
            raise OSError(None, f"rank {rank}: {report['failed']}")
        return dict(report)


@dataclass
class Snapshot:
    """One rank's copy of everything.

    `episodes`: those that are new, and facts about the buffer. `flushed`: bytes of its lines, by file.
    """

    draft: CheckpointWriter
    own: dict[str, Any]
    common: dict[str, Any] | None
    modules: dict[str, dict[str, Any]]
    episodes: dict[str, tuple[EpisodeRange, dict[str, Any]]]
    facts: dict[str, Any]
    flushed: dict[Path, int]


class SnapshotWriter:
    """Writes snapshots of one rank, one after another.

    Args:
        store: the run's checkpoints. dist: the ranks. folder: of the run. minutes: that rank 0 waits for the others.

    Attributes:
        parts: entries of the files that hold this rank's episodes, oldest first, by buffer. modules: trained modules
            that have a file of their own.
    """

    def __init__(self, store: CheckpointStore, dist: Dist, folder: RunFolder, minutes: float) -> None:
        self.store, self.dist, self.folder, self.minutes = store, dist, folder, minutes
        self.parts: dict[str, list[dict[str, Any]]] = {}
        self.modules: dict[str, dict[str, Any]] = {}
        self._logged: dict[str, float] = {}

    def continue_from(self, state: RecoveredState) -> None:
        """Refer to the files of the checkpoint from which the run continues.

        Where episodes were lost or redistributed, all of them are numbered and written again.
        """
        manifest = state.checkpoint.manifest
        files = manifest["files"]
        modules = state.common["modules"]
        self.modules = {name: {"file": file, "entry": files[file]} for name, file in modules.items() if file in files}
        if state.own is not None and state.kind == "exact":
            self.parts = {name: list(entry["parts"]) for name, entry in manifest["logs"][self.dist.rank].items()}

    def write(self, snapshot: Snapshot, logger: Logger) -> str:
        """Write a snapshot to the disk, in the thread; return the error, which is also logged: training continues."""
        draft = snapshot.draft
        try:
            for path, size in snapshot.flushed.items():
                if size and path.stat().st_size < size:
                    raise OSError(None, f"lines of {path.name} wait to be written")
                if path.exists():
                    sync(path)
            logs = {name: self._write_episodes(name, *each, draft) for name, each in snapshot.episodes.items()}
            modules = {name: self._write_module(name, state, draft) for name, state in snapshot.modules.items()}
            draft.refer({entry["file"]: entry["entry"] for entry in self.modules.values()})
            if snapshot.common is not None:
                known = {name: entry["file"] for name, entry in {**self.modules, **modules}.items()}
                draft.put("common", {**snapshot.common, "modules": known})
            draft.put(f"rank_{self.dist.rank}", snapshot.own)
            draft.report(logs)
            if self.dist.is_main:
                draft.commit(snapshot.facts, 60.0 * self.minutes)
        except (OSError, MemoryError) as problem:
            reason = " ".join(str(getattr(problem, "strerror", None) or problem).split()) or "out of memory"
            draft.report_failure(reason)
            if self.dist.is_main:
                draft.discard()
            if self.store.waits_until == math.inf:  # else the run ends with its own error
                self._log(snapshot.facts["iteration"], reason, logger)
            return reason
        self.parts = {name: entry["parts"] for name, entry in logs.items()}
        self.modules.update(modules)
        if self.dist.is_main:
            self._remove_old(snapshot.facts["iteration"], logger)
        return ""

    def _log(self, iteration: int, reason: str, logger: Logger) -> None:
        """Log that a save has failed: the first time for a reason, then every ten minutes."""
        now = time.monotonic()
        if now - self._logged.get(reason, -math.inf) >= REMIND_SECONDS:
            self._logged[reason] = now
            then = "training continues, and the previous checkpoint remains"
            logger.error(f"iteration {iteration} could not be saved ({reason}): {then}")

    def _remove_old(self, iteration: int, logger: Logger) -> None:
        """Make a complete checkpoint durable and remove what it replaces. What goes wrong does not undo it."""
        require_held(self.store.path)  # before anything is removed
        try:
            for path in (self.folder.checkpoints, self.folder.path, self.folder.path.parent):
                sync(path)
            self.store.prune()
            note_saved(self.folder, iteration)
        except (OSError, Unreadable) as problem:
            logger.error(f"iteration {iteration} is saved, but not all of its folder could be updated: {problem}")

    def _write_episodes(
        self, name: str, new: EpisodeRange, facts: dict[str, Any], draft: CheckpointWriter
    ) -> dict[str, Any]:
        """Write the episodes that are in no file; return the manifest's entry of the buffer."""
        parts = list(self.parts[name])
        draft.refer({part["file"]: part["entry"] for part in parts})
        if new.records:
            file = f"{name}_rank{self.dist.rank}_{new.first:09d}_{self.store.attempt}.episodes"
            path = draft.keep(file, new.save)
            parts.append({**new.describe(), "file": path, "entry": draft.files[path]})
        return {**facts, "parts": parts}

    def _write_module(self, name: str, state: dict[str, Any], draft: CheckpointWriter) -> dict[str, Any]:
        file = draft.keep(f"{name}_{self.store.attempt}.th", lambda path: write_part(path, state))
        return {"file": file, "entry": draft.files[file]}


def write_part(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a `pack` state and return its size and SHA-256."""
    content = serialized(state)
    replace_file(path, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
