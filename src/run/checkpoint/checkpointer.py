"""Keeping the state of a run while it goes on, and putting it back.

At the end of an iteration each rank copies its state and goes on; a thread writes the copy, and rank 0's completes the
checkpoint when all ranks have written theirs. Whether to save or to stop is summed over the ranks in each iteration, so
that all save the same one. Episodes are written once, into files that successive checkpoints share.
"""

from __future__ import annotations

import math
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_range import EpisodeRange
from omagd.config.schema import Config
from omagd.run.checkpoint.recovery import Recovered, TakenUp, unusable
from omagd.run.checkpoint.serialization import pack
from omagd.run.checkpoint.store import CheckpointStore, CheckpointWriter, Damaged, read_part
from omagd.run.checkpoint.weights import checksum
from omagd.run.checkpoint.writer import Save, Saver, Written
from omagd.utils.dist_utils import Dist, Pending
from omagd.utils.errors import UserError
from omagd.utils.metrics import added
from omagd.utils.run_folder import RunFolder, rank_of
from omagd.utils.seeding import random_state, set_random_state
from omagd.utils.signals import deferred, saving, stop_now, stop_wanted
from omagd.utils.writing import STORAGE

if TYPE_CHECKING:
    from omagd.run.training.session import Session
    from omagd.run.training.stages.base import PretrainedModules, Stage, StageResult


