"""A short trace of a stage for Chrome's and Perfetto's viewers (`profile=True`)."""

from __future__ import annotations

import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from omagd.utils.writing import STORAGE

SKIPPED = 2
"""Iterations with an update that pass first: allocations and first calls are not what a run spends its time on."""

RECORDED = 3
"""Iterations at most in a trace."""

ENOUGH_SECONDS = 0.3
"""Once this much is recorded no further iteration is added, which bounds the file."""


class Tracer:
    """Records a few whole iterations and writes them as one file.

    Args:
        path: the trace's file. gpu: record the kernels of the GPU as well.
    """

    def __init__(self, path: Path, gpu: bool = False) -> None:
        self.path = path
        self.gpu = gpu
        self.iterations = 0
        self._skipped = 0
        self._profile: profile | None = None
        self._started = 0.0
        self._over = False

    def step(self, learned: bool) -> bool:
        """Say that an iteration has ended, one with an update if `learned`; return whether the file is written now."""
        if self._over:
            return False
        if self._profile is None:
            self._skipped += learned
            if self._skipped >= SKIPPED:
                self._start()
            return False
        self.iterations += 1
        if self.iterations < RECORDED and time.perf_counter() - self._started < ENOUGH_SECONDS:
            return False
        return self.close()

    def close(self) -> bool:
        """Write what has been recorded of whole iterations; return whether there was anything."""
        self._over = True
        running, self._profile = self._profile, None
        if running is None:
            return False
        running.stop()
        if not self.iterations:
            return False
        with STORAGE.attempt(STORAGE.name(self.path), RuntimeError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.path))
        return self.path.is_file()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._started = time.perf_counter()
