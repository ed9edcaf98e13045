"""Counters of a stage over all ranks, and events at regular intervals of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """The counters of one stage, equal on every rank and part of the checkpoint.

    Attributes:
        epoch: updates of a pre-training stage. t_env: environment steps. episodes: episodes played for training.
        updates: optimisation steps.
    """

    epoch: int = 0
    t_env: int = 0
    episodes: int = 0
    updates: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain integers."""
        return {name: int(value) for name, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore `state_dict()`. Errors: KeyError for a missing counter."""
        for spec in fields(self):
            setattr(self, spec.name, int(state[spec.name]))


class Every:
    """Decides whether an event that happens every `interval` is due.

    It is due at the first time at or after each multiple of the interval: events with the same interval coincide.

    Args:
        interval: at least 1, in the unit of the times. first: also due at the first call.
    """

    def __init__(self, interval: int, *, first: bool = False) -> None:
        self.interval = interval
        self.last: int | None = None if first else 0

    def due(self, t: int) -> bool:
        """Return True, and remember `t`, if a multiple of `interval` has been passed since the last event."""
        if self.last is not None and t // self.interval == self.last // self.interval:
            return False
        self.last = int(t)
        return True

    def state_dict(self) -> dict[str, int | None]:
        """Return the time of the last event."""
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Restore `state_dict()`; the interval is not part of it."""
        self.last = state["last"]


class Stopwatch:
    """Seconds since it was made, and CPU seconds of this process outside `paused`; a restored one continues."""

    def __init__(self) -> None:
        self._started, self._cpu = time.monotonic(), time.process_time()

    def seconds(self) -> float:
        """Return the seconds so far, earlier starts of the run included."""
        return time.monotonic() - self._started

    def cpu_seconds(self) -> float:
        """Return the CPU seconds so far, earlier starts of the run included."""
        return time.process_time() - self._cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the CPU seconds of a block."""
        before = time.process_time()
        try:
            yield
        finally:
            self._cpu += time.process_time() - before

    def state_dict(self) -> list[float]:
        """Return both."""
        return [self.seconds(), self.cpu_seconds()]

    def load_state_dict(self, state: list[float] | float) -> None:
        """Continue from `state_dict()`; earlier versions saved the seconds alone."""
        seconds, cpu = state if isinstance(state, list) else (state, math.nan)
        self._started, self._cpu = time.monotonic() - float(seconds), time.process_time() - float(cpu)
