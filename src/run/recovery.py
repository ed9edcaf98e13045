"""Finding what a run goes on from, and cutting back what was written after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_stretch import Stretch, load_stretch
from omagd.utils.checkpoint_store import Checkpoint, Damaged, clean, folders, read_checkpoint
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder


@dataclass(frozen=True)
class Recovered:
    """A complete checkpoint that this run goes on from.

    Attributes:
        checkpoint: it. common: what all ranks share. own: this rank's part; None where the number of ranks has changed.
        everyone: the parts of all ranks that wrote it, where the number has changed; else empty.
    """

    checkpoint: Checkpoint
    common: dict[str, Any]
    own: dict[str, Any] | None
    everyone: tuple[dict[str, Any], ...]

    @property
    def iteration(self) -> int:
        """Iterations of the run until it was written."""
        return int(self.checkpoint.manifest["iteration"])

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return int(self.checkpoint.manifest["world_size"])

    def said_of(self, log: str, rank: int) -> dict[str, Any]:
        """Return what the manifest says of a rank's episodes under a name; empty where there are none."""
        return dict(self.checkpoint.manifest["logs"][rank].get(log, {}))

    def refill(self, log: str, buffer: EpisodeBuffer, dist: Dist) -> None:
        """Put the episodes under a name back; among another number of ranks they are dealt anew, by age.

        Errors: UserError for what cannot be read.
        """
        try:
            if self.own is not None:
                said = self.said_of(log, dist.rank)
                if said:
                    oldest = said["added"] - said["kept"]
                    buffer.restore([part.from_number(oldest) for part in self._stretches(said)], said["added"])
                return
            dealt = self._aged(log)[dist.rank :: dist.world_size]
            buffer.capacity = max(buffer.capacity, len(dealt)) if log != "replay" else buffer.capacity
            buffer.restore(dealt, len(dealt))
        except (Damaged, ValueError, KeyError, TypeError) as problem:
            raise unusable(self.checkpoint.path, problem) from problem

    def _stretches(self, said: dict[str, Any]) -> Iterator[Stretch]:
        for part in said["parts"]:
            yield load_stretch(self.checkpoint.shared(part["file"]), part)

    def _aged(self, log: str) -> list[Stretch]:
        """Return the episodes of all ranks one by one, oldest first."""
        found: list[tuple[int, int, Stretch]] = []
        for rank in range(self.world_size):
            said = self.said_of(log, rank)
            for part in self._stretches(said) if said else ():
                kept = part.from_number(said["added"] - said["kept"])
                for place, records in enumerate(kept.records, start=kept.first):
                    found.append((place - said["added"], rank, Stretch(place, kept.codec, (records,))))
        return [stretch for _, _, stretch in sorted(found, key=lambda each: each[:2])]


def recover(folder: RunFolder, dist: Dist) -> tuple[Recovered | None, dict[Path, str]]:
    """Return the newest complete checkpoint of a run, None without one, and what is wrong with each that is damaged.

    Called on every rank; the ranks share the work of comparing checksums and get the same answer.
    """
    skipped: dict[Path, str] = {}
    for name in dist.broadcast([path.name for path in folders(folder.checkpoints)]):
        path = folder.checkpoints / name
        found, problem = None, ""
        try:
            found = _read(path, dist)
        except Damaged as damage:
            problem = str(damage)
        problems = [each for each in dist.gather(problem) if each]
        if not problems:
            return found, skipped
        skipped[path] = problems[0]
    return None, skipped


def _read(path: Path, dist: Dist) -> Recovered:
    checkpoint = read_checkpoint(path)
    checkpoint.check(dist.rank, dist.world_size)
    common = checkpoint.part("common")
    if not {"stage", "finished", "shared", "run"} <= common.keys():
        raise Damaged("common.th: something is missing")
    writers = int(checkpoint.manifest["world_size"])
    if writers == dist.world_size:
        return Recovered(checkpoint, common, checkpoint.part(f"rank_{dist.rank}"), ())
    return Recovered(checkpoint, common, None, tuple(checkpoint.part(f"rank_{rank}") for rank in range(writers)))


def cut_back(folder: RunFolder, dist: Dist, found: Recovered | None) -> None:
    """Take back what was written after the checkpoint, or all of it: lines of metrics and episodes, later weights.

    What killed starts have left half written goes too. Called on every rank, while no rank of another start is alive.
    """
    if dist.is_main:
        clean(folder.checkpoints)
        for half in folder.path.rglob(".*.tmp"):
            half.unlink(missing_ok=True)
        run = {} if found is None else found.common["run"]
        _truncate(folder.metrics_jsonl, int(run.get("metrics_bytes", 0)))
        folder.summary_json.unlink(missing_ok=True)
        reached = 0 if found is None else int(found.checkpoint.manifest.get("t_env", 0))
        for step in folder.saved_steps():
            if step > reached:
                folder.remove_step(step)
    for path in folder.episode_logs() if dist.is_main else ():
        rank = int(path.stem.rpartition("_")[2])
        if found is None or rank >= found.world_size:
            path.unlink()
    if found is not None and found.own is not None:
        _truncate(folder.episode_log(dist.rank), int(found.own["episode_bytes"]))
    elif found is not None and dist.is_main:
        for rank, part in enumerate(found.everyone):
            _truncate(folder.episode_log(rank), int(part["episode_bytes"]))
    dist.gather(None)  # nobody writes before all is cut


def _truncate(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)


def unusable(path: Path, problem: BaseException) -> UserError:
    """Return the error for a checkpoint whose files are whole but do not fit this run."""
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:160]
    return UserError(
        f"checkpoint {path} does not fit this run ({reason}); use the configuration that wrote it, or auto_resume=False"
    )