class Checkpointer:
    """Saves and restores one run on this rank.

    Args:
        config: the run. dist: the ranks. folder: of the run.

    Attributes:
        found: what this start goes on from, until it has been put back. results: of the stages that are finished.
        stage: the one in progress, once it is restored or started.
        iteration: iterations of the run, over all its stages and starts.
    """

    def __init__(self, config: Config, dist: Dist, folder: RunFolder) -> None:
        self.config, self.dist, self.folder = config, dist, folder
        self.enabled = config.enable_checkpointing and not config.evaluate
        self.found: Recovered | None = None
        self._taken = TakenUp()
        self.results: list[StageResult] = []
        self.stage: Stage | None = None
        self.iteration = 0
        self._began = time.monotonic()
        self._earlier = 0.0
        attempt = dist.broadcast(secrets.token_hex(4)) if self.enabled else ""
        keep = config.max_checkpoints_to_keep
        store = CheckpointStore(folder.checkpoints, dist.rank, dist.world_size, attempt, keep)
        self._saver = Saver(store, dist, folder, config.dist_timeout_minutes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[str] | None = None
        self._failed = ""
        self._saved_at = time.monotonic()
        self._flags: Pending | None = None
        self._sums: dict[str, str] = {}

    def until_boundary(self) -> AbstractContextManager[None]:
        """Return the context in which SIGTERM waits a little for the end of an iteration."""
        return deferred() if self.enabled else nullcontext()

    def ask(self) -> None:
        """Begin to ask all ranks whether this iteration shall be saved, or be the last one."""
        if not self.enabled:
            return
        due = self.dist.is_main and time.monotonic() - self._saved_at >= self.config.checkpoint_interval
        flags = stop_wanted(), due, self._busy
        self._flags = self.dist.sum_later(torch.tensor(flags, dtype=torch.int64))

    def boundary(self, stage: Stage) -> None:
        """End an iteration: save if that is due; stop if a rank was asked to. Errors: Stopped."""
        self.iteration += 1
        if not self.enabled:
            return
        assert self._flags is not None
        stop, due, busy = self._flags.wait().tolist()
        if not self._busy:
            self.finish()  # what has gone wrong there is told here
        if stop or stage.done():
            if stop:
                saving()  # from here on a signal that comes late does not cut the save short
            self.finish()
            draft = self._begin(stage, stage.buffers())
            self.finish()
        elif (due or stage.urgent()) and not busy:
            self._begin(stage, stage.buffers())
        if stop:
            self._say_saved(draft, stage.session)
            stop_now()

    def _say_saved(self, draft: CheckpointWriter, session: Session) -> None:
        """Say that an iteration is saved once every rank has found its part in the complete checkpoint."""
        failed = self.dist.gather(self._failed)  # rank 0 comes here when the checkpoint is complete, or cannot be
        lacks = self.dist.gather("" if any(failed) else draft.lacks())
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(lacks) if text] or list(filter(None, failed))
        how = f"is not saved ({problems[0]}): the checkpoint before it stands" if problems else "is saved"
        tell = session.logger.error if problems else session.logger.info
        tell(f"asked to stop: iteration {self.iteration} {how}")

    def stage_finished(self, stage: Stage, result: StageResult, more: bool) -> None:
        """Keep a stage's result and, where `more` stages follow, what it trained."""
        self.results.append(result)
        self.stage = None
        if self.enabled and more:
            self.finish()
            self._begin(stage, stage.products.buffers(), over=True)
            self.finish()

    def reached(self) -> list[StageResult]:
        """Return the results of the finished stages, and what the stage in progress has reached."""
        return [*self.results, *([] if self.stage is None else [self.stage.so_far()])]

    def finish(self) -> None:
        """Wait until what is being saved is saved, or has failed."""
        if self._saving is not None:
            self._failed = self._saving.result()
            self._saving = None

    def close(self, patience: float = math.inf) -> None:
        """Wait for the thread and end it. patience: seconds that a save may still wait for the other ranks."""
        self._saver.store.waits_until = time.monotonic() + patience
        self._thread.shutdown(wait=True)

    @property
    def wall_seconds(self) -> float:
        """Seconds that the run has taken, starts that were killed included as far as they were saved."""
        return self._earlier + time.monotonic() - self._began

    @property
    def _busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def _begin(self, stage: Stage, buffers: dict[str, EpisodeBuffer], over: bool = False) -> CheckpointWriter:
        """Copy everything and let the thread write it. Errors: UserError where something is not finite."""
        stage.require_sound()
        session = stage.session
        own = {
            "stage": {} if over else stage.own_state(),
            "random": random_state(),
            "runners": {name: runner.snapshot() for name, runner in session.runners.items()},
            "past": session.logged_failures,
            "episode_bytes": session.episode_log.size(),
        }
        save = Save(
            draft=self._saver.store.draft(self.iteration),
            own=pack(own),
            common=pack(self._common(stage, over)) if self.dist.is_main else None,
            modules=self._new_modules(stage.products) if self.dist.is_main else {},
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
        self._saved_at = time.monotonic()
        self._saving = self._thread.submit(self._saver.write, save, session)
        return save.draft

    def _common(self, stage: Stage, over: bool) -> dict[str, Any]:
        """Return what all ranks share; rank 0 writes it."""
        logger = stage.session.logger
        return {
            "stage": None if over else stage.name,
            "shared": {} if over else stage.shared_state(),
            "finished": [asdict(result) for result in self.results],
            "products": self._checksums(stage.products),
            "run": {
                "wall_seconds": self.wall_seconds,
                "metrics_bytes": STORAGE.size(self.folder.metrics_jsonl),
                "earlier_ranks": self._earlier_ranks(),
                "sinks": logger.state_dict(),
            },
        }

    def _earlier_ranks(self) -> dict[int, int]:
        """Return the bytes of episode logs by ranks that this start does not have; nobody writes to them now."""
        found = {rank_of(path): path.stat().st_size for path in self.folder.episode_logs()}
        return {rank: size for rank, size in found.items() if rank >= self.dist.world_size}

    def _checksums(self, products: PretrainedModules) -> dict[str, str]:
        """Return checksums of the trained modules that there are; nothing changes them any more."""
        modules = {"tokenizer": products.tokenizer, "predictor": products.predictor}
        for name, module in modules.items():
            if module is not None and name not in self._sums:
                self._sums[name] = checksum(module.state_dict())
        return dict(self._sums)

    def _new_modules(self, products: PretrainedModules) -> dict[str, dict[str, Any]]:
        """Return copies of the weights of modules that this run has trained and no file holds."""
        trained = {"stage1": products.tokenizer, "stage2": products.predictor}
        names = {result.name for result in self.results} - self._saver.modules.keys()
        return {name: pack(module.state_dict()) for name, module in trained.items() if name in names and module}

    def _new_episodes(self, name: str, buffer: EpisodeBuffer) -> tuple[EpisodeRange, dict[str, Any]]:
        """Return a buffer's episodes that are in no file, and what is said of all of it."""
        written = self._saver.written.setdefault(name, Written())
        oldest = buffer.added - len(buffer)
        written.parts = [part for part in written.parts if part["first"] + part["count"] > oldest]
        return buffer.since(written.next), {"added": buffer.added, "kept": len(buffer)}

    def take_up(self, taken: TakenUp) -> None:
        """Continue from what was found: all that does not belong to a stage."""
        from omagd.run.training.stages.base import StageResult

        found = self.found = taken.found
        self._taken = taken
        if taken.salvaged is not None:
            self.iteration = taken.least
            self.results = [StageResult(name, {}, {}, {name: str(p)}) for name, p in taken.salvaged.trained.items()]
        if found is None:
            return
        self.iteration = taken.least if found.kind == "weights" else found.iteration
        self._earlier = float(found.common["run"]["wall_seconds"])
        self.results = [StageResult(**result) for result in found.common["finished"]]
        files = found.checkpoint.manifest["files"]
        kept = found.common["modules"]
        self._saver.modules = {
            name: {"file": file, "entry": files[file]} for name, file in kept.items() if file in files
        }
        # What is left where episodes were lost is numbered and written again.
        if found.own is not None and found.kind == "exact":
            for name, said in found.checkpoint.manifest["logs"][self.dist.rank].items():
                self._saver.written[name] = Written(list(said["parts"]), said["added"])

    def trained(self, stage: str) -> dict[str, Any] | None:
        """Return the weights that a finished stage has left, None where there are none. Errors: UserError."""
        entry, salvaged = self._saver.modules.get(stage), self._taken.salvaged
        try:
            if salvaged is not None and stage in salvaged.trained:
                return dict(read_part(salvaged.trained[stage])["weights"])
            if self.found is None or entry is None:
                return None
            return read_part(self.found.checkpoint.shared(entry["file"]))
        except (Damaged, KeyError) as problem:
            raise unusable(self.folder.path, problem) from problem

    def restore(self, stage: Stage) -> None:
        """Put back what was saved, into the first stage that is run; any other starts at its beginning."""
        self._restore(stage)
        self.stage = stage

    def _restore(self, stage: Stage) -> None:
        found, self.found = self.found, None
        if found is None:
            stage.start()
            if self._taken.salvaged is not None:
                self._renew(stage, [])
            return
        session = stage.session
        here = self._checksums(stage.products)
        if any(here.get(name) != there for name, there in found.common["products"].items()):
            raise UserError(
                "pretrained_tokenizer_path or pretrained_mask_predictor_path: not the modules that this run has begun"
                " with; give the same ones, or auto_resume=False"
            )
        inside = found.common["stage"] == stage.name
        if found.common["stage"] is not None and not inside:
            raise UserError(
                f"checkpoint {found.checkpoint.path} is of {found.common['stage']}, which this configuration does not"
                f" run; use the configuration that wrote it"
            )
        try:
            for name, buffer in stage.buffers().items():
                found.refill(name, buffer, self.dist)
            if inside:
                stage.load_shared(found.common["shared"])
            else:
                stage.start()
            self._restore_own(stage, found, inside)
            if found.kind != "exact":
                stage.without_episodes()
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, IndexError) as problem:
            raise unusable(found.checkpoint.path, problem) from problem
        session.logger.info(self._how(stage, found, inside))

    def _restore_own(self, stage: Stage, found: Recovered, inside: bool) -> None:
        """Put this rank's part back; among another number of ranks, begin new reproducible streams instead."""
        session = stage.session
        if found.own is None:
            self._renew(stage, [part["stage"] for part in found.everyone] if inside else [])
            if self.dist.is_main:
                session.go_on_counting(added([part["past"] for part in found.everyone]))
            return
        for name, runner in session.runners.items():
            runner.restore(found.own["runners"][name], stage.policies().get(name))
        session.go_on_counting(found.own["past"])
        if inside:
            stage.load_own(found.own["stage"])
            set_random_state(found.own["random"])

    def _renew(self, stage: Stage, everyone: list[dict[str, Any]]) -> None:
        """Begin new reproducible streams of chance."""
        for runner in stage.session.runners.values():
            runner.renew(self.iteration)
        stage.renew(everyone, self.iteration)

    def _how(self, stage: Stage, found: Recovered, inside: bool) -> str:
        where = f"{stage.name}, {stage.clock_name} {stage.now():,}" if inside else f"the beginning of {stage.name}"
        text = f"continuing from {found.checkpoint.path}: iteration {found.iteration}, {where}"
        if found.kind == "lossy":
            text += f"; resume=lossy: {found.lost_episodes()} episode(s) are lost"
        if found.kind == "weights":
            text += "; resume=weights: the replay starts empty, generators begin new streams"
        if found.own is not None or found.kind == "weights":
            return text
        batch, unit = self.config.batch_size * self.dist.world_size, stage.session.runners["train"].unit
        return (
            f"{text}; it was written by {found.world_size} rank(s), now there are {self.dist.world_size}: the episodes"
            f" are dealt anew, generators begin new streams, the effective batch is {batch} {unit}"
        )
