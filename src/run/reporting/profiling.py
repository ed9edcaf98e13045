"""Profiling of one rank: time by phase, traces, memory, speed; and their reduction over all ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from omagd.run.memory_budget import resident_bytes
from omagd.run.reporting.metrics import weighted_means
from omagd.utils.dist_utils import Dist
from omagd.utils.storage import STORAGE, make_folder

Pairs = dict[str, tuple[float, float]]
"""(sum, count) by name, as `Metrics.add` takes them."""

OTHER = "other"


class Phases:
    """Timers by name. A nested phase interrupts the outer one: all phases and `other` add up to the wall time.

    Work with its own timer (waiting for ranks, the reconstructor) is added by `watch` and subtracted from its phase.

    Args:
        mark: opens a named context around every phase, such as a profiler's annotation.

    Attributes:
        synchronise: called before every reading of the clock, to wait for an asynchronous device.
    """

    def __init__(self, mark: Callable[[str], Any] = nullcontext) -> None:
        self.synchronise: Callable[[], None] = lambda: None
        self.mark = mark
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        self._at = self._turned = time.perf_counter()

    @property
    def current(self) -> tuple[str, float]:
        """The running phase and the time (`time.perf_counter`) since which it has run without interruption."""
        return (self._open[-1] if self._open else OTHER), self._turned

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a block as `name`."""
        self._turn()
        self._open.append(name)
        self._turned = time.perf_counter()
        try:
            with self.mark(name):
                yield
        finally:
            self._turn()
            self._open.pop()
            self._turned = time.perf_counter()

    def watch(self, name: str, seconds: Callable[[], float]) -> None:
        """Count the increase of a running total of seconds as `name` from now on; a second call replaces the first."""
        self._turn()
        self._watched[name] = (seconds, seconds())

    def totals(self) -> dict[str, float]:
        """Return the seconds of every phase since the beginning."""
        self._turn()
        return dict(self.seconds)

    def _turn(self) -> None:
        """Add the time since the last reading to the watched timers and the running phase."""
        self.synchronise()
        now = time.perf_counter()
        passed, self._at = now - self._at, now
        for name, (read, before) in self._watched.items():
            after = read()
            apart = min(max(after - before, 0.0), passed)  # a timer in another thread may have run longer
            self._watched[name] = (read, after)
            passed -= apart
            self.seconds[name] += apart
        self.seconds[self.current[0]] += passed


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def shares(seconds: Mapping[str, float]) -> Pairs:
    """Return `time/<phase>` as (seconds, wall seconds) pairs; their quotient is the mean share over ranks."""
    wall = sum(seconds.values())
    return {f"time/{name}": (value, wall) for name, value in seconds.items() if name != OTHER or value > 0}


SKIPPED = 2
"""Iterations with an update before a trace begins, since first calls and allocations are not typical."""

RECORDED = 3
"""Iterations at most in a trace."""

ENOUGH_SECONDS = 0.3
"""A trace of this length takes no further iteration, which bounds the file."""


class Tracer:
    """Records a few whole iterations with torch's profiler and writes them to one file."""

    def __init__(self, path: Path, gpu: bool = False) -> None:
        self.path = path
        self.iterations = 0
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])])
        self._skip, self._until = SKIPPED, 0.0
        self._over = False

    def step(self, learned: bool) -> bool:
        """End an iteration, `learned` if it had an update; return whether the file was written."""
        if self._over:
            return False
        if self._skip:
            self._skip -= learned
            if not self._skip:
                self._profile.start()
                self._until = time.perf_counter() + ENOUGH_SECONDS
            return False
        self.iterations += 1
        if self.iterations < RECORDED and time.perf_counter() < self._until:
            return False
        self.close()
        return self.path.is_file()

    def close(self) -> None:
        """Write the recorded iterations, if there are any."""
        if self._over or self._skip:
            return
        self._over = True
        self._profile.stop()
        if self.iterations:
            with STORAGE.attempt(STORAGE.name(self.path), RuntimeError):
                make_folder(self.path.parent)
                self._profile.export_chrome_trace(str(self.path))


MEGABYTE = 2.0**20


def usage(device: torch.device) -> dict[str, float]:
    """Return `memory/rss_mb` and, on a GPU, `memory/gpu_mb`, `memory/gpu_peak_mb` and `gpu/use` (0 to 1, if known).

    Megabytes of 2^20 bytes; on the GPU those that torch has allocated, now and at the peak.
    """
    values = {"memory/rss_mb": resident_bytes() / MEGABYTE}
    if device.type == "cuda":
        values["memory/gpu_mb"] = torch.cuda.memory_allocated(device) / MEGABYTE
        values["memory/gpu_peak_mb"] = torch.cuda.max_memory_allocated(device) / MEGABYTE
        with suppress(Exception):  # NVML is not available
            values["gpu/use"] = torch.cuda.utilization(device) / 100.0
    return values


