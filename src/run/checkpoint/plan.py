"""What a start continues from: a checkpoint, weights without one, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_file import EpisodeRange, load_range
from omagd.run.checkpoint.store import Checkpoint, Damaged, read_part
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

STAGES = ("stage1", "stage2", "stage3")
EVER = float("inf")
Position = tuple[int, float]
"""A stage's place among the three, and its clock: epochs, or environment steps in stage 3."""


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
class SavedWeights:
    """Weights in `models/` that this run continues from, without a checkpoint.

    Attributes:
        step: folder of stage 3's weights, None before that stage. trained: files of finished stages by name.
    """

    step: Path | None
    trained: Mapping[str, Path]

    @property
    def position(self) -> Position:
        """Stage and clock at which they were written."""
        return (2, float(self.step.name)) if self.step is not None else (max(map(STAGES.index, self.trained)), EVER)


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
    def finished(self) -> set[str]:
        """Stages that have ended before."""
        if self.weights is not None:
            return set(self.weights.trained)
        return set() if self.state is None else {result["name"] for result in self.state.common["finished"]}

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
