"""What a rank measures of itself while it runs, and what all ranks make of it when a record is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omagd.utils.dist_utils import Dist
from omagd.utils.memory import over_ranks, usage
from omagd.utils.phases import OTHER, Phases, shares
from omagd.utils.tracing import Tracer


class Measures:
    """Phases, waiting, memory and speed of one rank.

    Args:
        dist: the ranks. each: show every rank's memory, not only the largest.
        traces: folder for the profiler's traces; None for no profiling. Under profiling the phases wait for the GPU.
    """

    def __init__(self, dist: Dist | None = None, *, each: bool = False, traces: Path | None = None) -> None:
        self.dist = dist or Dist()
        self.each = each
        self.traces = traces
        self.tracer: Tracer | None = None
        self._acting: Any = None
        self._acted = (0.0, 0.0, 0.0)
        on_gpu = self.dist.device.type == "cuda"
        self.phases = Phases(
            (lambda: torch.cuda.synchronize(self.dist.device)) if traces and on_gpu else None,
            torch.profiler.record_function if traces else None,
        )
        self.stage = ""
        self.dist.waits.place = lambda: (self.stage, *self.phases.current)
        if self.dist.world_size > 1:
            self.phases.watch("communicate", lambda: self.dist.waits.seconds)
        self.begin("")

    def begin(self, stage: str) -> None:
        """Start to count for a stage."""
        self.stage = stage
        self._from = self._last = self.phases.totals()
        self._updates, self._waited, self._syncs = 0, self.dist.waits.seconds, self.dist.waits.calls
        if self.traces is not None and stage:
            path = self.traces / f"{stage}_rank{self.dist.rank}.json"
            self.tracer = Tracer(path, self.dist.device.type == "cuda")

    def watch_acting(self, mac: Any) -> None:
        """Count the seconds of a controller's reconstructor, where it has one, as `reconstruct`.

        It counts `seconds`, `calls` (ticks) and `frames` (what agents saw, with something missing) by itself.
        """
        reconstructor = getattr(mac, "reconstructor", None)
        if reconstructor is not None:
            self._acting = reconstructor
            self._acted = _counts(reconstructor)
            self.phases.watch("reconstruct", lambda: float(reconstructor.seconds))

    def go_on_from(self, updates: int) -> None:
        """Count updates from those that a loaded training has behind it."""
        self._updates = updates

    def end(self) -> dict[str, float]:
        """End a stage: write what the profiler has; return the `summary`."""
        if self.tracer is not None:
            self.tracer.close()
            self.tracer = None
        return self.summary()

    def record(self, updates: int) -> dict[str, float]:
        """Return shares of the phases, speed and memory over all ranks since the last call. The same on every rank.

        updates: optimisation steps since the stage began.
        """
        now, waits = self.phases.totals(), self.dist.waits
        seconds = {name: value - self._last.get(name, 0.0) for name, value in now.items()}
        pairs = shares(seconds)
        pairs["updates_per_second"] = (float(updates - self._updates), sum(seconds.values()))
        pairs["communicate_ms_per_sync"] = (1e3 * (waits.seconds - self._waited), float(waits.calls - self._syncs))
        if self._acting is not None:
            before, self._acted = self._acted, _counts(self._acting)
            spent, ticks, frames = (after - earlier for after, earlier in zip(self._acted, before, strict=True))
            pairs["reconstruct_ms_per_tick"] = (1e3 * spent, ticks)
            pairs["reconstruct_frames_per_tick"] = (frames, ticks)
        self._last, self._updates, self._waited, self._syncs = now, updates, waits.seconds, waits.calls
        parts = self.dist.gather((pairs, usage(self.dist.device)))
        names = {name: None for mine, _ in parts for name in mine}
        values: dict[str, float] = {}
        for name in names:
            total = sum(mine[name][0] for mine, _ in parts if name in mine)
            count = sum(mine[name][1] for mine, _ in parts if name in mine)
            if count > 0:
                values[name] = total / count
        return {**values, **over_ranks([memory for _, memory in parts], self.each)}

    def summary(self) -> dict[str, float]:
        """Return the seconds of every phase since the stage began, means over ranks, and their sum as `wall`."""
        parts = self.dist.gather(self.phases.since(self._from))
        names = [name for name in {name: None for part in parts for name in part} if name != OTHER]
        means = {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name in [*names, OTHER]}
        return {"wall": sum(means.values()), **{name: value for name, value in means.items() if value > 0}}


def _counts(reconstructor: Any) -> tuple[float, float, float]:
    return float(reconstructor.seconds), float(reconstructor.calls), float(reconstructor.frames)