def over_ranks(parts: list[dict[str, float]], each: bool) -> dict[str, float]:
    """Return the maximum of each name over the ranks' `usage`; with `each` also every rank's as `<name>_rank<r>`."""
    names = sorted({name for part in parts for name in part})
    values = {name: max(part[name] for part in parts if name in part) for name in names}
    if each:
        values |= {f"{name}_rank{rank}": part[name] for rank, part in enumerate(parts) for name in sorted(part)}
    return values


class Profiler:
    """Measures the phases, communication, memory and speed of one rank.

    Args:
        dist: the ranks. each: report every rank's memory, not only the largest.
        traces: folder for traces; None for no tracing. With tracing, phases wait for the GPU.
    """

    def __init__(self, dist: Dist | None = None, *, each: bool = False, traces: Path | None = None) -> None:
        self.dist = dist or Dist()
        self.each = each
        self.traces = traces
        self.tracer: Tracer | None = None
        self._acting: Any = None
        self.phases = Phases(mark=torch.profiler.record_function) if traces else Phases()
        if traces and self.dist.device.type == "cuda":
            self.phases.synchronise = lambda: torch.cuda.synchronize(self.dist.device)
        self.stage = ""
        self.dist.waits.place = lambda: (self.stage, *self.phases.current)
        if self.dist.world_size > 1:
            self.phases.watch("communicate", lambda: self.dist.waits.seconds)
        self.begin("")

    def begin(self, stage: str) -> None:
        """Start a stage."""
        self.stage = stage
        self._from = self._last = self.phases.totals()
        self._counted = self._counters(0)
        if self.traces is not None and stage:
            path = self.traces / f"{stage}_rank{self.dist.rank}.json"
            self.tracer = Tracer(path, self.dist.device.type == "cuda")

    def watch_acting(self, mac: Any) -> None:
        """Count the time of a controller's reconstructor, if it has one, as `reconstruct`.

        The reconstructor counts its `seconds`, `calls` (ticks) and `frames` (agents' views with unseen units).
        """
        reconstructor = getattr(mac, "reconstructor", None)
        if reconstructor is not None:
            self._acting = reconstructor
            self._counted = {**self._counters(0), **self._counted}
            self.phases.watch("reconstruct", lambda: float(reconstructor.seconds))

    def resume_at(self, updates: int) -> None:
        """Start the update counter at that of a resumed stage."""
        self._counted["updates"] = updates

    def end(self) -> dict[str, float]:
        """End a stage: write the trace; return the `summary`."""
        if self.tracer is not None:
            self.tracer.close()
            self.tracer = None
        return self.summary()

    def record(self, updates: int) -> dict[str, float]:
        """Return time shares, speed and memory over all ranks since the last call; a collective, equal on every rank.

        updates: optimisation steps since the stage began.
        """
        now, counted = self.phases.totals(), self._counters(updates)
        seconds, new = _since(self._last, now), _since(self._counted, counted)
        self._last, self._counted = now, counted
        pairs = shares(seconds)
        pairs["updates_per_second"] = (new["updates"], sum(seconds.values()))
        pairs["communicate_ms_per_sync"] = (1e3 * new["waited"], new["syncs"])
        if self._acting is not None:
            pairs["reconstruct_ms_per_tick"] = (1e3 * new["acted"], new["ticks"])
            pairs["reconstruct_frames_per_tick"] = (new["frames"], new["ticks"])
        parts = self.dist.gather((pairs, usage(self.dist.device)))
        return {**weighted_means(mine for mine, _ in parts), **over_ranks([memory for _, memory in parts], self.each)}

    def summary(self) -> dict[str, float]:
        """Return the seconds of every phase since the stage began, means over ranks, and their sum as `wall`."""
        parts = self.dist.gather(_since(self._from, self.phases.totals()))
        names = [name for name in {name: None for part in parts for name in part} if name != OTHER]
        means = {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name in [*names, OTHER]}
        return {"wall": sum(means.values()), **{name: value for name, value in means.items() if value > 0}}

    def _counters(self, updates: int) -> dict[str, float]:
        waits, acting = self.dist.waits, self._acting
        counted = {"updates": updates, "waited": waits.seconds, "syncs": waits.calls}
        if acting is not None:
            counted |= {"acted": acting.seconds, "ticks": acting.calls, "frames": acting.frames}
        return {name: float(value) for name, value in counted.items()}
