"""Writing one rank's copy of a run's state, in a thread, while the run goes on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.components.episode_range import EpisodeRange
from omagd.run.checkpoint.set_aside import note_saved
from omagd.run.checkpoint.store import CheckpointStore, CheckpointWriter, write_part
from omagd.utils.dist_utils import Dist
from omagd.utils.run_folder import RunFolder
from omagd.utils.storage import Unreadable, sync
from omagd.utils.writing import REMIND_SECONDS

if TYPE_CHECKING:
    from omagd.run.training.session import Session


@dataclass
class Written:
    """The files that hold one rank's episodes under one name, oldest first; `next` is the first one in none of them."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    next: int = 0


@dataclass
class Save:
    """One rank's copy of everything, on its way to the disk.

    `episodes`: those that are new, and facts of all. `flushed`: bytes of the lines that belong to it, by file.
    """

    draft: CheckpointWriter
    own: dict[str, Any]
    common: dict[str, Any] | None
    modules: dict[str, dict[str, Any]]
    episodes: dict[str, tuple[EpisodeRange, dict[str, Any]]]
    facts: dict[str, Any]
    flushed: dict[Path, int]


class Saver:
    """Writes saves of one rank, one after another.

    Args:
        store: the run's checkpoints. dist: the ranks. folder: of the run. minutes: that rank 0 waits for the others.

    Attributes:
        written: which files hold this rank's episodes, by name. modules: trained modules that have a file of their own.
    """

    def __init__(self, store: CheckpointStore, dist: Dist, folder: RunFolder, minutes: float) -> None:
        self.store, self.dist, self.folder, self.minutes = store, dist, folder, minutes
        self.written: dict[str, Written] = {}
        self.modules: dict[str, dict[str, Any]] = {}
        self._warned = False
        self._said: dict[str, float] = {}

    def write(self, save: Save, session: Session) -> str:
        """Write a copy to the disk, in the thread. Return what went wrong, which is also said; the run goes on."""
        draft = save.draft
        try:
            for path, size in save.flushed.items():
                if size and path.stat().st_size < size:
                    raise OSError(None, f"lines of {path.name} wait to be written")
                if path.exists():
                    sync(path)
            logs = {name: self._write_episodes(name, *each, draft) for name, each in save.episodes.items()}
            modules = {name: self._write_module(name, state, draft) for name, state in save.modules.items()}
            draft.refer({entry["file"]: entry["entry"] for entry in self.modules.values()})
            if save.common is not None:
                known = {name: entry["file"] for name, entry in {**self.modules, **modules}.items()}
                draft.put("common", {**save.common, "modules": known})
            draft.put(f"rank_{self.dist.rank}", save.own)
            draft.report({name: said for name, (said, _) in logs.items()})
            if self.dist.is_main:
                draft.commit(save.facts, 60.0 * self.minutes)
        except (OSError, MemoryError) as problem:
            reason = " ".join(str(getattr(problem, "strerror", None) or problem).split()) or "out of memory"
            draft.give_up(reason)
            if self.dist.is_main:
                draft.discard()
            if self.store.waits_until == math.inf:  # else the run ends, and says why
                self._say(save.facts["iteration"], reason, session)
            return reason
        self.written = {name: written for name, (_, written) in logs.items()}
        self.modules.update(modules)
        if self.dist.is_main:
            self._tidy(save.facts["iteration"], session)
        return ""

    def _say(self, iteration: int, reason: str, session: Session) -> None:
        """Say that a save has failed: the first time for a reason, then every ten minutes."""
        now = time.monotonic()
        if now - self._said.get(reason, -math.inf) >= REMIND_SECONDS:
            self._said[reason] = now
            then = "the run goes on, and the checkpoint before it stands"
            session.logger.error(f"iteration {iteration} could not be saved ({reason}): {then}")

    def _tidy(self, iteration: int, session: Session) -> None:
        """Make a complete checkpoint durable and remove what it replaces. What goes wrong does not undo it."""
        try:
            for path in (self.folder.checkpoints, self.folder.path, self.folder.path.parent):
                sync(path)
            unknown = self.store.prune()
            note_saved(self.folder, iteration)
        except (OSError, Unreadable) as problem:
            session.logger.error(
                f"iteration {iteration} is saved, but not all of its folder could be updated: {problem}"
            )
            return
        if unknown and not self._warned:
            self._warned = True
            session.logger.warning(f"files of old checkpoints stay in {self.store.path / 'kept'}: {unknown}")

    def _write_episodes(
        self, name: str, stretch: EpisodeRange, said: dict[str, Any], draft: CheckpointWriter
    ) -> tuple[dict[str, Any], Written]:
        """Write the episodes that are in no file; return what the manifest says of them, and what is written now."""
        parts = list(self.written[name].parts)
        draft.refer({part["file"]: part["entry"] for part in parts})
        if stretch.records:
            file = f"{name}_rank{self.dist.rank}_{stretch.first:09d}_{self.store.attempt}.episodes"
            path = draft.keep(file, stretch.save)
            parts.append({**stretch.describe(), "file": path, "entry": draft.files[path]})
        return {**said, "parts": parts}, Written(parts, stretch.first + len(stretch.records))

    def _write_module(self, name: str, state: dict[str, Any], draft: CheckpointWriter) -> dict[str, Any]:
        file = draft.keep(f"{name}_{self.store.attempt}.th", lambda path: write_part(path, state))
        return {"file": file, "entry": draft.files[file]}
