"""Write one rank's copy of a run's state in a thread, while training continues."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omagd.components.episode_file import EpisodeRange
from omagd.run.checkpoint.recovery import RecoveredState
from omagd.run.checkpoint.state import serialized
from omagd.run.checkpoint.store import (
    FORMAT,
    MANIFEST,
    CheckpointStore,
    digest,
    note_saved,
    remove_kept,
    sealed,
)
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Logger
from omagd.utils.run_folder import RunFolder, plain, write_json
from omagd.utils.storage import Unreadable, make_folder, read_json, require_held, sync
from omagd.utils.writing import REMIND_SECONDS, replace_file

POLL_SECONDS = 0.02
MOST_BYTES = 1 << 28  # of the report of one rank, which names each of its files of episodes


class CheckpointWriter:
    """Writes one rank's part of a checkpoint, in any thread.

    Args:
        store: the run's checkpoints. iteration: that is saved.

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
        remove_kept(self.store.path, self._new)
        with suppress(OSError):  # the disk is full: rank 0 stops waiting after its time limit
            write_json(self.path / f"report_{self.store.rank}.json", {"failed": reason})

    def commit(self, facts: Mapping[str, Any], patience: float) -> Path:
        """Wait for all reports, then make the checkpoint appear; rank 0 alone. Return its folder.

        Args:
            facts: of the manifest. patience: seconds to wait for the other ranks.
        Errors: OSError where something could not be written or a rank did not report: then there is no checkpoint.
        """
        reports = [self._report_of(rank, time.monotonic() + patience) for rank in range(self.store.world_size)]
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
        report = read_json(path, MOST_BYTES)
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
